"""What users see of a job: in a notebook, on a terminal, in Prometheus, and in the traceback of an error.

Spark puts the whole traceback of an error into its own text, above a description of the query. The frames of the
user's code are shown, and no others if they do not matter.
"""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from html import escape
from types import TracebackType
from typing import Any, TextIO, TypeVar

from statebackend.errors import StateBackendError

#: How wide the bar of a batch is, and the parts of a batch that it shows, by the letter of each.
_WIDTH = 20
_PARTS = {"read": "r", "function": "f", "state": "s", "output": "o", "sink": "k"}

#: Figures of progress in a notebook, with the name of each figure.
_SHOWN = {
    "batchId": "batch",
    "numInputRows": "rows in",
    "numOutputRows": "rows out",
    "numRowsTotal": "rows of state",
    "memoryUsedBytes": "bytes of state",
    "numTimersPending": "timers that wait",
    "watermark": "watermark",
    "numRowsLate": "late rows",
    "processedRowsPerSecond": "rows a second",
}


def table(lines: Iterable[tuple[str, object]], caption: str) -> str:
    """A small table of HTML; names and values are text."""
    rows = "".join(
        f"<tr><th style='text-align:left'>{escape(name)}</th><td>{escape(_text(value))}</td></tr>"
        for name, value in lines
    )
    return f"<table><caption>{escape(caption)}</caption>{rows}</table>"


def shown_progress(progress: Mapping[str, Any] | None) -> list[tuple[str, object]]:
    """The lines about the newest batch.

    >>> shown_progress({"batchId": 7, "durationMs": {"read": 3.0, "sink": 1.5, "batch": 9.0}})
    [('batch', 7), ('milliseconds', 'read 3, sink 2, batch 9')]
    """
    if progress is None:
        return [("batch", "none yet")]
    lines: list[tuple[str, object]] = [
        (label, progress[name]) for name, label in _SHOWN.items() if progress.get(name) is not None
    ]
    took = ", ".join(f"{name} {ms:.0f}" for name, ms in progress.get("durationMs", {}).items())
    return [*lines, ("milliseconds", took)] if took else lines


def progress_bar(file: TextIO | None = None) -> Callable[[Mapping[str, Any]], None]:
    """What shows the newest batch in one line, which it writes again each time: pass it as ``on_batch=``.

    For terminals and notebooks. The line has a bar of where the time of the batch went: reading, the function, state,
    output and the sink. ``file`` is where it is written, by default the standard error.

    >>> import io
    >>> shown = io.StringIO()
    >>> progress_bar(shown)({
    ...     "batchId": 7, "numInputRows": 2000, "numRowsTotal": 10, "processedRowsPerSecond": 1234.5,
    ...     "durationMs": {"read": 20.0, "function": 50.0, "sink": 25.0, "batch": 100.0},
    ... })
    >>> print(shown.getvalue().strip())
    batch 7 [rrrrffffffffffkkkkk.] 2,000 rows in, 1,234 rows/s, state 10 rows
    """
    return _ProgressBar(file)


class _ProgressBar:
    """Picklable, unless a file is given."""

    def __init__(self, file: TextIO | None) -> None:
        self._file = file
        self._width = 0

    def __call__(self, progress: Mapping[str, Any]) -> None:
        file = self._file or sys.stderr
        line = (
            f"batch {progress['batchId']} [{_bar(progress['durationMs'])}] {progress['numInputRows']:,} rows in, "
            f"{progress['processedRowsPerSecond']:,.0f} rows/s, state {progress['numRowsTotal'] or 0:,} rows"
        )
        # Blanks over what the line before has had more.
        file.write("\r" + line.ljust(self._width))
        file.flush()
        self._width = len(line)


def _bar(durations: Mapping[str, float]) -> str:
    """A letter for each twentieth of a batch; a dot for the rest.

    >>> _bar({"read": 1.0, "state": 3.0, "batch": 8.0})
    'rrssssssss..........'
    """
    whole = durations["batch"] or 1.0
    bar, passed = "", 0.0
    for part, letter in _PARTS.items():
        passed += durations.get(part, 0.0)
        bar = bar.ljust(round(_WIDTH * min(passed / whole, 1.0)), letter)
    return bar.ljust(_WIDTH, ".")


def _text(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    return f"{value:,.0f}"


E = TypeVar("E", bound=BaseException)

#: The beginnings of the paths of code that is not a user's.
_INSTALLED = ("<frozen ", *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")))


def shortened(error: E) -> E:
    """Take the frames of the library out of the traceback of an error and of those it came from; return the error.

    They stay where the library itself failed: in the traceback of an error of another class without the user's frames.
    """
    each: BaseException | None = error
    seen: set[int] = set()
    while each is not None and id(each) not in seen:
        seen.add(id(each))
        frames = _frames(each.__traceback__)
        if isinstance(each, StateBackendError) or any(map(_is_users, frames)):
            with suppress(Exception):  # the class of a user's error may refuse any attribute
                each.__traceback__ = _joined([frame for frame in frames if not _is_library(frame)])
        each = each.__cause__ or (None if each.__suppress_context__ else each.__context__)
    return error


def _frames(traceback: TracebackType | None) -> list[TracebackType]:
    found = []
    while traceback is not None:
        found.append(traceback)
        traceback = traceback.tb_next
    return found


def _is_library(traceback: TracebackType) -> bool:
    return str(traceback.tb_frame.f_globals.get("__name__")).partition(".")[0] == "statebackend"


def _is_users(traceback: TracebackType) -> bool:
    path = traceback.tb_frame.f_code.co_filename
    return not (_is_library(traceback) or path.startswith(_INSTALLED))


def _joined(frames: list[TracebackType]) -> TracebackType | None:
    made = None
    for each in reversed(frames):
        made = TracebackType(made, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return made
