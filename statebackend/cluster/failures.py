"""Failures of other processes: errors travel as JSON, and the end of a host's process is known.

What the library raised comes back as it was, other errors by their names. A host has its own process, so that its
end is known: the exit status, or the signal that ended it. Spark forks its Python workers from a daemon that ignores
how they end. A worker that is to run a host therefore forks once more, waits, and reports.

>>> from statebackend.errors import UsageError
>>> try:
...     raise UsageError("no current key is set", detail="state 'sum'")
... except UsageError as error:
...     said = described(error)
>>> print(raised(said, "host 2"))
no current key is set (state 'sum', host 2) [USAGE]
>>> print(raised({**said, "kind": "ValueError", "is_ours": False, "message": "boom"}, "host 2"))
ValueError: boom (host 2). Hint: the traceback below is the host's [HOST.FUNCTION]
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from statebackend import errors
from statebackend.errors import HostError, StateBackendError
from statebackend.runtime.function_calls import text_of

#: The code of an error that a retry of the batch mends.
LOST_PIECES = "HOST.LOST_PIECES"

_TEXTS = ("code", "detail", "hint")
#: The longest text of an error, in characters: all of them come in the header of one frame.
_LONGEST = 100_000


def described(error: BaseException) -> dict[str, Any]:
    """What another process needs to raise the error again: JSON, of texts that are cut where they are very long."""
    is_ours = isinstance(error, StateBackendError)
    said = {name: getattr(error, name, None) for name in _TEXTS} if is_ours else dict.fromkeys(_TEXTS)
    trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    return {
        "kind": type(error).__name__,
        "is_ours": is_ours,
        "message": _text(getattr(error, "message", error) if is_ours else error),
        "notes": [_text(each) for each in getattr(error, "__notes__", ())],
        "trace": _cut(trace),
        **{name: None if text is None else _text(text) for name, text in said.items()},
    }


def _text(said: object) -> str:
    return _cut(text_of(said))


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST // 2]} … {text[-_LONGEST // 2 :]}"


def raised(said: dict[str, Any], where: str) -> StateBackendError:
    """The error to raise here for one that another process has described."""
    found = getattr(errors, str(said["kind"]), None) if said["is_ours"] else None
    if isinstance(found, type) and issubclass(found, StateBackendError):
        error = found.__new__(found, said["message"])
        error.args = (said["message"],)
        error.message = said["message"]
        error.code, error.detail, error.hint = said["code"], said["detail"], said["hint"]
        error.detail = f"{error.detail}, {where}" if error.detail else where
    else:
        error = HostError(
            f"{said['kind']}: {said['message']}",
            code="HOST.FUNCTION",
            detail=where,
            hint="the traceback below is the host's",
        )
    # A note comes after the error. Python 3.10 shows none.
    error.__notes__ = [*said["notes"], f"On {where}:\n{said['trace']}"]
    return error


#: The option of Linux's prctl by which a process gets a signal when its parent ends.
_PR_SET_PDEATHSIG = 1
_LONGEST_TRACE = 20_000


def reported(serve: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Call ``serve`` in a forked process and return what it returns, or else the facts about its end.

    ``failed`` is an error that it raised, ``died`` says how the process ended, ``trace`` where it was then, if it is
    known. The process ends with this one.
    """
    parent = os.getpid()
    sys.stdout.flush()  # or both processes would write what waits there
    sys.stderr.flush()
    with _memory() as report:
        process = os.fork()
        if process == 0:
            _run(serve, report, parent)
        try:
            _, status = os.waitpid(process, 0)
        except BaseException:
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
            raise
        report.seek(0)
        written = report.read()
    code = os.waitstatus_to_exitcode(status)
    if code == 0 and written:
        said: dict[str, Any] = json.loads(written)
        return said
    if code >= 0:
        return {"died": f"ended with exit status {code}"}
    return {"died": f"was ended by {_named(-code)}", **_trace()}


def _memory() -> IO[bytes]:
    """Its own file for the report: a pipe would stay open in processes that the host has started."""
    if sys.platform == "linux":
        return open(os.memfd_create("statebackend-report"), "w+b")  # disks may be full
    else:
        return tempfile.TemporaryFile()


def _trace() -> dict[str, Any]:
    """The traces of all threads, where Spark lets its workers write them when a signal ends them."""
    folder = os.environ.get("PYTHON_FAULTHANDLER_DIR")
    try:
        trace = "" if folder is None else Path(folder, str(os.getpid())).read_text(errors="replace")
    except OSError:
        return {}
    return {"trace": trace[:_LONGEST_TRACE]} if trace else {}


def _named(number: int) -> str:
    try:
        return f"signal {number} ({signal.Signals(number).name})"
    except ValueError:
        return f"signal {number}"


def _run(serve: Callable[[], dict[str, Any]], report: IO[bytes], parent: int) -> None:
    status = 1
    try:
        _end_with(parent)
        try:
            said = serve()
        except BaseException as error:  # noqa: BLE001 - of code that only this process has loaded
            said = {"failed": described(error)}
        report.write(json.dumps(said).encode())
        report.flush()
        sys.stdout.flush()
        sys.stderr.flush()
        status = 0
    finally:
        # No code of the worker's runs here: it would speak to Spark a second time.
        os._exit(status)


def _end_with(parent: int) -> None:
    """Let this process end when its parent does, also if it is stopped then."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    else:
        threading.Thread(target=_follow, args=(parent,), name="statebackend: parent", daemon=True).start()
    if os.getppid() != parent:
        os._exit(1)


def _follow(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)
