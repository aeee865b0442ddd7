"""Keys that become bytes: what is read of their objects, also of those that may come next, and what keys hold on to."""

from __future__ import annotations

import collections
import itertools
import os
import random
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import statebackend as sb
from statebackend import types as t
from statebackend._core.handles.key_shape import _bytes_ahead, _bytes_of
from statebackend._core.handles.look_ahead import looks_ahead
from statebackend.columns.codec_choice import key_codec
from statebackend.errors import KeyGroupError, SerializationError
from statebackend.keys import key_encoder

pytestmark = pytest.mark.checked

looking_ahead_only = pytest.mark.skipif(not looks_ahead(), reason="this build does not look ahead")
#: With the allocator of the C library, as sanitizers want it, objects do not lie beside one another.
pythons_allocator_only = pytest.mark.skipif(
    os.environ.get("PYTHONMALLOC") == "malloc", reason="needs Python's own allocator"
)

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


@settings(max_examples=200, deadline=None)
@given(composites())
def test_bytes_of_a_tuple_are_those_of_the_encoder(drawn: tuple[t.Type, list[tuple[Any, ...]]]) -> None:
    declared, keys = drawn
    codec, encode = key_codec(declared), key_encoder(declared).encode
    for key in keys:
        wanted = encode(key)
        is_short = len(key) <= 8 and len(wanted) <= 64
        assert _bytes_of(codec, key) == (wanted if is_short else None)


def test_what_has_another_shape_takes_the_general_way() -> None:
    pair = key_codec(t.TUPLE(t.INT, t.STRING))
    assert _bytes_of(pair, Pair(1, "x")) == key_encoder(t.TUPLE(t.INT, t.STRING)).encode((1, "x"))
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
        assert _bytes_of(pair, key) is None
    for declared in (t.LONG, t.STRING, t.TUPLE(t.DOUBLE), t.TUPLE(t.TUPLE(t.LONG)), t.TUPLE(*[t.LONG] * 9)):
        assert _bytes_of(key_codec(declared), (1,)) is None


KEYS: dict[str, tuple[t.Type, Any]] = {
    "pair": (t.TUPLE(t.LONG, t.LONG), lambda i: (i << 33, -i)),
    "mixed": (
        t.TUPLE(t.LONG, t.STRING, t.BYTES, t.BOOL, t.INT),
        lambda i: (i, f"n{i}", b"%d" % i, i % 2 == 0, i % 9),
    ),
    "nulls": (t.TUPLE(t.LONG, t.STRING), lambda i: (None if i % 3 else i << 40, None if i % 2 else f"n{i}")),
    "row": (t.ROW(a=t.LONG, b=t.LONG), lambda i: Pair(i << 20, i)),
    "text": (t.STRING, lambda i: f"user-{i:010d}"),
    "bytes": (t.BYTES, lambda i: b"user-%010d" % i),
}


@looking_ahead_only
@pytest.mark.parametrize("name", KEYS)
def test_what_is_seen_ahead_is_what_is_there(name: str) -> None:
    declared, make = KEYS[name]
    codec, encode = key_codec(declared), key_encoder(declared).encode
    keys = [make(i) for i in range(1000, 6000)]
    for near, far in zip(keys, keys[8:], strict=False):
        assert _bytes_ahead(codec, id(far), near) in (None, encode(far))


#: How many of 5,000 keys are seen in the memory of a fresh process, which has no holes.
COUNT_SEEN = """
from heap.test_keys_ahead import KEYS, _bytes_ahead, key_codec
for name, (declared, make) in KEYS.items():
    codec, keys = key_codec(declared), [make(i) for i in range(1000, 6000)]
    print(name, sum(_bytes_ahead(codec, id(far), near) is not None for near, far in zip(keys, keys[8:])))
"""


