"""The compiled form of declared types."""

from collections.abc import Callable
from typing import Any, final

import numpy as np

@final
class TypeCodec:
    def __init__(
        self,
        name: str,
        serializer: Any,
        parts: tuple[TypeCodec, ...] = (),
        *,
        names: tuple[str, ...] | None = None,
        record_class: type | None = None,
        reader: Callable[[Any], Any] | None = None,
        precision: int = 0,
        scale: int = 0,
        is_key: bool = False,
    ) -> None: ...
    @property
    def kind(self) -> int: ...
    @property
    def is_compiled(self) -> bool: ...
    @property
    def width(self) -> int: ...
    @property
    def parts(self) -> tuple[TypeCodec, ...]: ...
    def encode(self, value: Any) -> bytes | None: ...
    def decode(self, data: bytes) -> Any: ...
    def values_of(
        self,
        numbers: np.ndarray[Any, np.dtype[np.int64]],
        nulls: np.ndarray[Any, np.dtype[np.uint8]] | None = None,
    ) -> list[Any]: ...
    def numbers_of(
        self,
        values: list[Any],
        numbers: np.ndarray[Any, np.dtype[np.int64]],
        nulls: np.ndarray[Any, np.dtype[np.uint8]],
    ) -> bool: ...
    def encode_key(self, key: Any) -> int | bytes | None: ...
    def encode_keys(self, keys: list[Any], ends: np.ndarray[Any, np.dtype[np.int64]]) -> bytes | None: ...
    def decode_key(self, canonical: int | bytes) -> Any: ...
