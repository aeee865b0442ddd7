"""The loop of a job that goes row by row."""

from collections.abc import Callable
from typing import Any, final

from statebackend._core.codecs.row_maker import RowMaker
from statebackend._core.codecs.row_writer import RowWriter

@final
class Output:
    def __init__(self, writer: RowWriter | None, refused: Callable[[object], Any]) -> None: ...
    @property
    def writer(self) -> RowWriter | None: ...
    @property
    def rows(self) -> list[Any]: ...
    def take(self, given: object) -> None: ...

def run_rows(
    rows: RowMaker,
    key_columns: tuple[int, ...],
    is_composite: bool,
    backend: Any,
    process: Callable[[Any, Any], Any],
    context: Any,
    output: Output,
) -> None: ...
