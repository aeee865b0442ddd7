"""Stored states that a program does not request: the start is refused, until `drop_state` says that it is meant."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from host_queries import HostQuery, rows_out
from simulated_disk import Dead, Disk, SimulatedCalls

import statebackend as sb
from statebackend.backends.reference import ReferenceKeyedBackend
from statebackend.checkpoint import CheckpointReader, CheckpointStore
from statebackend.checkpoint.files import PosixFiles
from statebackend.runtime import BatchSource, Job, Runner
from statebackend.runtime.batch_progress import Stopwatch
from statebackend.runtime.start_checks import StartFrom, source_of
from statebackend.types import STRING

USERS = [f"user {number}" for number in range(20)]
BACKENDS: dict[str, Callable[[], Any]] = {
    "heap": lambda: "heap",
    "reference": lambda: "reference",
    "rocksdb": lambda: "rocksdb",
    "native": lambda: sb.create_backend("rocksdb", checkpoints="native"),
}
each_backend = pytest.mark.parametrize("backend", BACKENDS)


class Keeps(sb.KeyedProcessFunction):
    """Adds each row's number to states of these names, and emits the states as they were before."""

    def __init__(self, *names: str, fails: bool = False, declared: Any = int) -> None:
        self.names, self.fails, self.declared = names, fails, declared

    def open(self, ctx: sb.FunctionContext) -> None:
        self.states = [
            ctx.get_value_state(sb.ValueStateDescriptor(name, self.declared)) for name in self.names
        ]

    def process_element(self, row: Any, ctx: sb.FunctionContext) -> Iterator[Any]:
        yield ctx.current_key, repr([state.value() for state in self.states])
        for state in self.states:
            state.update(self.declared(state.value() or 0) + self.declared(row.n))
        if self.fails:
            raise OSError("as told")


class KeepsLists(Keeps, sb.CheckpointedFunction):
    """The same, with an operator state."""

    operator = "offsets"

    def initialize_state(self, ctx: Any) -> None:
        self.offsets = ctx.operator_state_store.get_list_state(sb.ListStateDescriptor(self.operator, int))

    def process_element(self, row: Any, ctx: sb.FunctionContext) -> Iterator[Any]:
        self.offsets.add(row.n)
        yield from super().process_element(row, ctx)

    def snapshot_state(self, ctx: Any) -> None:
        pass


class KeepsBoth(KeepsLists):
    """The same, with an operator state that is called like a keyed one."""

    operator = "count"


def create(backend: str) -> Any:
    return sb.create_backend(made) if isinstance(made := BACKENDS[backend](), str) else made


def job_of(function: Any, backend: str = "heap") -> Job:
    return Job(function, key="user", schema="user string, states string", backend=BACKENDS[backend]())


def rows(number: int, users: int = len(USERS)) -> pa.Table:
    return pa.table({"user": USERS[:users], "n": [number] * users})


def run(
    folder: Path, batch_id: int, function: Any, backend: str = "heap", users: int = len(USERS), **options: Any
) -> str:
    """Start a query, run one batch, and stop it. Returns the states that each of these users had before."""
    store = CheckpointStore(folder, retain=10)
    with closing(Runner(job_of(function, backend), store, STRING, **options)) as runner:
        committed = runner.run(batch_id, BatchSource(lambda: rows(batch_id + 1, users)), Stopwatch())
    (before,) = {states for _, states in rows_out(committed)}
    return str(before)


def refused(folder: Path, batch_id: int, function: Any, backend: str = "heap", **options: Any) -> Any:
    with pytest.raises(sb.StateMigrationError) as caught:
        run(folder, batch_id, function, backend, **options)
    assert caught.value.code == "STATE_MIGRATION.NOT_REQUESTED"
    return caught.value


def contents_of(folder: Path) -> dict[str, bytes]:
    """The data files and entries of a store, without takeovers."""
    reader = CheckpointReader(folder)
    names = {name for each in reader.checkpoints() for name in reader.open(each).files}
    return {name: (folder / name).read_bytes() for name in names}


