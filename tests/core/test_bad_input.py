"""Wrong arguments, wrong moments: the right error, and nothing has changed."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from ids import stable_repr
from processes import run

from statebackend._core.core_probe import MapTable, StateTable
from statebackend._core.kernels import batch_kernels
from statebackend._core.tables.state_core import CoreMark, StateCore
from statebackend.errors import ClosedError, KeyGroupError, SerializationTypeError, UsageError

pytestmark = pytest.mark.checked


def contents(table: StateTable) -> dict[Any, Any]:
    return {(e.key, e.namespace): e.value for e in table}


def call_everything(table: StateTable, key: Any, value: Any) -> Iterator[Callable[[], Any]]:
    if table.value_code == StateTable(StateCore(), value=("list", "long")).value_code:
        yield lambda: table.append(key, value)
    else:
        yield lambda: table.put(key, value)
    for method in (
        table.get,
        table.contains,
        table.timestamp,
        table.remove,
        table.group_of,
        table.chain,
    ):
        yield lambda method=method: method(key)


class Sly(int):
    """An int that is more than an int."""


# --- keys and values ----------------------------------------------------------------------------------------

NOT_INTS = [None, True, 1.0, "1", b"1", (1,), [1], np.int64(1), Sly(1), object()]
NOT_BYTES = [None, 1, "a", bytearray(b"a"), memoryview(b"a"), ["a"], np.bytes_(b"a"), object()]


@pytest.mark.parametrize(
    ("kind", "key"), [*(("int", k) for k in NOT_INTS), *(("bytes", k) for k in NOT_BYTES)], ids=stable_repr
)
@pytest.mark.parametrize("value", ["long", ("list", "long")])
def test_a_key_of_the_wrong_type(kind: str, key: Any, value: Any) -> None:
    table = StateTable(StateCore(), key=kind, value=value)
    for call in call_everything(table, key, 1):
        with pytest.raises(SerializationTypeError):
            call()
    assert (len(table), contents(table)) == (0, {})
    assert table.metrics()["maps"] == 0
    table._check()


@pytest.mark.parametrize("key", [2**63, -(2**63) - 1, 2**64, 10**40])
def test_a_key_out_of_range(key: int) -> None:
    table = StateTable(StateCore())
    for call in call_everything(table, key, 1):
        with pytest.raises(OverflowError):
            call()
    table.put(2**63 - 1, 1)
    table.put(-(2**63), 2)
    assert contents(table) == {(2**63 - 1, 0): 1, (-(2**63), 0): 2}


OUT_OF_RANGE = {"long": 2**63, "int": 2**31, "short": 2**15, "byte": 2**7}
WRONG_VALUES = {
    **dict.fromkeys(OUT_OF_RANGE, NOT_INTS),
    "double": [None, 1, True, "1", b"1", np.float64(1)],
    "float": [None, 1, "1", np.float32(1)],
    "bool": [None, 0, 1, "", b"", np.bool_(True)],
    "bytes": NOT_BYTES,
    5: [None, 1, "abcde", b"abcd", b"abcdef", b"", bytearray(5)],
}
GOOD_VALUES = {"double": 1.0, "float": 1.0, "bool": True, "bytes": b"a", 5: b"abcde"}


@pytest.mark.parametrize("kind", WRONG_VALUES)
def test_a_value_of_the_wrong_type_or_out_of_range(kind: Any) -> None:
    core = StateCore()
    table, lists = StateTable(core, value=kind), StateTable(core, value=("list", kind))
    good = GOOD_VALUES.get(kind, 1)
    table.put(1, good)
    lists.append(1, good)
    mark = core.mark()
    wrong = [(value, SerializationTypeError) for value in WRONG_VALUES[kind]]
    if kind in OUT_OF_RANGE:
        limit = OUT_OF_RANGE[kind]
        wrong += [(value, OverflowError) for value in (limit, -limit - 1, 10**30)]  # type: ignore[misc]
        for value in (limit - 1, -limit):
            table.put(9, value)
            assert table.get(9) == value
        core.rollback(mark)
    for value, error in wrong:
        for key in (1, 2):
            for call in (table.put, lists.append):
                with pytest.raises(error):
                    call(key, value)
    assert contents(table) == {(1, 0): good}
    assert contents(lists) == {(1, 0): [good]}
    assert table.dirty(mark) == lists.dirty(mark) == set()
    table._check()
    lists._check()


def test_a_float_that_rounds_to_infinity_is_out_of_range() -> None:
    core = StateCore()
    table, lists = StateTable(core, value="float"), StateTable(core, value=("list", "float"))
    for good in (3.4e38, float("inf"), float("-inf")):
        table.put(1, good)
        assert table.get(1) == np.float32(good)
    for call in (table.put, lists.append):
        for wrong in (1e39, -1e39):
            with pytest.raises(OverflowError):
                call(1, wrong)
    assert (table.get(1), lists.get(1)) == (float("-inf"), None)


def test_namespaces_and_timestamps_that_do_not_fit() -> None:
    table = StateTable(StateCore(), namespaces=True, timestamps=True)
    for namespace in (-1, 2**32, "a", None):
        for call in (
            lambda namespace=namespace: table.put(1, 1, namespace),
            lambda namespace=namespace: table.get(1, namespace),
            lambda namespace=namespace: batch_kernels.update_many(
                table, np.arange(2), np.arange(2), namespace=namespace
            ),
        ):
            with pytest.raises((OverflowError, TypeError)):
                call()
    for timestamp in (2**63, -(2**63) - 1, "a", None):
        with pytest.raises((OverflowError, TypeError)):
            table.put(1, 1, 0, timestamp)
    assert len(table) == 0
    table.put(1, 1, 2**32 - 1)
    assert contents(table) == {(1, 2**32 - 1): 1}


def test_a_namespace_for_a_table_without_them() -> None:
    table = StateTable(StateCore())
    table.put(1, 1)
    for call in (lambda: table.put(1, 2, 5), lambda: table.get(1, 5), lambda: table.remove(1, 5)):
        with pytest.raises(UsageError):
            call()
    table._check()
    assert contents(table) == {(1, 0): 1}


def test_keys_of_foreign_key_groups() -> None:
    table = StateTable(StateCore(), max_parallelism=10, key_group_range=(3, 5))
    everywhere = StateTable(StateCore(), max_parallelism=10)
    foreign = next(key for key in range(1000) if not 3 <= everywhere.group_of(key) <= 5)
    for call in call_everything(table, foreign, 1):
        with pytest.raises(KeyGroupError, match="own 3..5"):
            call()
    assert table.metrics()["maps"] == 0


def test_operations_of_another_kind_of_table() -> None:
    core = StateCore()
    longs, lists = StateTable(core), StateTable(core, value=("list", "long"))
    with pytest.raises(UsageError):
        longs.append(1, 1)
    with pytest.raises(UsageError):
        lists.put(1, [1])
    longs.put(1, 5)
    lists.append(1, 5)
    assert contents(longs) == {(1, 0): 5}
    assert contents(lists) == {(1, 0): [5]}


# --- layouts ------------------------------------------------------------------------------------------------


WRONG_OPTIONS: list[tuple[str, Any, list[Any]]] = [
    ("value", UsageError, ["string", None, 0, -1, 65_537, 1.5, (), ("list",), ("map", "long")]),
    ("value", UsageError, [("list", "nothing"), ("list", ("list", "long"))]),
    ("key", UsageError, ["long", None, 5]),
    ("max_parallelism", UsageError, [0, -1, 32_769]),
    ("initial_capacity", UsageError, [0, 2, 65, 2**31, -64]),
    ("key_group_range", KeyGroupError, [(-1, 3), (0, 128), (5, 4), (128, 128)]),
    ("hash_mask", (TypeError, OverflowError), [2**32, -1]),
    ("key_group_range", (TypeError, UsageError), [5]),
    ("max_parallelism", (TypeError, UsageError), ["8"]),
    ("initial_capacity", (TypeError, UsageError), ["64"]),
    ("plan", (TypeError, UsageError), [5]),
]


@pytest.mark.parametrize(("option", "error", "values"), WRONG_OPTIONS, ids=stable_repr)
def test_an_option_that_makes_no_table(option: str, error: Any, values: list[Any]) -> None:
    core = StateCore()
    for value in values:
        with pytest.raises(error):
            StateTable(core, **{option: value})
    usable(core)


def usable(core: StateCore) -> None:
    table = StateTable(core)
    table.put(1, 1)
    mark = core.mark()
    table.put(1, 2)
    core.rollback(mark)
    assert contents(table) == {(1, 0): 1}


def test_a_map_state_does_not_hold_lists() -> None:
    core = StateCore()
    with pytest.raises(UsageError):
        MapTable(core, value=("list", "long"))
    usable(core)


@pytest.mark.parametrize("wrong", [None, 5, "core", object()], ids=stable_repr)
def test_a_table_or_view_needs_a_core(wrong: Any) -> None:
    from statebackend._core.snapshots.snapshot_view import SnapshotView

    for make in (StateTable, SnapshotView, MapTable):
        with pytest.raises(TypeError):
            make(wrong)
    core = StateCore()
    for call in (core.rollback, core.release, StateTable(core).dirty):
        with pytest.raises(TypeError):
            call(wrong)
    for call, mark in itertools.product(
        (core.rollback, StateTable(core).dirty), (CoreMark(), StateCore().mark())
    ):
        with pytest.raises(UsageError):
            call(mark)


# --- snapshots ----------------------------------------------------------------------------------------------


def test_snapshots_that_cannot_be_read() -> None:
    core, other = StateCore(), StateCore()
    table, foreign = StateTable(core, max_parallelism=10, key_group_range=(2, 5)), StateTable(other)
    view = core.snapshot()
    for call in (lambda: view.rows(foreign, 2, 2), lambda: view.group_sizes(foreign)):
        with pytest.raises(UsageError):
            call()
    for group in (0, 1, 6, 10, 2**31):
        with pytest.raises(KeyGroupError):
            view.rows(table, group, group)
    with pytest.raises(OverflowError):
        view.rows(table, -1, 2)
    for call in (lambda: view.rows(None, 2, 2), lambda: view.group_sizes(None)):
        with pytest.raises(TypeError):
            call()
    assert table.rows_in(view) == {}
    newer = core.snapshot()
    for _ in range(2):
        view.release()
        core.advance()
        assert (view.version, core.metrics()["snapshots"]) == (0, [newer.version])
    del newer
    core.advance()
    assert core.metrics()["snapshots"] == []
    for call in (lambda: view.rows(table, 2, 2), lambda: view.group_sizes(table)):
        with pytest.raises(ClosedError):
            call()


# --- after close --------------------------------------------------------------------------------------------

AFTER_CLOSE = [
    "table.get(1)",
    "table.put(1, 1)",
    "table.remove(1)",
    "table.contains(1)",
    "table.timestamp(1)",
    "table.append(1, 1)",
    "list(table)",
    "table.keys_of(0)",
    "len(table)",
    "table.chain(1)",
    "table.group_of(1)",
    "table.map_info(0)",
    "table.metrics()",
    "table._check()",
    "batch_kernels.get_many(table, keys)",
    "batch_kernels.update_many(table, keys, keys)",
    "batch_kernels.remove_many(table, keys)",
    "batch_kernels.find_many(table, keys)",
    "add_many(table, keys, keys, AddPlan('sum', 'long'))",
    "core.mark()",
    "core.rollback(mark)",
    "core.snapshot()",
    "core.advance()",
    "StateTable(core)",
    "maps.get(1, 1)",
    "maps.put(1, 1, 1)",
    "maps.remove(1, 1)",
    "maps.clear(1)",
    "maps.contains(1, 1)",
    "len(maps)",
    "list(maps.items(1))",
    "maps._check()",
]
SETUP = """
import numpy as np
from statebackend._core.kernels import batch_kernels
from statebackend._core.kernels.aggregation_kernels import add_many
from statebackend._core.core_probe import MapTable, StateTable
from statebackend._core.tables.accumulators import AddPlan
from statebackend._core.tables.state_core import StateCore
from statebackend.errors import ClosedError

