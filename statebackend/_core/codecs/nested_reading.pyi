"""Stored values and canonical keys of nested types to Arrow's buffers, without the GIL."""

from typing import Any, final

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

def read_values(
    column: SinkPart, offsets: Any, data: Any, valid: Any = None, is_key: bool = False
) -> bool: ...