@each_backend
def test_start_is_refused_when_the_name_of_a_state_is_misspelt(tmp_path: Path, backend: str) -> None:
    assert run(tmp_path, 0, Keeps("count", "total"), backend) == "[None, None]"
    before = contents_of(tmp_path)
    error = refused(tmp_path, 1, Keeps("count", "totl"), backend)
    assert "'total' missing" in error.message
    assert error.detail == "'count': kept; 'total': stored, not declared; 'totl': begun empty"
    assert "sb.tools.drop_state(store, 'total')" in error.hint
    assert CheckpointReader(tmp_path).checkpoints() == [0]
    assert contents_of(tmp_path) == before
    assert "'total' missing" in refused(tmp_path, 1, Keeps("count"), backend, users=0).message, "without rows"
    assert run(tmp_path, 1, Keeps("count", "total"), backend) == "[1, 1]"


@each_backend
def test_approved_plan_drops_what_the_program_does_not_request(tmp_path: Path, backend: str) -> None:
    run(tmp_path, 0, KeepsLists("count", "total"), backend)
    function = Keeps("count", "totl")
    error = refused(tmp_path, 1, function, backend)
    assert "sb.tools.plan" in error.hint
    planned = sb.tools.plan(tmp_path, function)
    assert repr(planned).splitlines() == [
        "Plan, checkpoint 0",
        "  'count': kept",
        "  'total': stored, not declared",
        "  'totl': begun empty",
        "  operator state 'offsets': stored, not declared",
    ]
    assert not planned.is_safe
    assert planned.approve().is_safe
    with pytest.raises(sb.UsageError, match="has changed since") as caught:
        planned.approve()
    assert caught.value.code == "USAGE.PLAN"
    assert run(tmp_path, 1, function, backend) == "[1, None]"
    other = sb.tools.plan(tmp_path, [sb.ValueStateDescriptor("count", str)])
    with pytest.raises(sb.StateMigrationError, match="cannot approve this plan"):
        other.approve()
    assert sb.tools.plan(tmp_path, function).is_safe


@each_backend
def test_renamed_state_is_in_the_plan_of_a_refused_start(tmp_path: Path, backend: str) -> None:
    class Renames(Keeps):
        def open(self, ctx: sb.FunctionContext) -> None:
            renamed = sb.ValueStateDescriptor("sum", str, renamed_from="total", migrate=str)
            self.declared, self.states = str, [ctx.get_value_state(renamed)]

    run(tmp_path, 0, Keeps("count", "total"), backend)
    how = "'sum': migrated - renamed from 'total', bigint to string, by migrate="
    error = refused(tmp_path, 1, Renames(), backend)
    assert error.detail == f"'count': stored, not declared; {how}"
    assert how in repr(sb.tools.plan(tmp_path, Renames()).approve())
    for batch, before in ((1, "['1']"), (2, "['12']")):
        assert run(tmp_path, batch, Renames(), backend) == before
    assert "'sum': kept" in repr(sb.tools.plan(tmp_path, Renames()))


def test_start_is_refused_when_an_operator_state_is_not_requested(tmp_path: Path) -> None:
    run(tmp_path, 0, KeepsLists("count"))
    error = refused(tmp_path, 1, Keeps("count"))
    assert error.detail == "'count': kept; operator state 'offsets': stored, not declared"
    sb.tools.drop_state(tmp_path, "offsets")
    assert run(tmp_path, 1, Keeps("count")) == "[1]"
    with pytest.raises(sb.UsageError) as caught:
        sb.tools.state(tmp_path, "offsets").to_table()
    assert caught.value.code == "USAGE.NO_STATE"


def test_state_that_is_requested_after_open_is_refused(tmp_path: Path) -> None:
    class Late(Keeps):
        def process_element(self, row: Any, ctx: sb.FunctionContext) -> Iterator[Any]:
            ctx.get_value_state(sb.ValueStateDescriptor("total", int))
            yield from super().process_element(row, ctx)

    run(tmp_path, 0, Late("count"))
    refused(tmp_path, 1, Late("count"))


def test_commit_is_refused_when_a_state_that_was_requested_is_listed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the library's own backends none lists a state again: this is the check of the others, before a commit."""

    class Listed(Keeps):
        def process_element(self, row: Any, ctx: sb.FunctionContext) -> Iterator[Any]:
            monkeypatch.setattr(ReferenceKeyedBackend, "undeclared_states", lambda keyed: ["total"])
            yield from super().process_element(row, ctx)

    run(tmp_path, 0, Keeps("count", "total"), "reference")
    before = contents_of(tmp_path)
    assert "'total' missing" in refused(tmp_path, 1, Listed("count", "total"), "reference").message
    assert CheckpointReader(tmp_path).checkpoints() == [0]
    assert contents_of(tmp_path) == before
    monkeypatch.undo()
    assert run(tmp_path, 1, Keeps("count", "total"), "reference") == "[1, 1]"


