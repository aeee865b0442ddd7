"""Flink's formulas for key groups, against values recorded from Flink itself."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from statebackend.errors import UsageError
from statebackend.keys import key_groups as kg
from statebackend.keys.key_groups import KeyGroupRange

pytestmark = pytest.mark.checked

FLINK_GROUPS = {
    0: 94,
    1: 86,
    -1: 80,
    42: 29,
    1000: 7,
    2**31 - 1: 62,
    -(2**31): 108,
    "hello": 35,
    "user-1": 121,
}
FLINK_MURMUR = {
    0: 593689054,
    1: 68075478,
    -1: 1982413648,
    42: 1134849565,
    1000: 3506311,
    2**31 - 1: 1653689534,
    -(2**31): 1718298732,
    99162322: 1715862179,
    -836031825: 1662039673,
}


def test_flink_key_groups() -> None:
    assert {key: kg.flink_key_group(key, 128) for key in FLINK_GROUPS} == FLINK_GROUPS
    assert {code: kg._flink_murmur(code) for code in FLINK_MURMUR} == FLINK_MURMUR
    mixed = [kg._signed(kg._bit_mix(x & 0xFFFFFFFF)) for x in (1, -1, 42)]
    assert mixed == [1364076727, -2114883783, 142593372]


def test_java_hash_codes() -> None:
    code = kg.java_hash_code
    assert code("hello") == 99162322
    assert code("user-1") == -836031825
    assert code("") == 0
    assert code("\U0001f600") == 1772899  # a surrogate pair: 31 * 0xD83D + 0xDE00
    assert code(5_000_000_000) == 705032705
    assert code(-1) == -1
    assert code(-1, java_type="long") == code(np.int64(-1)) == 0
    assert code(np.int32(-1)) == -1
    assert (code(True), code(False), code(None)) == (1231, 1237, 0)
    assert code(1.0) == 1072693248
    assert code(float("nan")) == 2146959360
    assert code((1, 2)) == 31 * 1 + 2
    with pytest.raises(OverflowError, match="Java Integer"):
        code(2**31, java_type="int")
    with pytest.raises(OverflowError, match="Java Long"):
        code(2**63)
    with pytest.raises(UsageError, match="hash code of a bytes is not known"):
        code(b"a")
    with pytest.raises(UsageError, match="unknown java_type"):
        code(1, java_type="short")


@pytest.mark.parametrize(
    ("parallelism", "ranges"),
    [
        (3, [(0, 3), (4, 6), (7, 9)]),
        (4, [(0, 2), (3, 4), (5, 7), (8, 9)]),
        (7, [(0, 1), (2, 2), (3, 4), (5, 5), (6, 7), (8, 8), (9, 9)]),
    ],
)
def test_ranges_of_ten_groups(parallelism: int, ranges: list[tuple[int, int]]) -> None:
    assert [kg.range_for(10, parallelism, i) for i in range(parallelism)] == [
        KeyGroupRange(*r) for r in ranges
    ]


@given(st.integers(1, 32768).flatmap(lambda m: st.tuples(st.just(m), st.integers(1, min(m, 300)))))
def test_ranges_cover_every_group_once_and_invert(sizes: tuple[int, int]) -> None:
    max_parallelism, parallelism = sizes
    following = 0
    lengths = set()
    for index in range(parallelism):
        groups = kg.range_for(max_parallelism, parallelism, index)
        assert groups.start == following
        following = groups.end + 1
        lengths.add(len(groups))
        for group in (groups.start, groups.end):
            assert kg.operator_index_for(max_parallelism, parallelism, group) == index
    assert following == max_parallelism
    assert max(lengths) - min(lengths) <= 1


@pytest.mark.parametrize(
    ("parallelism", "wanted"), [(1, 128), (85, 128), (86, 256), (171, 256), (200, 512), (20_000, 32768)]
)
def test_default_max_parallelism(parallelism: int, wanted: int) -> None:
    assert kg.default_max_parallelism(parallelism) == wanted


def test_a_range_is_a_set_of_groups() -> None:
    groups = KeyGroupRange(3, 5)
    assert list(groups) == [3, 4, 5]
    assert len(groups) == 3
    assert 5 in groups
    assert np.uint16(4) in groups
    assert 6 not in groups
    assert "4" not in groups
    assert groups == KeyGroupRange(3, 5) != KeyGroupRange(3, 6)
    assert hash(groups) == hash(KeyGroupRange(3, 5))
    assert pickle.loads(pickle.dumps(groups)) == groups
    assert groups.intersection(KeyGroupRange(5, 9)) == KeyGroupRange(5, 5)
    assert groups.intersection(KeyGroupRange(6, 9)) is None
    with pytest.raises(AttributeError, match="immutable"):
        groups.start = 4


@pytest.mark.parametrize(
    ("call", "complaint"),
    [
        (lambda: KeyGroupRange(3, 2), "not a range of key groups"),
        (lambda: KeyGroupRange(-1, 2), "not a range of key groups"),
        (lambda: KeyGroupRange(0, 32768), "not a range of key groups"),
        (lambda: kg.range_for(0, 1, 0), "max_parallelism is out of range"),
        (lambda: kg.range_for(32769, 1, 0), "max_parallelism is out of range"),
        (lambda: kg.range_for(10, 11, 0), "parallelism is out of range"),
        (lambda: kg.range_for(10, 2, 2), "no instance has this index"),
        (lambda: kg.operator_index_for(10, 2, 10), "no such key group"),
        (lambda: kg.default_max_parallelism(0), "parallelism is out of range"),
        (lambda: kg.key_group_of(1, 0), "max_parallelism is out of range"),
        (lambda: kg.flink_key_group(1, 40_000), "max_parallelism is out of range"),
    ],
)
def test_senseless_arguments_are_refused(call: Any, complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        call()
