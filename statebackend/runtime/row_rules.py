"""The rules for rows that do not fit: those with a null key, those whose call raises, and late ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

from statebackend.errors import UsageError


@dataclass(frozen=True)
class ToOutput:
    """The rule that gives rows to the output of this name; `to_output` makes it."""

    name: str

    def __post_init__(self) -> None:
        name: Any = self.name
        if not isinstance(name, str) or not name:
            raise UsageError("to_output takes the name of an output", hint="name one of schema=")

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
    raise UsageError(
        f"{option} is not a rule for rows: {shown}",
        hint=f"write {', '.join(map(repr, words))} or sb.to_output(name)",
    )


def output_of(rule: Rule) -> str | None:
    """The output that a rule gives rows to, or None."""
    return rule.name if isinstance(rule, ToOutput) else None