@each_backend
def test_dropped_state_is_gone_and_its_name_begins_empty(tmp_path: Path, backend: str) -> None:
    store = tmp_path / "store"
    for batch_id in range(3):
        run(store, batch_id, Keeps("count", "total"), backend)
    dropped = sb.tools.drop_state(store, "total")
    assert dropped == sb.tools.Dropped("total", 2, ["count"])
    (record,) = CheckpointReader(store).records()
    assert (record.kind, record.dropped_state, record.upon.checkpoint_id) == ("drop", "total", 2)
    with pytest.raises(sb.UsageError, match="state 'total' not found"):
        sb.tools.drop_state(store, "total")
    assert [each.name for each in sb.tools.plan(store, []).states] == ["count"]
    assert sb.tools.verify(store).ok
    for _ in range(2):
        with pytest.raises(OSError, match="as told"):
            run(store, 3, Keeps("count", "total", fails=True), backend)
    # One user: a delta would do if nothing had been dropped, and the others would have their old totals again.
    assert run(store, 3, Keeps("count", "total"), backend, users=1) == "[6, None]"
    assert run(store, 4, Keeps("count", "total"), backend, users=1) == "[10, 4]"
    with create(backend).create_keyed_backend(str, restore=CheckpointReader(store).open(4)) as keyed:
        totals = keyed.get_value_state(sb.ValueStateDescriptor("total", int))
        assert totals.get_many(USERS).to_pylist() == [9, *[None] * (len(USERS) - 1)]
    assert sb.tools.verify(store).ok


@each_backend
def test_rows_of_dropped_state_go_with_the_next_base_and_its_name_may_get_another_type(
    tmp_path: Path, backend: str
) -> None:
    for batch_id in range(2):
        run(tmp_path, batch_id, Keeps("count", "total"), backend)
    sb.tools.drop_state(tmp_path, "total")
    for batch_id in range(2, 4):
        run(tmp_path, batch_id, Keeps("count"), backend, users=1)
    with create(backend).create_keyed_backend(str, restore=CheckpointReader(tmp_path).open(3)) as keyed:
        assert keyed.undeclared_states() == ["count"]
        if backend == "native":
            assert "total" not in [family.table for family in keyed.native.families()]
    before = CheckpointReader(tmp_path).open(1).snapshots[0]
    after = CheckpointReader(tmp_path).open(2).snapshots[0]
    assert sum(file.size for file in after.files) < sum(file.size for file in before.files)
    sb.tools.drop_state(tmp_path, "count")
    for batch_id, told in ((4, "[None]"), (5, "['05']")):
        assert run(tmp_path, batch_id, Keeps("count", declared=str), backend) == told


def test_older_checkpoints_keep_a_dropped_state(tmp_path: Path) -> None:
    for batch_id in range(3):
        run(tmp_path, batch_id, Keeps("count", "total"))
    sb.tools.drop_state(tmp_path, "total")
    run(tmp_path, 3, Keeps("count"))
    assert len(sb.tools.state(tmp_path, "total", id=1).to_table()) == len(USERS)
    sb.tools.rewind(tmp_path, to=2, checkpoint_location=None)
    assert run(tmp_path, 3, Keeps("count", "total")) == "[6, None]", "checkpoint 2 has lost it"
    sb.tools.rewind(tmp_path, to=1, checkpoint_location=None)
    assert "'total' missing" in refused(tmp_path, 2, Keeps("count")).message
    assert run(tmp_path, 2, Keeps("count", "total")) == "[3, 3]"
    assert run(tmp_path, 3, Keeps("count", "total")) == "[6, 6]"


