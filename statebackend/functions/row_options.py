"""What a job says about its rows: their event time, and the rules for those that do not fit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

from statebackend.errors import usage
from statebackend.state import Duration, milliseconds

TIMERS = ("between_rows", "after_batch")


@dataclass(frozen=True)
class ToOutput:
    """The rule that gives rows to the output of this name; `to_output` makes it."""

    name: str

    def __post_init__(self) -> None:
        name: Any = self.name
        if not isinstance(name, str) or not name:
            raise usage.name("to_output takes the name of an output", hint="name one of schema=")

    def __repr__(self) -> str:
        return f"to_output({self.name!r})"


#: A word such as "fail" or "drop", or an output.
Rule: TypeAlias = str | ToOutput


def to_output(name: str) -> ToOutput:
    """Give the rows that ``null_keys=``, ``errors=`` or ``late=`` is about to the output of this name.

    They have the columns that the output's schema names, as they came.

    >>> to_output("late")
    to_output('late')
    """
    return ToOutput(name)


def checked_rule(option: str, given: Any, *words: str) -> Rule:
    """The rule itself, one of these words or an output; refuses any other.

    >>> checked_rule("null_keys", "drop", "fail", "drop")
    'drop'
    """
    if isinstance(given, ToOutput) or (isinstance(given, str) and given in words):
        return given
    shown = repr(given) if isinstance(given, str) else f"a {type(given).__name__}"
    raise usage.option(
        f"{option} is not a rule for rows: {shown}",
        hint=f"write {', '.join(map(repr, words))} or sb.to_output(name)",
    )


def output_of(rule: Rule) -> str | None:
    """The output that a rule gives rows to, or None."""
    return rule.name if isinstance(rule, ToOutput) else None


@dataclass(frozen=True)
class EventTime:
    """All that a job says about the time of its rows: pass it as ``event_time=``.

    ``column`` is a timestamp, or a number of milliseconds. The *watermark* is the greatest time so far less
    ``watermark_delay``, and never falls. A row is late if its time is below the watermark of the batch before:
    ``late="keep"`` gives such rows to the function, ``"drop"`` drops them, ``"fail"`` fails the batch, and
    ``to_output(name)`` gives them, as they are, to an output. With ``timers="between_rows"``, the default for a
    `KeyedProcessFunction`, the rows of a batch come in the order of their times, each after the timers that are due
    before it. With ``"after_batch"``, which all other functions use, they come as they are, and all timers after them.
    A time that is further than ``max_ahead`` ahead of the clock does not move the watermark, and its
    row goes the way of a late one. When no row with a time has come for ``idle_after``, the watermark follows the
    clock, at a distance of ``idle_after`` and ``watermark_delay``; that is for rows whose times follow the clock,
    and not for a replay of older ones. ``watermark_delay``, ``max_ahead`` and ``idle_after`` are durations:
    milliseconds, a `datetime.timedelta`, or a text such as ``"10 minutes"``.

    >>> EventTime("at", watermark_delay="1 minute", late="drop").watermark_delay
    60000
    >>> EventTime("at", timers="sometimes")
    Traceback (most recent call last):
    statebackend.errors.UsageError: unknown timers='sometimes'; expected 'between_rows' or 'after_batch' [USAGE.OPTION]
    """

    column: str
    watermark_delay: Duration = 0
    late: Rule = "keep"
    timers: str | None = None
    max_ahead: Duration | None = None
    idle_after: Duration | None = None

    def __post_init__(self) -> None:
        column: Any = self.column
        if not isinstance(column, str) or not column:
            raise usage.option("event_time is the name of a column, or an EventTime of one")
        for name in ("watermark_delay", "max_ahead", "idle_after"):
            given = getattr(self, name)
            if given is not None or name == "watermark_delay":
                object.__setattr__(self, name, milliseconds(name, given, least=0))
        checked_rule("late", self.late, "keep", "drop", "fail")
        if self.timers is not None and self.timers not in TIMERS:
            raise usage.option(f"unknown timers={self.timers!r}; expected {' or '.join(map(repr, TIMERS))}")
