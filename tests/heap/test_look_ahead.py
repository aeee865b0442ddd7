"""Looking ahead: which builds do it, what it sees, and that it reads no more than it may."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from statebackend._core.handles import look_ahead
from statebackend._core.handles.look_ahead import (
    _in_runs,
    _map_keys_expected,
    _number_ahead,
    _number_at,
    _peeked_bytes,
    looks_ahead,
)
from statebackend._core.tables.state_core import StateCore
from statebackend._core.tables.state_table import StateTable

pytestmark = pytest.mark.checked

looking_ahead_only = pytest.mark.skipif(not looks_ahead(), reason="this build does not look ahead")

EDGES = [0, 1, -1, 2**30, -(2**30), 2**60, -(2**60), 2**62 + 7, 2**63 - 1, -(2**63), -(2**63) + 1]
NUMBERS = EDGES + [each + delta for each in EDGES[3:8] for delta in (-1, 1)]

#: Two pages of memory, of which the second must not be read; `place` puts what an object looks like into the first.
PAGES = """
import ctypes, mmap, sys
from statebackend._core.handles.look_ahead import _map_key_ahead, _number_ahead, _peeked_bytes
PAGE = 4096
memory = mmap.mmap(-1, 2 * PAGE)
start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
mprotect = ctypes.CDLL(None, use_errno=True).mprotect
assert mprotect(ctypes.c_void_p(start + PAGE), ctypes.c_size_t(PAGE), 0) == 0 and start % PAGE == 0
def place(number, at):
    image = ctypes.string_at(id(number), min(sys.getsizeof(number), PAGE - at))
    memory[at:at + len(image)] = image
def ahead(at, stride=16):
    # What is seen at this place: eight keys on.
    return _number_ahead(start + at - 8 * stride, stride)
def map_key_ahead(at, stride=16):
    # The same for map keys: four on.
    return _map_key_ahead(start + at - 4 * stride, stride)
"""


def run_apart(program: str) -> str:
    """What a program prints that a read of a forbidden page would end."""
    done = subprocess.run([sys.executable, "-c", PAGES + program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


@looking_ahead_only
def test_what_is_seen_ahead_is_what_is_there() -> None:
    assert [_number_at(number) for number in NUMBERS] == NUMBERS
    # A subclass is not what a list of keys is made of, and wider numbers are no keys.
    assert [_number_at(other) for other in ("1", 1.0, None, (1,), True, 2**90, int)] == [None] * 7


def test_what_is_read_is_what_an_int_of_64_bits_takes() -> None:
    digits = -(-64 // sys.int_info.bits_per_digit)
    assert _peeked_bytes() == int.__basicsize__ + digits * int.__itemsize__


@looking_ahead_only
def test_the_end_of_the_page_is_not_passed() -> None:
    """Nothing is read that might reach into the next page, and all that cannot."""
    seen = run_apart("""
for at in range(PAGE - 128, PAGE, 8):
    place(2**62 + at, at)
    print(at, ahead(at), map_key_ahead(at))
""")
    last = 4096 - _peeked_bytes()
    for at, line in zip(range(4096 - 128, 4096, 8), seen.splitlines(), strict=True):
        expected = str(2**62 + at if at <= last else None)
        assert line.split() == [str(at), expected, expected]


@looking_ahead_only
def test_other_pages_are_not_read() -> None:
    assert (
        run_apart("""