def test_copies_and_savepoints_leave_out_a_dropped_state(tmp_path: Path) -> None:
    store = tmp_path / "store"
    for batch_id in range(3):
        run(store, batch_id, KeepsLists("count", "total", "old"))
    sb.tools.drop_state(store, "total")
    sb.tools.drop_state(store, "offsets")
    sb.tools.drop_state(store, "old", target=tmp_path / "copied")
    copies: list[Any] = [
        sb.tools.rescale(store, tmp_path / "rescaled", max_parallelism=32),
        tmp_path / "copied",
        sb.tools.savepoint(store, tmp_path / "savepoint"),
    ]
    for copy in copies:
        groups = 32 if copy is copies[0] else 128
        factory = sb.create_backend("heap")
        with factory.create_keyed_backend(str, max_parallelism=groups, restore=source_of(copy)) as keyed:
            assert keyed.undeclared_states() == (["count"] if copy is copies[1] else ["count", "old"])
            counts = keyed.get_value_state(sb.ValueStateDescriptor("count", int))
            assert counts.get_many(USERS).to_pylist() == [6] * len(USERS)
        assert factory.create_operator_backend(restore=source_of(copy)).undeclared_states() == []
    assert not CheckpointReader(tmp_path / "copied").open(2).dropped_states


@pytest.mark.parametrize("source", ["savepoint", "store"])
def test_state_is_dropped_from_the_source_of_the_first_batch_until_a_rewind_to_before_it(
    tmp_path: Path, source: str
) -> None:
    run(tmp_path / "store", 0, KeepsLists("count", "total"))
    sb.tools.savepoint(tmp_path / "store", tmp_path / "savepoint")
    started = tmp_path / "started"
    options = {"start": StartFrom(tmp_path / source, first_batch=5)}

    def drop() -> None:
        refused(started, 5, Keeps("count"), **options)
        for name in ("total", "offsets"):
            assert sb.tools.drop_state(started, name).checkpoint is None

    drop()
    assert sb.tools.rewind(started, to=None, checkpoint_location=None).taken_back == []
    drop()
    assert run(started, 5, Keeps("count"), **options) == "[1]"
    assert run(started, 6, Keeps("count"), **options) == "[7]"
    sb.tools.rewind(started, to=5, checkpoint_location=None)
    assert run(started, 6, Keeps("count"), **options) == "[7]"
    assert len(sb.tools.state(tmp_path / source, "total").to_table()) == len(USERS), "the source is unchanged"
    sb.tools.rewind(started, to=None, checkpoint_location=None)
    refused(started, 5, Keeps("count"), **options)
    assert run(started, 5, KeepsLists("count", "total"), **options) == "[1, 1]"


def test_name_of_a_keyed_and_an_operator_state_is_not_dropped(tmp_path: Path) -> None:
    store = tmp_path / "store"
    run(store, 0, KeepsBoth("count", "total"))
    with pytest.raises(sb.UsageError, match="both a keyed state and an operator state are called 'count'"):
        sb.tools.drop_state(store, "count")
    with pytest.raises(sb.UsageError, match="both a keyed state and an operator state are called 'count'"):
        sb.tools.drop_state(store, "count", target=tmp_path / "copy")
    error = refused(store, 1, Keeps("count", "total"))
    assert "operator 'count' missing" in error.message
    assert error.detail == "'count': kept; 'total': kept; operator state 'count': stored, not declared"
    with pytest.raises(sb.UsageError, match="both a keyed state and an operator state are called 'count'"):
        sb.tools.plan(store, Keeps("count")).approve()
    assert "'total': kept" in repr(sb.tools.plan(store, KeepsBoth("count", "total"))), "nothing was dropped"
    assert "cannot drop one of two stored states that share a name" in error.hint
    assert "drop_state(store, 'total')" in refused(store, 1, Keeps("count")).hint
    started = tmp_path / "started"
    refused(started, 5, Keeps("count"), start=StartFrom(store, first_batch=5))
    sb.tools.drop_state(started, "count")
    with pytest.raises(sb.UsageError, match="both a keyed state and an operator state"):
        run(started, 5, Keeps("total"), start=StartFrom(store, first_batch=5))
    assert run(store, 1, KeepsBoth("count", "total")) == "[1, 1]"


def test_state_of_the_other_kind_may_have_the_name_of_a_dropped_one(tmp_path: Path) -> None:
    run(tmp_path, 0, KeepsLists("count", "total"))

    class Moved(KeepsLists):
        operator = "total"

    sb.tools.drop_state(tmp_path, "offsets")
    error = refused(tmp_path, 1, Moved("count"))
    assert "keyed 'total' missing" in error.message
    left = "'total': stored, not declared; operator state 'total': begun empty"
    assert error.detail == f"'count': kept; {left}"
    assert "drop_state(store, 'total')" in error.hint
    sb.tools.drop_state(tmp_path, "total")
    assert run(tmp_path, 1, Moved("count")) == "[1]"
    assert sb.tools.state(tmp_path, "total").to_table()["value"].to_pylist() == [2] * len(USERS)


