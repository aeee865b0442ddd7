"""State in event time does not depend on how rows were cut into batches, on every backend, against a plain model.

The model knows no watermark and removes nothing: it is the rules of visibility alone. Rows come in one order of
arrival, none older than the greatest time before it less the delay, so that no row is late in any cut. A backend runs
the same rows in batches, cleans up, and is restored in between: all of this must not be seen.
"""

from __future__ import annotations

import itertools
import operator
import pickle
import random
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from contract.conftest import MakeKeyed

import statebackend as sb
from statebackend.checkpoint.keyed import chain

TTL, DELAY, KEYS = 30, 10, 2
Update = sb.StateTtlConfig.UpdateType
DESCRIPTORS: dict[str, Callable[[], Any]] = {
    "value": lambda: sb.ValueStateDescriptor("s", int),
    "text": lambda: sb.ValueStateDescriptor("s", str),
    "object": lambda: sb.ValueStateDescriptor("s", sb.types.PICKLE),
    "list": lambda: sb.ListStateDescriptor("s", int),
    "texts": lambda: sb.ListStateDescriptor("s", str),
    "map": lambda: sb.MapStateDescriptor("s", int, int),
    "text map": lambda: sb.MapStateDescriptor("s", str, str),
    "sum": lambda: sb.ReducingStateDescriptor("s", "sum", int),
    "last text": lambda: sb.ReducingStateDescriptor("s", "last", str),
    "own reducing": lambda: sb.ReducingStateDescriptor("s", lambda a, b: a * 3 + b, int),
    "average": lambda: sb.AggregatingStateDescriptor("s", "avg", int),
    "max text": lambda: sb.AggregatingStateDescriptor("s", "max", str),
    "folding": lambda: sb.FoldingStateDescriptor("s", 0, lambda a, b: a * 3 + b, int),
}


class Row(NamedTuple):
    time: int
    key: int
    namespace: Any
    call: str
    arguments: tuple[Any, ...]


class Model:
    """The rules: what a call at a time sees and leaves, with all that was ever stored in its place."""

    def __init__(self, kind: str, renews: bool, is_sorted: bool) -> None:
        self.kind, self.renews, self.is_sorted = kind, renews, is_sorted
        #: Per key and namespace a list of [value, timestamp], or a dict of them by map key.
        self.stored: dict[Any, Any] = {}

    def run(self, row: Row) -> Any:
        at = row.key, row.namespace
        now = row.time
        if row.call == "merge_namespaces":
            return self.merge(row.key, *row.arguments, now)
        if row.call == "clear" or row.arguments == (None,):
            self.stored.pop(at, None)
            return None
        if "map" in self.kind:
            return self.map_call(row, self.stored.setdefault(at, {}))
        kept = self.stored.setdefault(at, [])
        seen = [each for each in kept if each[1] + TTL > now]
        if row.call == "exists":
            return bool(seen)
        if row.call in ("get", "value"):
            for each in seen:
                each[1] = max(each[1], now) if self.renews else each[1]
            return [value for value, _ in seen] if self.is_list else self.shown(seen)
        if row.call == "update":
            self.stored[at] = (
                [[value, now] for value in row.arguments[0]] if self.is_list else [[*row.arguments, now]]
            )
            return None
        assert row.call == "add"
        if self.is_list:
            kept.append([*row.arguments, now])
        elif seen:
            self.stored[at] = [[self.added(seen[0][0], row.arguments[0]), max(seen[0][1], now)]]
        else:
            self.stored[at] = [[self.added(None, row.arguments[0]), now]]
        return None

    @property
    def is_list(self) -> bool:
        return self.kind in ("list", "texts")

    def added(self, old: Any, new: Any) -> Any:
        if self.kind == "average":
            return (new, 1) if old is None else (old[0] + new, old[1] + 1)
        if self.kind == "folding":
            return (old or 0) * 3 + new
        if old is None:
            return new
        if self.kind == "own reducing":
            return old * 3 + new
        return {"sum": operator.add, "last text": lambda a, b: b, "max text": max}[self.kind](old, new)

    def merged(self, a: Any, b: Any) -> Any:
        return (a[0] + b[0], a[1] + b[1]) if self.kind == "average" else self.added(a, b)

    def shown(self, seen: list[Any]) -> Any:
        if not seen:
            return None
        value = seen[0][0]
        return value[0] / value[1] if self.kind == "average" else value

    def map_call(self, row: Row, entries: dict[Any, Any]) -> Any:
        now = row.time
        seen = {key: entry for key, entry in entries.items() if entry[1] + TTL > now}
        name, (key, *values) = row.call, row.arguments or (None,)
        if name == "put":
            if key not in seen:
                entries.pop(key, None)  # a new place in the order
            entries[key] = [*values, now]
            return None
        if name == "remove":
            entries.pop(key, None)
            return None
        if name == "exists":
            return bool(seen)
        read = seen if name == "items" else {key: seen[key]} if key in seen else {}
        for entry in read.values():
            entry[1] = max(entry[1], now) if self.renews else entry[1]
        if name == "items":
            items = [(key, value) for key, (value, _) in seen.items()]
            return sorted(items) if self.is_sorted else items
        return read[key][0] if key in read else None

    def merge(self, key: int, target: Any, sources: list[Any], now: int) -> None:
        found = [self.stored.pop((key, each), []) for each in dict.fromkeys(sources)]
        if self.is_list:
            self.stored.setdefault((key, target), []).extend(each for part in found for each in part)
            return
        seen = [each for part in found for each in part if each[1] + TTL > now]
        if seen:
            seen = [each for each in self.stored.get((key, target), []) if each[1] + TTL > now] + seen
            value = seen[0][0]
            for other, _ in seen[1:]:
                value = self.merged(value, other)
            self.stored[key, target] = [[value, max(now, *(each[1] for each in seen))]]


