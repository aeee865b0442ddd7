"""A state read as a table is what a backend would hold: of checkpoints, with changes over bases, and of savepoints."""

from __future__ import annotations

import decimal
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from all_backends import BACKENDS
from keyed_files import Model, keyed_snapshot, shown, without_times, write
from keyed_story import DESCRIPTORS, Story

import statebackend as sb
from statebackend.checkpoint import CheckpointStore, StoredFile
from statebackend.checkpoint.format import GroupedBatch, Section
from statebackend.checkpoint.keyed.compaction import applied
from statebackend.checkpoint.store.savepoint_folder import Savepoint
from statebackend.errors import CorruptCheckpointError, UsageError
from statebackend.keys import encode_namespace
from statebackend.tools import sources

pytestmark = pytest.mark.usefixtures("no_fsync")


KEYS: dict[str, tuple[Any, Callable[[int], Any]]] = {
    "long": (int, lambda n: n - 3),
    "string": (str, lambda n: "é" * n),
    "bytes": (bytes, lambda n: bytes([n])),
    "decimal": ("decimal(10,1)", lambda n: decimal.Decimal(n).scaleb(-1)),
    "double": (float, lambda n: n / 2),
    "row": ("struct<a:bigint,b:string>", lambda n: (None if n % 3 else n, None if n % 2 else "x")),
}


NAMESPACES: dict[str, list[Any]] = {
    "none": [sb.VOID],
    "windows": [sb.TimeWindow(0, 60), sb.TimeWindow(60, 120)],
    "numbers": [1, -7],
    "texts": ["a", ""],
    "some": [sb.VOID, 5],
}


def long(rng: random.Random) -> int:
    return rng.randrange(100)


@pytest.mark.sampled(15)
@pytest.mark.parametrize("namespaces", NAMESPACES)
@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("kind", ["value", "list", "map", "folding"])
def test_a_chain_of_changes_is_applied(
    store: CheckpointStore, root: Path, rng: random.Random, kind: str, key: str, namespaces: str
) -> None:
    ttl = rng.random() < 0.5
    key_type, make_key = KEYS[key]
    keys = [make_key(n) for n in range(8)]
    model, other = Model(kind, key_type, int, ttl=ttl), Model("value", key_type, str)
    files: list[StoredFile] = []
    for checkpoint_id in range(12):
        for _ in range(rng.randrange(8)):
            model.change(rng, keys, NAMESPACES[namespaces], long, time=checkpoint_id)
            other.change(rng, keys, [sb.VOID], lambda rng: rng.choice("ab"), time=0)
        is_base = not files or rng.random() < 0.2
        sections = [other.section("other", is_base=is_base), model.section("state", is_base=is_base)]
        if not is_base and rng.random() < 0.2:
            sections = [
                each for each in sections if each.batches
            ]  # as of a state in which nothing has changed
        file = write(store, checkpoint_id, "base" if is_base else "delta", sections)
        files = [file] if is_base else [*files, file]
        states = [model.described("state"), other.described("other")]
        store.commit(checkpoint_id, [keyed_snapshot(store, checkpoint_id, files, states, key_type)])
        found = sb.tools.state(root, "state").to_table()
        assert shown(found, ttl) == without_times(model.expected(), ttl)
        assert shown(sb.tools.state(root, "other").to_table(), False) == without_times(
            other.expected(), False
        )
        assert "op" not in found.schema.names


@pytest.mark.parametrize("kind", ["value", "list", "map"])
def test_many_rows_are_applied_in_slices(
    store: CheckpointStore, root: Path, rng: random.Random, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "_PIECE_ROWS", 300)
    model = Model(kind, int, int)
    files = []
    for number in range(4):
        for _ in range(1500):
            model.change(rng, range(700), [sb.VOID, 1], long, time=0)
        files.append(
            write(store, 0, "delta" if number else "base", [model.section("state", is_base=not number)])
        )
    store.commit(0, [keyed_snapshot(store, 0, files, [model.described("state")])])
    assert shown(sb.tools.state(root, "state").to_table(), False) == without_times(model.expected(), False)


def test_nulls_within_composite_keys_are_told_apart() -> None:
    keys = pa.array(
        [{"a": None}, {"a": {"x": None}}, {"a": {"x": 0}}], pa.struct({"a": pa.struct({"x": pa.int64()})})
    )
    base = pa.table({"key": keys, "value": [1, 2, 3]})
    delta = pa.table({"key": keys.slice(0, 1), "value": [4]})
    assert sorted(applied("value", [base, delta])["value"].to_pylist()) == [2, 3, 4]