core = StateCore()
table = StateTable(core)
maps = MapTable(core)
keys = np.arange(5)
for key in range(5):
    table.put(key, key)
    maps.put(1, key, key)
mark = core.mark()
core.close()
"""
TRY = """
print({call!r}, flush=True)
try:
    {call}
except ClosedError:
    print("closed")
"""


def test_after_close_everything_raises() -> None:
    """In a process of its own, because it has ended in freed memory."""
    done = run(SETUP + "".join(TRY.format(call=call) for call in AFTER_CLOSE), status=None)
    assert done.stdout.splitlines() == [line for call in AFTER_CLOSE for line in (call, "closed")], (
        done.stderr
    )
    assert done.returncode == 0


def test_after_close_what_ends_things_is_silent() -> None:
    core = StateCore()
    table = StateTable(core)
    mark = core.mark()
    table.put(1, 1)
    core.close()
    core.close()
    core.release(mark)
    assert core.closed
    assert not mark.is_open
    assert core.arena.usage()["run_bytes"] == 0
    core._check()


# --- overlapping calls --------------------------------------------------------------------------------------


def test_a_call_inside_a_call() -> None:
    """A copy function may not use the backend that calls it."""
    errors = []

    def copy(value: list[int]) -> list[int]:
        for call in (
            lambda: table.get(1),
            lambda: table.put(2, [2]),
            core.advance,
            lambda: batch_kernels.find_many(table, np.arange(3)),
        ):
            with pytest.raises(UsageError) as error:
                call()
            errors.append(error.value.code)
        return list(value)

    core = StateCore()
    table = StateTable(core, value="object", copy_value=copy)
    table.put(1, [1])
    mark = core.mark()
    assert table.get(1) == [1]
    assert errors == ["USAGE.OVERLAPPING_CALL"] * 4
    assert contents(table) == {(1, 0): [1]}
    assert table.dirty(mark) == set()
    table._check()


def test_a_call_on_another_thread_during_a_batch() -> None:
    core = StateCore()
    table = StateTable(core, value="long")
    keys = np.arange(300_000)
    stop = threading.Event()
    batches = 0

    def work() -> None:
        nonlocal batches
        while not stop.is_set():
            try:
                batch_kernels.update_many(table, keys, keys)
                batches += 1
            except UsageError:
                pass  # the other thread was inside first

    thread = threading.Thread(target=work)
    thread.start()
    codes: list[str] = []
    deadline = time.monotonic() + 60  # the other thread may have to wait for its turn
    while len(codes) < 3 and time.monotonic() < deadline:
        try:
            table.get(7)
        except UsageError as error:
            codes.append(error.code)
    stop.set()
    thread.join()
    assert codes == ["USAGE.OVERLAPPING_CALL"] * 3
    assert batches
    assert len(table) == len(keys)
    table._check()
