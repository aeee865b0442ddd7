"""Errors of a function: rows whose call failed, in a job with ``on_error="route"``, and what an error says.

What a failed call did is taken back, and its row goes to an output. An exit, such as `SystemExit`, `KeyboardInterrupt`
or `asyncio.CancelledError`, is no `Exception` and ends the batch.

>>> described(KeyError("secret")), described(ClosedError("the job is closed"))
(('KeyError', None), ('statebackend.errors.ClosedError', 'CLOSED'))
>>> summary(SystemExit(3)), summary(GeneratorExit())
('SystemExit: 3', 'GeneratorExit')
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from typing import Any

import pyarrow as pa

from statebackend.errors import (
    ClosedError,
    CommitConflictError,
    CorruptCheckpointError,
    MemoryLimitError,
    MutationError,
    StateBackendError,
    StoreError,
)
from statebackend.operator_state import OperatorStateBackend
from statebackend.runtime.job import ERROR_COLUMNS, ERRORS
from statebackend.runtime.output import BatchOutput
from statebackend.state import BackendMark, KeyedStateBackend

_log = logging.getLogger(__name__)


def is_interrupt(error: BaseException) -> bool:
    """Return True if the user may have interrupted the program: Python raises that in the main thread alone.

    >>> is_interrupt(KeyboardInterrupt()), is_interrupt(SystemExit())
    (True, False)
    """
    return isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread()


def summary(error: BaseException) -> str:
    """The class of an error and its text, in one line if the text is one."""
    text = text_of(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def text_of(error: object) -> str:
    """The text of an error, whose class is the user's and may fail at that, too."""
    try:
        # PySpark sends it to the JVM in UTF-8, which has no lone surrogates.
        return str(error).encode("utf-8", "backslashreplace").decode("utf-8")
    except BaseException as other:  # noqa: BLE001 - any: another error is to be told
        return f"its text cannot be had: {type(other).__name__}"


#: What is not the fault of a row: these fail the batch.
_NOT_OF_A_ROW = (
    MemoryError,
    MemoryLimitError,
    StoreError,
    CorruptCheckpointError,
    CommitConflictError,
    ClosedError,
    MutationError,
)


def described(error: Exception) -> tuple[str, str | None]:
    """The class of an error, and its code if it has one."""
    kind = type(error)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return name, error.code if isinstance(error, StateBackendError) else None


class FailedRows:
    """A mark for each row: `begin` before its call, then `passed` or `failed`.

    What a failed call has changed in keyed and operator state, given out or registered is taken back.
    """

    __slots__ = ("_failures", "_kept", "_keyed", "_marks", "_namespace", "_operator", "_output", "counts")

    def __init__(self, keyed: KeyedStateBackend, operator: OperatorStateBackend, given: BatchOutput) -> None:
        self._keyed = keyed
        self._operator = operator
        self._output = given
        self._marks: tuple[BackendMark, BackendMark] | None = None
        self._namespace: object = None
        self._kept: list[int] = []
        #: Numbers of rows of the piece, with their errors.
        self._failures: list[tuple[int, str, str | None]] = []
        #: How many rows have failed, by the class of the error.
        self.counts: Counter[str] = Counter()

    def begin(self) -> None:
        """A call begins."""
        self._namespace = self._keyed.current_namespace
        self._marks = (self._keyed.mark(), self._operator.mark())
        self._kept = [output.count for output in self._output.outputs.values()]

    def passed(self) -> None:
        """It has returned, and its rows have been taken."""
        self._release()

    def failed(self, at: int, error: Exception) -> None:
        """It has raised, for row ``at`` of the piece. Raises the error again if it is not that row's fault."""
        if isinstance(error, _NOT_OF_A_ROW):
            raise error
        self.take_back()
        name, code = described(error)
        self._failures.append((at, name, code))
        self.counts[name] += 1

    def take_back(self) -> None:
        """Return state, timers and outputs to what they were at `begin`."""
        assert self._marks is not None
        keyed, operator = self._marks
        self._keyed.rollback(keyed)
        self._operator.rollback(operator)
        self._release()
        for output, count in zip(self._output.outputs.values(), self._kept, strict=True):
            output.cut(count)
        self._keyed.set_current_namespace(self._namespace)

    def _release(self) -> None:
        if self._marks is not None:
            (keyed, operator), self._marks = self._marks, None
            self._keyed.release(keyed)
            self._operator.release(operator)

    def settle(self, rows: pa.RecordBatch) -> None:
        """Give the rows of this piece that have failed to their output."""
        if not self._failures:
            return
        at, names, codes = zip(*self._failures, strict=True)
        self._failures = []
        taken = pa.Table.from_batches([rows]).take(pa.array(at))
        for name, values in zip(ERROR_COLUMNS, (names, codes), strict=True):
            taken = taken.append_column(name, pa.array(values, pa.string()))
        self._output.add_rows_as_they_are(ERRORS, taken)

    def settle_row(self, row: Any) -> None:
        """The same for a call with a single row, of a harness."""
        for _, name, code in self._failures:
            self._output.add_row_as_it_is(ERRORS, row, {ERROR_COLUMNS[0]: name, ERROR_COLUMNS[1]: code})
        self._failures = []

    def tell(self, batch_id: int) -> None:
        """Say in the log how many rows have failed."""
        if self.counts:
            told = ", ".join(f"{name} {count:,}" for name, count in self.counts.most_common(5))
            _log.warning(
                "batch %d: %d rows went to the output %r: %s", batch_id, self.counts.total(), ERRORS, told
            )
