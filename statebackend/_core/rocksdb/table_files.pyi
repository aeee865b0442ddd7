import os
from typing import final

import numpy as np
from numpy.typing import NDArray

from statebackend._core.rocksdb.database import ColumnFamily
from statebackend._core.rocksdb.options import Options

_Ints = NDArray[np.int64]
_Data = NDArray[np.uint8]

@final
class TableFile:
    def __init__(self, path: str | os.PathLike[str], options: Options) -> None: ...
    @property
    def path(self) -> str | os.PathLike[str]: ...
    @property
    def last(self) -> bytes | None: ...
    @property
    def size(self) -> int: ...
    def add(self, offsets: _Ints, keys: _Data, value_offsets: _Ints, values: _Data, order: _Ints) -> None: ...
    def finish(self) -> None: ...

def ingest(family: ColumnFamily, path: str | os.PathLike[str]) -> None: ...
