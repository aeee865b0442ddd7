"""The compiled hash plan does what the plain Python hash does, and never reads too far."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from type_samples import key_types, values_of, with_values

from statebackend import types as t
from statebackend.errors import SerializationError, UsageError
from statebackend.keys import key_encoder
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
    canonical = encoder.encode_many(keys)
    if plan.is_int:
        hashes, groups = plan.hashes_of_ints(canonical), plan.key_groups_of_ints(canonical, max_parallelism)
    else:
        hashes = plan.hashes_of_bytes(*canonical)
        groups = plan.key_groups_of_bytes(*canonical, max_parallelism)
    wanted = [encoder.spark_hash(encoder.encode(key)) for key in keys]
    assert hashes.tolist() == wanted
    assert groups.tolist() == [key_group_of(one, max_parallelism) for one in wanted]


@pytest.mark.parametrize("max_parallelism", [1, 2, 3, 7, 127, 128, 1000, 12345, 32767, 32768])
@pytest.mark.parametrize("kind", ["int32", "int64"])
def test_vectorised_groups_are_exact(kind: str, max_parallelism: int, np_rng: np.random.Generator) -> None:
    plan = HashPlan(kind)
    low, high = (-(2**31), 2**31) if kind == "int32" else (-(2**63), 2**63 - 1)
    keys = np_rng.integers(low, high, 300_001)
    hashes = plan.hashes_of_ints(keys).astype(np.int64)
    assert (plan.key_groups_of_ints(keys, max_parallelism) == np.mod(hashes, max_parallelism)).all()
    assert hashes[:50].tolist() == [spark_hash(int(key), kind) for key in keys[:50]]


@given(st.binary(max_size=60), with_values(key_types))
def test_any_bytes_can_be_hashed_without_reading_beyond(junk: bytes, case: tuple[t.Type, Any]) -> None:
    """What the fields do not cover does not matter, and a key that ends early hashes as far as it goes."""
    encoder = key_encoder(case[0])
    if encoder.kind == "bytes":
        plan = HashPlan(encoder.hash_plan)
        assert plan.hash_bytes(junk) == plan.hash_bytes(bytearray(junk))
        whole = encoder.encode(case[1])
        for end in range(len(whole)):
            behind = [memoryview(whole[:end] + byte * 200)[:end] for byte in (b"\x00", b"\x01")]
            assert plan.hash_bytes(behind[0]) == plan.hash_bytes(behind[1])
        if encoder.hash_plan != "bytes":
            assert plan.hash_bytes(whole + junk) == plan.hash_bytes(whole)


def test_plans_pickle() -> None:
    plan = HashPlan(("struct", ("int64", ("struct", ("bytes",)))))
    copy = pickle.loads(pickle.dumps(plan))
    assert copy.description == plan.description
    key = b"\x01" + bytes(8) + b"\x01\x01\x02\x00\x00\x00ab"
    assert copy.hash_bytes(key) == plan.hash_bytes(key) == spark_hash(key, plan.description)


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
        HashPlan("int64").hash_bytes(b"12345678")
    with pytest.raises(UsageError, match="takes bytes, not integers"):
        HashPlan("bytes").key_groups_of_ints(np.zeros(1, np.int64), 128)


@pytest.mark.parametrize("offsets", [[0, 4], [-1, 2], [2, 1, 3], []])
def test_offsets_outside_the_data_are_refused(offsets: list[int]) -> None:
    with pytest.raises(SerializationError, match="offsets"):
        HashPlan("bytes").hashes_of_bytes(np.array(offsets, dtype=np.int64), b"abc")


@pytest.mark.parametrize("max_parallelism", [0, -1, 32769])
def test_max_parallelism_is_checked(max_parallelism: int) -> None:
    with pytest.raises(UsageError, match="max_parallelism is out of range"):
        HashPlan("int64").key_groups_of_ints(np.zeros(1, np.int64), max_parallelism)
