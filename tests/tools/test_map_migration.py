"""`split_maps`: entry by entry the map state holds what the maps held, and all else is as it was."""

from __future__ import annotations

import random
from collections import Counter
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from all_backends import BACKENDS
from keyed_story import Story, contents

import statebackend as sb
from statebackend import types as t
from statebackend.checkpoint import CheckpointStore
from statebackend.checkpoint.store.savepoint_folder import Savepoint
from statebackend.errors import CorruptCheckpointError, StateBackendError, StateMigrationError, UsageError
from statebackend.keys.key_groups import range_for
from statebackend.testing import ManualClock
from statebackend.tools import map_migration

pytestmark = pytest.mark.usefixtures("no_fsync")

each_backend = pytest.mark.parametrize("backend", BACKENDS)
TTL = sb.StateTtlConfig(1000)
#: The type of the maps, what the map state declares, a key and a value of a number.
MAPS: dict[str, Any] = {
    "map": (dict[str, int], (str, int), lambda n: f"k{n}", lambda n: n),
    "nested": (
        t.MAP(t.of("struct<a:int,b:string>"), t.LIST(t.DECIMAL(9, 2))),
        ("struct<a:int,b:string>", t.LIST(t.DECIMAL(9, 2))),
        lambda n: (n, None if n % 2 else "x"),
        lambda n: [Decimal(n).quantize(Decimal("0.01")), None],
    ),
    "pickles in maps": (t.MAP(int, t.PICKLE), (int, t.PICKLE), lambda n: n, lambda n: {n}),
    "pickled": (t.PICKLE, (str, int), lambda n: f"k{n}", lambda n: n),
    "pickled objects": (t.PICKLE, ("bigint", t.PICKLE), lambda n: n, lambda n: {"set": {n}}),
}


def old_state(keyed: Any, kind: str, name: str = "maps", *, ttl: bool = False) -> Any:
    descriptor = sb.ValueStateDescriptor(name, MAPS[kind][0])
    return keyed.get_state(descriptor.enable_time_to_live(TTL) if ttl else descriptor)


def new_descriptor(kind: str, name: str = "maps", *, ttl: bool = False) -> Any:
    descriptor = sb.MapStateDescriptor(name, *MAPS[kind][1])
    return descriptor.enable_time_to_live(TTL) if ttl else descriptor


def make_map(rng: random.Random, kind: str) -> dict[Any, Any]:
    _, _, key, value = MAPS[kind]
    numbers = rng.sample(range(100), rng.choice([0, 1, 3, 60]))
    return {key(n): None if n % 10 == 0 else value(n) for n in numbers}


def shown(entries: Any) -> list[Any]:
    return sorted(
        ([repr(tuple(key) if isinstance(key, tuple) else key), repr(value)] for key, value in entries)
    )


