from collections.abc import Iterator as _Iterator
from types import TracebackType
from typing import final

import numpy as np
from numpy.typing import NDArray

from statebackend._core.rocksdb.database import ColumnFamily
from statebackend._core.rocksdb.overlay import Layer, Overlay

@final
class Walk:
    def __init__(
        self,
        family: ColumnFamily,
        layer: Layer | None,
        prefix: bytes = b"",
        start: bytes | None = None,
        *,
        overlay: Overlay | None = None,
        fill_cache: bool = True,
    ) -> None: ...
    def __enter__(self) -> Walk: ...
    def __exit__(
        self,
        kind: type[BaseException] | None = ...,
        error: BaseException | None = ...,
        trace: TracebackType | None = ...,
        /,
    ) -> None: ...
    def __iter__(self) -> _Iterator[tuple[bytes, bytes]]: ...
    def close(self) -> None: ...
    def read_many(
        self, rows: int, nbytes: int = 1 << 24
    ) -> tuple[NDArray[np.int64], NDArray[np.uint8], NDArray[np.int64], NDArray[np.uint8]]: ...
    def rows(self, most: int) -> list[tuple[bytes, bytes]]: ...
