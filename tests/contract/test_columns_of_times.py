"""Vectorised calls with a column of times do what a loop does that sets each row's time, on every backend."""

from __future__ import annotations

import datetime
import random
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from contract.conftest import MakeKeyed
from contract.samples import Longest, last_of

import statebackend as sb
from statebackend import types as t
from statebackend.state import KeyedStateBackend, StateDescriptor, StateTtlConfig

pytestmark = pytest.mark.checked

TTL = 100
Update = StateTtlConfig.UpdateType
Visibility = StateTtlConfig.StateVisibility
EVENT_TIME = StateTtlConfig.TtlTimeCharacteristic.EventTime
UTC = datetime.timezone.utc

#: For each kind a state, the columns beside the keys that writes and reads take, and what makes their results.
STATES: dict[str, Any] = {
    "value": lambda: sb.ValueStateDescriptor("s", int, default=5),
    "text": lambda: sb.ValueStateDescriptor("s", str),
    "wide": lambda: sb.ValueStateDescriptor("s", "struct<a:bigint,b:bigint>"),
    "object": lambda: sb.ValueStateDescriptor("s", t.PICKLE),
    "list": lambda: sb.ListStateDescriptor("s", int),
    "texts": lambda: sb.ListStateDescriptor("s", str),
    "map": lambda: sb.MapStateDescriptor("s", int, int),
    "text map": lambda: sb.MapStateDescriptor("s", str, str),
    "sum": lambda: sb.ReducingStateDescriptor("s", "sum", int),
    "float max": lambda: sb.ReducingStateDescriptor("s", "max", "float"),
    "first": lambda: sb.ReducingStateDescriptor("s", "first", str),
    "own reducing": lambda: sb.ReducingStateDescriptor("s", lambda a, b: a - b, int),
    "average": lambda: sb.AggregatingStateDescriptor("s", "avg", int),
    "own aggregate": lambda: sb.AggregatingStateDescriptor("s", Longest(), str, str),
    "folding": lambda: sb.FoldingStateDescriptor("s", "", last_of, str),
}


def with_ttl(descriptor: StateDescriptor, **options: Any) -> Any:
    config = StateTtlConfig(TTL, ttl_time_characteristic=EVENT_TIME, **options)
    return descriptor.enable_time_to_live(config)


def sample(kind: str, rng: random.Random) -> Any:
    if kind == "wide":
        return (rng.randrange(9), rng.choice([None, 3]))
    if kind == "object":
        return {"n": rng.randrange(9)}
    if kind in ("text", "texts", "text map", "first", "own aggregate", "folding"):
        return rng.choice(["", "a", "b" * 50])
    return float(rng.randrange(9)) if kind == "float max" else rng.randrange(9)


