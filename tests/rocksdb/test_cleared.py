"""What is cleared after a compaction has dropped it must not come back: older files of the chain still have it.

A restore with a longer time to live shows what had only expired, and nothing that was cleared.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from all_backends import BACKENDS

import statebackend as sb
from statebackend.checkpoint.format import Op, read_data_file
from statebackend.checkpoint.keyed import chain, compiled_backend
from statebackend.keys import KeyGroupRange
from statebackend.state import StateTtlConfig
from statebackend.testing import ManualClock

pytestmark = pytest.mark.checked

TTL, GROUPS, LONG_AGO, NOW = 100, 8, 0, 1_000


def declared(kind: str, ttl: int = TTL, **options: Any) -> Any:
    made = {
        "value": lambda: sb.ValueStateDescriptor("s", int),
        "list": lambda: sb.ListStateDescriptor("s", int),
        "map": lambda: sb.MapStateDescriptor("s", str, int),
        "reducing": lambda: sb.ReducingStateDescriptor("s", "sum", int),
    }[kind]()
    return made.enable_time_to_live(StateTtlConfig(ttl, **options))


def put(state: Any, kind: str) -> None:
    if kind == "map":
        state.put_all({"": 1, "a": 2, "b": 3})
    elif kind == "value":
        state.update(1)
    else:
        state.add(1)


def clear(run: Running, state: Any, how: str) -> None:
    if how == "clear_many":
        state.clear_many([1])
    else:
        state.clear() if how == "clear" else run.keyed.clear_key()


class Running:
    """A backend whose state expires, with a store that it writes to."""

    def __init__(self, folder: Path, kind: str = "map", **options: Any) -> None:
        self.clock = ManualClock(LONG_AGO)
        self.kind = kind
        self.keyed = sb.create_backend("rocksdb").create_keyed_backend(
            int, max_parallelism=GROUPS, clock=self.clock
        )
        self.state = self.keyed.get_state(declared(kind, **options))
        # A delta is for what has hardly changed.
        self.others = self.keyed.get_state(sb.ValueStateDescriptor("others", int))
        self.others.update_many(range(1_000), range(1_000))
        self.store = sb.CheckpointStore(folder).open_for_writing(key_type=int, max_parallelism=GROUPS)
        self.taken = 0

    def close(self) -> None:
        self.keyed.close()
        self.store.close()

    def at(self, key: int, namespace: Any = sb.VOID) -> Any:
        self.keyed.set_current_key(key)
        self.keyed.set_current_namespace(namespace)
        return self.state

    def fill(self, keys: int = 4, namespaces: Any = (sb.VOID,)) -> None:
        for key in range(keys):
            for namespace in namespaces:
                put(self.at(key, namespace), self.kind)

    def take(self, kind: str | None = None) -> Any:
        pending = self.keyed.snapshot(self.taken, self.store)
        checkpoint = self.store.commit(self.taken, [pending.result()], now=self.clock.now())
        self.taken += 1
        self.keyed.release(self.keyed.mark())  # the next one tells compactions the time of the commit
        if kind is not None:
            assert checkpoint.snapshots[0].files[-1].kind == kind
        return checkpoint

    def expire(self) -> None:
        """Commit at a time at which all has expired, and let compactions drop it."""
        self.clock.set(NOW)
        self.others.update_many([self.taken], [0])
        self.take("delta")
        self.compact()
        assert sum(self.state.rules.counters()[each] for each in ("dropped_values", "dropped_in_merges"))

    def compact(self) -> None:
        database = self.keyed.scratch.database
        if not self.keyed.store.has_marks:
            self.keyed.store.flush()
        database.flush()
        for _ in range(2):  # one merges lists, the next one removes those that have nothing left
            database.compact(self.state.table.family)

    def ops(self, checkpoint: Any, name: str = "s") -> list[tuple[str, Any, Any]]:
        """What the newest file does to the state: operation, key, map key or value."""
        file, found = checkpoint.snapshots[0].files[-1], []
        assert file.kind == "delta"
        with checkpoint.open_file(file) as source:
            for rows in read_data_file(source, file.name).read(name):
                for row in rows.batch.to_pylist():
                    found.append((Op(row["op"]).name, row["key"], row.get("map_key")))
        return found


def shown(checkpoint: Any, backend: str, kind: str, places: Any, **options: Any) -> list[Any]:
    """What a restore with an endless time to live has at places."""
    with sb.create_backend(backend).create_keyed_backend(
        int, max_parallelism=GROUPS, restore=checkpoint, clock=ManualClock(NOW), **options
    ) as keyed:
        state, found = keyed.get_state(declared(kind, 10**9)), []
        for key, namespace in places:
            keyed.set_current_key(key)
            keyed.set_current_namespace(namespace)
            if kind == "map":
                found.append(dict(state.items()))
            else:
                found.append(state.value() if kind == "value" else state.get())
        return found


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Any]:
    made: list[Running] = []

    def run(kind: str = "map", **options: Any) -> Running:
        made.append(Running(tmp_path / f"store {len(made)}", kind, **options))
        return made[-1]

    yield run
    while made:
        made.pop().close()


@pytest.fixture
def dropped(running: Any) -> Any:
    """Makes backends whose first rows are in a base, have expired, and were dropped by compactions."""

    def run(kind: str = "map", keys: int = 4, namespaces: Any = (sb.VOID,)) -> Running:
        made: Running = running(kind)
        made.fill(keys, namespaces)
        made.take("base")
        made.expire()
        return made

    return run


ALL = {"": 1, "a": 2, "b": 3}


@pytest.mark.parametrize("how", ["clear", "clear_many", "clear_key"])
def test_a_map_that_was_cleared_stays_empty(dropped: Any, how: str) -> None:
    run = dropped()
    state = run.at(1)
    assert list(state.items()) == []
    clear(run, state, how)
    committed = run.take("delta")
    assert run.ops(committed) == [("CLEAR", 1, None)]
    for backend in BACKENDS:
        assert shown(committed, backend, "map", [(0, sb.VOID), (1, sb.VOID)]) == [ALL, {}]


@pytest.mark.parametrize("kind", ["map", "list"])
def test_a_namespace_that_was_never_written_is_not_taken_for_another(dropped: Any, kind: str) -> None:
    run = dropped(kind)
    run.at(1, "w").clear()
    if kind == "list":
        run.at(2)
        run.keyed.merge_namespaces(declared(kind), "t", ["v"])
    committed = run.take("delta")
    there = ALL if kind == "map" else [1]
    assert shown(committed, "heap", kind, [(1, sb.VOID), (2, sb.VOID)]) == [there, there]


def test_deltas_that_are_merged_clear_what_they_cleared(
    dropped: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chain, "FAN", 3)
    run = dropped(keys=20)
    merged = 0
    for key in range(12):
        run.at(key).clear()
        if key % 2:
            run.at(key).put("n", key)
        if key > 2:
            run.at(key - 2).put("late", key)
        committed = run.take("delta")
        if run.keyed._log.rewriting is not None:
            run.keyed._log.rewriting.wait()
            merged += 1
    assert merged >= 2
    expected = [
        ({"n": key} if key % 2 else {}) | ({"late": key + 2} if 0 < key < 10 else {}) for key in range(12)
    ]
    places = [(key, sb.VOID) for key in range(13)]
    for backend in BACKENDS:
        assert shown(committed, backend, "map", places) == [*expected, ALL]


def test_a_backend_of_some_key_groups_restores_their_clears(dropped: Any) -> None:
    run = dropped(keys=40)
    for key in range(0, 40, 2):
        run.at(key).clear()
    committed = run.take("delta")
    seen = set()
    for groups in (KeyGroupRange(0, 2), KeyGroupRange(3, GROUPS - 1)):
        own = [key for key in range(40) if groups.start <= run.keyed._group_of(key) <= groups.end]
        places = [(key, sb.VOID) for key in own]
        for backend in ("rocksdb", "heap"):
            found = shown(committed, backend, "map", places, key_group_range=groups)
            assert found == [ALL if key % 2 else {} for key in own]
        seen |= set(own)
    assert seen == set(range(40))


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        *(("value", how) for how in ("clear", "clear_many", "clear_key")),
        *((kind, "clear") for kind in ("list", "reducing")),
    ],
)
def test_other_states_that_were_cleared_stay_empty(dropped: Any, kind: str, how: str) -> None:
    run = dropped(kind)
    state = run.at(1)
    clear(run, state, how)
    committed = run.take("delta")
    assert run.ops(committed) == [("REMOVE", 1, None)]
    there, gone = shown(committed, "heap", kind, [(0, sb.VOID), (1, sb.VOID)])
    assert (there, gone) in [(1, None), ([1], [])]


@pytest.mark.parametrize("kind", ["map", "value", "list", "reducing"])
def test_key_is_cleared_in_forgotten_namespaces(dropped: Any, kind: str) -> None:
    """No row of a delta says that, so the next snapshot is a base; the one after it is a delta again."""
    run = dropped(kind, namespaces=(sb.VOID, "w"))
    run.at(1)
    run.keyed.clear_key()
    committed = run.take("base")
    places = [(1, sb.VOID), (1, "w")]
    assert shown(committed, "heap", kind, places) in [[{}, {}], [None, None], [[], []]]
    run.at(2)
    run.keyed.clear_key()
    run.others.update_many([2], [0])
    run.take("delta")


@pytest.mark.parametrize("kind", ["list", "reducing"])
@pytest.mark.parametrize("is_new", [False, True], ids=["all had expired", "one had not"])
def test_namespaces_that_were_merged_away_stay_empty(dropped: Any, kind: str, is_new: bool) -> None:
    run = dropped(kind, namespaces=("a", "b", "c"))
    if is_new:
        run.at(1, "b").add(7)
    run.at(1)
    run.keyed.merge_namespaces(declared(kind), "t", ["a", "b"])
    committed = run.take("delta")
    *gone, target, left = shown(committed, "heap", kind, [(1, each) for each in ("a", "b", "t", "c")])
    assert gone in ([None, None], [[], []])
    assert target in ((7, [7]) if is_new else (None, []))
    assert left in (1, [1])


@pytest.mark.parametrize(("how", "is_watched"), [("remove", True), ("remove_many", False)])
def test_an_entry_that_was_removed_stays_away(dropped: Any, how: str, is_watched: bool) -> None:
    """Also while somebody iterates over a map of the state."""
    run = dropped()
    run.at(3).put("x", 1)
    watching = run.state.items() if is_watched else None
    state = run.at(1)
    state.remove("a") if how == "remove" else state.remove_many([1], ["a"])
    committed = run.take("delta")
    assert shown(committed, "heap", "map", [(1, sb.VOID)]) == [{"": 1, "b": 3}]
    if watching is not None:
        assert list(watching) == [("x", 1)]


@pytest.mark.parametrize("is_kept", [False, True], ids=["no time to live", "no compaction drops"])
def test_where_compactions_drop_nothing_a_delta_has_what_was_found(running: Any, is_kept: bool) -> None:
    run = running(cleanup_in_background=False) if is_kept else running()
    if not is_kept:
        run.state = run.keyed.get_state(sb.MapStateDescriptor("plain", str, int))
    assert not run.state.has_drops
    run.fill()
    run.take("base")
    run.at(1).clear()
    run.at(9).clear()
    run.keyed.clear_key()
    committed = run.take("delta")
    found = run.ops(committed, "s" if is_kept else "plain")
    assert found == [("REMOVE", 1, each) for each in ("", "a", "b")]


def test_clears_of_many_rows_are_written_in_pieces(dropped: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_backend, "BATCH_ROWS", 3)
    run = dropped(keys=60)
    for key in range(50):
        run.at(key).clear()
        run.state.put("n", key)
    committed = run.take("delta")
    found = shown(committed, "rocksdb", "map", [(key, sb.VOID) for key in range(60)])
    assert found == [{"n": key} for key in range(50)] + [ALL] * 10


def test_nothing_comes_back_whatever_happens(running: Any, rng: random.Random) -> None:
    """A model that never forgets: what a restore shows is in it, and what has not expired is shown."""
    run = running()
    model: dict[tuple[int, str], dict[str, tuple[int, int]]] = {}
    marks: list[tuple[Any, Any]] = []
    spaces = ("", "w")

    def copied() -> Any:
        return {place: dict(entries) for place, entries in model.items()}

    for _ in range(1_500):
        key, space, entry = rng.randrange(6), rng.choice(spaces), rng.choice("abc")
        what = rng.choices(
            ("put", "remove", "clear", "key", "time", "compact", "mark", "back", "release", "take"),
            (30, 8, 12, 1, 10, 4, 4, 2, 3, 6),
        )[0]
        state = run.at(key, space or sb.VOID)
        entries = model.setdefault((key, space), {})
        if what == "put":
            entries[entry] = (run.clock.now(), run.clock.now())
            state.put(entry, run.clock.now())
        elif what == "remove":
            entries.pop(entry, None)
            state.remove(entry)
        elif what == "clear":
            entries.clear()
            state.clear()
        elif what == "key":
            for each in spaces:
                model.setdefault((key, each), {}).clear()
            run.keyed.clear_key()
        elif what == "time":
            run.clock.set(run.clock.now() + rng.randrange(60))
        elif what == "compact":
            run.compact()
        elif what == "mark":
            marks.append((run.keyed.mark(), copied()))
        elif what == "back" and marks:
            mark, model = marks.pop()
            run.keyed.rollback(mark)
            run.keyed.release(mark)
        elif what == "release" and marks:
            run.keyed.release(marks.pop()[0])
        elif what == "take":
            pending = run.keyed.snapshot(run.taken, run.store)
            if rng.random() < 0.2:
                pending.abort()
                continue
            committed = run.store.commit(run.taken, [pending.result()], now=run.clock.now())
            run.taken += 1
            if rng.random() < 0.7:
                continue
            places = sorted(model)
            backend = rng.choice(["rocksdb", "heap"])
            found = shown(committed, backend, "map", [(key, each or sb.VOID) for key, each in places])
            for place, entries in zip(places, found, strict=True):
                known = {each: value for each, (value, _) in model[place].items()}
                assert entries.items() <= known.items(), place
                alive = {each for each, (_, at) in model[place].items() if at + TTL > run.clock.now()}
                assert alive <= entries.keys(), place
    assert run.state.rules.counters()["dropped_values"] > 10
    while marks:
        run.keyed.release(marks.pop()[0])
