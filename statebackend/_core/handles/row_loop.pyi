"""The loop of a job that goes row by row."""

from collections.abc import Callable
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from statebackend._core.codecs.codecs import KeyCodec
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
    def add(self, row: object) -> None: ...
    @property
    def count(self) -> int: ...
    def cut(self, count: int) -> None: ...

@final
class RowTimes:
    def __init__(
        self,
        own: NDArray[np.int64],
        by: NDArray[np.int64],
        is_null: NDArray[np.uint8],
    ) -> None: ...
    @property
    def timestamp(self) -> int | None: ...

def run_rows(
    rows: RowMaker,
    key_columns: tuple[int, ...],
    is_composite: bool,
    backend: Any,
    process: Callable[[Any, Any], Any],
    context: Any,
    output: Output,
    times: RowTimes | None = None,
    before_row: Callable[[], object] | None = None,
    guard: Any = None,
) -> None: ...
def _key_bytes(rows: RowMaker, key_columns: tuple[int, ...], codec: KeyCodec, at: int) -> bytes | None: ...
