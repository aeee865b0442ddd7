"""Rows of Python objects as columns that grow."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias, final

from statebackend._core.codecs.type_codec import TypeCodec

_Taken: TypeAlias = list[Any] | tuple[bytes, bytes | None, bytes]

@final
class ColumnWriter:
    def __init__(self, codec: TypeCodec | None) -> None: ...
    def take(self, count: int) -> _Taken: ...

@final
class RowWriter:
    def __init__(
        self,
        codecs: tuple[TypeCodec | None, ...],
        names: tuple[str, ...],
        fields_of: Callable[[Any], Sequence[Any] | None],
        values_of: Callable[[int, Any], list[Any]] | None,
    ) -> None: ...
    @property
    def count(self) -> int: ...
    @property
    def misfit(self) -> tuple[Any, int] | None: ...
    def cut(self, count: int) -> None: ...
    def extend(self, rows: Iterable[Any]) -> None: ...
    def take(self) -> list[_Taken]: ...
