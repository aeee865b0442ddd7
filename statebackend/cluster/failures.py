"""Errors that travel between processes as JSON: what the library raised comes back as it was, others by their names.

>>> from statebackend.errors import UsageError
>>> try:
...     raise UsageError("no current key is set", detail="state 'sum'")
... except UsageError as error:
...     said = described(error)
>>> print(raised(said, "host 2"))
no current key is set (state 'sum', host 2) [USAGE]
>>> print(raised({**said, "kind": "ValueError", "is_ours": False, "message": "boom"}, "host 2"))
ValueError: boom (host 2). Hint: the traceback below is that of the host [HOST.FUNCTION]
"""

from __future__ import annotations

import traceback
from typing import Any

from statebackend import errors
from statebackend.errors import HostError, StateBackendError
from statebackend.runtime.failed_rows import text_of

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
            hint="the traceback below is that of the host",
        )
    # A note comes after the error. Python 3.10 shows none.
    error.__notes__ = [*said["notes"], f"On {where}:\n{said['trace']}"]
    return error
