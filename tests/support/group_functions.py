# mypy: ignore-errors
"""Functions for ``applyInPandasWithState``, which one query runs together: the text of a key names its function."""

from __future__ import annotations

import datetime
import sys
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
from processor_pairs import Query, table
from pyspark.cloudpickle import register_pickle_by_value

import statebackend as sb

register_pickle_by_value(sys.modules[__name__])

#: Spark 4.3 takes neither arrays nor maps here.
STATE = "n bigint, x double, s string, t timestamp, d decimal(10,2), r struct<a:int,t:timestamp>"
#: The functions of each timeout, by name; those of ``NoTimeout`` run with every one.
CASES: dict[str, dict[str, Any]] = {"NoTimeout": {}, "ProcessingTimeTimeout": {}, "EventTimeTimeout": {}}


def case(timeout="NoTimeout"):
    def noted(function):
        CASES[timeout][function.__name__] = function
        return function

    return noted


def out(key, *seen):
    return pd.DataFrame({"k": [key[0]], "text": [repr(seen)]})


def stored(n=None, x=None, s=None, t=None, d=None, r=None):
    return (n, x, s, t, d, r)


def cases_of(timeout):
    """The functions that run with a timeout."""
    return {**CASES["NoTimeout"], **CASES[timeout]}


def rows_of(names, rng, batch):
    """Some rows for each function or processor of these names."""
    rows = [
        {
            "k": f"{name}:{key}",
            "g": rng.choice([None, 1, 2]),
            "n": rng.randrange(1, 9),
            "x": rng.choice([None, 0.5, -1.0]),
            "s": rng.choice(["a", "é", None]),
            "at": 100 + 8 * batch + rng.randrange(-12, 12),
        }
        for name in names
        for key in range(3)
        for _ in range(rng.randrange(4))
    ]
    rng.shuffle(rows)
    return table(rows)


def several(timeout):
    """All functions that run with a timeout, as one."""
    cases = cases_of(timeout)

    def function(key, frames, state):
        return cases[key[0].split(":")[0]](key, frames, state)

    return function


def caught(call, *arguments):
    """The class of an error of PySpark and its text."""
    try:
        return call(*arguments)
    except Exception as error:  # noqa: BLE001 - any
        return type(error).__name__, str(error)


@case()
def totals(key, frames, state):
    n, x = state.get[:2] if state.exists else (0, 0.0)
    for frame in frames:
        n, x = n + int(frame["n"].sum()), x + float(frame["x"].fillna(0).sum())
    state.update(stored(n, x))
    yield out(key, n, x)


@case()
def frames_and_their_types(key, frames, state):
    for frame in frames:
        frame = frame.sort_values(["n", "x", "s", "at", "g"], ignore_index=True)
        yield out(key, list(frame.columns), [str(kind) for kind in frame.dtypes], frame.to_dict("list"))
    state.update(stored())


@case()
def sparse_numbers(key, frames, state):
    for frame in frames:
        yield out(key, str(frame["g"].dtype), sorted(map(repr, frame["g"])), list(frame.index))


@case()
def removed_at_nine(key, frames, state):
    n = sum(len(frame) for frame in frames) + (state.get[0] if state.exists else 0)
    if n > 8:
        state.remove()
    else:
        state.update(stored(n))
    yield out(key, n, state.exists, caught(lambda: state.get))


@case()
def nothing_comes_out(key, frames, state):
    state.update(stored((state.getOption or (0,))[0] + 1))
    return []


@case()
def a_list_of_frames(key, frames, state):
    seen = [len(frame) for frame in frames]
    state.update(stored(sum(seen)))
    return [out(key, 1, sum(seen)), pd.DataFrame({"k": [], "text": []}), out(key, 2), pd.DataFrame()]


@case()
def rows_stay_unread(key, frames, state):
    n = (state.getOption or (0,))[0]
    state.update(stored(n + 1))
    yield out(key, n)


@case()
def one_frame_is_read(key, frames, state):
    yield out(key, len(next(iter(frames))), state.exists)
    state.update(stored(s="é"))


@case()
def all_types(key, frames, state):
    yield out(
        key,
        state.exists,
        state.getOption,
        str(state),
        [type(each).__name__ for each in state.getOption or ()],
    )
    when = datetime.datetime(2024, 3, 31, 1, 30, 0, 123456)
    from decimal import Decimal

    from pyspark.sql import Row

    state.update((1, 0.5, "é", when, Decimal("1.25"), Row(a=3, t=when)))
    yield out(key, state.get)


@case()
def numpy_values(key, frames, state):
    yield out(key, state.getOption)
    when = pd.Timestamp("2024-01-02 03:04:05.678")
    state.update((np.int64(7), np.float32(0.5), "s", when, None, None))
    yield out(key, state.get)


@case()
def update_and_remove(key, frames, state):
    seen = [state.exists]
    state.update(stored(1))
    state.remove()
    seen.append(state.exists)
    if len(next(iter(frames))) % 2:
        state.update(stored(2))
    yield out(key, seen, state.exists, state.getOption)


@case()
def removed_without_state(key, frames, state):
    state.remove()
    yield out(key, state.exists)