def test_files_of_a_database_that_hold_a_dropped_state_are_not_copied(tmp_path: Path) -> None:
    store = tmp_path / "store"
    run(store, 0, KeepsLists("count", "total"), "native")
    sb.tools.drop_state(store, "offsets", target=tmp_path / "before")
    with create("native").create_keyed_backend(str, restore=source_of(tmp_path / "before")) as keyed:
        assert keyed.undeclared_states() == ["count", "total"]
    sb.tools.drop_state(store, "total")
    with pytest.raises(sb.UsageError, match="files of kind 'sst' cannot be changed"):
        sb.tools.drop_state(store, "offsets", target=tmp_path / "copy")
    assert not (tmp_path / "copy").exists()
    run(store, 1, KeepsLists("count"), "native")
    sb.tools.drop_state(store, "offsets", target=tmp_path / "after")
    with create("native").create_keyed_backend(str, restore=source_of(tmp_path / "after")) as keyed:
        assert keyed.undeclared_states() == ["count"]


@pytest.mark.parametrize("source", ["savepoint", "store", None])
def test_start_is_refused_when_its_source_lacks_a_dropped_state(tmp_path: Path, source: str | None) -> None:
    run(tmp_path / "store", 0, KeepsLists("count"))
    sb.tools.savepoint(tmp_path / "store", tmp_path / "savepoint")
    options = {} if source is None else {"start": StartFrom(tmp_path / source)}
    started = tmp_path / "started"
    CheckpointStore(started).open_for_writing(key_type=str, max_parallelism=128).close()
    if source is None:
        sb.tools.reset(started, first_batch=0)
    sb.tools.drop_state(started, "cuont")
    for _ in range(2):
        with pytest.raises(sb.UsageError, match="state 'cuont' not found") as caught:
            run(started, 0, KeepsLists("count"), **options)
        assert caught.value.code == "USAGE.NO_STATE"
        named = "none" if source is None else "'count', 'offsets'"
        assert f"there are: {named}. The state was dropped in " in str(caught.value.hint)
    sb.tools.rewind(started, to=None, checkpoint_location=None)
    assert run(started, 0, KeepsLists("count"), **options) == ("[None]" if source is None else "[1]")


def test_timers_are_not_dropped(tmp_path: Path) -> None:
    store = tmp_path / "store"
    with CheckpointStore(store).open_for_writing(key_type=str, max_parallelism=128) as opened:
        for named in ("statebackend.timers.event", 5):
            with pytest.raises(sb.UsageError, match=r"timers cannot be dropped|not a int"):
                sb.tools.drop_state(opened.uri, named)  # type: ignore[arg-type]
        with create("heap").create_keyed_backend(str) as keyed:
            keyed.get_value_state(sb.ValueStateDescriptor("count", int)).update_many(["a"], [1])
            keyed.set_current_key("a")
            keyed.timers.register_event_time_timer(100)
            opened.commit(0, [keyed.snapshot(0, opened).result()])
    for options in ({}, {"target": tmp_path / "copy"}):
        with pytest.raises(sb.UsageError, match="timers cannot be dropped"):
            sb.tools.drop_state(store, "statebackend.timers.event", **options)  # type: ignore[arg-type]
        with pytest.raises(sb.UsageError) as caught:
            sb.tools.drop_state(store, "cuont", **options)  # type: ignore[arg-type]
        assert caught.value.hint == "there are: 'count'"
    assert CheckpointReader(store).records() == []


def test_drop_state_is_refused_while_a_query_writes(tmp_path: Path) -> None:
    run(tmp_path, 0, Keeps("count"))
    with CheckpointStore(tmp_path).open_for_writing(), pytest.raises(sb.UsageError) as caught:
        sb.tools.drop_state(tmp_path, "count")
    assert caught.value.code == "USAGE.STORE_IN_USE"
    with pytest.raises(sb.UsageError, match="id= needs target="):
        sb.tools.drop_state(tmp_path, "count", id=0)
    with pytest.raises(sb.UsageError, match="open for reading only"):
        sb.tools.drop_state(CheckpointReader(tmp_path), "count")
    with pytest.raises(sb.UsageError, match="there is no store"):
        sb.tools.drop_state(tmp_path / "nowhere", "count")
    assert CheckpointReader(tmp_path).records() == []


