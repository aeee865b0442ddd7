"""Handles of reducing, aggregating and folding states, which call the user's function for each value that is added."""

from typing import Any

from statebackend._core.codecs.codecs import ValueCodec
from statebackend._core.handles.single_handle import SingleHandle

class AddingHandle(SingleHandle):
    def add(self, value: Any) -> None: ...
    def _add_in_turn(
        self,
        keys: list[Any],
        namespaces: list[bytes] | None,
        times: list[int] | None,
        values: list[Any],
        are_copies: bool,
    ) -> None: ...
    def get(self) -> Any: ...

class ReducingHandle(AddingHandle):
    def _merged(self, a: Any, b: Any) -> Any: ...

class AggregatingHandle(AddingHandle):
    def __init__(self, *arguments: Any, inputs: ValueCodec | None = None, **options: Any) -> None: ...
    def get(self) -> Any: ...
    @property
    def inputs(self) -> ValueCodec | None: ...
    def _merged(self, a: Any, b: Any) -> Any: ...

class FoldingHandle(AddingHandle): ...