@pytest.mark.parametrize(
    ("namespaces", "wanted"),
    [
        ([1, 2], pa.array([1, 2])),
        (["a", sb.VOID], pa.array(["a", None])),
        ([b"a", b""], pa.array([b"a", b""])),
        ([sb.TimeWindow(0, 5), sb.VOID], pa.array([{"start": 0, "end": 5}, None])),
        ([(1, "a"), (2,)], pa.array(["(1, 'a')", "(2,)"])),
        ([1, "a", sb.VOID], pa.array(["1", "'a'", None])),
    ],
    ids=["numbers", "texts", "bytes", "windows", "tuples", "mixed"],
)
def test_show_namespaces(store: CheckpointStore, root: Path, namespaces: list[Any], wanted: pa.Array) -> None:
    count = len(namespaces)
    rows = pa.record_batch(
        {"key": range(count), "namespace": list(map(encode_namespace, namespaces)), "value": range(count)}
    )
    section = Section("state", rows.schema, [GroupedBatch.of(rows, [0] * count)])
    states = [Model("value", int, int).described("state")]
    store.commit(0, [keyed_snapshot(store, 0, [write(store, 0, "base", [section])], states)])
    found = sb.tools.state(root, "state").to_table()
    assert found.schema.names == ["key", "namespace", "value"]
    assert found["namespace"].combine_chunks().equals(wanted)


@pytest.mark.parametrize("ttl", [False, True])
@pytest.mark.parametrize(
    ("kind", "columns"),
    [
        ("value", {"key": pa.int64(), "value": pa.string()}),
        ("list", {"key": pa.int64(), "value": pa.list_(pa.string())}),
        ("map", {"key": pa.int64(), "map_key": pa.int64(), "value": pa.string()}),
        ("folding", {"key": pa.int64(), "value": pa.string()}),
    ],
)
def test_a_state_without_rows_has_its_columns(
    store: CheckpointStore, root: Path, kind: str, columns: dict[str, pa.DataType], ttl: bool
) -> None:
    states = [Model(kind, int, str, ttl=ttl).described("state")]
    store.commit(0, [keyed_snapshot(store, 0, [], states)])
    found = sb.tools.state(root, "state").to_table()
    if ttl:
        columns = {**columns, "timestamp": pa.list_(pa.int64()) if kind == "list" else pa.int64()}
    assert found.schema == pa.schema(columns)
    assert found.num_rows == 0


def test_operator_states(store: CheckpointStore, root: Path) -> None:
    operators = [sb.OperatorStateBackend(subtask_index=index, parallelism=2) for index in range(2)]
    for index, each in enumerate(operators):
        each.get_list_state(sb.ListStateDescriptor("split", int)).add_all([index, 10])
        each.get_broadcast_state(sb.MapStateDescriptor("rules", str, int)).put_all({"b": index, "a": None})
    operators[1].get_union_list_state(sb.ListStateDescriptor("late", str)).add("x")
    operators[0].get_list_state(sb.ListStateDescriptor("empty", float))
    operators[0].get_list_state(sb.ListStateDescriptor("pickled", sb.types.PICKLE)).add({1})
    store.commit(0, [each.snapshot(0, store).result() for each in operators])
    assert sb.tools.state(root, "split").to_table().to_pydict() == {
        "subtask": [0, 0, 1, 1],
        "value": [0, 10, 1, 10],
    }
    assert sb.tools.state(root, "rules").to_table().to_pydict() == {
        "subtask": [0, 0, 1, 1],
        "map_key": ["b", "a"] * 2,
        "value": [0, None, 1, None],
    }
    assert sb.tools.state(root, "late").to_table().to_pydict() == {"subtask": [1], "value": ["x"]}
    assert sb.tools.state(root, "empty").to_table().schema == pa.schema(
        {"subtask": pa.int32(), "value": pa.float64()}
    )
    assert sb.tools.state(root, "pickled").to_table().schema.field("value").type == pa.binary()
    for each in operators:
        each.get_list_state(sb.ListStateDescriptor("split", int)).clear()
        each.get_broadcast_state(sb.MapStateDescriptor("rules", str, int)).clear()
    operators[0].get_list_state(sb.ListStateDescriptor("pickled", sb.types.PICKLE)).clear()
    store.commit(1, [each.snapshot(1, store).result() for each in operators])
    empty = sb.tools.state(root, "rules").to_table()
    assert empty.schema == pa.schema({"subtask": pa.int32(), "map_key": pa.string(), "value": pa.int64()})
    assert (empty.num_rows, sb.tools.state(root, "rules", id=0).to_table().num_rows) == (0, 4)