@pytest.mark.sampled(6)
@pytest.mark.parametrize("kind", MAPS)
@each_backend
def test_every_entry_is_in_the_map_state(
    tmp_path: Path, rng: random.Random, backend: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With namespaces and time stamps, of several instances, also where entries are written a few at a time."""
    monkeypatch.setattr(map_migration, "_PIECE_ENTRIES", 7)
    monkeypatch.setattr(map_migration, "_BATCH_BYTES", 400)
    clock = ManualClock(5000)
    written: dict[Any, dict[Any, Any]] = {}
    for index in range(2):
        own = range_for(16, 2, index)
        with sb.create_backend(backend).create_keyed_backend(
            int, max_parallelism=16, key_group_range=own, clock=clock
        ) as keyed:
            state = old_state(keyed, kind, ttl=True)
            for key in range(60):
                if keyed._encoder.key_group(key, 16) in own:
                    clock.set(5000 + key)
                    keyed.set_current_key(key)
                    keyed.set_current_namespace(
                        rng.choice([sb.VOID, sb.VOID, 7, "window", sb.TimeWindow(0, 5)])
                    )
                    state.update(made := make_map(rng, kind))
                    written[key, keyed.current_namespace] = made
            clock.set(6000)
            keyed.savepoint(tmp_path / "old")
    made = sb.tools.split_maps(
        tmp_path / "old", "maps", target=tmp_path / "new", descriptor=new_descriptor(kind, ttl=True)
    )
    assert made.now == Savepoint(tmp_path / "old").now
    for restored in BACKENDS:
        later = ManualClock(6000)
        with sb.create_backend(restored).create_keyed_backend(
            int, max_parallelism=64, restore=tmp_path / "new", clock=later
        ) as keyed:
            state = keyed.get_state(new_descriptor(kind, ttl=True))
            for now, first in ((5999, 0), (6030, 31), (6060, 60)):  # of key k, the stamp is 5000 + k
                later.set(now)
                for (key, namespace), expected in written.items():
                    keyed.set_current_namespace(namespace)
                    keyed.set_current_key(key)
                    assert shown(state.items()) == (shown(expected.items()) if key >= first else []), (
                        key,
                        now,
                    )
            assert keyed.num_entries("maps") <= sum(map(bool, written.values()))


@each_backend
def test_all_else_stays_as_it_was(tmp_path: Path, rng: random.Random, backend: str) -> None:
    """Other states, also those that nobody has asked for, timers, operator state, and the times."""
    made = sb.create_backend(backend)
    with made.create_keyed_backend(int, max_parallelism=16, clock=ManualClock(77)) as keyed:
        Story(keyed, rng, int).change(400)
        keyed.set_current_namespace(sb.VOID)
        old_state(keyed, "map").update_many([1, 2], [{"a": 1}, {}])
        keyed.get_value_state(sb.ValueStateDescriptor("no rows", int))
        keyed.savepoint(tmp_path / "old")
        expected = contents(keyed)
    operator = made.create_operator_backend()
    operator.get_list_state(sb.ListStateDescriptor("offsets", int)).add_all([1, 2])
    operator.savepoint(tmp_path / "old")
    before = {path: path.read_bytes() for path in (tmp_path / "old").rglob("*") if path.is_file()}
    copy = sb.tools.split_maps(
        tmp_path / "old", "maps", target=tmp_path / "new", descriptor=new_descriptor("map", "as map")
    )
    assert {path: path.read_bytes() for path in before} == before
    old = Savepoint(tmp_path / "old")
    assert (copy.now, copy.watermark) == (old.now, old.watermark)
    with made.create_keyed_backend(int, max_parallelism=16, restore=copy, clock=ManualClock(77)) as keyed:
        assert {"as map", "no rows", "total"} < set(keyed.undeclared_states())
        assert "maps" not in keyed.undeclared_states()
        assert contents(keyed) == expected
        keyed.set_current_namespace(sb.VOID)
        assert list(keyed.get_state(new_descriptor("map", "as map")).get_many([1], ["a"]).to_pylist()) == [1]
        again = made.create_operator_backend(restore=copy)
        assert again.contents() == operator.contents()


@each_backend
def test_an_empty_map_is_nothing_and_so_is_a_state_of_them(tmp_path: Path, backend: str) -> None:
    for number, maps in enumerate(([{}, {}], [{}, {"a": None}], [])):
        folder = tmp_path / str(number)
        with sb.create_backend(backend).create_keyed_backend(int) as keyed:
            old_state(keyed, "map").update_many(list(range(len(maps))), maps)
            keyed.savepoint(folder / "old")
        sb.tools.split_maps(folder / "old", "maps", target=folder / "new", descriptor=new_descriptor("map"))
        with sb.create_backend(backend).create_keyed_backend(int, restore=folder / "new") as keyed:
            state = keyed.get_state(new_descriptor("map"))
            assert keyed.num_entries("maps") == sum(map(bool, maps))
            for key, each in enumerate(maps):
                keyed.set_current_key(key)
                assert dict(state.items()) == each
                assert state.is_empty() == (not each)


def test_dicts_of_all_sorts_are_maps(tmp_path: Path) -> None:
    with sb.create_backend("heap").create_keyed_backend(int) as keyed:
        old_state(keyed, "pickled").update_many([1, 2], [Counter("aab"), {"b": None, "a": 3}])
        keyed.savepoint(tmp_path / "old")
    made = sb.tools.split_maps(
        Savepoint(tmp_path / "old"),
        "maps",
        target=Savepoint(tmp_path / "new"),
        descriptor=new_descriptor("pickled"),
    )
    assert sb.tools.state(made, "maps").to_table().sort_by("key").to_pydict() == {
        "key": [1, 1, 2, 2],
        "map_key": ["a", "b", "b", "a"],
        "value": [2, 1, None, 3],
    }


def test_one_batch_of_maps_is_in_memory_at_a_time(tmp_path: Path) -> None:
    entries = 20_000
    with sb.create_backend("heap").create_keyed_backend(int) as keyed:
        state = old_state(keyed, "map")
        keys = [f"the key of entry {n:,}" for n in range(entries)]
        for key in range(100):
            state.update_many([key], [dict.fromkeys(keys, key)])
        keyed.savepoint(tmp_path / "old")
    before = pa.default_memory_pool()
    pool = pa.proxy_memory_pool(before)
    pa.set_memory_pool(pool)
    try:
        made = sb.tools.split_maps(
            tmp_path / "old", "maps", target=tmp_path / "new", descriptor=new_descriptor("map")
        )
    finally:
        pa.set_memory_pool(before)
    assert pool.max_memory() < 48 << 20
    table = sb.tools.state(made, "maps").to_table()
    assert table.num_rows == 100 * entries
    assert table.nbytes > 64 << 20


def refused(tmp_path: Path, name: str, descriptor: Any, error: type[StateBackendError], message: str) -> Any:
    with pytest.raises(error, match=message) as caught:
        sb.tools.split_maps(tmp_path / "old", name, target=tmp_path / "new", descriptor=descriptor)
    assert not [path for path in (tmp_path / "new").rglob("*") if path.is_file()]
    return caught.value


def test_states_that_do_not_become_a_map_state(tmp_path: Path) -> None:
    made = sb.create_backend("reference")
    with made.create_keyed_backend(int) as keyed:
        old_state(keyed, "map").update_many([1], [{"a": 1}])
        keyed.get_value_state(sb.ValueStateDescriptor("number", int)).update_many([1], [1])
        keyed.get_list_state(sb.ListStateDescriptor("listed", dict[str, int]))
        keyed.savepoint(tmp_path / "old")
    operator = made.create_operator_backend()
    operator.get_list_state(sb.ListStateDescriptor("offsets", t.PICKLE)).add({"a": 1})
    operator.savepoint(tmp_path / "old")
    error = refused(tmp_path, "mops", new_descriptor("map", "mops"), UsageError, "state 'mops' not found")
    assert error.code == "USAGE.NO_STATE"
    assert "'maps'" in error.hint
    for name in ("number", "listed", "offsets"):
        refused(
            tmp_path,
            name,
            new_descriptor("map", name),
            UsageError,
            f"{name!r} is no value state that holds maps",
        )
    for name in ("number", "offsets"):
        refused(tmp_path, "maps", new_descriptor("map", name), UsageError, f"a state {name!r} already")
    error = refused(
        tmp_path, "maps", sb.MapStateDescriptor("maps", int, int), StateMigrationError, "asked for as MAP"
    )
    assert error.code == "STATE_MIGRATION.INCOMPATIBLE"
    refused(tmp_path, "maps", sb.ListStateDescriptor("maps", int), UsageError, "another descriptor")
    with pytest.raises(UsageError, match="there is a savepoint already"):
        sb.tools.split_maps(
            tmp_path / "old", "maps", target=tmp_path / "old", descriptor=new_descriptor("map")
        )


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"a": 1, 2: 3}, "STRING does not take a value of type int"),
        ({None: 1}, "STRING does not take None"),
        ({"a": "b"}, "LONG does not take a value of type str"),
        (["a"], "holds a value of type list beside maps"),
    ],
)
def test_pickles_that_do_not_fit_leave_no_copy(tmp_path: Path, value: Any, message: str) -> None:
    with sb.create_backend("heap").create_keyed_backend(int) as keyed:
        old_state(keyed, "pickled").update_many([1, 2], [{"a": 1}, value])
        keyed.get_value_state(sb.ValueStateDescriptor("another", int)).update_many([1], [1])
        keyed.savepoint(tmp_path / "old")
    error = refused(tmp_path, "maps", new_descriptor("pickled"), StateMigrationError, message)
    assert error.code == "STATE_MIGRATION.INCOMPATIBLE"
    assert "MAP(STRING, LONG)" in error.detail


def test_two_keys_that_become_one(tmp_path: Path) -> None:
    with sb.create_backend("heap").create_keyed_backend(int) as keyed:
        old_state(keyed, "pickled").update_many([1], [{float("nan"): 1, float("nan"): 2}])
        keyed.savepoint(tmp_path / "old")
    refused(
        tmp_path, "maps", sb.MapStateDescriptor("maps", float, int), StateMigrationError, "two keys in a map"
    )


def test_maps_of_a_store_are_split_on_the_way_into_a_savepoint(tmp_path: Path) -> None:
    with sb.create_backend("heap").create_keyed_backend(int) as keyed:
        old_state(keyed, "map").update_many([1, 2], [{"a": 1}, {}])
        old_state(keyed, "pickled", "pickled").update_many([1], [{"b": 2}])
        with CheckpointStore(tmp_path / "old").open_for_writing(key_type=int, max_parallelism=128) as store:
            store.commit(0, [keyed.snapshot(0, store).result()])
    made = sb.tools.split_maps(tmp_path / "old", "maps", target=tmp_path / "typed")
    assert sb.tools.state(made, "maps").to_table().to_pylist() == [{"key": 1, "map_key": "a", "value": 1}]
    assert sb.tools.state(made, "pickled").to_table().num_rows == 1
    error = refused(tmp_path, "pickled", None, UsageError, "missing the types of the map state 'pickled'")
    assert error.code == "USAGE.DESCRIPTOR"
    described = sb.MapStateDescriptor("as map", str, int)
    made = sb.tools.split_maps(tmp_path / "old", "pickled", target=tmp_path / "split", descriptor=described)
    assert sb.tools.state(made, "as map").to_table().to_pylist() == [{"key": 1, "map_key": "b", "value": 2}]


def test_damage_is_found_and_leaves_no_copy(tmp_path: Path) -> None:
    with sb.create_backend("heap").create_keyed_backend(int) as keyed:
        old_state(keyed, "map").update_many([1], [{"a": 1}])
        keyed.get_value_state(sb.ValueStateDescriptor("another", int)).update_many([1], [1])
        keyed.savepoint(tmp_path / "old")
    for name in ("maps", "another"):
        (path,) = (tmp_path / "old" / "keyed" / name).iterdir()
        content = path.read_bytes()
        for damaged in (content[:-20], content[:50] + bytes([content[50] ^ 1]) + content[51:]):
            path.write_bytes(damaged)
            error = refused(tmp_path, "maps", new_descriptor("map"), CorruptCheckpointError, "checksum")
            assert name in error.detail
        path.write_bytes(content)