for see in (_number_ahead, _map_key_ahead):
    print(see(start + PAGE - 64, 16), see(start + PAGE - 64, PAGE // 4))
    print(see(start + 32, -16), see(start + 64, 2**61), see(start, -(2**60)))
""").split()
        == ["None"] * 10
    )


#: The second page may be read, a third one must not: keys lie at a distance over both.
READABLE = """
from statebackend._core.handles.look_ahead import _numbers_ahead
memory = mmap.mmap(-1, 3 * PAGE)
start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
assert mprotect(ctypes.c_void_p(start + 2 * PAGE), ctypes.c_size_t(PAGE), 0) == 0
def lay(stride, first):
    # Keys at each distance, and their addresses; what does not end before the third page is cut.
    there = list(range(first, 2 * PAGE, stride))
    for at in there:
        number = 2**62 + at
        image = ctypes.string_at(id(number), min(sys.getsizeof(number), 2 * PAGE - at, stride))
        memory[at:at + len(image)] = image
    return there
"""


@looking_ahead_only
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the system is not asked")
@pytest.mark.parametrize("stride", [40, 48, 64, 200, 512])
@pytest.mark.parametrize("direction", [1, -1])
def test_keys_on_the_next_page_are_seen_if_it_can_be_read(stride: int, direction: int) -> None:
    """In both directions, those across the boundary too; nothing of the page behind, which would end the process."""
    run_apart(
        READABLE
        + f"""
stride, direction = {stride}, {direction}
for first in range(0, stride, 8):
    there = lay(stride, first)
    expected = {{at: 2**62 + at if at + _peeked_bytes() <= 2 * PAGE else None for at in there}}
    keys = there[::direction]
    seen = _numbers_ahead(start + keys[0], direction * stride, len(keys) - 8)
    assert seen == [expected[at] for at in keys[8:]], (first, seen)
"""
    )


@looking_ahead_only
def test_keys_far_apart_are_not_asked_for() -> None:
    """Each would need a question of its own."""
    run_apart(
        READABLE
        + """
there = lay(PAGE // 8 + 8, 0)
seen = _numbers_ahead(start, PAGE // 8 + 8, len(there) - 8)
assert seen == [None] * len(seen), seen
"""
    )


def test_a_key_of_another_size_does_not_end_a_run() -> None:
    small, wide = range(10**6, 2 * 10**6, 32), range(5 * 10**6, 6 * 10**6, 48)
    keys = [*small[:5], wide[0], *small[5:9], wide[1], wide[2], *small[9:12]]
    expected = [False, False, True, True, True, False, *[True] * 4, False, False, *[True] * 3]
    assert _in_runs(keys) == expected


def test_a_run_that_goes_on_in_another_place_is_followed_from_its_second_key() -> None:
    keys = [*range(1000, 1320, 32), *range(9000, 9320, 32), *range(70000, 70480, 48)]
    expected = [False, False] + [True] * 8 + [False] + [True] * 9 + [False, False] + [True] * 8
    assert _in_runs(keys) == expected


@looking_ahead_only
def test_most_keys_of_a_list_of_random_numbers_are_in_runs() -> None:
    """Those of three digits of Python's and those of two lie apart: one in eight is of the smaller size."""
    seen = run_apart("""
import random
from statebackend._core.handles.look_ahead import _in_runs
random.seed(1)
keys = [random.getrandbits(64) - 2**63 for _ in range(20_000)]
print(sum(_in_runs([id(key) for key in keys])) / len(keys))
""")
    assert float(seen) > 0.75


def map_keys_expected(looked_up: list[tuple[int, Any]]) -> list[Any]:
    kind = "bytes" if isinstance(looked_up[0][1], bytes) else "int"
    return _map_keys_expected(StateTable(StateCore(), key=kind, value="long"), looked_up)


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
    assert map_keys_expected([(1, short), (2, short), (3, longer), (4, longer), (5, b""), (6, b"")]) == [
        b"",
        short,
    ]


def test_a_build_without_it_guesses_nothing() -> None:
    numbers = [each + 2**40 for each in range(64)]
    at, stride = id(numbers[0]), 32
    ahead = [_number_ahead(at + i * stride, stride) for i in range(48)]
    assert any(number is not None for number in [*ahead, _number_at(numbers[0])]) == looks_ahead()


COMPILER = shlex.split(sysconfig.get_config_var("CC") or "")


@pytest.mark.skipif(not COMPILER or shutil.which(COMPILER[0]) is None, reason="no C compiler")
@pytest.mark.parametrize(
    ("flag", "expected"),
    [
        ("-DSTATEBACKEND_LOOK_AHEAD=1", 1),
        ("-DSTATEBACKEND_LOOK_AHEAD=0", 0),
        ("-fsanitize=address", 0),
        ("-fsanitize=thread", 0),
        ("-DPy_GIL_DISABLED=1", 0),
    ],
)
def test_where_it_is_off(flag: str, expected: int) -> None:
    """The switch as the compiler sees it, without a build of its own."""
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        expected = 0
    text = Path(look_ahead.__file__).with_name("look_ahead.pxd").read_text()
    block = re.search(r'cdef extern from \*:\n    """\n(.*?)\n    """', text, re.S)
    assert block is not None
    done = subprocess.run(
        [*COMPILER, flag, f"-I{sysconfig.get_path('include')}", "-E", "-P", "-x", "c", "-"],
        input=f"#include <Python.h>\n{block[1]}\nlooks_ahead = SB_LOOKS_AHEAD;\n",
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-3:] == ["looks_ahead", "=", f"{expected};"]


def test_a_clock_that_closes_the_backend_ends_the_call() -> None:
    """In a process of its own: what keys were looked up in is gone then."""
    seen = run_apart("""
import statebackend as sb
class Closing:
    def now(self):
        self.left -= 1
        if not self.left:
            keyed.close()
        return 1000
clock = Closing()
clock.left = 10**9
keyed = sb.create_backend("heap").create_keyed_backend("bigint", clock=clock)
count = keyed.get_value_state(sb.ValueStateDescriptor("count", "bigint"))
keys = list(range(1000, 2000))
for key in keys:
    keyed.set_current_key(key)
    count.update(key)
clock.left = 300
try:
    for key in keys:
        keyed.set_current_key(key)
        count.value()
except sb.ClosedError:
    print(key)
""")
    assert 1000 < int(seen) <= 1300