def test_which_checkpoint_and_which_state(store: CheckpointStore, root: Path) -> None:
    with pytest.raises(UsageError, match=r"\[USAGE\.NO_CHECKPOINT\]"):
        sb.tools.state(root, "state").to_table()
    operator = sb.OperatorStateBackend()
    for checkpoint_id in range(2):
        operator.get_list_state(sb.ListStateDescriptor("n", int)).add(checkpoint_id)
        store.commit(checkpoint_id, [operator.snapshot(checkpoint_id, store).result()])
    assert sb.tools.state(str(root), "n").to_table()["value"].to_pylist() == [0, 1]
    assert sb.tools.state(root, "n", id=0).to_table()["value"].to_pylist() == [0]
    for name, checkpoint_id, code in (("m", None, "USAGE.NO_STATE"), ("n", 7, "USAGE.NO_CHECKPOINT")):
        with pytest.raises(UsageError) as caught:
            sb.tools.state(root, name, id=checkpoint_id).to_table()
        assert caught.value.code == code
    keyed = keyed_snapshot(store, 2, [], [Model("value", int, int).described("n")])
    store.commit(2, [keyed, operator.snapshot(2, store).result()])
    with pytest.raises(UsageError, match="both a keyed state and an operator state"):
        sb.tools.state(root, "n").to_table()


def test_only_what_is_needed_is_read_and_damage_is_found(store: CheckpointStore, root: Path) -> None:
    rows = pa.record_batch({"key": range(1000), "value": range(1000)})
    sections = [
        Section(name, rows.schema, [GroupedBatch.of(rows, [0] * 1000)]) for name in ("first", "second")
    ]
    file = write(store, 0, "base", sections)
    states = [Model("value", int, int).described(name) for name in ("first", "second")]
    store.commit(0, [keyed_snapshot(store, 0, [file], states)])
    path = root / file.name
    content = bytearray(path.read_bytes())
    content[600] ^= 1  # in the first batch
    path.write_bytes(bytes(content))
    assert sb.tools.state(root, "second").to_table().num_rows == 1000
    with pytest.raises(CorruptCheckpointError, match=file.name):
        sb.tools.state(root, "first").to_table()
    path.unlink()
    with pytest.raises(CorruptCheckpointError, match=file.name):
        sb.tools.state(root, "second").to_table()


@pytest.mark.parametrize(
    ("kind", "columns"),
    [
        ("value", {"key": [1, 2], "namespace": [b"\x09", b""], "value": [1, 2]}),
        ("map", {"key": [1, 2], "value": [1, 2], "op": pa.array([0, 1], pa.uint8())}),
    ],
)
def test_misdescribed_files(store: CheckpointStore, root: Path, kind: str, columns: dict[str, Any]) -> None:
    rows = pa.record_batch(columns)
    file = write(store, 0, "base", [Section("state", rows.schema, [GroupedBatch.of(rows, [0, 0])])])
    store.commit(0, [keyed_snapshot(store, 0, [file], [Model(kind, int, int).described("state")])])
    with pytest.raises(CorruptCheckpointError, match=r"checkpoints/2\.json"):
        sb.tools.state(root, "state").to_table()


def test_files_that_disagree_about_a_type_are_refused(store: CheckpointStore, root: Path) -> None:
    files = []
    for values in ([1], ["a"]):
        rows = pa.record_batch({"key": [1], "value": values})
        files.append(write(store, 0, "delta", [Section("state", rows.schema, [GroupedBatch.of(rows, [0])])]))
    store.commit(0, [keyed_snapshot(store, 0, files, [Model("value", int, int).described("state")])])
    with pytest.raises(CorruptCheckpointError, match="not as its snapshot describes it"):
        sb.tools.state(root, "state").to_table()


TIMED = sb.ListStateDescriptor("timed", str).enable_time_to_live(sb.StateTtlConfig(10**12))


