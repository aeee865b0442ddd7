"""Checkpoints copied with other key groups, or without a state: all else is as it was, and a query goes on from it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from keyed_files import GROUPS, Model, group_of, keyed_snapshot, shown, without_times, write

import statebackend as sb
from statebackend.checkpoint import Checkpoint, CheckpointStore, StateSnapshot, StoredFile
from statebackend.checkpoint.format import GroupedBatch, Op, Section, read_data_file
from statebackend.errors import CorruptCheckpointError, StateMigrationError, UsageError
from statebackend.keys import key_encoder
from statebackend.keys.key_groups import KeyGroupRange, range_for
from statebackend.types import of

pytestmark = pytest.mark.usefixtures("no_fsync")

KINDS = ("value", "list", "map", "folding")
KEYS: dict[str, list[Any]] = {
    "bigint": list(range(-20, 20)),
    "string": [f"user-{n}" for n in range(40)],
    "struct<a:bigint,b:string>": [(n, None if n % 2 else "x") for n in range(40)],
}


def write_history(
    store: CheckpointStore, rng: random.Random, key_type: str, parallelism: int = 2
) -> tuple[Checkpoint, dict[str, Model]]:
    """A checkpoint of several instances, each with a base and deltas, operator state and output."""
    models = {kind: Model(kind, key_type, int, ttl=kind == "map") for kind in KINDS}
    files: list[list[StoredFile]] = [[] for _ in range(parallelism)]
    for number in range(4):
        for model in models.values():
            for _ in range(60):
                model.change(rng, KEYS[key_type], [sb.VOID, 1], lambda rng: rng.randrange(100), time=number)
        sections = [model.section(kind, is_base=not number) for kind, model in models.items()]
        for index, own in enumerate(files):
            groups = range_for(GROUPS, parallelism, index)
            kind = "delta" if number else "base"
            own.append(
                write(store, 7, kind, [part_of(section, groups) for section in sections], key_groups=groups)
            )
    described = [model.described(kind) for kind, model in models.items()]
    operators = [sb.OperatorStateBackend(subtask_index=index, parallelism=2) for index in range(2)]
    for each in operators:
        each.get_list_state(sb.ListStateDescriptor("offsets", int)).add_all(range(each.subtask_index, 5))
        each.get_broadcast_state(sb.MapStateDescriptor("rules", str, int)).put("limit", 1)
    with store.begin_snapshot(7).create("output", suffix=".parquet") as file:
        file.write(b"what the batch gave")
        output = file.finish()
    keyed = [
        keyed_snapshot(
            store,
            7,
            own,
            described,
            key_type,
            subtask_index=index,
            parallelism=parallelism,
            key_groups=range_for(GROUPS, parallelism, index),
            now=5000,
        )
        for index, own in enumerate(files)
    ]
    checkpoint = store.commit(
        7,
        [*keyed, *(each.snapshot(7, store).result() for each in operators)],
        files=[output],
        now=5000,
        progress={"batchId": 7},
    )
    return checkpoint, models


def part_of(section: Section, groups: KeyGroupRange) -> Section:
    parts = []
    for rows in section.batches:
        of_rows = rows.key_group_of_rows()
        chosen = np.flatnonzero((of_rows >= groups.start) & (of_rows <= groups.end))
        if len(chosen):
            parts.append(GroupedBatch.of(rows.batch.take(pa.array(chosen)), of_rows[chosen]))
    return Section(section.name, section.schema, parts)


def check_same(copy: Checkpoint, original: Checkpoint, target: Path, models: dict[str, Model]) -> None:
    assert (copy.id, copy.now, copy.manifest.progress) == (7, 5000, {"batchId": 7})
    assert copy.metadata.query == original.metadata.query == "q"
    assert copy.metadata.key_type == original.metadata.key_type
    copy.verify()
    (output,) = copy.manifest.files
    assert output.name.endswith(".parquet")
    assert copy.read_file(output) == b"what the batch gave"
    for name, model in models.items():
        assert shown(sb.tools.state(target, name).to_table(), model.ttl) == without_times(
            model.expected(), model.ttl
        )


def operators_of(checkpoint: Checkpoint) -> list[Any]:
    made = [
        sb.OperatorStateBackend(subtask_index=index, parallelism=2, restore=checkpoint) for index in range(2)
    ]
    return [each.contents() for each in made]


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "target"


@pytest.fixture
def made_for(root: Path) -> Any:
    opened = []

    def make(key_type: str) -> CheckpointStore:
        store = CheckpointStore(root).open_for_writing(query="q", key_type=key_type, max_parallelism=GROUPS)
        opened.append(store)
        return store

    yield make
    for store in opened:
        store.close()


@pytest.mark.sampled(5)
@pytest.mark.parametrize("max_parallelism", [1, 7, 128, 32_768])
@pytest.mark.parametrize("key_type", KEYS)
def test_every_row_goes_to_the_key_group_of_its_key(
    made_for: Any, root: Path, target: Path, rng: random.Random, key_type: str, max_parallelism: int
) -> None:
    original, models = write_history(made_for(key_type), rng, key_type)
    copy = sb.tools.rescale(root, target, max_parallelism=max_parallelism)
    check_same(copy, original, target, models)
    assert copy.metadata.max_parallelism == max_parallelism
    assert operators_of(copy) == operators_of(original)
    (keyed,) = [each for each in copy.snapshots if each.extra["part"] == "keyed"]
    assert keyed.key_groups == KeyGroupRange(0, max_parallelism - 1)
    assert keyed.extra["max_parallelism"] == max_parallelism
    assert [file.kind for file in keyed.files] == ["base", "delta", "delta", "delta"] * 2
    encoder, rank = key_encoder(key_type), {Op.CLEAR: 0, Op.REMOVE: 0, Op.PUT: 1, Op.APPEND: 2}
    for file in keyed.files:
        with copy.open_file(file) as source:
            reader = read_data_file(source, file.name)
            for name in reader.states:
                for rows in reader.read(name):
                    keys = rows.batch["key"].to_pylist()
                    plain = [tuple(key.values()) if isinstance(key, dict) else key for key in keys]
                    groups = [encoder.key_group(key, max_parallelism) for key in plain]
                    assert rows.key_group_of_rows().tolist() == groups
                    if "op" in rows.batch.schema.names:
                        places = [
                            *zip(groups, [rank[op] for op in rows.batch["op"].to_pylist()], strict=True)
                        ]
                        assert places == sorted(places)


def test_the_original_is_left_as_it_was(made_for: Any, root: Path, target: Path, rng: random.Random) -> None:
    made_for("bigint").close()
    with made_for("bigint") as store:
        write_history(store, rng, "bigint")
    before = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    sb.tools.rescale(root, target, max_parallelism=32)
    sb.tools.drop_state(root, "map", target=target.with_name("other"))
    assert {path: path.read_bytes() for path in root.rglob("*") if path.is_file()} == before


def test_rows_that_are_a_history_stay_in_order(store: CheckpointStore, root: Path, target: Path) -> None:
    """A state that nobody asked for is written as it was read: its changes one after the other."""
    ops = [Op.PUT, Op.REMOVE, Op.PUT, Op.REMOVE, Op.PUT, Op.APPEND]
    lists = pa.record_batch(
        {
            "key": [1, 1, 1, 2, 2, 2],
            "value": pa.array([[1], None, [2], None, [3], [4]], pa.list_(pa.int64())),
            "op": pa.array(ops, pa.uint8()),
        }
    )
    puts = pa.array([Op.PUT] * 3, pa.uint8())
    values = pa.record_batch({"key": [1, 2, 1], "value": [1, 2, 3], "op": puts})
    sections = [
        Section("list", lists.schema, [GroupedBatch.of(lists, [4] * 6)]),
        Section("value", values.schema, [GroupedBatch.of(values, [4] * 3)]),
    ]
    described = [Model(kind, int, int).described(kind) for kind in ("list", "value")]
    store.commit(7, [keyed_snapshot(store, 7, [write(store, 7, "base", sections)], described)])
    sb.tools.rescale(root, target, max_parallelism=1)
    for each in (root, target):
        found = sb.tools.state(each, "list").to_table().to_pylist()
        assert found == [{"key": 1, "value": [2]}, {"key": 2, "value": [3, 4]}]
        found = sb.tools.state(each, "value").to_table().to_pylist()
        assert found == [{"key": 2, "value": 2}, {"key": 1, "value": 3}]


def test_more_rows_than_a_batch_holds(store: CheckpointStore, root: Path, target: Path) -> None:
    count = 150_000
    rows = pa.record_batch({"key": range(count), "value": [str(n) for n in range(count)]})
    section = Section("state", rows.schema, [GroupedBatch.of(rows, [3] * count)])
    described = [Model("value", int, str).described("state")]
    store.commit(7, [keyed_snapshot(store, 7, [write(store, 7, "base", [section])], described)])
    sb.tools.rescale(root, target, max_parallelism=64)
    found = sb.tools.state(target, "state").to_table().sort_by("key")
    assert found["value"].to_pylist() == [str(n) for n in range(count)]


def test_stores_that_cannot_be_rescaled_are_refused(
    store: CheckpointStore, root: Path, target: Path, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match="no checkpoint"):
        sb.tools.rescale(root, target, max_parallelism=32)
    model = Model("value", int, int)
    native = write(store, 1, "sst", [])
    store.commit(1, [keyed_snapshot(store, 1, [native], [model.described("n")])])
    with pytest.raises(UsageError, match="'sst'"):
        sb.tools.rescale(root, target, max_parallelism=32)
    described = [model.described("n"), {**model.described("n"), "ttl": True}]
    both = [
        keyed_snapshot(store, 2, [], [each], subtask_index=index, parallelism=2)
        for index, each in enumerate(described)
    ]
    store.commit(2, both)
    with pytest.raises(StateMigrationError, match="'n'"):
        sb.tools.rescale(root, target, max_parallelism=32)
    for wrong in (0, 32_769, "8", None):
        with pytest.raises(UsageError, match="max_parallelism"):
            sb.tools.rescale(root, target, max_parallelism=wrong)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="is a store already"):
        sb.tools.rescale(root, root, max_parallelism=32, id=1)
    with CheckpointStore(tmp_path / "nameless") as nameless:
        nameless.open_for_writing().commit(0, [StateSnapshot(0, nameless.epoch)])
    with pytest.raises(UsageError, match="what type its keys have"):
        sb.tools.rescale(tmp_path / "nameless", target, max_parallelism=32)
    assert CheckpointStore(target).checkpoints() == []
    assert not list(target.glob("data/*/*"))


@pytest.mark.parametrize("name", [*KINDS, "offsets", "rules"])
def test_one_state_is_dropped(made_for: Any, root: Path, target: Path, rng: random.Random, name: str) -> None:
    original, models = write_history(made_for("bigint"), rng, "bigint")
    sb.tools.drop_state(root, name, target=target)
    copy = CheckpointStore(target).open_latest()
    models.pop(name, None)
    check_same(copy, original, target, models)
    assert copy.metadata.max_parallelism == GROUPS
    with pytest.raises(UsageError, match=r"\[USAGE\.NO_STATE\]"):
        sb.tools.state(target, name).to_table()
    left = operators_of(original)
    for contents in left:
        contents.pop(name, None)
    assert operators_of(copy) == left
    for mine, other in zip(copy.snapshots, original.snapshots, strict=True):
        assert (mine.key_groups, mine.subtask_index, mine.parallelism) == (
            other.key_groups,
            other.subtask_index,
            other.parallelism,
        )
        assert [(f.kind, f.key_groups) for f in mine.files] == [(f.kind, f.key_groups) for f in other.files]


def test_the_last_state_is_dropped(store: CheckpointStore, root: Path, target: Path) -> None:
    model = Model("value", int, int)
    model.change(random.Random(1), [1], [sb.VOID], lambda rng: 1, time=0)
    file = write(store, 3, "base", [model.section("n", is_base=True)])
    store.commit(3, [keyed_snapshot(store, 3, [file], [model.described("n")])])
    with pytest.raises(UsageError, match=r"\[USAGE\.NO_STATE\]"):
        sb.tools.drop_state(root, "m", target=target)
    assert sb.tools.drop_state(root, "n", target=target, id=3) == sb.tools.Dropped("n", 3, [])
    copy = CheckpointStore(target).open_latest()
    assert (copy.id, copy.files, copy.snapshots[0].states) == (3, {}, ())


def test_damage_leaves_nothing(made_for: Any, root: Path, target: Path, rng: random.Random) -> None:
    original, _ = write_history(made_for("bigint"), rng, "bigint")
    for number, file in enumerate(original.files.values()):
        path = root / file.name
        content = path.read_bytes()
        changed = bytearray(content)
        changed[len(content) // 3] ^= 4
        path.write_bytes(bytes(changed))
        to = target / str(number)
        for copies in (
            lambda: sb.tools.rescale(root, to, max_parallelism=8),  # noqa: B023 - called at once
            lambda: sb.tools.drop_state(root, "value", target=to),  # noqa: B023
        ):
            with pytest.raises(CorruptCheckpointError, match=file.name):
                copies()
            assert CheckpointStore(to).checkpoints() == []
            assert list(to.glob("data/*/*")) == []
        path.write_bytes(content)


def test_a_file_that_two_instances_name_is_copied_once_or_divided(
    store: CheckpointStore, root: Path, target: Path, rng: random.Random
) -> None:
    """After a change of parallelism instances share files, and each has only its own key groups of them."""
    model, other = Model("value", int, int), Model("value", int, int)
    for each in (model, other):
        for _ in range(100):
            each.change(rng, range(50), [sb.VOID], lambda rng: rng.randrange(9), time=0)
    sections = [model.section("n", is_base=True), other.section("m", is_base=True)]
    more = Section("m", sections[1].schema, [])
    files = [write(store, 7, "base", [sections[0], more]), write(store, 7, "delta", sections[1:])]
    described = [model.described("n"), other.described("m")]
    snapshots = [
        keyed_snapshot(
            store,
            7,
            files,
            described,
            subtask_index=index,
            parallelism=2,
            key_groups=range_for(GROUPS, 2, index),
        )
        for index in range(2)
    ]
    store.commit(7, snapshots)
    sb.tools.rescale(root, target / "a", max_parallelism=32)
    for name, each in (("n", model), ("m", other)):
        for where in (root, target / "a"):
            found = shown(sb.tools.state(where, name).to_table(), False)
            assert found == without_times(each.expected(), False)
    sb.tools.drop_state(root, "m", target=target / "b")
    dropped = CheckpointStore(target / "b").open_latest()
    assert [file.kind for file in dropped.files.values() if file.kind != "manifest"] == ["base"]
    assert shown(sb.tools.state(target / "b", "n").to_table(), False) == without_times(
        model.expected(), False
    )


def test_model_and_library_do_not_agree_by_chance() -> None:
    """The key groups of the files written here are not those of the library."""
    assert [group_of(key) for key in range(20)] != [
        key_encoder(of(int)).key_group(key, GROUPS) for key in range(20)
    ]