@pytest.fixture(params=STATES)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_late_rows_are_cleaned_up_too(make_keyed: MakeKeyed, kind: str, backend: sb.StateBackend) -> None:
    """What is known of the oldest timestamps must not hide one that a late row of a column has written."""
    idle = {"cleanup_idle": True, "cleanup_in_background": False}
    for options in (idle, {}) if backend.cleans_up_incrementally else (idle,):
        keyed = make_keyed(str)
        keyed.begin_event_time(None, None)
        state: Any = keyed.get_state(with_ttl(STATES[kind](), **options))
        write = {"value": "update_many", "map": "put_many"}.get(state.descriptor.kind, "add_many")
        watermark = 10_000
        for number in range(60):
            keyed.begin_event_time(watermark, watermark)
            keys = [f"{number}", f"{number} late", f"{number} too"]
            values = [sample(kind, random.Random(number))] * 3
            columns = [keys, values]
            if "map" in kind:
                columns.insert(1, [1, 2, 3] if kind == "map" else ["a", "b", "c"])
            getattr(state, write)(*columns, times=[watermark, watermark - 10 * TTL, watermark - TTL // 2])
            keyed.advance()
            watermark += 7
        keyed.begin_event_time(watermark + TTL, watermark + TTL)
        keyed.advance()
        keyed.set_current_key("x")
        for _ in range(100):
            state.clear()
        assert keyed.num_entries("s") == 0


def test_without_a_column_calls_go_by_the_watermark_after_the_batch(make_keyed: MakeKeyed) -> None:
    keyed = make_keyed()
    state = keyed.get_state(with_ttl(sb.ValueStateDescriptor("s", int)))
    keyed.begin_event_time(1000, 1050)
    state.update_many([1, 2, 3], [1, 2, 3], times=[1000, None, 1100])
    for at, left in ((1099, [1, 2, 3]), (1100, [None, 2, 3]), (1150, [None, None, 3]), (1200, [None] * 3)):
        mark = keyed.mark()
        keyed.begin_event_time(1000, at)
        assert state.get_many([1, 2, 3]).to_pylist() == left
        assert state.get_many([1, 2, 3], times=[at] * 3).to_pylist() == left
        keyed.rollback(mark)
        keyed.release(mark)


def test_a_call_leaves_the_time_of_the_row(make_keyed: MakeKeyed) -> None:
    keyed = make_keyed()
    for kind in ("value", "object", "list", "map"):
        state = keyed.get_state(with_ttl(STATES[kind](), cleanup_in_background=False))
        keyed.begin_event_time(None, 5000)
        keyed.set_event_time(1000)
        keyed.set_current_key(1)
        if kind == "map":
            state.put(1, 1)
        else:
            (state.add if kind == "list" else state.update)(1)
        state.exists_many([1, 2], times=[3000, 4000])
        assert state.exists(), kind
        state.clear()
        keyed.close()
        keyed = make_keyed()


def test_parts_of_a_millisecond_are_cut_off(make_keyed: MakeKeyed) -> None:
    """As the time of a row is, wherever it is asked for."""
    keyed = make_keyed()
    state = keyed.get_state(with_ttl(sb.ValueStateDescriptor("s", int)))
    keyed.begin_event_time(None, 0)
    for column, written in (
        (pa.array([1_000_999, -1], pa.timestamp("us")), [1000, -1]),
        (pa.array([1_000_999_999, -1], pa.timestamp("ns")), [1000, -1]),
        (pa.array([1, -1], pa.timestamp("s", "Europe/Berlin")), [1000, -1000]),
        (np.array([1_000_999, -1], dtype="datetime64[us]"), [1000, -1]),
        (
            [datetime.datetime(1970, 1, 1, 0, 0, 1, 999, UTC), datetime.datetime(1970, 1, 1, tzinfo=UTC)],
            [1000, 0],
        ),
    ):
        state.update_many([1, 2], [1, 2], times=column)
        ends = np.array(written) + TTL
        assert state.exists_many([1, 2], times=ends - 1).to_pylist() == [True, True]
        assert state.exists_many([1, 2], times=ends).to_pylist() == [False, False]


def call_all(state: Any, **columns: Any) -> list[Any]:
    """Each vectorised method of a state, with columns of two rows."""
    kind = state.descriptor.kind
    calls = [lambda: state.clear_many([1, 2], **columns), lambda: state.exists_many([1, 2], **columns)]
    if kind == "map":
        calls.append(lambda: state.get_many([1, 2], [1, 1], **columns))
        calls.append(lambda: state.put_many([1, 2], [1, 1], [1, 1], **columns))
        calls.append(lambda: state.remove_many([1, 2], [1, 1], **columns))
        return calls
    write = state.update_many if kind == "value" else state.add_many
    values = ["a", "b"] if kind == "folding" else [1, 2]
    return [*calls, lambda: state.get_many([1, 2], **columns), lambda: write([1, 2], values, **columns)]


PLAIN = ["value", "object", "list", "map", "sum", "own reducing", "average", "folding"]


@pytest.mark.parametrize("kind", PLAIN)
def test_a_time_to_live_in_processing_time_refuses(make_keyed: MakeKeyed, kind: str) -> None:
    keyed = make_keyed()
    keyed.begin_event_time(None, 5000)
    state = keyed.get_state(STATES[kind]().enable_time_to_live(StateTtlConfig(TTL)))
    for call in call_all(state, times=[1, 2]):
        with pytest.raises(sb.UsageError, match="processing time goes by the clock"):
            call()
    assert keyed.num_entries() == 0


@pytest.mark.parametrize("kind", PLAIN)
def test_a_backend_without_the_time_of_rows_refuses(make_keyed: MakeKeyed, kind: str) -> None:
    keyed = make_keyed()
    state = keyed.get_state(with_ttl(STATES[kind]()))
    for call in call_all(state, times=[1, 2]):
        with pytest.raises(sb.UsageError, match="no time of rows"):
            call()
    assert keyed.num_entries() == 0


@pytest.mark.parametrize("kind", PLAIN)
@pytest.mark.parametrize("has_ttl", [True, False], ids=["ttl", "no ttl"])
def test_wrong_columns_are_refused(make_keyed: MakeKeyed, kind: str, has_ttl: bool) -> None:
    keyed = make_keyed()
    keyed.begin_event_time(None, 5000)
    state = keyed.get_state(with_ttl(STATES[kind]()) if has_ttl else STATES[kind]())
    wrong: list[Any] = [
        [1],
        [1, 2, 3],
        [1, 1.5],
        ["now", "then"],
        [True, False],
        [1, 2**63],
        pa.array([1.0, 2.0]),
        pa.array([2**63, 1], pa.uint64()),
        pa.array([2**60, 1], pa.timestamp("s")),
        pa.array([datetime.date(2024, 1, 1)] * 2),
    ]
    for column in wrong:
        for call in call_all(state, times=column):
            with pytest.raises(sb.UsageError):
                call()
    assert keyed.num_entries() == 0


@pytest.mark.parametrize("kind", PLAIN)
def test_states_without_a_time_to_live_take_times_and_do_nothing_with_them(
    keyed: KeyedStateBackend, kind: str
) -> None:
    state = keyed.get_state(STATES[kind]())
    for call in call_all(state, times=[5, None]):
        call()


def test_a_clock_that_was_given_is_read_once_a_call(make_keyed: MakeKeyed) -> None:
    """Though the call goes by the times of its rows: checkpoints have what the clock said last."""

    class Counting:
        reads = 0

        def now(self) -> int:
            self.reads += 1
            return 1000

    clock = Counting()
    keyed = make_keyed(clock=clock)
    values = keyed.get_state(with_ttl(sb.ValueStateDescriptor("v", int)))
    keyed.begin_event_time(None, 5000)
    for times in ([4900, 5000], None):
        clock.reads = 0
        values.update_many([1, 2], [1, 2], times=times)
        assert clock.reads == 1, times
