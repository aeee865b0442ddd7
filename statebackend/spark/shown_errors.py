"""The traceback of an error as Spark shows it: the frames of the user's code, and no others if they do not matter.

Spark puts the whole traceback into the text of its own error, above a description of the query.
"""

from __future__ import annotations

import sysconfig
from contextlib import suppress
from types import TracebackType
from typing import TypeVar

from statebackend.errors import StateBackendError

__all__ = ["shortened"]

E = TypeVar("E", bound=BaseException)

#: The beginnings of the paths of code that is no user's.
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
