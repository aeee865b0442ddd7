"""Rows of a checkpoint in many namespaces at once: each lands in its own, and of lists that repeat the last counts."""

from __future__ import annotations

import pickle
from typing import Any

import pyarrow as pa
import pytest

import statebackend as sb
from statebackend.backends.heap.load_rows import load
from statebackend.checkpoint.format import Op
from statebackend.keys import VOID, encode_namespace
from statebackend.types import PICKLE

NAMESPACES = [7, VOID, "a", 7, VOID, "a", 8]
KEYS = [1, 1, 1, 1, 2, 2, 1]


def rows(**columns: Any) -> pa.RecordBatch:
    names = pa.array([encode_namespace(each) for each in NAMESPACES], pa.binary())
    return pa.record_batch({"key": pa.array(KEYS, pa.int64()), "namespace": names, **columns})


@pytest.mark.parametrize("objects", [False, True], ids=["numbers", "objects"])
@pytest.mark.parametrize("expires", [False, True], ids=["for ever", "with times"])
def test_lists_that_come_twice_in_one_batch_count_as_the_last_one_of_their_namespace(
    objects: bool, expires: bool
) -> None:
    stored = pickle.dumps if objects else int
    descriptor = sb.ListStateDescriptor("tags", PICKLE if objects else int)
    columns: dict[str, Any] = {"value": [[stored(10 * n), stored(10 * n + 1)] for n in range(len(KEYS))]}
    if expires:
        descriptor = descriptor.enable_time_to_live(sb.StateTtlConfig(10**15))
        columns["timestamp"] = pa.array([[n, n] for n in range(len(KEYS))], pa.list_(pa.int64()))
    with sb.create_backend("heap").create_keyed_backend(int) as keyed:
        tags = keyed.get_state(descriptor)
        for _ in range(2):  # into nothing, and over what is there
            load(keyed, tags, Op.PUT, rows(**columns))
            found = {}
            for key, namespace in keyed.keys_and_namespaces("tags"):
                keyed.set_current_key(key)
                keyed.set_current_namespace(namespace)
                found[key, namespace] = tags.get()
            assert found == {
                (1, 7): [30, 31],
                (1, VOID): [10, 11],
                (1, "a"): [20, 21],
                (2, VOID): [40, 41],
                (2, "a"): [50, 51],
                (1, 8): [60, 61],
            }
        load(keyed, tags, Op.CLEAR, rows().take(pa.array([0, 1, 5])))
        assert sorted(keyed.keys_and_namespaces("tags"), key=repr) == [(1, "a"), (1, 8), (2, VOID)]
        keyed.core.namespaces._check()
