"""From Python objects to what tables store, and back."""

from collections.abc import Callable
from typing import Any, final

from statebackend._core.codecs.type_codec import TypeCodec
from statebackend._core.key_groups import HashPlan

FORMS: dict[str, tuple[int, int]]
KEY_FORMS: dict[str, int]
WIDEST_IN_ENTRY: int

@final
class ValueCodec:
    def __init__(
        self,
        form: str | int,
        serializer: Any,
        where: str,
        copy_value: Callable[[Any], Any] | None = None,
        typed: TypeCodec | None = None,
    ) -> None: ...
    @property
    def form(self) -> int: ...
    @property
    def is_native(self) -> bool: ...
    @property
    def width(self) -> int: ...
    @property
    def layout(self) -> str | int: ...
    @property
    def serializer(self) -> Any: ...
    @property
    def copy_value(self) -> Callable[[Any], Any] | None: ...
    @property
    def typed(self) -> TypeCodec | None: ...
    @property
    def where(self) -> str: ...

@final
class KeyCodec:
    def __init__(self, form: str | int, encoder: Any, typed: TypeCodec | None = None) -> None: ...
    @property
    def form(self) -> int: ...
    @property
    def plan(self) -> HashPlan: ...
    @property
    def typed(self) -> TypeCodec | None: ...
    @property
    def encoder(self) -> Any: ...
    @property
    def is_int(self) -> bool: ...
