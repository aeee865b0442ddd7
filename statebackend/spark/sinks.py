"""Calling a sink: what it is given, and what is looked at before.

>>> def sink(df, batch_id, context):
...     print(batch_id, context.is_replay)
>>> call(sink, None, 3, SinkContext(3, 1, "0" * 32, False))
3 False
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from statebackend.errors import UsageError

__all__ = ["SinkContext", "asks_for_context", "call", "check"]


@dataclass(frozen=True)
class SinkContext:
    """What a sink with a parameter called ``context`` is told, to hand on to systems that can keep an older writer out.

    A pair of ``incarnation`` and ``batch_id`` stands for the same rows for ever. A larger ``epoch`` is that of a newer
    writer: a system that has seen it refuses smaller ones.

    >>> SinkContext(3, 1, "0" * 32, True).is_replay
    True
    """

    #: The batch that is delivered.
    batch_id: int
    #: Larger with every opening of the store.
    epoch: int
    #: New after the store was restarted from empty or rewound: its batches are others, under numbers that come again.
    incarnation: str
    #: Whether the batch had been committed before, and is delivered again.
    is_replay: bool


def check(sink: Any) -> None:
    """Raise unless it can be called as a sink is: found out now, not when a batch is committed.

    >>> check(lambda df: df.show())
    Traceback (most recent call last):
    statebackend.errors.UsageError: a sink is called with (df, batch_id), and this one cannot be [USAGE]
    """
    if not callable(sink):
        raise UsageError("sink is a function (DataFrame, batch id)")
    try:
        signature = inspect.signature(sink, follow_wrapped=False)
    except (TypeError, ValueError):  # something built in, which says nothing of its parameters
        return
    named = {"context": None} if asks_for_context(sink) else {}
    try:
        signature.bind(None, 0, **named)
    except TypeError:
        raise UsageError("a sink is called with (df, batch_id), and this one cannot be") from None


def call(sink: Callable[..., Any], frame: Any, batch_id: int, context: SinkContext) -> None:
    """Call a sink with its frame and its batch, and with the context if it asks for it by name."""
    if asks_for_context(sink):
        sink(frame, batch_id, context=context)
    else:
        sink(frame, batch_id)


def asks_for_context(sink: Callable[..., Any]) -> bool:
    """Whether a sink has a parameter ``context`` that can be given by name, and that nobody has bound.

    >>> asks_for_context(lambda df, batch_id, context: None), asks_for_context(lambda df, context: None)
    (True, False)
    """
    if isinstance(sink, partial) and "context" in sink.keywords:
        return False
    try:
        parameters = list(inspect.signature(sink, follow_wrapped=False).parameters.values())
    except (TypeError, ValueError):
        return False
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return any(each.name == "context" and each.kind in named for each in parameters[2:]) or any(
        each.name == "context" and each.kind is inspect.Parameter.KEYWORD_ONLY for each in parameters[:2]
    )