@looking_ahead_only
def test_most_keys_are_seen_ahead() -> None:
    done = subprocess.run(
        [sys.executable, "-c", COUNT_SEEN],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    seen = {name: int(count) for name, count in (line.split() for line in done.stdout.splitlines())}
    assert seen.keys() == KEYS.keys()
    assert min(seen.values()) > 1000, seen


@looking_ahead_only
@pythons_allocator_only
def test_other_objects_are_not_seen() -> None:
    codec = key_codec(t.STRING)

    def seen(codec: Any, keys: list[Any], near: Any = None) -> bool:
        return any(_bytes_ahead(codec, id(far), near or each) for each, far in itertools.pairwise(keys))

    assert seen(codec, ["k" * 48 + str(i) for i in range(2000)])
    assert not seen(codec, ["k" * 70 + str(i) for i in range(2000)])
    assert not seen(codec, ["é" * 20 + str(i) for i in range(2000)])
    pairs = [(i << 40, i) for i in range(2000)]
    assert seen(key_codec(t.TUPLE(t.LONG, t.LONG)), pairs)
    for declared in (t.TUPLE(t.LONG, t.LONG, t.LONG), t.TUPLE(t.STRING, t.LONG), t.TUPLE(t.SHORT, t.LONG)):
        assert not seen(key_codec(declared), pairs)
    mixed = [Pair(i << 40, i) if i % 2 else (i << 40, i) for i in range(2000)]
    assert seen(key_codec(t.TUPLE(t.LONG, t.LONG)), mixed[::2])
    assert not seen(key_codec(t.TUPLE(t.LONG, t.LONG)), mixed), "neighbours of different classes"
    for near in ((1, 2, 3), Pair(1, 2), [1, 2]):
        assert not seen(key_codec(t.TUPLE(t.LONG, t.LONG)), pairs, near)


@pythons_allocator_only
def test_a_build_without_it_sees_nothing() -> None:
    keys = [(i << 40, i) for i in range(5000)]
    codec = key_codec(t.TUPLE(t.LONG, t.LONG))
    found = [_bytes_ahead(codec, id(far), near) for near, far in zip(keys, keys[8:], strict=False)]
    assert any(found) == looks_ahead()


#: A page of memory between two that must not be read, filled with what looks like keys, whole or cut off.
FORBIDDEN = """
import ctypes, mmap, os, random, struct, sys
from statebackend import types as t
from statebackend._core.handles.key_shape import _bytes_ahead
from statebackend.columns.codec_choice import key_codec
PAGE = 4096
memory = mmap.mmap(-1, 3 * PAGE)
start = ctypes.addressof(ctypes.c_char.from_buffer(memory)) + PAGE
mprotect = ctypes.CDLL(None, use_errno=True).mprotect
for forbidden in (start - PAGE, start + PAGE):
    assert start % PAGE == 0 and mprotect(ctypes.c_void_p(forbidden), ctypes.c_size_t(PAGE), 0) == 0
def place(image, at):
    image = image[:max(PAGE - at, 0)]
    memory[PAGE + at:PAGE + at + len(image)] = image
def image_of(thing):
    image = bytearray(ctypes.string_at(id(thing), sys.getsizeof(thing, 0) - 16 * isinstance(thing, tuple)))
    image[:8] = struct.pack("<q", 1 << 20)
    return bytes(image)
def here(at):
    return ctypes.cast(start + at, ctypes.py_object).value
"""


def run_apart(program: str) -> str:
    """What a program prints that a read of a forbidden page would end."""
    # The objects in the page are no objects of the interpreter, which must not end them.
    program = f"{FORBIDDEN}{program}\nsys.stdout.flush()\nos._exit(0)\n"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@looking_ahead_only
def test_the_end_of_the_page_is_not_passed() -> None:
    """A text, a byte string, and the items of a tuple are seen exactly if all of them lie on the page."""
    run_apart("""
for form, thing in ((t.STRING, "k" * 30), (t.BYTES, b"k" * 30)):
    image, codec = image_of(thing), key_codec(form)
    place(image, 0)
    near = here(0)
    for at in range(512, PAGE, 8):
        place(image, at)
        found = _bytes_ahead(codec, start + at, near)
        assert (found == b"k" * 30) == (at + len(image) - 1 <= PAGE), (form, at, found)
        place(bytes(len(image)), at)
number, codec = image_of(2**62), key_codec(t.TUPLE(t.LONG, t.LONG))
pair = image_of((2**62, 2**62))
def pair_of(one, other):
    return pair[:-16] + struct.pack("<QQ", start + one, start + other)
place(number, 0)
place(pair_of(0, 0), 64)
near = here(64)
for at in range(512, PAGE, 8):
    place(number, at)
    place(pair_of(0, at), 128)
    assert (_bytes_ahead(codec, start + 128, near) is not None) == (at + 36 <= PAGE), at
    place(bytes(48), at)
    place(pair_of(0, 0), at)
    assert (_bytes_ahead(codec, start + at, near) is not None) == (at + len(pair) <= PAGE), at
    place(bytes(48), at)
for elsewhere in (start - 8, start + PAGE, start + PAGE + 64, 0, 8, 2**63, 2**64 - 8):
    assert _bytes_ahead(codec, elsewhere, near) is None
    place(pair[:-16] + struct.pack("<QQ", elsewhere, elsewhere), 128)
    assert _bytes_ahead(codec, start + 128, near) is None
""")


@looking_ahead_only
def test_garbage_is_read_without_harm() -> None:
    """Heads of objects with any sizes, states and items, anywhere on the page."""
    run_apart("""
rng = random.Random(7)
place(image_of("k" * 30), 0)
place(image_of(2**62), 128)
place(image_of((1, 2))[:-16] + struct.pack("<QQ", start + 128, start), 192)
text, pair = here(0), here(192)
codecs = [(key_codec(t.STRING), text), (key_codec(t.TUPLE(t.LONG, t.STRING)), pair)]
heads = [id(each) for each in (str, int, tuple, bytes, bool)]
for _ in range(300):
    words = [rng.choice((rng.getrandbits(64), rng.choice(heads), start + rng.randrange(PAGE + 64), rng.randrange(200)))
             for _ in range((PAGE - 256) // 8)]
    place(struct.pack(f"<{len(words)}Q", *words), 256)
    for at in range(256, PAGE, 4):
        for codec, near in codecs:
            _bytes_ahead(codec, start + at, near)
""")


# --- what the backend does with it ---


def backend_of(declared: t.Type, **options: Any) -> Any:
    return sb.create_backend("heap").create_keyed_backend(declared, **options)


@pytest.mark.parametrize("name", KEYS)
def test_states_hold_what_was_written_in_any_order_of_keys(name: str) -> None:
    declared, make = KEYS[name]
    keyed = backend_of(declared)
    state = keyed.get_state(sb.ValueStateDescriptor("v", t.LONG))
    texts = keyed.get_state(sb.ListStateDescriptor("l", t.STRING))
    rng, model = random.Random(11), {}
    for turn in range(30):
        numbers = [rng.randrange(3000) for _ in range(rng.randrange(1, 300))]
        keys = [make(number) for number in numbers]  # fresh objects, most of them side by side in memory
        if turn % 3 == 1:
            keys.reverse()
        if turn % 3 == 2:
            rng.shuffle(keys)
        keyed.set_current_namespace(("n", turn % 2))
        for i, key in enumerate(keys):
            keyed.set_current_key(key)
            if i % 50 == 49:
                keyed.set_current_namespace(("n", (turn + i) % 2))
            at = tuple(key) if isinstance(key, tuple) else key, keyed._namespace
            assert state.value() == model.get(at)
            model[at] = turn * 1000 + i
            state.update(turn * 1000 + i)
            texts.add(str(i))
            current = keyed.current_key
            assert (tuple(current) if isinstance(current, tuple) else current) == at[0]
    assert keyed.num_entries() == 2 * len(model)
    keyed.close()


def test_a_key_of_another_group_leaves_the_current_one() -> None:
    declared = t.TUPLE(t.LONG, t.LONG)
    keyed = backend_of(declared, max_parallelism=128, key_group_range=sb.KeyGroupRange(0, 63))
    encoder, current, refused = key_encoder(declared), None, 0
    for number in range(500):
        key = (number, -number)
        if encoder.key_group(key, 128) < 64:
            keyed.set_current_key(key)
            current = key
            continue
        with pytest.raises(KeyGroupError, match="does not serve"):
            keyed.set_current_key(key)
        refused += 1
        if current is not None:
            assert keyed.current_key == current
    assert refused > 100
    with pytest.raises(SerializationError):
        keyed.set_current_key((1, "x"))
    assert keyed.current_key == current
    keyed.close()


def test_a_function_that_sets_another_key_does_not_move_the_result() -> None:
    """The bytes of the key that was noted stay, though the next keys are written to the same memory."""
    keyed = backend_of(t.TUPLE(t.LONG, t.LONG))

    def reduce(old: int, new: int) -> int:
        for other in range(40):
            keyed.set_current_key((other, other))
        return old + new

    state = keyed.get_state(sb.ReducingStateDescriptor("sum", reduce, t.LONG))
    for _ in range(3):
        keyed.set_current_key((7 << 40, 8))
        state.add(5)
    lists = keyed.get_state(sb.ListStateDescriptor("l", t.LONG))
    keyed.set_current_key((1, 2))
    lists.update([1, 2, 3])
    items = iter(lists.get())
    assert next(items) == 1
    keyed.set_current_key((3, 4))
    lists.update([9])
    assert list(items) == [2, 3]
    keyed.set_current_key((7 << 40, 8))
    assert state.get() == 15
    assert sorted(map(tuple, keyed.keys("sum"))) == [(7 << 40, 8)]
    keyed.close()
