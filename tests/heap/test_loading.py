"""Rows of a checkpoint in many namespaces at once: each lands in its own, and of rows that repeat the last counts."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

import statebackend as sb
from statebackend.backends.heap.row_loader import load
from statebackend.checkpoint.format import Op
from statebackend.keys import VOID, encode_namespace
from statebackend.types import PICKLE

NAMESPACES = [7, VOID, "a", 7, VOID, "a", 8]
KEYS = [1, 1, 1, 1, 2, 2, 1]


def rows(**columns: Any) -> pa.RecordBatch:
    names = pa.array([encode_namespace(each) for each in NAMESPACES], pa.binary())
    return pa.record_batch({"key": pa.array(KEYS, pa.int64()), "namespace": names, **columns})


def descriptor_of(kind: str, type_: Any) -> Any:
    if kind == "map":
        return sb.MapStateDescriptor("tags", int, type_)
    return (sb.ListStateDescriptor if kind == "list" else sb.ValueStateDescriptor)("tags", type_)


@pytest.mark.parametrize("kind", ["value", "list", "map"])
@pytest.mark.parametrize("objects", [False, True], ids=["numbers", "objects"])
@pytest.mark.parametrize("expires", [False, True], ids=["for ever", "with times"])
def test_rows_that_come_twice_in_one_batch_count_as_the_last_one_of_their_namespace(
    kind: str, objects: bool, expires: bool
) -> None:
    stored = pickle.dumps if objects else int
    descriptor = descriptor_of(kind, PICKLE if objects else int)
    columns: dict[str, Any] = {"value": [stored(10 * n) for n in range(len(KEYS))]}
    stamps: Any = pa.array(range(len(KEYS)), pa.int64())
    if kind == "list":
        columns["value"] = [[each, stored(10 * n + 1)] for n, each in enumerate(columns["value"])]
        stamps = pa.array([[n, n] for n in range(len(KEYS))], pa.list_(pa.int64()))
    if kind == "map":
        columns["map_key"] = pa.array([5, 5, 5, 5, 5, 5, 6], pa.int64())
    if expires:
        descriptor = descriptor.enable_time_to_live(sb.StateTtlConfig(10**15))
        columns["timestamp"] = stamps
    last = {(1, 7): 3, (1, VOID): 1, (1, "a"): 2, (2, VOID): 4, (2, "a"): 5, (1, 8): 6}
    expected: dict[str, Callable[[int], Any]] = {
        "value": lambda n: 10 * n,
        "list": lambda n: [10 * n, 10 * n + 1],
        "map": lambda n: [(6 if n == 6 else 5, 10 * n)],
    }
    with sb.create_backend("heap").create_keyed_backend(int) as keyed:
        tags: Any = keyed.get_state(descriptor)
        for _ in range(2):  # into nothing, and over what is there
            load(keyed, tags, Op.PUT, rows(**columns))
            found = {}
            for key, namespace in keyed.keys_and_namespaces("tags"):
                keyed.set_current_key(key)
                keyed.set_current_namespace(namespace)
                read = {"value": "value", "list": "get", "map": "items"}[kind]
                seen = getattr(tags, read)()
                found[key, namespace] = list(seen) if kind == "map" else seen
            assert found == {place: expected[kind](n) for place, n in last.items()}
        load(keyed, tags, Op.CLEAR, rows().take(pa.array([0, 1, 5])))
        assert sorted(keyed.keys_and_namespaces("tags"), key=repr) == [(1, "a"), (1, 8), (2, VOID)]
        keyed.core.namespaces._check()
