"""Operator state in checkpoints: what was taken comes back, whole or not at all, at any parallelism."""

from __future__ import annotations

import datetime
import decimal
import errno
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, strategies as st
from simulated_disk import Disk, SimulatedCalls
from type_samples import OBJECTS, SORTS, SORTS_OF_KEYS, Backwards, same, sample

import statebackend as sb
from statebackend import types as t
from statebackend.checkpoint import CheckpointStore, StateSnapshot
from statebackend.checkpoint.files import PosixFiles
from statebackend.checkpoint.format import read_data_file
from statebackend.checkpoint.format.index import TRAILER, Trailer
from statebackend.errors import (
    ClosedError,
    CorruptCheckpointError,
    StateMigrationError,
    StoreError,
    UsageError,
)
from statebackend.operator_state.element_columns import to_bytes, to_column

pytestmark = pytest.mark.usefixtures("no_fsync")

UTC = datetime.timezone.utc


class Eight(Backwards):
    fixed_width = 8


class Thing:
    def __init__(self, n: int) -> None:
        self.n = n

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Thing) and self.n == other.n

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> Any:
        return remade, (self.n,)


#: How many things have been unpickled.
unpickled = [0]


def remade(n: int) -> Thing:
    unpickled[0] += 1
    return Thing(n)


#: A type of every sort, and values of it.
TYPES = {sort: sample(sort, random.Random(sort)) for sort in [*SORTS, *OBJECTS]}


def elements(name: str) -> sb.ListStateDescriptor:
    return sb.ListStateDescriptor(name, TYPES[name.split(":")[1]].declared)


def entries(name: str) -> sb.MapStateDescriptor:
    _, key, value = name.split(":")
    return sb.MapStateDescriptor(name, TYPES[key].declared, TYPES[value].declared)


def states_of(operator: sb.OperatorStateBackend, names: list[str]) -> Iterator[Any]:
    for name in names:
        kind = name.split(":")[0]
        if kind == "split":
            yield operator.get_list_state(elements(name))
        elif kind == "union":
            yield operator.get_union_list_state(elements(name))
        else:
            yield operator.get_broadcast_state(entries(name))


def fill(operator: sb.OperatorStateBackend, names: list[str], rng: random.Random) -> None:
    for name, state in zip(names, states_of(operator, names), strict=True):
        *kinds, of = name.split(":")
        for _ in range(rng.randrange(5)):
            if kinds[0] == "broadcast":
                state.put(rng.choice(TYPES[kinds[1]].present), rng.choice(TYPES[of].values))
            else:
                state.add(rng.choice(TYPES[of].present))
        if rng.random() < 0.2:
            state.clear()


NAMES = [
    *(f"split:{name}" for name in TYPES),
    *(f"union:{name}" for name in TYPES),
    *(f"broadcast:{key}:bigint" for key in SORTS_OF_KEYS),
    *(f"broadcast:string:{name}" for name in TYPES),
]


def numbers(operator: sb.OperatorStateBackend) -> Any:
    return operator.get_list_state(sb.ListStateDescriptor("n", int))


def rules(operator: sb.OperatorStateBackend) -> Any:
    return operator.get_broadcast_state(sb.MapStateDescriptor("rules", str, int))


def checkpoint_of(
    store: CheckpointStore, checkpoint_id: int, operators: list[sb.OperatorStateBackend]
) -> sb.Checkpoint:
    pending = [each.snapshot(checkpoint_id, store) for each in operators]
    return store.commit(checkpoint_id, [each.result() for each in pending])


def restored(restore: Any, parallelism: int) -> list[sb.OperatorStateBackend]:
    return [
        sb.OperatorStateBackend(subtask_index=index, parallelism=parallelism, restore=restore)
        for index in range(parallelism)
    ]


@given(st.lists(st.none() | st.binary()))
def test_pickles_and_values_of_a_users_serializer_are_bytes(data: list[bytes | None]) -> None:
    for config in (t.PICKLE.config(), t.of(Backwards()).config(), t.LIST(t.of(Eight())).config()):
        column = to_column(data, config)
        assert column.type == pa.binary()
        assert column.to_pylist() == to_bytes(column, config) == data


