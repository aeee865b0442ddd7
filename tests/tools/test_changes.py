"""Changes between checkpoints are what the history says, and a difference leads from one side to the other."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import pytest
from all_backends import BACKENDS
from keyed_stores import create, open_store
from keyed_story import DESCRIPTORS, Story

import statebackend as sb
from statebackend.tools import comparison

pytestmark = pytest.mark.usefixtures("no_fsync")

NAMES = ["count", "pair", "tags", "seen", "things", "total", "statebackend.timers.event"]
ENTRY = ("key", "a", "b", "namespace", "map_key")


def entries(root: Any, name: str, **options: Any) -> dict[Any, str]:
    """The entries of a state: of each key, namespace and map key the value."""
    found = {}
    for row in sb.tools.state(root, name, **options).to_table().to_pylist():
        own = ENTRY if "key" not in row else ("key", "namespace", "map_key")
        value = row["value"] if "value" in row else {n: v for n, v in row.items() if n not in own}
        found[entry_of(row)] = value_of(value)
    return found


def entry_of(row: dict[str, Any]) -> str:
    key = row["key"] if "key" in row else (row["a"], row["b"])
    return repr((key, shown(row.get("namespace")), row.get("map_key")))


def shown(namespace: Any) -> str:
    """The type of the column depends on all namespaces in it."""
    return repr(sb.TimeWindow(**namespace)) if isinstance(namespace, dict) else str(namespace).strip("'")


def changed(before: dict[Any, str], after: dict[Any, str]) -> dict[Any, tuple[str, Any, Any]]:
    """The changes that lead from one moment to another, by entry."""
    found = {}
    for entry in {**before, **after}:
        old, new = before.get(entry), after.get(entry)
        if old != new:
            kind = "insert" if old is None else "delete" if new is None else "update"
            found[entry] = (kind, new, old)
    return found


def value_of(value: Any) -> str:
    return repr(list(value.values()) if isinstance(value, dict) else [value])


def by_entry(rows: list[dict[str, Any]]) -> dict[Any, tuple[str, Any, Any]]:
    found = {}
    for row in rows:
        kind = row["change_type"]
        new = None if kind == "delete" else value_of(row["value"])
        old = None if kind == "insert" else value_of(row["old_value"])
        assert entry_of(row) not in found, "one change for each entry"
        found[entry_of(row)] = (kind, new, old)
    return found


def applied(before: dict[Any, str], rows: list[dict[str, Any]]) -> dict[Any, str]:
    """The entries after changes."""
    after = {**before, **{entry: new for entry, (_, new, _) in by_entry(rows).items()}}
    return {entry: value for entry, value in after.items() if value is not None}


def told(
    path: Path,
    backend: Any,
    rng: random.Random,
    key_type: Any,
    batches: list[int],
    retain: int,
    names: list[str] = NAMES,
) -> Any:
    """Entries of each state after each batch of a history, by batch; each restart goes back some batches."""
    truth: dict[int, dict[str, dict[Any, str]]] = {}
    number, restore = -1, None
    for length in batches:
        with (
            sb.CheckpointStore(path, retain=retain).open_for_writing(
                key_type=key_type, max_parallelism=32
            ) as store,
            backend.create_keyed_backend(key_type, max_parallelism=32, restore=restore) as keyed,
        ):
            story = Story(keyed, rng, int if key_type is int else tuple, keys=60, names=names[:-1])
            for _ in range(length):
                story.change(rng.choice([1, 10, 10, 200]))
                number += 1
                store.commit(number, [keyed.snapshot(number, store).result()])
                truth[number] = {name: entries(path, name) for name in names}
            number = rng.choice(store.checkpoints()[-5:])
        sb.tools.rewind(path, to=number, checkpoint_location=None)
        restore = sb.CheckpointStore(path).open(number)
    return truth


def check_changes(path: Path, truth: Any, ids: list[int]) -> None:
    """The changes between these checkpoints, which are all that there are, are those of the recorded entries."""
    for name in truth[ids[0]]:
        found = sb.tools.changes(path, name, since=ids[0], until=ids[-1]).to_table().to_pylist()
        by_batch: dict[int, list[dict[str, Any]]] = {}
        for row in found:
            by_batch.setdefault(row["batch_id"], []).append(row)
        assert by_batch.keys() <= set(ids[1:])
        for before, after in itertools.pairwise(ids):
            rows = by_batch.get(after, [])
            assert {row["from_batch_id"] for row in rows} <= {before}
            assert by_entry(rows) == changed(truth[before][name], truth[after][name])


def test_changes_of_many_batches_equal_the_recorded_truth(
    tmp_path: Path, rng: random.Random, is_stress: bool
) -> None:
    batches, names = [340, 340, 340] if is_stress else [25, 25], ["count", "seen", NAMES[-1]]
    truth = told(tmp_path, sb.create_backend("heap"), rng, int, batches, retain=1001, names=names)
    ids = sb.CheckpointStore(tmp_path).checkpoints()
    assert ids == list(range(len(ids)))
    assert len(ids) > (1000 if is_stress else 40)
    check_changes(tmp_path, truth, ids)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("piece", [1 << 20, 40])
@pytest.mark.parametrize("key_type", [int, "struct<a:bigint,b:string>"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_changes_equal_the_history(
    tmp_path: Path,
    rng: random.Random,
    backend: str,
    key_type: Any,
    piece: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With deltas, merges of deltas, new bases, gaps, restarts and rewinds."""
    monkeypatch.setattr(comparison, "_PIECE_ROWS", piece)
    path, batches = tmp_path / "store", [rng.randrange(8, 22) for _ in range(3)]
    truth = told(path, sb.create_backend(backend), rng, key_type, batches, retain=14)
    ids = sb.CheckpointStore(path).checkpoints()
    check_changes(path, truth, ids[1:-1])
    opened = sb.CheckpointStore(path)
    for first, last in ((ids[0], ids[-1]), (ids[-1], ids[0]), (ids[1], ids[1])):
        difference = sb.tools.diff(opened.open(first), opened.open(last))
        for name in NAMES:
            rows = difference[name].to_table().to_pylist() if name in difference else []
            assert by_entry(rows) == changed(truth[first][name], truth[last][name])
            assert applied(truth[first][name], rows) == truth[last][name]
    assert bool(difference) is False
    assert repr(difference) == "no difference"