def test_drop_state_happens_whole_or_not_when_it_is_killed_at_any_call() -> None:
    def made() -> Disk:
        disk = Disk()
        store = CheckpointStore("/", _files=PosixFiles("/store", SimulatedCalls(disk)))
        with (
            store.open_for_writing(key_type=int, max_parallelism=16),
            sb.create_backend("heap").create_keyed_backend(int, max_parallelism=16) as keyed,
        ):
            for name in ("kept", "dropped"):
                keyed.get_value_state(sb.ValueStateDescriptor(name, int)).update_many([1, 2], [1, 2])
            store.commit(7, [keyed.snapshot(7, store).result()])
        return disk

    def on(disk: Disk, calls: SimulatedCalls | None = None) -> CheckpointStore:
        return CheckpointStore("/", _files=PosixFiles("/store", calls or SimulatedCalls(disk)))

    def names_of(checkpoint: sb.Checkpoint) -> list[str]:
        names = [state["name"] for state in checkpoint.snapshots[0].states]
        return [name for name in names if not name.startswith("statebackend.")]

    clean = SimulatedCalls(made())
    sb.tools.drop_state(on(clean.disk, clean), "dropped")
    found = set()
    for at in range(len(clean.made)):
        disk = made()
        calls = SimulatedCalls(disk, lambda number, name, at=at: "die" if number == at else None)
        with pytest.raises(Dead):
            sb.tools.drop_state(on(disk, calls), "dropped")
        for policy in ("kept", "lost"):
            left = disk.crash(policy, at)
            store = on(left)
            states = names_of(store.open_latest())
            found.add(tuple(states))
            with (
                store.open_for_writing(),
                sb.create_backend("heap").create_keyed_backend(
                    int, max_parallelism=16, restore=store.open(7)
                ) as keyed,
            ):
                assert keyed.undeclared_states() == states, "a takeover keeps what was dropped"
                store.commit(8, [keyed.snapshot(8, store).result()])
                assert names_of(store.open(8)) == states
    assert found == {("dropped", "kept"), ("kept",)}


def test_state_is_dropped_from_a_golden_store(tmp_path: Path) -> None:
    """Its entries were written before a log could say which states are dropped."""
    golden = Path(__file__).parents[1] / "golden" / "2" / "store"
    shutil.copytree(golden, tmp_path / "store")
    names = {"aging", "count", "deep", "joined", "mean", "name", "numbers", "pair", "seen", "tags", "total"}
    sb.tools.drop_state(tmp_path / "store", "seen")
    dropped = source_of(tmp_path / "store")
    with create("heap").create_keyed_backend(str, max_parallelism=16, restore=dropped) as keyed:
        assert set(keyed.undeclared_states()) == names - {"seen"}
    with CheckpointStore(tmp_path / "store").open_for_writing() as store:
        assert store.open_latest().dropped_states == {"seen"}


def test_hosts_refuse_a_misspelt_name_and_follow_a_drop(tmp_path: Path) -> None:
    def batch(batch_id: int, function: Any) -> None:
        with closing(HostQuery(tmp_path, job_of(function), 2)) as query:
            query.run(batch_id, rows(batch_id + 1))

    for batch_id in range(2):
        batch(batch_id, KeepsLists("count", "total"))
    with pytest.raises(sb.StateMigrationError) as caught:
        batch(2, KeepsLists("count", "totl"))
    assert caught.value.code == "STATE_MIGRATION.NOT_REQUESTED"
    assert "'total': stored, not declared; 'totl': begun empty" in str(caught.value.detail)
    assert CheckpointReader(tmp_path).checkpoints() == [0, 1]
    sb.tools.drop_state(tmp_path, "total")
    batch(2, KeepsLists("count", "total"))
    assert set(sb.tools.state(tmp_path, "count").to_table()["value"].to_pylist()) == {6}
    assert set(sb.tools.state(tmp_path, "total").to_table()["value"].to_pylist()) == {3}
    assert run(tmp_path, 3, KeepsLists("count", "total")) == "[6, 3]"


def test_harness_keeps_states_that_a_function_does_not_request() -> None:
    with (
        sb.testing.Harness(Keeps("count", "total"), key="user") as first,
        sb.testing.Harness(Keeps("count"), key="user") as second,
    ):
        first.process_batch(rows(1))
        second.restore(first.snapshot())
        second.process_batch(rows(2))
        assert second.keyed.undeclared_states() == ["total"]
