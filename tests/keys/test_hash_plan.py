"""The compiled hash plan does what the plain Python hash does, and never reads too far."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st
from type_samples import key_types, remainders, told_apart, values_of, with_values

from statebackend import types as t
from statebackend.errors import SerializationError, UsageError
from statebackend.keys import key_encoder, runs_of_list
from statebackend.keys.key_groups import key_group_of, spark_hash

key_groups = pytest.importorskip("statebackend._core.key_groups", reason="the compiled core is not built")
HashPlan = key_groups.HashPlan


@given(
    key_types.flatmap(lambda k: st.tuples(st.just(k), st.lists(values_of(k), max_size=30))),
    st.integers(1, 32768),
)
def test_batches_agree_with_single_keys(case: tuple[t.Type, list[Any]], max_parallelism: int) -> None:
    declared, keys = case
    encoder = key_encoder(declared)
    plan = HashPlan(encoder.hash_plan)
    groups = plan.key_groups(encoder.encode_many(keys), max_parallelism)
    wanted = [encoder.spark_hash(encoder.encode(key)) for key in keys]
    assert groups.tolist() == [key_group_of(one, max_parallelism) for one in wanted]
    assert (told_apart(plan, encoder.encode_many(keys)) == remainders(wanted)).all()


@pytest.mark.parametrize("max_parallelism", [1, 2, 3, 7, 127, 128, 1000, 12345, 32767, 32768])
@pytest.mark.parametrize("kind", ["int32", "int64"])
def test_vectorised_groups_are_exact(kind: str, max_parallelism: int, np_rng: np.random.Generator) -> None:
    plan = HashPlan(kind)
    low, high = (-(2**31), 2**31) if kind == "int32" else (-(2**63), 2**63 - 1)
    keys = np_rng.integers(low, high, 30_001)
    hashes = np.array([spark_hash(int(key), kind) for key in keys])
    assert (plan.key_groups(keys, max_parallelism) == np.mod(hashes, max_parallelism)).all()


@given(st.binary(max_size=60), with_values(key_types))
def test_any_bytes_can_be_hashed_without_reading_beyond(junk: bytes, case: tuple[t.Type, Any]) -> None:
    """What the fields do not cover does not matter, and a key that ends early hashes as far as it goes."""
    encoder = key_encoder(case[0])
    if encoder.kind == "bytes":
        plan = HashPlan(encoder.hash_plan)
        whole = encoder.encode(case[1])
        for data in [junk, *(whole[:end] for end in range(len(whole)))]:
            behind = [
                plan.key_groups((np.array([0, len(data)]), data + byte * 200), 32749)
                for byte in (b"\x00", b"\x01")
            ]
            assert behind[0] == behind[1]
        if encoder.hash_plan != "bytes":
            both = plan.key_groups(runs_of_list([whole + junk, whole]), 32749)
            assert both[0] == both[1]


def test_plans_pickle() -> None:
    plan = HashPlan(("struct", ("int64", ("struct", ("bytes",)))))
    copy = pickle.loads(pickle.dumps(plan))
    assert copy.description == plan.description
    key = b"\x01" + bytes(8) + b"\x01\x01\x02\x00\x00\x00ab"
    for each in (plan, copy):
        groups = told_apart(each, runs_of_list([key]))
        assert (groups == remainders([spark_hash(key, plan.description)])).all()


@pytest.mark.parametrize(
    "description",
    [
        "novelty",
        7,
        ("struct",),
        ("struct", ()),
        ("struct", ["int64"]),
        ("list", ("int64",)),
        ("struct", (7,)),
    ],
    ids=str,
)
def test_a_bad_description_is_refused(description: Any) -> None:
    with pytest.raises(UsageError, match="unknown hash description"):
        HashPlan(description)


def test_a_plan_has_bounds() -> None:
    deep: Any = "int64"
    for _ in range(100):
        deep = ("struct", (deep,))
    with pytest.raises(UsageError, match="nested too deeply"):
        HashPlan(deep)
    with pytest.raises(UsageError, match="too many fields"):
        HashPlan(("struct", ("int64",) * 5000))


def test_kinds_are_not_mixed_up() -> None:
    with pytest.raises(UsageError, match="takes integers, not bytes"):
        HashPlan("int64").key_groups(runs_of_list([b"12345678"]), 128)
    with pytest.raises(UsageError, match="takes bytes, not integers"):
        HashPlan("bytes").key_groups(np.zeros(1, np.int64), 128)


@pytest.mark.parametrize("offsets", [[0, 4], [-1, 2], [2, 1, 3], []])
def test_offsets_outside_the_data_are_refused(offsets: list[int]) -> None:
    with pytest.raises(SerializationError, match="offsets"):
        HashPlan("bytes").key_groups((np.array(offsets, dtype=np.int64), b"abc"), 128)


@pytest.mark.parametrize("max_parallelism", [0, -1, 32769])
def test_max_parallelism_is_checked(max_parallelism: int) -> None:
    with pytest.raises(UsageError, match="max_parallelism is out of range"):
        HashPlan("int64").key_groups(np.zeros(1, np.int64), max_parallelism)
