"""Rows of a record batch as Python objects, one at a time."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, final

from statebackend._core.codecs.type_codec import TypeCodec

FORMS: dict[str, tuple[int, int]]

@final
class RowMaker:
    def __init__(
        self,
        rows: int,
        row_class: type[tuple[Any, ...]],
        columns: Sequence[list[Any] | tuple[str, int, Any, Any, Any, TypeCodec | None, int]],
        unreadable: Callable[[int], Exception] | None,
    ) -> None: ...
    @property
    def rows(self) -> int: ...
    def __iter__(self) -> Iterator[tuple[Any, ...]]: ...

@final
class RowsOf:
    def __init__(self, maker: RowMaker) -> None: ...
    def __iter__(self) -> RowsOf: ...
    def __next__(self) -> tuple[Any, ...]: ...