def test_all_returns_at_any_parallelism(store: CheckpointStore, tmp_path: Path, rng: random.Random) -> None:
    """What a checkpoint or a savepoint gives is what the same contents give without files, in any chain."""
    operators = restored((), 1)
    for checkpoint_id, parallelism in enumerate((2, 3, 1, 5)):
        for each in operators:
            fill(each, NAMES, rng)
        expected = restored([each.contents() for each in operators], parallelism)
        if checkpoint_id == 1:
            for each in operators:
                each.savepoint(tmp_path / "savepoint")
            of_savepoint = restored(tmp_path / "savepoint", parallelism)
            assert [each.contents() for each in of_savepoint] == [each.contents() for each in expected]
        operators = restored(checkpoint_of(store, checkpoint_id, operators), parallelism)
        assert [each.contents() for each in operators] == [each.contents() for each in expected]
        assert all(each.is_restored for each in operators)
        for mine, other in zip(operators, expected, strict=True):
            for state, same_state in zip(states_of(mine, NAMES), states_of(other, NAMES), strict=True):
                if isinstance(state, sb.BroadcastState):
                    assert same(list(state.items()), list(same_state.items()), keys=False)
                elif isinstance(same_state.descriptor.element_type, t.Type):
                    assert same(state.get(), same_state.get())


def test_files_hold_declared_types(store: CheckpointStore) -> None:
    operator = sb.OperatorStateBackend()
    operator.get_list_state(sb.ListStateDescriptor("rows", t.ROW(a=t.LONG, b=t.STRING))).add((1, "x"))
    operator.get_broadcast_state(sb.MapStateDescriptor("rules", str, t.DECIMAL(4, 1))).put_all(
        {"b": decimal.Decimal("1.5"), "a": None}
    )
    checkpoint = checkpoint_of(store, 0, [operator])
    (snapshot,) = checkpoint.snapshots
    (file,) = snapshot.files
    assert file.kind == "operator"
    assert snapshot.extra == {"part": "operator"}
    assert [(state["name"], state["kind"]) for state in snapshot.states] == [
        ("rows", "split"),
        ("rules", "broadcast"),
    ]
    with checkpoint.open_file(file) as source:
        data = read_data_file(source, file.name)
        (rows,), (rules,) = list(data.read("rows")), list(data.read("rules"))
    assert rows.batch.to_pylist() == [{"value": {"a": 1, "b": "x"}}]
    assert rules.batch.schema.types == [pa.string(), pa.decimal128(4, 1)]
    assert rules.batch.column("map_key").to_pylist() == ["b", "a"]
    with checkpoint.open_file(file) as source:
        assert pa.ipc.open_file(source).read_all().num_rows == 3


def test_many_elements_come_back_in_order(store: CheckpointStore) -> None:
    """More than one batch of the file, cut anywhere."""
    old = restored((), 2)
    numbers(old[0]).add_all(range(150_001))
    numbers(old[1]).add_all(range(150_001, 200_000))
    checkpoint = checkpoint_of(store, 0, old)
    new = [numbers(each).get() for each in restored(checkpoint, 3)]
    assert [len(each) for each in new] == [66_667, 66_667, 66_666]
    assert [*new[0], *new[1], *new[2]] == list(range(200_000))


def test_undeclared_state_is_never_unpickled(store: CheckpointStore, rng: random.Random) -> None:
    first = sb.OperatorStateBackend()
    fill(first, NAMES, rng)
    first.get_list_state(sb.ListStateDescriptor("things", t.PICKLE)).add_all([Thing(1), Thing(2)])
    before, unpickled[0] = first.contents(), 0
    operators = restored(checkpoint_of(store, 0, [first]), 3)
    assert all(each.registered_state_names() == [] for each in operators)
    operators = restored(checkpoint_of(store, 1, operators), 2)
    (last,) = restored(checkpoint_of(store, 2, operators), 1)
    assert unpickled == [0]
    after = last.contents()
    assert set(after) == set(before)
    for name, state in before.items():
        if state["mode"] == "union":
            # Once more for each instance of the generations between.
            assert after[name]["elements"] == state["elements"] * 6
        elif state["mode"] == "split":
            assert sorted(after[name]["elements"]) == sorted(state["elements"])
        else:
            assert after[name] == state
    things = last.get_list_state(sb.ListStateDescriptor("things", t.PICKLE)).get()
    assert sorted(thing.n for thing in things) == [1, 2]
    assert unpickled == [2]