def test_gaps_name_the_checkpoint_before(tmp_path: Path) -> None:
    with open_store(tmp_path, retain=2) as store, create("heap") as keyed:
        count = keyed.get_state(sb.ValueStateDescriptor("count", int))
        for number in (3, 8, 11):
            count.update_many([1, number], [number, 0])
            store.commit(number, [keyed.snapshot(number, store).result()])
        rows = sb.tools.changes(store, "count")
        assert rows.schema.names == ["batch_id", "from_batch_id", "change_type", "key", "value", "old_value"]
        assert sorted(rows.to_table().to_pylist(), key=repr) == [
            {
                "batch_id": 11,
                "from_batch_id": 8,
                "change_type": "insert",
                "key": 11,
                "value": 0,
                "old_value": None,
            },
            {
                "batch_id": 11,
                "from_batch_id": 8,
                "change_type": "update",
                "key": 1,
                "value": 11,
                "old_value": 8,
            },
        ]
        assert len(sb.tools.changes(store, "count", since=11)) == 0
        for options, code in (({"since": 3}, "NO_CHECKPOINT"), ({"since": 11, "until": 8}, "CHECKPOINT_ID")):
            with pytest.raises(sb.UsageError, match=code):
                sb.tools.changes(store, "count", **options)
        with pytest.raises(sb.UsageError, match="state 'other' not found"):
            sb.tools.changes(store, "other")
        with pytest.raises(sb.UsageError, match="NOT_A_STORE"):
            sb.tools.changes(keyed.savepoint(tmp_path / "savepoint"), "count")


@pytest.mark.parametrize("kind", ["value", "map", "list"])
def test_expired_entries_give_a_row_on_request(tmp_path: Path, kind: str) -> None:
    clock = sb.testing.ManualClock()
    made = {
        "value": lambda: sb.ValueStateDescriptor("s", int),
        "map": lambda: sb.MapStateDescriptor("s", str, int),
        "list": lambda: sb.ListStateDescriptor("s", int),
    }[kind]()
    timed = made.enable_time_to_live(sb.StateTtlConfig(100))
    with open_store(tmp_path) as store, create("heap", clock=clock) as keyed:
        state = keyed.get_state(timed)

        def put(key: int) -> None:
            keyed.set_current_key(key)
            if kind == "map":
                state.put("a", key)
            else:
                (state.update if kind == "value" else state.add)(key)

        for number, at in enumerate((0, 50, 120)):
            clock.set(at)
            put(number)
            put(7 + number)
            if number == 1:
                keyed.set_current_key(7)
                state.clear()
            store.commit(number, [keyed.snapshot(number, store).result()], now=at)
    found = sb.tools.changes(tmp_path, "s", expired=True).to_table().to_pylist()
    kinds = sorted((row["batch_id"], row["change_type"], row["key"]) for row in found)
    own = [(1, "delete", 7), (1, "insert", 1), (1, "insert", 8), (2, "insert", 2), (2, "insert", 9)]
    assert kinds == sorted([*own, (2, "expire", 0)])
    found = sb.tools.changes(tmp_path, "s").to_table().to_pylist()
    assert sorted((row["batch_id"], row["change_type"], row["key"]) for row in found) == own


def test_a_difference_compares_stores_savepoints_and_key_groups(tmp_path: Path, rng: random.Random) -> None:
    with open_store(tmp_path / "store") as store, create("heap") as keyed:
        story = Story(keyed, rng, int, keys=60)
        story.change(2000)
        store.commit(0, [keyed.snapshot(0, store).result()])
        savepoint = keyed.savepoint(tmp_path / "savepoint")
        before = {name: entries(store, name) for name in DESCRIPTORS}
        story.change(200)
        store.commit(1, [keyed.snapshot(1, store).result()])
    sb.tools.rescale(tmp_path / "store", tmp_path / "copy", max_parallelism=7)
    assert not sb.tools.diff(tmp_path / "store", tmp_path / "copy")
    assert not sb.tools.diff(savepoint, store.open(0))
    for other in (tmp_path / "store", tmp_path / "copy"):
        for name in DESCRIPTORS:
            found = sb.tools.diff(savepoint, other, name=name)
            rows = found[name].to_table().to_pylist() if found else []
            assert by_entry(rows) == changed(before[name], entries(other, name))
    with pytest.raises(sb.UsageError, match="state 'nobody' not found"):
        sb.tools.diff(savepoint, store, name="nobody")


def test_states_of_two_types_are_not_compared(tmp_path: Path) -> None:
    for name, declared in (("one", int), ("two", str)):
        with sb.create_backend("heap").create_keyed_backend(int) as keyed:
            keyed.get_state(sb.ValueStateDescriptor("s", declared))
            keyed.savepoint(tmp_path / name)
    with pytest.raises(sb.StateMigrationError, match="its kind or its types differ") as caught:
        sb.tools.diff(tmp_path / "one", tmp_path / "two")
    assert caught.value.code == "STATE_MIGRATION.INCOMPATIBLE"
