"""Columns of nested types: Arrow's buffers to stored values and canonical keys, and back, without the GIL."""

from typing import Any, final

import numpy as np
from numpy.typing import NDArray

FORMS: dict[str, int]

@final
class Block: ...

@final
class SourcePart:
    def __init__(
        self,
        form: str,
        width: int,
        rows: int,
        *,
        origin: int = 0,
        valid: Any = None,
        first: int = 0,
        data: Any = None,
        offsets: Any = None,
        is_wide: bool = False,
        step: int = -1,
        low: int = ...,
        high: int = ...,
        is_canonical: bool = False,
        parts: tuple[SourcePart, ...] = (),
    ) -> None: ...

@final
class SinkPart:
    parts: tuple[SinkPart, ...]
    def __init__(
        self,
        form: str,
        width: int,
        *,
        stride: int = 0,
        low: int = ...,
        high: int = ...,
        is_canonical: bool = False,
        parts: tuple[SinkPart, ...] = (),
    ) -> None: ...
    def take_buffers(self) -> tuple[int, int, list[Any]]: ...

def write_values(
    column: SourcePart, is_key: bool = False
) -> tuple[NDArray[np.int64], NDArray[np.uint8]] | None: ...
def read_values(
    column: SinkPart, offsets: Any, data: Any, valid: Any = None, is_key: bool = False
) -> bool: ...