def rows(table: pa.Table) -> list[Any]:
    return sorted(table.to_pylist(), key=repr)


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_equal_a_checkpoint(tmp_path: Path, backend: str, rng: random.Random) -> None:
    store = sb.CheckpointStore(tmp_path / "store").open_for_writing(key_type=int, max_parallelism=32)
    ranges = [sb.key_groups.range_for(32, 3, index) for index in range(3)]
    made = sb.create_backend(backend)
    instances = [made.create_keyed_backend(int, max_parallelism=32, key_group_range=own) for own in ranges]
    operators = [made.create_operator_backend(subtask_index=index, parallelism=2) for index in range(2)]
    with store:
        for number, keyed in enumerate(instances):
            story = Story(keyed, rng, int, keys=120)
            story.keys = [key for key in story.keys if keyed._encoder.key_group(key, 32) in ranges[number]]
            story.change(1500)
            keyed.set_current_namespace(sb.VOID)
            keyed.get_state(TIMED).add_many(story.keys[:5], ["x"] * 5)
            if number:
                keyed.get_state(sb.ValueStateDescriptor("here and there", "date"))
            keyed.savepoint(tmp_path / "savepoint")
        for number, operator in enumerate(operators):
            operator.get_list_state(sb.ListStateDescriptor("n", "int")).add_all(range(3 * number))
            operator.get_broadcast_state(sb.MapStateDescriptor("b", str, float)).put("x", 0.5)
            operator.savepoint(tmp_path / "savepoint")
        taken = [each.snapshot(0, store) for each in (*instances, *operators)]
        store.commit(0, [each.result() for each in taken])
    for name in [*DESCRIPTORS, "timed", "here and there", "n", "b", "statebackend.timers.event"]:
        expected = sb.tools.state(tmp_path / "store", name).to_table()
        for savepoint in (tmp_path / "savepoint", Savepoint(tmp_path / "savepoint")):
            found = sb.tools.state(savepoint, name).to_table()
            assert sorted(found.schema.names) == sorted(expected.schema.names)
            assert rows(found) == rows(expected)
            assert {each.name: each.type for each in found.schema} == {
                each.name: each.type for each in expected.schema
            }
    assert sb.tools.state(tmp_path / "savepoint", "count").to_table()["namespace"].null_count > 0
    with pytest.raises(sb.UsageError, match="state 'nobody' not found") as caught:
        sb.tools.state(tmp_path / "savepoint", "nobody").to_table()
    assert "'count'" in str(caught.value)


def test_a_savepoint_within_a_store_is_read_and_the_store_is_preferred(tmp_path: Path) -> None:
    count = sb.ValueStateDescriptor("count", int)
    store = sb.CheckpointStore(tmp_path).open_for_writing(key_type=int, max_parallelism=128)
    with store, sb.create_backend("heap").create_keyed_backend(int) as keyed:
        keyed.get_state(count).update_many([1], [10])
        store.commit(4, [keyed.snapshot(4, store).result()])
        keyed.get_state(count).update_many([1], [11])
        savepoint = keyed.savepoint(store)
    assert sb.tools.state(tmp_path, "count").to_table()["value"].to_pylist() == [10]
    assert sb.tools.state(savepoint, "count").to_table()["value"].to_pylist() == [11]
    assert sb.tools.state(tmp_path / "savepoints" / "4", "count").to_table()["value"].to_pylist() == [11]
    with pytest.raises(sb.UsageError, match="there is no checkpoint"):
        sb.tools.state(tmp_path / "savepoints", "count").to_table()
    with pytest.raises(sb.UsageError, match="a savepoint has no ids"):
        sb.tools.state(savepoint, "count", id=4).to_table()


def test_one_name_for_two_states_and_parts_that_are_missing(tmp_path: Path) -> None:
    made = sb.create_backend("reference")
    for index in range(2):
        own = sb.key_groups.range_for(128, 2, index)
        with made.create_keyed_backend(int, key_group_range=own) as keyed:
            keyed.get_state(sb.ValueStateDescriptor("n", int))
            keyed.savepoint(tmp_path)
    operator = made.create_operator_backend()
    operator.get_list_state(sb.ListStateDescriptor("n", int)).add(1)
    operator.savepoint(tmp_path)
    with pytest.raises(sb.UsageError, match="both a keyed state and an operator state are called 'n'"):
        sb.tools.state(tmp_path, "n").to_table()
    (tmp_path / "_savepoint" / "operator-0-of-1.json").unlink()
    assert sb.tools.state(tmp_path, "n").to_table().schema.names == ["key", "value"]
    (tmp_path / "_savepoint" / "keyed-0-63.json").unlink()
    with pytest.raises(sb.CorruptCheckpointError, match="every key group once"):
        sb.tools.state(tmp_path, "n").to_table()


def test_damage_is_found(tmp_path: Path) -> None:
    with sb.create_backend("heap").create_keyed_backend(int) as keyed:
        keyed.get_state(sb.ValueStateDescriptor("n", int)).update_many(range(10), range(10))
        keyed.savepoint(tmp_path)
    (path,) = (tmp_path / "keyed" / "n").iterdir()
    content = path.read_bytes()
    for at in range(0, len(content), 7):
        path.write_bytes(content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :])
        with pytest.raises(sb.CorruptCheckpointError, match=path.name):
            sb.tools.state(tmp_path, "n").to_table()