def test_restored_types_may_widen_and_rows_may_change(store: CheckpointStore) -> None:
    first = sb.OperatorStateBackend()
    first.get_list_state(sb.ListStateDescriptor("n", "int")).add(7)
    first.get_union_list_state(sb.ListStateDescriptor("r", "struct<a:int,b:string>")).add((1, "x"))
    again = sb.OperatorStateBackend(restore=checkpoint_of(store, 0, [first]))
    assert again.get_list_state(sb.ListStateDescriptor("n", "bigint")).get() == [7]
    rows = again.get_union_list_state(sb.ListStateDescriptor("r", "struct<c:date,a:bigint>"))
    assert [tuple(row) for row in rows.get()] == [(None, 1)]
    # What was migrated is written as it is now.
    last = sb.OperatorStateBackend(restore=checkpoint_of(store, 1, [again]))
    assert last.contents()["n"]["config"]["types"] == {"element": {"type": "long"}}


def test_state_that_does_not_fit_is_refused_and_stays(store: CheckpointStore) -> None:
    first = sb.OperatorStateBackend()
    first.get_list_state(sb.ListStateDescriptor("n", "int")).add(7)
    first.get_list_state(sb.ListStateDescriptor("p", t.PICKLE)).add(7)
    first.get_list_state(sb.ListStateDescriptor("c", Backwards())).add("ab")
    first.get_broadcast_state(sb.MapStateDescriptor("b", "int", "float")).put(1, 0.5)
    again = sb.OperatorStateBackend(restore=checkpoint_of(store, 0, [first]))
    for name, element in [("n", "smallint"), ("p", t.BYTES), ("c", t.BYTES), ("c", Eight())]:
        with pytest.raises(StateMigrationError, match=f"'{name}'"):
            again.get_list_state(sb.ListStateDescriptor(name, element))
    for name in "nb":
        with pytest.raises(StateMigrationError, match=f"'{name}'"):
            again.get_broadcast_state(sb.MapStateDescriptor(name, "int", "int"))
    assert again.contents() == first.contents()


def test_snapshots_of_keyed_state_are_passed_over(store: CheckpointStore) -> None:
    operator = sb.OperatorStateBackend()
    numbers(operator).add(7)
    with store.begin_snapshot(0).create("base") as file:
        file.write(b"no file of ours")
        keyed = StateSnapshot(
            0,
            store.epoch,
            files=(file.finish(),),
            states=({"name": "n", "kind": "value"},),
            extra={"part": "keyed"},
        )
    checkpoint = store.commit(0, [keyed, operator.snapshot(0, store).result()])
    assert sb.OperatorStateBackend(restore=checkpoint).contents() == operator.contents()
    only_keyed = store.commit(1, [StateSnapshot(1, store.epoch, extra={"part": "keyed"})])
    again = sb.OperatorStateBackend(restore=only_keyed)
    assert again.is_restored
    assert again.contents() == {}


def test_snapshots_that_are_not_committed_are_opened_by_their_store(store: CheckpointStore) -> None:
    old = restored((), 2)
    for index, each in enumerate(old):
        numbers(each).add_all([index, 10 + index])
    snapshots = [each.snapshot(4, store).result() for each in old]
    given = [snapshots[1].to_json(), snapshots[0]]
    checkpoint = store.open_readonly().open_snapshots(given)
    assert checkpoint.id == 4
    (one,) = restored(checkpoint, 1)
    assert numbers(one).get() == [0, 10, 1, 11]
    store.abort(4)
    with pytest.raises(CorruptCheckpointError, match="missing"):
        restored(checkpoint, 1)
    for refused in ([], [snapshots[0], StateSnapshot(5, store.epoch)]):
        with pytest.raises(UsageError):
            store.open_snapshots(refused)


