"""Timers as columns: each call does what a loop over its rows does, on every backend."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import statebackend as sb
from statebackend.keys import encode_namespace

pytestmark = pytest.mark.checked

NAMESPACES: list[Any] = [sb.VOID, 7, "text", b"bytes", sb.TimeWindow(0, 60), ("session", 7)]


def key_samples(kind: Any) -> list[Any]:
    if kind is str:
        return ["", "ann", "é" * 30, *(f"user {n}" for n in range(20))]
    if kind is int:
        return [0, -1, 2**62, *range(5, 25)]
    return [(n % 3, None if n % 4 == 0 else f"part {n}") for n in range(20)]


def all_timers(keyed: Any) -> list[Any]:
    return list(keyed.timers.rows())


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
        name = "register" if registers else "delete"
        getattr(whole.timers, f"{name}_many")(keys, times, domain, namespaces=spaces)
        for at, key in enumerate(keys):
            single.set_current_key(key)
            single.set_current_namespace(current if spaces is None else spaces[at])
            getattr(single.timers, name)(times[at], domain)
        assert whole.current_key == key_samples(kind)[3]
        assert whole.current_namespace == current
        assert all_timers(whole) == all_timers(single), step
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
            assert all_timers(whole) == all_timers(single)
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
        keyed.timers.register_many([1, 2], [10, 20], namespaces=column)
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
            keyed.timers.register_many([at, at], column)
            keyed.set_current_key(at)
            assert keyed.timers.pending() == [5, 6]


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
        keyed.timers.register_many([9], [9])
        for call in (keyed.timers.register_many, keyed.timers.delete_many):
            with pytest.raises((sb.StateBackendError, OverflowError, TypeError)):
                call(keys, times, namespaces=namespaces)
        with pytest.raises(sb.UsageError):
            keyed.timers.register_many([1], [1], "lunar")
        assert [row.key for row in keyed.timers.rows()] == [9]


def test_keys_of_other_groups_are_refused_as_a_whole(backend: Any) -> None:
    with backend.create_keyed_backend(
        int, max_parallelism=8, key_group_range=sb.KeyGroupRange(0, 3)
    ) as keyed:
        with pytest.raises(sb.KeyGroupError):
            keyed.timers.register_many(list(range(50)), [1] * 50)
        assert all_timers(keyed) == []


def test_a_closed_backend_is_told(backend: Any) -> None:
    keyed = backend.create_keyed_backend(int, max_parallelism=8)
    timers = keyed.timers
    keyed.close()
    for call in (timers.register_many, timers.delete_many):
        with pytest.raises(sb.ClosedError):
            call([1], [1])
    with pytest.raises(sb.ClosedError):
        timers.take_due(1)
