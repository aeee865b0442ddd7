"""Which sinks are given a context, and which cannot be called at all; found out before anything is committed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

import statebackend as sb
from statebackend.spark.sinks.interface import SinkContext, call, check

CONTEXT = SinkContext(7, 3, "0" * 32, False)


def given(*arguments: Any, **named: Any) -> tuple[Any, ...]:
    seen.append((*arguments, named))
    return seen[-1]


seen: list[tuple[Any, ...]] = []


class Sink:
    def __call__(self, df: Any, batch_id: int, context: Any = None) -> None:
        given(df, batch_id, context)

    def method(self, df: Any, batch_id: int, *, context: Any) -> None:
        given(df, batch_id, context)

    def plain(self, df: Any, batch_id: int) -> None:
        given(df, batch_id)


def with_context(df: Any, batch_id: int, context: Any) -> None:
    given(df, batch_id, context)


@functools.wraps(with_context)
def wrapper(df: Any, batch_id: int) -> None:
    given(df, batch_id)


@pytest.mark.parametrize(
    ("sink", "wanted"),
    [
        (with_context, ("df", 7, CONTEXT, {})),
        (Sink(), ("df", 7, CONTEXT, {})),
        (Sink().method, ("df", 7, CONTEXT, {})),
        (Sink().plain, ("df", 7, {})),
        (lambda df, batch_id: given(df, batch_id), ("df", 7, {})),
        (lambda *both: given(*both), ("df", 7, {})),
        (lambda df, batch_id, *context: given(df, batch_id, *context), ("df", 7, {})),
        (lambda df, batch_id, **context: given(df, batch_id, **context), ("df", 7, {})),
        (lambda context, batch_id: given(context, batch_id), ("df", 7, {})),
        (functools.partial(with_context, context="mine"), ("df", 7, "mine", {})),
        (
            functools.partial(lambda table, df, batch_id, context: given(table, df, batch_id, context), "t"),
            ("t", "df", 7, CONTEXT, {}),
        ),
        (wrapper, ("df", 7, {})),
        (print, None),
    ],
)
def test_a_sink_gets_what_it_asks_for(sink: Callable[..., Any], wanted: Any) -> None:
    seen.clear()
    check(sink)
    call(sink, "df", 7, CONTEXT)
    assert seen == ([] if wanted is None else [wanted])


def positional(df: Any, batch_id: int, context: Any, /) -> None: ...


@pytest.mark.parametrize("sink", [lambda df: None, lambda: None, lambda a, b, c: None, positional, 7, "sink"])
def test_what_cannot_be_called_as_a_sink_is_refused_at_once(sink: Any) -> None:
    with pytest.raises(sb.UsageError, match="sink is"):
        sb.spark.stateful(
            sb.map_with_state(lambda row, n: (None, 1), int),
            key="user",
            schema="a int",
            checkpoint="/x",
            sink=sink,
        )