@pytest.mark.parametrize("wrong", [{}, "", b"x", 7, [7], ["x"], [[]], [StateSnapshot(0, epoch=1)]], ids=repr)
def test_wrong_sources_of_a_restore_are_refused(wrong: Any) -> None:
    with pytest.raises(UsageError, match="restore is a Checkpoint, a savepoint"):
        sb.OperatorStateBackend(restore=wrong)


def test_a_checkpoint_that_lacks_an_instance_or_splits_its_state_is_refused(store: CheckpointStore) -> None:
    old = restored((), 3)
    for each in old:
        numbers(each).add(1)
    for checkpoint_id, chosen in enumerate(((0, 1), (0, 2), (1,), (0, 1, 2, 2))):
        snapshots = [old[index].snapshot(checkpoint_id, store).result() for index in chosen]
        checkpoint = store.commit(checkpoint_id, snapshots)
        with pytest.raises(CorruptCheckpointError, match="every instance") as caught:
            sb.OperatorStateBackend(restore=checkpoint)
        assert caught.value.code == "CORRUPT_CHECKPOINT.INCOMPLETE"
    told = [each.snapshot(9, store).result().to_json() for each in old]
    told[0]["files"] += told[1]["files"]
    with pytest.raises(CorruptCheckpointError, match="more than one file"):
        sb.OperatorStateBackend(restore=store.commit(9, told))


#: It says of a map that it is a list, which holds no nulls.
NULLS = {"name": "n", "kind": "split", "types": {"element": {"type": "long"}}}


@pytest.mark.parametrize(
    "state",
    [
        {"name": "n", "kind": "value", "types": {"value": {"type": "long"}}},
        {"name": "n", "kind": "split"},
        {"name": "n", "kind": "split", "types": {"value": {"type": "long"}}},
        {"name": "n", "kind": "broadcast", "types": {"element": {"type": "long"}}},
        {"name": "n", "kind": "split", "types": {"element": {"type": "int"}}},
        {"name": "n", "kind": "split", "types": {"element": {"type": "of another planet"}}},
        {"name": "m", "kind": "split", "types": {"element": {"type": "long"}}},
        NULLS,
    ],
    ids=str,
)
def test_a_file_that_is_not_as_described_is_refused(store: CheckpointStore, state: dict[str, Any]) -> None:
    operator = sb.OperatorStateBackend()
    if state is NULLS:
        operator.get_broadcast_state(sb.MapStateDescriptor("n", int, int)).put(1, None)
    else:
        numbers(operator).add(1)
    told = operator.snapshot(0, store).result().to_json()
    told["states"] = [state]
    checkpoint = store.commit(0, [told])
    with pytest.raises(CorruptCheckpointError, match=told["files"][0]["name"]):
        sb.OperatorStateBackend(restore=checkpoint)


def regions(content: bytes) -> dict[str, range]:
    """The parts of a data file, by the page that describes them."""
    footer = int.from_bytes(content[-10:-6], "little") + 10
    trailer_end = len(content) - footer
    trailer_start = trailer_end - TRAILER.size
    trailer = Trailer.decode(content[trailer_start:trailer_end], "", 0)
    index_start = trailer_start - trailer.index_length
    schema_end = 16 + int.from_bytes(content[12:16], "little")
    return {
        "start": range(schema_end),
        "batches and their end": range(schema_end, index_start),
        "index": range(index_start, trailer_start),
        "trailer": range(trailer_start, trailer_end),
        "footer": range(trailer_end, len(content)),
    }


