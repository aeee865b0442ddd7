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
from typing import Any

__all__ = ["SinkContext", "call"]


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


def call(sink: Callable[..., Any], frame: Any, batch_id: int, context: SinkContext) -> None:
    """Call a sink with its frame and its batch, and with the context if it asks for it by name."""
    if _asks_for_context(sink):
        sink(frame, batch_id, context=context)
    else:
        sink(frame, batch_id)


def _asks_for_context(sink: Callable[..., Any]) -> bool:
    try:
        return "context" in inspect.signature(sink).parameters
    except (TypeError, ValueError):  # something built in, which says nothing of its parameters
        return False
