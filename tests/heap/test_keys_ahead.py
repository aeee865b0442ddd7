"""Runs of keys: the bytes of keys, and the map keys that are expected."""

from __future__ import annotations

import collections
from typing import Any

import pytest
from hypothesis import given, strategies as st

from statebackend import types as t
from statebackend._core import core_probe
from statebackend._core.core_probe import StateTable, bytes_of_short_key
from statebackend._core.tables.state_core import StateCore
from statebackend.columns.codec_factory import key_codec
from statebackend.keys import key_encoder

pytestmark = pytest.mark.checked

FIELDS = {
    t.LONG: st.integers(-(2**63), 2**63 - 1) | st.integers(-6, 257),
    t.SHORT: st.integers(-(2**15), 2**15 - 1),
    t.BOOL: st.booleans(),
    t.STRING: st.text(max_size=20),
    t.BYTES: st.binary(max_size=20),
}
Pair = collections.namedtuple("Pair", "a b")


@st.composite
def composites(draw: st.DrawFn) -> tuple[t.Type, list[tuple[Any, ...]]]:
    fields = draw(st.lists(st.sampled_from(list(FIELDS)), min_size=1, max_size=9))
    key = st.tuples(*(st.none() | FIELDS[field] for field in fields))
    return t.TUPLE(*fields), draw(st.lists(key, min_size=1, max_size=8))


@given(composites())
def test_bytes_of_a_tuple_equal_the_encoders(drawn: tuple[t.Type, list[tuple[Any, ...]]]) -> None:
    declared, keys = drawn
    codec, encode = key_codec(declared), key_encoder(declared).encode
    for key in keys:
        wanted = encode(key)
        is_short = len(key) <= 8 and len(wanted) <= 64
        assert bytes_of_short_key(codec, key) == (wanted if is_short else None)


def test_keys_of_another_shape_take_the_general_way() -> None:
    pair = key_codec(t.TUPLE(t.INT, t.STRING))
    assert bytes_of_short_key(pair, Pair(1, "x")) == key_encoder(t.TUPLE(t.INT, t.STRING)).encode((1, "x"))
    for key in [
        (1,),
        (1, "x", 2),
        [1, "x"],
        (True, "x"),
        (1.0, "x"),
        (2**31, "x"),
        (1, b"x"),
        (1, "\ud800"),
        None,
        7,
    ]:
        assert bytes_of_short_key(pair, key) is None
    for declared in (t.LONG, t.TUPLE(t.DOUBLE), t.TUPLE(t.TUPLE(t.LONG)), t.TUPLE(*[t.LONG] * 9)):
        assert bytes_of_short_key(key_codec(declared), (1,)) is None
    for declared, key in ((t.STRING, "k" * 65), (t.STRING, "\ud800"), (t.STRING, b"k"), (t.BYTES, "k")):
        assert bytes_of_short_key(key_codec(declared), key) is None
    assert bytes_of_short_key(key_codec(t.STRING), "é" * 32) == ("é" * 32).encode()
    assert bytes_of_short_key(key_codec(t.BYTES), b"k") == b"k"


def map_keys_expected(looked_up: list[tuple[int, Any]]) -> list[Any]:
    kind = "bytes" if isinstance(looked_up[0][1], bytes) else "int"
    return core_probe.map_keys_expected(StateTable(StateCore(), key=kind, value="long"), looked_up)


@pytest.mark.parametrize("made", [lambda number: number, lambda number: b"%d" % number])
def test_map_keys_that_come_again_are_expected(made: Any) -> None:
    def expected(*looked_up: tuple[int, int]) -> list[Any]:
        return map_keys_expected([(turn, made(key)) for turn, key in looked_up])

    assert expected((1, 7)) == []
    assert expected((1, 7), (1, 7)) == [], "read and written for one key"
    assert expected((1, 7), (2, 7)) == [made(7)]
    assert expected(*enumerate([1, 2, 3, 4] * 3, 1)) == [made(1), made(2), made(3), made(4)]
    assert expected(*enumerate([1, 2, 3, 4, 5] * 3, 1)) == [], "each goes before it comes again"
    assert expected(*enumerate(range(100), 1)) == []
    assert expected((1, 7), (2, 7), *((turn, 8) for turn in range(3, 33))) == [made(7), made(8)]
    assert expected((1, 7), (2, 7), *((turn, 8) for turn in range(3, 40))) == [made(8)], "it came long ago"


def test_map_keys_of_any_length() -> None:
    short, longer = b"k" * 32, b"k" * 33
    looked_up = [(1, short), (2, short), (3, longer), (4, longer), (5, b""), (6, b"")]
    assert map_keys_expected(looked_up) == [b"", short]