def test_only_what_an_instance_gets_is_read(root: Path, store: CheckpointStore) -> None:
    old = restored((), 2)
    for each in old:
        numbers(each).add_all(range(1000))
    checkpoint = checkpoint_of(store, 0, old)
    path = root / checkpoint.snapshots[1].files[0].name
    content = bytearray(path.read_bytes())
    content[regions(bytes(content))["batches and their end"].start + 100] ^= 1
    path.write_bytes(bytes(content))
    states = [
        sb.OperatorStateBackend(subtask_index=index, parallelism=parallelism, restore=checkpoint)
        for index, parallelism in ((0, 2), (0, 4), (1, 4))
    ]
    sizes = [len(each.contents()["n"]["elements"]) for each in states]
    assert sizes == [1000, 500, 500]
    for index, parallelism in ((1, 2), (2, 4), (0, 1), (1, 3)):
        with pytest.raises(CorruptCheckpointError, match=path.name):
            sb.OperatorStateBackend(subtask_index=index, parallelism=parallelism, restore=checkpoint)


def data_files(root: Path) -> list[str]:
    return sorted(path.relative_to(root).as_posix() for path in root.glob("data/*/*"))


@pytest.fixture
def operator() -> Iterator[sb.OperatorStateBackend]:
    with sb.OperatorStateBackend() as made:
        numbers(made).add_all([1, 2])
        yield made


def test_each_snapshot_in_flight_describes_its_own_moment(
    operator: sb.OperatorStateBackend, store: CheckpointStore, rng: random.Random
) -> None:
    moments, pending, marks = [], [], [operator.mark()]
    for checkpoint_id in range(12):
        what = rng.randrange(6)
        if what == 0:
            numbers(operator).update([checkpoint_id])
        elif what == 1:
            numbers(operator).clear()
        elif what == 2:
            rules(operator).put("id", checkpoint_id)
        elif what == 3:
            operator.rollback(marks[0])
            del marks[1:]
        elif what == 4:
            marks.append(operator.mark())
        numbers(operator).add(checkpoint_id)
        moments.append(operator.contents())
        pending.append(operator.snapshot(checkpoint_id, store))
        numbers(operator).add(-checkpoint_id)
        rules(operator).put("late", checkpoint_id)
        operator.rollback(marks[-1])
    operator.close()
    for checkpoint_id, (each, contents) in enumerate(zip(pending, moments, strict=True)):
        checkpoint = store.commit(checkpoint_id, [each.result()])
        assert sb.OperatorStateBackend(restore=checkpoint).contents() == contents


def test_abort_leaves_nothing(operator: sb.OperatorStateBackend, root: Path, store: CheckpointStore) -> None:
    written = operator.snapshot(0, store)
    written.result()
    assert len(data_files(root)) == 1
    written.abort()
    written.abort()
    assert data_files(root) == []
    numbers(operator).add_all(range(300_000))
    pending = operator.snapshot(1, store)
    pending.abort()
    assert data_files(root) == []
    with pytest.raises(UsageError, match="aborted"):
        pending.result()
    store.restart()  # nothing is in flight
    checkpoint = checkpoint_of(store, 2, [operator])
    assert len(data_files(root)) == len(checkpoint.files) == 1


