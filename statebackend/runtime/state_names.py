"""The names of the states that a checkpoint or savepoint has, and what a name must be to be dropped.

>>> check_name("count")
>>> check_name("statebackend.timers.event")
Traceback (most recent call last):
statebackend.errors.UsageError: timers cannot be dropped (statebackend.timers.event). Hint: ... [USAGE]
"""

from __future__ import annotations

from collections.abc import Iterable

from statebackend.checkpoint import Checkpoint
from statebackend.checkpoint.store.savepoint_folder import Savepoint
from statebackend.errors import UsageError
from statebackend.operator_state.operator_snapshots import PART as OPERATOR
from statebackend.state import RESERVED

__all__ = ["ambiguous", "check_droppable", "check_name", "names_of", "no_state"]

_TIMERS = f"{RESERVED}timers."


def check_name(name: object) -> None:
    """Raise unless a state of this name can be dropped from what has it."""
    if not isinstance(name, str):
        raise UsageError(f"the name of a state is a str, not a {type(name).__name__}")
    if name.startswith(_TIMERS):
        raise UsageError(
            "timers cannot be dropped", detail=name, hint="delete them in the function, or let them fire"
        )


def check_droppable(name: str, saved: Checkpoint | Savepoint) -> None:
    """Raise unless exactly one state has the name, which can be dropped."""
    check_name(name)
    named = _named(saved)
    where = f"checkpoint {saved.id}" if isinstance(saved, Checkpoint) else f"savepoint {saved.uri}"
    parts = {part for part, each in named if each == name}
    if not parts:
        raise no_state(name, [each for _, each in named if not each.startswith(_TIMERS)], where)
    if len(parts) > 1:
        raise ambiguous(name, where)


def names_of(saved: Checkpoint | Savepoint) -> list[str]:
    """The names of all states of a checkpoint or savepoint.

    >>> names_of(Savepoint("/nowhere"))
    []
    """
    return [name for _, name in _named(saved)]


def _named(saved: Checkpoint | Savepoint) -> list[tuple[str, str]]:
    """The part, keyed or operator, and the name of each state."""
    if isinstance(saved, Checkpoint):
        return [
            (OPERATOR if each.extra.get("part") == OPERATOR else "keyed", state["name"])
            for each in saved.snapshots
            for state in each.states
        ]
    return [
        (part, state.described["name"])
        for part in ("keyed", OPERATOR)
        for each in saved.parts(part)
        for state in each.states
    ]


def no_state(name: str, known: Iterable[str], where: str) -> UsageError:
    """The error for a state that a checkpoint or savepoint does not have."""
    return UsageError(
        f"there is no state {name!r}",
        code="USAGE.NO_STATE",
        detail=where,
        hint=f"there are: {', '.join(map(repr, sorted(set(known)))) or 'none'}",
    )


def ambiguous(name: str, where: str) -> UsageError:
    """The error for a name that two states share."""
    return UsageError(
        f"both a keyed state and an operator state are called {name!r}",
        detail=where,
        hint="give one of them another name",
    )