def sample(kind: str, rng: random.Random) -> Any:
    if "text" in kind:
        return rng.choice(["", "a", "b" * 40])
    return {"n": rng.randrange(9)} if kind == "object" else rng.randrange(9)


SPACES = [sb.VOID, 7]
#: How rows come to a backend: one by one; so, with timers after each batch; in columns with a time for each row; in any
#: of these ways, or in columns at one time, that of the watermark after the batch.
MODES = ["rows", "timers", "times", "mixed"]


def a_call(kind: str, of: str, rng: random.Random, in_columns: bool) -> tuple[str, tuple[Any, ...]]:
    """A call of a state of this kind, with its arguments; one that there is for columns, too, if asked for."""
    value = sample(kind, rng)
    if of == "map":
        key = rng.choice(["", "k"]) if kind == "text map" else rng.randrange(3)
        choices: list[Any] = [("put", (key, value))] * 3 + [("get", (key,))] * 3 + [("remove", (key,))]
        return rng.choice([*choices, ("exists", ()), *([] if in_columns else [("items", ())] * 2)])
    if of != "list" and rng.random() < 0.1:
        value = None  # clears
    choices = [("update" if of == "value" else "add", (value,))] * 4
    choices += [("value" if of == "value" else "get", ())] * 4 + [("exists", ()), ("clear", ())]
    if of == "list" and not in_columns:
        choices.append(("update", ([sample(kind, rng) for _ in range(rng.randrange(1, 3))],)))
    if of in ("list", "reducing", "aggregating") and not in_columns:
        choices.append(("merge_namespaces", (rng.choice(SPACES), rng.sample(SPACES, rng.randrange(1, 3)))))
    return rng.choice(choices)


def cut(rows: list[Row], rng: random.Random) -> Iterator[list[Row]]:
    """The rows in batches: in one, in one for each row, or in any."""
    each = rng.choice([1, len(rows), 0])
    at = 0
    while at < len(rows):
        size = each or rng.randrange(1, 9)
        yield rows[at : at + size]
        at += size


