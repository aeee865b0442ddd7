"""Rules of vectorised calls with a column of times; `test_vectorised_sequences` compares them with loops."""

from __future__ import annotations

import datetime
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from contract.conftest import MakeKeyed
from contract.samples import last_of

import statebackend as sb
from statebackend import types as t
from statebackend.state import StateDescriptor

pytestmark = pytest.mark.checked

TTL = 100
EVENT_TIME = sb.StateTtlConfig.TtlTimeCharacteristic.EventTime
UTC = datetime.timezone.utc

STATES: dict[str, Any] = {
    "value": lambda: sb.ValueStateDescriptor("s", int, default=5),
    "object": lambda: sb.ValueStateDescriptor("s", t.PICKLE),
    "list": lambda: sb.ListStateDescriptor("s", int),
    "map": lambda: sb.MapStateDescriptor("s", int, int),
    "sum": lambda: sb.ReducingStateDescriptor("s", "sum", int),
    "own reducing": lambda: sb.ReducingStateDescriptor("s", lambda a, b: a - b, int),
    "average": lambda: sb.AggregatingStateDescriptor("s", "avg", int),
    "folding": lambda: sb.FoldingStateDescriptor("s", "", last_of, str),
}


def with_ttl(descriptor: StateDescriptor, **options: Any) -> Any:
    config = sb.StateTtlConfig(TTL, ttl_time_characteristic=EVENT_TIME, **options)
    return descriptor.enable_time_to_live(config)


def test_calls_without_a_column_use_the_watermark_after_the_batch(make_keyed: MakeKeyed) -> None:
    keyed = make_keyed()
    state = keyed.get_state(with_ttl(sb.ValueStateDescriptor("s", int)))
    keyed.begin(watermarks=(1000, 1050))
    state.update_many([1, 2, 3], [1, 2, 3], times=[1000, None, 1100])
    for at, left in ((1099, [1, 2, 3]), (1100, [None, 2, 3]), (1150, [None, None, 3]), (1200, [None] * 3)):
        mark = keyed.mark()
        keyed.begin(watermarks=(1000, at))
        assert state.get_many([1, 2, 3]).to_pylist() == left
        assert state.get_many([1, 2, 3], times=[at] * 3).to_pylist() == left
        keyed.rollback(mark)
        keyed.release(mark)


def test_a_call_leaves_the_time_of_the_row(make_keyed: MakeKeyed) -> None:
    keyed = make_keyed()
    for kind in ("value", "object", "list", "map"):
        state = keyed.get_state(with_ttl(STATES[kind](), cleanup_in_background=False))
        keyed.begin(watermarks=(None, 5000))
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
    keyed.begin(watermarks=(None, 0))
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


@pytest.mark.parametrize("kind", STATES)
def test_times_need_event_time_unless_nothing_expires(make_keyed: MakeKeyed, kind: str) -> None:
    make = STATES[kind]
    for descriptor, has_rows, refusal in (
        (make().enable_time_to_live(sb.StateTtlConfig(TTL)), True, "processing time uses the clock"),
        (with_ttl(make()), False, "lacks event time"),
    ):
        keyed = make_keyed()
        if has_rows:
            keyed.begin(watermarks=(None, 5000))
        for call in call_all(keyed.get_state(descriptor), times=[1, 2]):
            with pytest.raises(sb.UsageError, match=refusal):
                call()
        assert keyed.num_entries() == 0
    for call in call_all(make_keyed().get_state(make()), times=[5, None]):
        call()


@pytest.mark.parametrize("kind", STATES)
def test_wrong_columns_are_refused(make_keyed: MakeKeyed, kind: str) -> None:
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
    for descriptor in (with_ttl(STATES[kind]()), STATES[kind]()):
        keyed = make_keyed()
        keyed.begin(watermarks=(None, 5000))
        state = keyed.get_state(descriptor)
        for column in wrong:
            for call in call_all(state, times=column):
                with pytest.raises(sb.UsageError):
                    call()
        assert keyed.num_entries() == 0
