"""The bytes of many blobs as one column that Arrow can share: offsets and data."""

import numpy as np
from numpy.typing import NDArray

def blobs_of(blobs: NDArray[np.uint64]) -> tuple[NDArray[np.int64], NDArray[np.uint8]]: ...