class Run:
    """A backend beside the model, through all that may happen in batches and between them."""

    def __init__(
        self, make_keyed: MakeKeyed, kind: str, rng: random.Random, mode: str, folder: Path | None
    ) -> None:
        self.make_keyed, self.kind, self.rng, self.mode = make_keyed, kind, rng, mode
        #: Where it commits, if it does.
        self.store: Any = None
        if folder is not None:
            store = sb.CheckpointStore(folder)
            self.store = store.open_for_writing(key_type="bigint", max_parallelism=128)
        renews = rng.random() < 0.5
        config = sb.StateTtlConfig(
            TTL,
            ttl_time_characteristic=sb.StateTtlConfig.TtlTimeCharacteristic.EventTime,
            update_type=Update.OnReadAndWrite if renews else Update.OnCreateAndWrite,
            state_visibility=rng.choice(list(sb.StateTtlConfig.StateVisibility)),
            cleanup_idle=rng.random() < 0.3,
            cleanup_full_snapshot=rng.random() < 0.5,
            cleanup_incrementally=rng.choice([None, (1, False), (10, True)]),
            cleanup_in_rocksdb_compact_filter=(1,),
        )
        self.descriptor = DESCRIPTORS[kind]().enable_time_to_live(config)
        self.keyed: Any = make_keyed("bigint")
        self.keyed.begin(watermarks=(None, None))
        self.state: Any = self.keyed.get_state(self.descriptor)
        self.is_rocksdb = type(self.keyed).__name__ == "RocksDbKeyedBackend"
        self.model = Model(kind, renews, is_sorted=self.is_rocksdb)
        self.read = "items" if "map" in kind else "value" if self.descriptor.kind == "value" else "get"
        #: Those to come, in the order in which they fire.
        self.timers: list[tuple[int, int]] = []
        self.newest: int | None = None
        self.watermark: int | None = None
        self.batches = 0

    def run(self) -> None:
        for batch in cut(self.rows(), self.rng):
            self.batch(batch)
            if self.is_rocksdb and self.rng.random() < 0.1:
                self.compact()
            if self.store is not None and self.rng.random() < 0.7:
                committed = self.commit()
                if self.rng.random() < 0.2:
                    self.restart(committed)
        self.check_what_is_left()
        self.keyed.close()
        if self.store is not None:
            self.store.close()

    def rows(self) -> list[Row]:
        """Rows of which none is late, wherever batches end."""
        newest = 1000
        rows: list[Row] = []
        for _ in range(self.rng.randrange(4, 40)):
            time = max(newest, self.rng.choice(rows).time + TTL) if rows else newest  # when something expires
            if self.rng.random() < 0.5:
                time = newest + self.rng.choice([0, 0, 1, 3, 5, 9, 70])
            newest = max(newest, time)
            time -= self.rng.choice([0, self.rng.randrange(DELAY + 1)])
            call = a_call(self.kind, self.descriptor.kind, self.rng, self.mode in ("times", "mixed"))
            space = SPACES[self.rng.random() < 0.2]
            rows.append(Row(time, self.rng.choice([0, 0, 0, 1]), space, *call))
        return rows

    def batch(self, rows: list[Row]) -> None:
        times = [row.time for row in rows]
        self.newest = max(times if self.newest is None else [self.newest, *times])
        before, after = self.watermark, self.newest - DELAY
        mode = self.rng.choice(["rows", "times", "columns"]) if self.mode == "mixed" else self.mode
        if mode == "columns":
            rows = [row._replace(time=after) for row in rows]
        expected = [self.model.run(row) for row in rows]
        registered = [(row.time + TTL // 2, row.key) for row in rows] if self.mode == "timers" else []
        timers = sorted({*self.timers, *registered})
        fired = [each for each in timers if each[0] <= after]
        self.timers = timers[len(fired) :]
        expected += [self.model.run(Row(time, key, sb.VOID, self.read, ())) for time, key in fired]
        for is_last in self.rng.choice([[True], [False, True]]):  # a batch that fails is run again
            mark = self.keyed.mark()
            self.keyed.begin(watermarks=(before, after))
            if mode in ("times", "columns"):
                seen = self.in_columns(rows, at_own_times=mode == "times")
            else:
                seen = [self.call(row) for row in rows]
            seen += self.fire(registered, after)
            assert normal(seen) == normal(expected)
            self.keyed.begin(watermarks=(after, after))
            self.keyed.advance()
            if not is_last:
                self.keyed.rollback(mark)
                self.keyed.begin(watermarks=(before, before))
            self.keyed.release(mark)
        self.watermark = after
        self.batches += 1

    def call(self, row: Row) -> Any:
        self.keyed.set_event_time(row.time)
        self.keyed.set_current_key(row.key)
        self.keyed.set_current_namespace(row.namespace)
        if row.call == "merge_namespaces":
            return self.keyed.merge_namespaces(self.descriptor, *row.arguments)
        found = getattr(self.state, row.call)(*row.arguments)
        return list(found) if row.call == "items" else found

    def in_columns(self, rows: list[Row], *, at_own_times: bool) -> list[Any]:
        """Each run of rows that do the same, in one call."""
        seen: list[Any] = []
        for name, group in itertools.groupby(rows, key=lambda row: row.call):
            same = list(group)
            arguments = [list(column) for column in zip(*(row.arguments for row in same), strict=True)]
            options = {"times": [row.time for row in same]} if at_own_times else {}
            found = getattr(self.state, ("get" if name == "value" else name) + "_many")(
                [row.key for row in same], *arguments, namespaces=[row.namespace for row in same], **options
            )
            seen += [None] * len(same) if found is None else found.to_pylist()
        return seen

    def fire(self, registered: list[tuple[int, int]], until: int) -> list[Any]:
        self.keyed.set_current_namespace(sb.VOID)
        for time, key in registered:
            self.keyed.set_current_key(key)
            self.keyed.timers.register_event_time_timer(time)
        seen = []
        for time in self.keyed.timers.due(until):
            self.keyed.set_event_time(time)
            found = getattr(self.state, self.read)()
            seen.append(list(found) if self.read == "items" else found)
        return seen

    def compact(self) -> None:
        self.keyed.store.flush()
        self.keyed.scratch.database.flush()
        for _ in range(2):  # one merges lists, the next one removes those that have nothing left
            self.keyed.scratch.database.compact(self.state.table.family)

    def commit(self) -> sb.Checkpoint:
        """Commit this moment: a base at first, then mostly what has changed, in files that are merged meanwhile."""
        assert self.store is not None
        snapshot = self.keyed.snapshot(self.batches, self.store).result()
        committed = self.store.commit(self.batches, [snapshot], now=0, watermark=self.watermark)
        log = getattr(self.keyed, "_log", None)  # a backend of another package may have none
        if log is not None and log.rewriting is not None:
            log.rewriting.wait()
        return committed

    def restart(self, checkpoint: sb.Checkpoint) -> None:
        self.keyed.close()
        self.keyed = self.make_keyed("bigint", restore=checkpoint)
        self.state = self.keyed.get_state(self.descriptor)

    def check_what_is_left(self) -> None:
        """A call of any time that is on time sees the same."""
        assert self.watermark is not None
        times = sorted(self.rng.randrange(self.watermark, self.watermark + TTL + 5) for _ in range(2))
        for time, key, space in itertools.product(times, range(KEYS), SPACES):
            row = Row(time, key, space, self.read, ())
            assert normal([self.call(row)]) == normal([self.model.run(row)])


def normal(seen: list[Any]) -> list[Any]:
    """Columns have objects in their serialised form. An empty list is as good as none."""
    seen = [pickle.loads(each) if isinstance(each, bytes) else each for each in seen]
    return [None if each == [] else each for each in seen]


@pytest.fixture
def makers(make_keyed: MakeKeyed, backend: sb.StateBackend, clock: Any) -> list[MakeKeyed]:
    """What makes backends: of RocksDB those, too, whose checkpoints have files of the database."""
    if backend.name != "rocksdb":
        return [make_keyed]
    native = sb.create_backend("rocksdb", checkpoints="native")
    return [make_keyed, partial(native.create_keyed_backend, clock=clock)]


@pytest.fixture
def _merged_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two files of changes are merged, where eight are usually."""
    monkeypatch.setattr(chain, "FAN", 2)


@pytest.mark.usefixtures("_merged_soon", "no_fsync")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", DESCRIPTORS)
def test_the_cut_into_batches_is_not_seen(
    makers: list[MakeKeyed],
    backend: sb.StateBackend,
    kind: str,
    mode: str,
    rng: random.Random,
    tmp_path: Path,
    is_stress: bool,
) -> None:
    long, short = {"heap": (2000, 12), "reference": (200, 12)}.get(backend.name, (50, 6))
    for number in range(long if is_stress else short):  # in the long run more than 100,000
        folder = tmp_path / str(number) if number < 200 and number % 5 == 4 else None
        Run(rng.choice(makers), kind, rng, mode, folder).run()
        if folder is not None:
            shutil.rmtree(folder)