def test_a_thread_that_does_not_start(
    operator: sb.OperatorStateBackend, store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            operator.snapshot(0, store)
    assert not store._in_flight
    committed = store.commit(0, [operator.snapshot(0, store).result()])
    assert [file.kind for file in committed.files.values()] == ["operator"]


def test_a_snapshot_that_cannot_be_written_leaves_nothing(
    operator: sb.OperatorStateBackend,
) -> None:
    for failing in ("create", "write", "sync"):
        disk = Disk()
        calls = SimulatedCalls(disk)
        store = CheckpointStore("/", _files=PosixFiles("/store", calls)).open_for_writing()
        calls.plan = lambda number, name, failing=failing: errno.ENOSPC if name == failing else None
        pending = operator.snapshot(0, store)
        for _ in range(2):
            with pytest.raises(StoreError) as caught:
                pending.result()
            assert caught.value.errno == errno.ENOSPC
        calls.plan = lambda number, name: None
        assert [name for name in disk.walk() if name.endswith(".arrow")] == []
        store.restart()
        checkpoint_of(store, 0, [operator])


def test_the_unchanged_is_kept(operator: sb.OperatorStateBackend, root: Path, store: CheckpointStore) -> None:
    rules(operator).put("limit", 1)
    first = checkpoint_of(store, 0, [operator])
    mark = operator.mark()
    assert checkpoint_of(store, 1, [operator]).files == first.files
    numbers(operator).add(3)
    operator.rollback(mark)
    third = checkpoint_of(store, 2, [operator])
    assert third.files == first.files
    assert len(data_files(root)) == 1
    assert sb.OperatorStateBackend(restore=third).contents() == operator.contents()
    rules(operator).put("limit", 2)
    fourth = checkpoint_of(store, 3, [operator])
    assert fourth.files != first.files
    assert sb.OperatorStateBackend(restore=fourth).contents() == operator.contents()
    whole = store.commit(4, [operator.snapshot(4, store, incremental=False).result()])
    assert whole.files != fourth.files
    store.abort(4)
    operator.get_list_state(sb.ListStateDescriptor("another", int))
    assert checkpoint_of(store, 5, [operator]).files != whole.files
    store.close()
    store.open_for_writing()
    assert set(checkpoint_of(store, 6, [operator]).files) == set(store.open(5).files)


def test_only_files_that_will_be_kept_are_named_again(
    operator: sb.OperatorStateBackend, root: Path, store: CheckpointStore
) -> None:
    aborted = operator.snapshot(0, store)
    aborted.result()
    aborted.abort()
    first = checkpoint_of(store, 1, [operator])
    assert first.files
    for checkpoint_id in (2, 3, 4):  # commits without this backend: its file goes
        store.commit(checkpoint_id)
    assert data_files(root) == []
    again = checkpoint_of(store, 5, [operator])
    assert again.files != first.files
    in_flight = [operator.snapshot(checkpoint_id, store) for checkpoint_id in (6, 7)]
    numbers(operator).add(9)
    in_flight.append(operator.snapshot(8, store))
    in_flight[1].abort()
    store.commit(6, [in_flight[0].result()])
    eighth = store.commit(8, [in_flight[2].result()])
    assert store.open(6).files == again.files
    assert sb.OperatorStateBackend(restore=eighth).contents() == operator.contents()
    with CheckpointStore(root.parent / "other") as other:
        checkpoint_of(other.open_for_writing(), 0, [operator]).verify()


def test_without_elements_no_file_is_written(root: Path, store: CheckpointStore) -> None:
    operator = sb.OperatorStateBackend()
    assert checkpoint_of(store, 0, [operator]).files == {}
    numbers(operator).add(1)
    numbers(operator).clear()
    rules(operator)
    checkpoint = checkpoint_of(store, 1, [operator])
    assert checkpoint.files == {}
    assert data_files(root) == []
    again = sb.OperatorStateBackend(restore=checkpoint)
    assert again.contents() == operator.contents()
    assert set(again.contents()) == {"n", "rules"}


def test_refused_snapshots_change_nothing(operator: sb.OperatorStateBackend, store: CheckpointStore) -> None:
    for wrong_id in (-1, "7", None, True):
        with pytest.raises(UsageError):
            operator.snapshot(wrong_id, store)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="CheckpointStore"):
        operator.snapshot(0, store.uri)  # type: ignore[arg-type]
    store.restart()  # nothing is in flight
    store.close()
    with pytest.raises(ClosedError):
        operator.snapshot(0, store)
    operator.close()
    with pytest.raises(ClosedError):
        operator.snapshot(0, store)


def test_given_contents_may_go_on_being_changed(store: CheckpointStore) -> None:
    first = sb.OperatorStateBackend()
    numbers(first).add(1)
    contents = first.contents()
    again = sb.OperatorStateBackend(restore=[contents])
    pending = again.snapshot(0, store)
    contents["n"]["elements"].append(b"no long")
    checkpoint = store.commit(0, [pending.result()])
    last = sb.OperatorStateBackend(restore=checkpoint)
    assert numbers(last).get() == numbers(again).get() == [1]
