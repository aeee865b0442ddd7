"""Calling a sink: its arguments, and the checks before.

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
from typing import TYPE_CHECKING

from statebackend.errors import UsageError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["SinkContext", "asks_for_context", "call", "check"]


@dataclass(frozen=True)
class SinkContext:
    """The context for a sink with a parameter called ``context``, to pass on to systems that can fence older writers.

    A pair of ``incarnation`` and ``batch_id`` stands for the same rows for ever. A larger ``epoch`` belongs to a newer
    writer: a system that has seen it refuses smaller ones.

    >>> SinkContext(3, 1, "0" * 32, True).is_replay
    True
    """

    #: The batch that is delivered.
    batch_id: int
    #: Increases with every opening of the store.
    epoch: int
    #: New after the store was restarted from empty or rewound: other batches then come under the same numbers.
    incarnation: str
    #: True if the batch was committed before, and is delivered again.
    is_replay: bool


def check(sink: object) -> None:
    """Raise unless the object can be called as a sink: now, and not when a batch is committed.

    >>> check(lambda df: df.show())
    Traceback (most recent call last):
    statebackend.errors.UsageError: a sink is called with (df, batch_id), and this one cannot be [USAGE]
    """
    if not callable(sink):
        raise UsageError("sink is a function (DataFrame, batch id)")
    kinds = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)
    if any(kind(each) for kind in kinds for each in (sink, getattr(sink, "__call__", None))):  # noqa: B004
        raise UsageError(
            "a sink that is async, or that yields, would write nothing: nothing runs what it returns",
            hint="write it with def and without yield; run coroutines in it with asyncio.run",
        )
    try:
        signature = inspect.signature(sink, follow_wrapped=False)
    except (TypeError, ValueError):  # a built-in, which does not reveal its parameters
        return
    named = {"context": None} if asks_for_context(sink) else {}
    try:
        signature.bind(None, 0, **named)
    except TypeError:
        raise UsageError("a sink is called with (df, batch_id), and this one cannot be") from None


def call(sink: Callable[..., object], frame: DataFrame, batch_id: int, context: SinkContext) -> None:
    """Call a sink with its frame and its batch, and with the context if it asks for it by name."""
    if asks_for_context(sink):
        sink(frame, batch_id, context=context)
    else:
        sink(frame, batch_id)


def asks_for_context(sink: Callable[..., object]) -> bool:
    """Return True if a sink has an unbound parameter ``context`` that can be passed by name.

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
