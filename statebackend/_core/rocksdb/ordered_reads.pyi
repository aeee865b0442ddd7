import numpy as np
from numpy.typing import NDArray

from statebackend._core.rocksdb.database import ColumnFamily
from statebackend._core.rocksdb.overlay import Layer

def read_many(
    family: ColumnFamily, offsets: NDArray[np.int64], keys: NDArray[np.uint8]
) -> tuple[NDArray[np.bool_], NDArray[np.int64], NDArray[np.uint8]]: ...
def have_rows(
    family: ColumnFamily, layer: Layer | None, offsets: NDArray[np.int64], prefixes: NDArray[np.uint8]
) -> NDArray[np.bool_]: ...
