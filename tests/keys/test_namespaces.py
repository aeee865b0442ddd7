"""Namespaces describe themselves, and different ones have different bytes."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from statebackend.errors import SerializationError, SerializationTypeError
from statebackend.keys import ALL_NAMESPACES, VOID, TimeWindow, decode_namespace, encode_namespace

pytestmark = pytest.mark.checked

int64s = st.integers(-(2**63), 2**63 - 1)
windows = st.builds(TimeWindow, int64s, int64s)
parts = st.recursive(
    int64s | st.text(max_size=5) | st.binary(max_size=5) | windows,
    lambda inner: st.lists(inner, max_size=3).map(tuple),
    max_leaves=5,
)
namespaces = st.just(VOID) | parts


def kinds(namespace: Any) -> Any:
    """What makes two namespaces the same: type and value, all the way down."""
    if isinstance(namespace, tuple):
        return "tuple", tuple(map(kinds, namespace))
    return type(namespace).__name__, namespace


@given(namespaces)
def test_namespaces_come_back(namespace: Any) -> None:
    back = decode_namespace(encode_namespace(namespace))
    assert kinds(back) == kinds(namespace)


@given(namespaces, namespaces)
def test_different_namespaces_have_different_bytes(a: Any, b: Any) -> None:
    assert (encode_namespace(a) == encode_namespace(b)) == (kinds(a) == kinds(b))


@given(int64s, int64s)
def test_integers_and_windows_sort_as_their_bytes_do(a: int, b: int) -> None:
    assert (encode_namespace(a) < encode_namespace(b)) == (a < b)
    first, second = TimeWindow(a, 5), TimeWindow(b, 5)
    assert (encode_namespace(first) < encode_namespace(second)) == (first < second)


def test_numpy_integers_are_integers() -> None:
    assert encode_namespace(np.int32(7)) == encode_namespace(7)
    assert TimeWindow(np.int64(1), 2) == TimeWindow(1, 2)


@pytest.mark.parametrize(
    "namespace", [True, np.True_, 1.0, None, [1], {1}, ALL_NAMESPACES, (1, None), (VOID,)], ids=str
)
def test_values_that_are_not_namespaces_are_refused(namespace: Any) -> None:
    with pytest.raises(SerializationTypeError, match="cannot be a namespace"):
        encode_namespace(namespace)


def test_bounds() -> None:
    with pytest.raises(OverflowError, match="out of range for a namespace"):
        encode_namespace(2**63)
    with pytest.raises(OverflowError, match="out of range for a namespace"):
        TimeWindow(0, 2**63)
    with pytest.raises(SerializationTypeError, match="float cannot be a namespace"):
        TimeWindow(0.0, 1)  # type: ignore[arg-type]
    with pytest.raises(SerializationError, match="lone surrogate"):
        encode_namespace(("a", "\ud800"))
    deep: Any = ()
    for _ in range(100):
        deep = (deep,)
    with pytest.raises(SerializationError, match="nested too deeply"):
        encode_namespace(deep)


@given(parts, st.data())
def test_damaged_bytes_are_refused(namespace: Any, data: Any) -> None:
    whole = encode_namespace(namespace)
    cut = data.draw(st.integers(1, len(whole) - 1))
    for damaged in (whole[:cut], whole + b"\x00", b"\x09" + whole[1:]):
        with pytest.raises(SerializationError, match="bytes of a namespace cannot be read"):
            decode_namespace(damaged)


def test_bottomless_bytes_are_refused() -> None:
    with pytest.raises(SerializationError, match="bytes of a namespace cannot be read"):
        decode_namespace(b"\x05\x00\x00\x00\x01" * 10_000)


def test_sentinels_are_one_object_each() -> None:
    for sentinel in (VOID, ALL_NAMESPACES):
        assert pickle.loads(pickle.dumps(sentinel)) is sentinel
    assert (repr(VOID), repr(ALL_NAMESPACES)) == ("VOID", "ALL_NAMESPACES")


def test_time_windows() -> None:
    window = TimeWindow(0, 10)
    assert window.max_timestamp() == 9
    assert window == TimeWindow(0, 10) != (0, 10)
    in_order = [window, TimeWindow(0, 20), TimeWindow(5, 6)]
    assert sorted({TimeWindow(5, 6), window, TimeWindow(0, 20)}) == in_order
    assert len({window, TimeWindow(0, 10)}) == 1
    assert pickle.loads(pickle.dumps(window)) == window
    assert window.intersects(TimeWindow(10, 20))
    assert not window.intersects(TimeWindow(11, 20))
    assert window.cover(TimeWindow(-5, 3)) == TimeWindow(-5, 10)
    with pytest.raises(AttributeError, match="cannot assign to field"):
        window.start = 3  # type: ignore[misc]