@case()
def errors_of_pyspark(key, frames, state):
    yield out(
        key,
        caught(lambda: state.get),
        caught(state.update, None),
        caught(state.setTimeoutDuration, "1 hour"),
        caught(state.setTimeoutDuration, 0),
        caught(state.setTimeoutTimestamp, 0),
        caught(state.getCurrentWatermarkMs),
        state.hasTimedOut,
        state.oldTimeoutTimestamp,
        state.json(),
    )


@case()
def columns_in_another_order(key, frames, state):
    yield out(key, "a")[["text", "k"]]


@case()
def columns_of_other_names(key, frames, state):
    yield pd.DataFrame({"k": [key[0]], "other": ["lost"]})
    yield pd.DataFrame([[key[0], "by place"]])


@case()
def null_keys_come_out(key, frames, state):
    yield pd.DataFrame({"k": [key[0]], "text": [None]})
    yield pd.DataFrame({"k": [key[0], None], "text": ["1", "2"]})


@case()
def frames_are_written_to(key, frames, state):
    for frame in frames:
        frame["n"] += 1
        frame["new"] = frame["n"] * 2
        yield out(key, sorted(frame["new"]), sorted(frame.pop("n")))


# --- timeouts by the clock: a minute is longer than any test ---


@case("ProcessingTimeTimeout")
def a_timeout_that_is_late(key, frames, state):
    state.update(stored(1))
    state.setTimeoutDuration(60_000)
    yield out(key, state.hasTimedOut)


@case("ProcessingTimeTimeout")
def each_call_has_a_timeout(key, frames, state):
    if state.hasTimedOut:
        yield out(key, "out", state.get, [(len(frame), list(frame.columns)) for frame in frames])
        state.remove()
        return
    state.update(stored((state.getOption or (0,))[0] + 1))
    state.setTimeoutDuration(1)
    yield out(key, state.get)


@case("ProcessingTimeTimeout")
def a_timeout_without_state(key, frames, state):
    if not state.hasTimedOut:
        state.setTimeoutDuration(1)
    yield out(key, state.hasTimedOut, state.exists)


@case("ProcessingTimeTimeout")
def removed_with_a_timeout(key, frames, state):
    if state.hasTimedOut:
        state.update(stored(2))
    else:
        state.update(stored(1))
        state.remove()
        state.setTimeoutDuration(1)
    yield out(key, state.hasTimedOut, state.exists)


@case("ProcessingTimeTimeout")
def a_timeout_again_and_again(key, frames, state):
    state.setTimeoutDuration(1)
    yield out(key, state.hasTimedOut)


# --- timeouts by the watermark ---


@case("EventTimeTimeout")
def after_five_seconds(key, frames, state):
    if state.hasTimedOut:
        yield out(key, "out", state.get, state.getCurrentWatermarkMs())
        state.remove()
        return
    last = max(frame["at"].max() for frame in frames)
    state.update(stored(t=last))
    state.setTimeoutTimestamp(max(int(last.timestamp() * 1000), state.getCurrentWatermarkMs()) + 5_000)
    yield out(key, last)


@case("EventTimeTimeout")
def at_the_watermark(key, frames, state):
    watermark = state.getCurrentWatermarkMs()
    if not state.hasTimedOut and watermark:
        state.setTimeoutTimestamp(watermark)
        yield out(key, "set", caught(state.setTimeoutTimestamp, watermark - 1))
    else:
        yield out(key, state.hasTimedOut, watermark)


@case("EventTimeTimeout")
def updates_take_the_timeout_away(key, frames, state):
    if state.exists or state.hasTimedOut:
        state.update(stored(2))
    else:
        state.update(stored(1))
        state.setTimeoutTimestamp(state.getCurrentWatermarkMs() + 1)
    yield out(key, state.hasTimedOut, state.get)


@case("EventTimeTimeout")
def late_rows(key, frames, state):
    yield out(key, sorted(map(str, (at for frame in frames for at in frame["at"]))))
    state.setTimeoutTimestamp(state.getCurrentWatermarkMs() + 3_000)


@dataclass
class GroupPair:
    """A function with a group state, and how both sides run it."""

    function: Any
    timeout: str = "NoTimeout"
    key: tuple[str, ...] = ("k",)
    output_schema: str = "k string, text string"
    state_schema: str = STATE
    watermark: str | None = None
    settings: Any = field(default_factory=dict)
    options: Any = field(default_factory=dict)


class GroupQuery(Query):
    """The same for functions with a group state."""

    def sparks_frame(self, pair):
        grouped = self._rows(pair).groupBy(*pair.key)
        return grouped.applyInPandasWithState(
            pair.function, pair.output_schema, pair.state_schema, "update", pair.timeout
        )

    def callable(self, pair, sink):
        return sb.spark.apply_in_pandas_with_state(
            pair.function,
            key=list(pair.key),
            output_schema=pair.output_schema,
            state_schema=pair.state_schema,
            output_mode="update",
            timeout_conf=pair.timeout,
            state=self.folder / "state",
            sink=sink,
            **pair.options,
        )
