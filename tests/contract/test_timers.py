"""Timers: a set by time, key and namespace, fired in order, journalled with marks; one by one and as columns."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from contract.conftest import Keyed, MakeKeyed
from contract.samples import KEYS

import statebackend as sb
from statebackend import types as t
from statebackend.keys import encode_namespace, key_encoder
from statebackend.state.timers import TimerRow
from statebackend.testing import ManualClock

pytestmark = pytest.mark.checked

VERBS, DOMAINS = ("register", "delete"), ("event", "processing")


def register(keyed: Keyed, key: Any, *times: int, namespace: Any = sb.VOID, domain: str = "event") -> None:
    keyed.set_current_key(key)
    keyed.set_current_namespace(namespace)
    for time in times:
        getattr(keyed.timers, f"register_{domain}_time_timer")(time)
    keyed.set_current_namespace(sb.VOID)


def fire(keyed: Keyed, now: int, domain: str = "event") -> list[Any]:
    return [(time, keyed.current_key, keyed.current_namespace) for time in keyed.timers.due(now, domain)]


def test_key_and_namespace_are_what_they_were_after_firing(keyed: Keyed) -> None:
    register(keyed, 2, 10, namespace="n")
    keyed.set_current_key(7)
    keyed.set_current_namespace("mine")
    assert fire(keyed, 10) == [(10, 2, "n")]
    assert (keyed.current_key, keyed.current_namespace) == (7, "mine")
    register(keyed, 2, 10, 11)
    keyed.set_current_key(7)
    for _ in keyed.timers.due(100):
        break
    assert keyed.current_key == 7
    assert keyed.timers.count() == 1


def test_timer_sees_the_state_of_its_key(keyed: Keyed) -> None:
    state = keyed.get_value_state(sb.ValueStateDescriptor("s", int))
    for key in range(20):
        register(keyed, key, 100 - key)
        state.update(key)
    assert [state.value() for _ in keyed.timers.due(100)] == list(range(19, -1, -1))


@pytest.mark.parametrize("key_type", list(KEYS))
def test_order_is_time_then_key_then_namespace(make_keyed: MakeKeyed, key_type: t.Type) -> None:
    keyed = make_keyed(key_type, max_parallelism=4)
    encoder = key_encoder(key_type)
    expected = []
    rng = random.Random(5)
    pairs = [(key, ns) for key in KEYS[key_type] for ns in (sb.VOID, "b", "a", 3, sb.TimeWindow(1, 2))]
    rng.shuffle(pairs)
    for key, namespace in pairs:
        for time in rng.sample(range(-3, 3), 2):
            register(keyed, key, time, namespace=namespace)
            expected.append((time, encoder.encode(key), encode_namespace(namespace)))
    fired = [
        (time, encoder.encode(keyed.current_key), encode_namespace(keyed.current_namespace))
        for time in keyed.timers.due(10)
    ]
    assert fired == sorted(expected)


def test_due_timer_registered_while_firing_fires_in_its_turn(keyed: Keyed) -> None:
    for key in (1, 2, 3):
        register(keyed, key, 10)
    seen = []
    for time in keyed.timers.due(20):
        seen.append((time, keyed.current_key))
        if time == 10 and keyed.current_key == 2:
            keyed.timers.register_event_time_timer(5)  # has passed
            keyed.timers.register_event_time_timer(20)
            keyed.timers.register_event_time_timer(21)
            register(keyed, 1, 10)
            register(keyed, 3, 10)
    assert seen == [(10, 1), (10, 2), (5, 2), (10, 1), (10, 3), (20, 2)]
    assert fire(keyed, 21) == [(21, 2, sb.VOID)]


def test_the_clock_is_read_when_a_timer_fires(keyed: Keyed, clock: ManualClock) -> None:
    ttl = sb.StateTtlConfig(100, cleanup_in_background=False)
    state = keyed.get_value_state(sb.ValueStateDescriptor("s", int).enable_time_to_live(ttl))
    clock.set(0)
    register(keyed, 1, 10)
    state.update(1)
    register(keyed, 2, 20)
    clock.set(100)
    found = []
    for _ in keyed.timers.due(20):
        found.append(state.exists())
        state.update(5)
        clock.advance(100)
    assert found == [False, False]
    keyed.set_current_key(2)
    assert state.value() is None


@pytest.mark.parametrize("key_type", [int, str])
def test_random_use_agrees_with_sorted_set(make_keyed: MakeKeyed, key_type: type, rng: random.Random) -> None:
    keyed = make_keyed(key_type, max_parallelism=8)
    wanted: set[tuple[int, Any]] = set()
    marks: list[tuple[Any, set[tuple[int, Any]]]] = []
    now = 0
    for _ in range(3_000):
        key = key_type(rng.randrange(20))
        action = rng.random()
        if action < 0.5:
            time = now + rng.randrange(50)
            register(keyed, key, time)
            wanted.add((time, key))
        elif action < 0.8 and wanted:
            time, key = rng.choice(sorted(wanted))
            keyed.set_current_key(key)
            keyed.timers.delete_event_time_timer(time)
            wanted.discard((time, key))
        elif action < 0.9:
            now += rng.randrange(5)
            due = sorted(each for each in wanted if each[0] <= now)
            assert [(time, key) for time, key, _ in fire(keyed, now)] == due
            wanted -= set(due)
        elif action < 0.94:
            marks.append((keyed.mark(), set(wanted)))
        elif marks:
            mark, was = marks.pop()
            if rng.random() < 0.6:
                keyed.rollback(mark)
                wanted = was
            keyed.release(mark)
        assert keyed.timers.count() == len(wanted)
    assert [(time, key) for time, key, _ in fire(keyed, 10**6)] == sorted(wanted)


def test_rows_of_key_groups_are_loaded_elsewhere(backend: sb.StateBackend, make_keyed: MakeKeyed) -> None:
    keyed = make_keyed(max_parallelism=8)
    for key in range(40):
        register(keyed, key, key * 3 % 50, namespace=sb.VOID if key % 3 else "n")
        register(keyed, key, 100 - key, domain="processing")
    rows = keyed.timers.rows()
    assert rows == sorted(rows)
    assert len(rows) == 80
    half = keyed.timers.rows(sb.KeyGroupRange(0, 3))
    assert half == [row for row in rows if row.key_group <= 3]
    assert 0 < len(half) < 80
    other = make_keyed(max_parallelism=8, key_group_range=sb.KeyGroupRange(0, 3))
    other.timers.load(half)
    assert other.timers.rows() == half
    again = make_keyed(max_parallelism=8)
    again.timers.load(rows)
    for domain in ("event", "processing"):
        assert fire(again, 1000, domain) == fire(keyed, 1000, domain)
    with pytest.raises(sb.KeyGroupError, match="key group"):
        other.timers.load(rows)
    assert other.timers.rows() == half


def test_rows_are_in_canonical_form(make_keyed: MakeKeyed) -> None:
    keyed = make_keyed("string", max_parallelism=1)
    register(keyed, "é", 5, namespace=7)
    assert keyed.timers.rows() == [TimerRow("event", 0, "é".encode(), encode_namespace(7), 5)]


@pytest.mark.parametrize("wrong", [1.5, True, "10", None])
def test_times_are_whole_numbers(keyed: Keyed, wrong: Any) -> None:
    timers = keyed.timers
    calls = [getattr(timers, f"{verb}_{domain}_time_timer") for verb in VERBS for domain in DOMAINS]
    for call in (*calls, timers.due):
        with pytest.raises(sb.UsageError, match=r"the time of a timer is not a \w+.*milliseconds"):
            call(wrong)
    with pytest.raises(OverflowError, match="64 bits"):
        keyed.timers.register_event_time_timer(2**63)
    assert keyed.timers.count() == 0


def test_domains_have_names(keyed: Keyed) -> None:
    calls = [
        lambda: keyed.timers.due(1, "wall"),
        lambda: keyed.timers.count("wall"),
        lambda: keyed.timers.next_due("wall"),
    ]
    for call in calls:
        with pytest.raises(sb.UsageError, match="'event' or 'processing'"):
            call()


def test_a_key_has_to_be_current(make_keyed: MakeKeyed) -> None:
    keyed = make_keyed()
    for call in (
        lambda: keyed.timers.register_event_time_timer(1),
        lambda: keyed.timers.delete_event_time_timer(1),
        lambda: keyed.timers.pending_event_time_timers(),
    ):
        with pytest.raises(sb.UsageError, match="no current key"):
            call()
    assert list(keyed.timers.due(1)) == []


def test_closed_backend_refuses_timers(make_keyed: MakeKeyed) -> None:
    keyed = make_keyed()
    register(keyed, 1, 10, 20)
    timers = keyed.timers
    firing = timers.due(100)
    assert next(firing) == 10
    keyed.close()
    for call in (
        lambda: keyed.timers,
        lambda: timers.register_event_time_timer(1),
        lambda: timers.delete_event_time_timer(1),
        lambda: timers.pending_event_time_timers(),
        lambda: timers.due(1),
        lambda: timers.count(),
        lambda: timers.next_due(),
        lambda: timers.rows(),
        lambda: timers.register_event_time_timers([1], [1]),
        lambda: timers.delete_event_time_timers([1], [1]),
        lambda: timers.take_due(1),
        lambda: next(firing),
    ):
        with pytest.raises(sb.ClosedError):
            call()


def test_timers_are_not_state(keyed: Keyed) -> None:
    register(keyed, 1, 10)
    assert keyed.num_entries() == 0
    assert keyed.metrics()["states"] == {}
    keyed.clear_key()
    assert keyed.timers.pending_event_time_timers() == [10]


def test_metrics_tell_how_many_wait_and_how_many_have_fired(keyed: Keyed) -> None:
    register(keyed, 1, 10, 20, 30)
    register(keyed, 2, 10, domain="processing")
    keyed.timers.delete_processing_time_timer(10)
    register(keyed, 2, 15, domain="processing")
    assert keyed.metrics()["timers"] == {"event": 3, "processing": 1}
    assert keyed.metrics()["timers_fired"] == 0
    mark = keyed.mark()
    assert len(fire(keyed, 20)) == 2
    assert len(fire(keyed, 20, "processing")) == 1
    assert keyed.metrics()["timers"] == {"event": 1, "processing": 0}
    assert keyed.metrics()["timers_fired"] == 3
    keyed.rollback(mark)
    assert keyed.metrics()["timers"] == {"event": 3, "processing": 1}
    assert keyed.metrics()["timers_fired"] == 3, "counters are not rolled back"


NAMESPACES: list[Any] = [sb.VOID, 7, "text", b"bytes", sb.TimeWindow(0, 60), ("session", 7)]


def key_samples(kind: Any) -> list[Any]:
    if kind is str:
        return ["", "ann", "é" * 30, *(f"user {n}" for n in range(20))]
    if kind is int:
        return [0, -1, 2**62, *range(5, 25)]
    return [(n % 3, None if n % 4 == 0 else f"part {n}") for n in range(20)]


@pytest.mark.parametrize("kind", [int, str, tuple[int, str]], ids=["int", "str", "tuple"])
def test_columns_do_what_a_loop_does(backend: Any, kind: Any, rng: random.Random) -> None:
    whole, single = (backend.create_keyed_backend(kind, max_parallelism=8) for _ in range(2))
    for step in range(40):
        n = rng.choice([0, 1, 3, 50])
        keys = rng.choices(key_samples(kind), k=n)
        times = [rng.randrange(-50, 50) for _ in range(n)]
        spaces = rng.choices(NAMESPACES, k=n) if rng.random() < 0.6 else None
        domain = rng.choice(["event", "processing"])
        registers = rng.random() < 0.7
        current = rng.choice(NAMESPACES)
        for keyed in (whole, single):
            keyed.set_current_key(key_samples(kind)[3])
            keyed.set_current_namespace(current)
        mark = whole.mark(), single.mark()
        name = f"{'register' if registers else 'delete'}_{domain}_time_timer"
        getattr(whole.timers, f"{name}s")(keys, times, spaces)
        for at, key in enumerate(keys):
            single.set_current_key(key)
            single.set_current_namespace(current if spaces is None else spaces[at])
            getattr(single.timers, name)(times[at])
        assert whole.current_key == key_samples(kind)[3]
        assert whole.current_namespace == current
        assert whole.timers.rows() == single.timers.rows(), step
        if rng.random() < 0.2:
            whole.rollback(mark[0])
            single.rollback(mark[1])
        whole.release(mark[0])
        single.release(mark[1])
        if step % 5 == 4:
            until, most = rng.randrange(-50, 50), rng.choice([None, 0, 3])
            before = whole.timers.fired
            due = whole.timers.take_due(until, domain, most=most)
            fired = []
            firing = single.timers.due(until, domain)
            while most is None or len(fired) < most:
                timestamp = next(firing, None)
                if timestamp is None:
                    break
                fired.append((single.current_key, timestamp, single.current_namespace))
            firing.close()
            namespaces = due.namespaces
            if isinstance(namespaces, pa.Array):
                namespaces = [_namespace(each) for each in namespaces.to_pylist()]
            keys = [tuple(key.values()) if isinstance(key, dict) else key for key in due.keys.to_pylist()]
            assert list(zip(keys, due.timestamps.to_pylist(), namespaces, strict=True)) == fired
            assert whole.timers.fired - before == len(fired)
            assert whole.current_namespace == current
            assert whole.timers.rows() == single.timers.rows()
    whole.close()
    single.close()


def _namespace(shown: Any) -> Any:
    if shown is None:
        return sb.VOID
    return sb.TimeWindow(**shown) if isinstance(shown, dict) else shown


@pytest.mark.parametrize(
    ("column", "expected"),
    [
        (np.array([3, 4], dtype=np.int32), [3, 4]),
        (pa.array(["a", None]), ["a", sb.VOID]),
        (pa.array([b"a", None], pa.large_binary()), [b"a", sb.VOID]),
        (pa.array([{"start": 0, "end": 5}, None]), [sb.TimeWindow(0, 5), sb.VOID]),
        (pa.array([{"end": 5, "start": 0}] * 2), [sb.TimeWindow(0, 5)] * 2),
        (pa.chunked_array([["a"], ["b"]]), ["a", "b"]),
        (pa.array(["a", "b"]).dictionary_encode(), ["a", "b"]),
        (pa.nulls(2), [sb.VOID, sb.VOID]),
        (
            pa.StructArray.from_arrays(
                [
                    pa.array([0, 60_000_000], pa.timestamp("us", "UTC")),
                    pa.array([60, 120], pa.timestamp("s")),
                ],
                ["start", "end"],
            ),
            [sb.TimeWindow(0, 60_000), sb.TimeWindow(60_000, 120_000)],
        ),
    ],
    ids=str,
)
def test_namespaces_come_as_columns(backend: Any, column: Any, expected: list[Any]) -> None:
    with backend.create_keyed_backend(int, max_parallelism=8) as keyed:
        keyed.timers.register_event_time_timers([1, 2], [10, 20], namespaces=column)
        found = {row.key: row.namespace for row in keyed.timers.rows()}
        assert found == {key: encode_namespace(each) for key, each in zip((1, 2), expected, strict=True)}


def test_times_come_as_columns(backend: Any) -> None:
    with backend.create_keyed_backend(int, max_parallelism=8) as keyed:
        for at, column in enumerate(
            (
                pa.array([5_000, 6_000], pa.timestamp("us", "UTC")),
                pa.array([5, 6], pa.int8()),
                np.array([5, 6], dtype=np.uint32),
                pa.chunked_array([[5], [6]]),
                [5, np.int16(6)],
            )
        ):
            keyed.timers.register_event_time_timers([at, at], column)
            keyed.set_current_key(at)
            assert keyed.timers.pending_event_time_timers() == [5, 6]


@pytest.mark.parametrize(
    ("keys", "times", "namespaces"),
    [
        ([1], [1, 2], None),
        ([1, 2], [1, 2], [7]),
        ([1, None], [1, 2], None),
        ([1, "x"], [1, 2], None),
        ([1, 2], [1, None], None),
        ([1, 2], [1, 2**63], None),
        ([1, 2], [1, 2.5], None),
        ([1, 2], pa.array([1.5, 2.5]), None),
        ([1, 2], pa.array([1, None]), None),
        ([1, 2], pa.array([1, 2_001], pa.timestamp("us")), None),
        ([1, 2], [1, 2], [7, 2.5]),
        ([1, 2], [1, 2], pa.array([1.5, 2.5])),
        (
            [1, 2],
            [1, 2],
            pa.array([{"start": 0, "end": None}] * 2, pa.struct({"start": "int64", "end": "int64"})),
        ),
    ],
)
def test_columns_that_do_not_fit_change_nothing(backend: Any, keys: Any, times: Any, namespaces: Any) -> None:
    with backend.create_keyed_backend(int, max_parallelism=8) as keyed:
        keyed.timers.register_event_time_timers([9], [9])
        for call in (keyed.timers.register_event_time_timers, keyed.timers.delete_processing_time_timers):
            with pytest.raises((sb.StateBackendError, OverflowError, TypeError)):
                call(keys, times, namespaces=namespaces)
        assert [row.key for row in keyed.timers.rows()] == [9]


def test_keys_of_other_groups_are_refused_as_a_whole(make_keyed: MakeKeyed) -> None:
    keyed = make_keyed(max_parallelism=8, key_group_range=sb.KeyGroupRange(0, 3))
    with pytest.raises(sb.KeyGroupError):
        keyed.timers.register_event_time_timers(list(range(50)), [1] * 50)
    assert keyed.timers.rows() == []
