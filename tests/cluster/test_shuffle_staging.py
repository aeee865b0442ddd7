"""Pieces of batches on a host: what is taken is what was sent, and nothing of what is not stays anywhere."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import struct
import threading
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from processes import gone

from statebackend.cluster.shuffle_pieces import Attempt, Kind, Piece, PieceId, PieceSum, PieceSums
from statebackend.cluster.shuffle_staging import PieceStaging, StagedRows, remove_orphans
from statebackend.errors import ClosedError, StateBackendError, StoreError, UsageError

SCHEMA = pa.schema([("user", pa.string()), ("n", pa.int64())])
TAG = PieceId(3, 7, 0, 42)


def some_rows(rng: random.Random, most: int = 20) -> pa.RecordBatch:
    count = rng.randint(0, most)
    users = [rng.choice([None, "", "ann", "b" * rng.randint(0, 50)]) for _ in range(count)]
    return pa.record_batch([users, pa.array(range(count), pa.int64())], schema=SCHEMA)


def numbered(*numbers: int) -> pa.RecordBatch:
    return pa.record_batch(
        [pa.array([str(n) for n in numbers]), pa.array(numbers, pa.int64())], schema=SCHEMA
    )


def message(rows: pa.RecordBatch) -> bytes:
    return bytes(rows.serialize())


def send(staging: PieceStaging, tag: PieceId, *parts: tuple[Kind, pa.RecordBatch]) -> PieceSum:
    """Send a piece as a task does; the sums of both ends are the same."""
    piece, sums = staging.begin(tag, SCHEMA), PieceSums()
    for kind, rows in parts:
        data = message(rows)
        piece.add(kind, data)
        sums.add(kind, data, rows.num_rows)
    found = piece.finish()
    assert found == sums.total
    return found


def numbers(table: pa.Table | None) -> list[int]:
    found: list[int] = table["n"].to_pylist()
    return found


def holds(staging: PieceStaging) -> tuple[int, int]:
    return staging.bytes_in_memory, staging.bytes_on_disk


def files_in(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


@pytest.fixture(params=[1 << 20, 600, 0], ids=["in memory", "half and half", "on disk"])
def staging(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    made = PieceStaging(memory=request.param, folder=str(tmp_path))
    yield made
    made.close()
    assert holds(made) == (0, 0)
    assert list(tmp_path.iterdir()) == []


def test_pieces_are_taken_in_the_order_in_which_they_are_named(staging: PieceStaging) -> None:
    tags = [TAG._replace(task=task) for task in (5, 6, 7)]
    send(staging, tags[0], ("rows", numbered(1, 2)), ("broadcast", numbered(100)), ("rows", numbered(3)))
    send(staging, tags[1])
    send(staging, tags[2], ("broadcast", numbered(101, 102)), ("rows", numbered(4)))
    staged = staging.taken([tags[2], tags[1], tags[0]])
    assert (staged.num_rows, staged.num_broadcast) == (4, 3)
    for _ in range(2):  # reading may begin anew
        assert numbers(staged.rows()) == [4, 1, 2, 3]
        assert numbers(staged.broadcast()) == [101, 102, 100]
        assert [rows.num_rows for rows in staged.batches()] == [1, 2, 1]
    assert staged.schema == SCHEMA
    assert staged.num_bytes == sum(holds(staging))
    assert staged.is_in_memory == (staging.bytes_on_disk == 0)
    table = staged.rows()
    staged.release()
    staged.release()
    assert holds(staging) == (0, 0)
    assert numbers(table) == [4, 1, 2, 3], "what was read stays"
    with pytest.raises(ClosedError, match="have been released"):
        staged.rows()


def test_nothing_is_taken_if_anything_is_not_as_it_was_sent(staging: PieceStaging) -> None:
    other = TAG._replace(task=1)
    total = send(staging, TAG, ("rows", numbered(1)))
    half = staging.begin(other, SCHEMA)
    half.add("rows", message(numbered(2)))
    before = holds(staging)
    wrong = total._replace(checksum=total.checksum ^ 1)
    for tags, sums, error, text in [
        ([TAG, other], None, StoreError, "is not here"),  # not finished
        ([TAG, TAG._replace(task=9)], None, StoreError, "is not here"),
        ([TAG], [wrong], StoreError, "not what its task has sent"),
        ([TAG], [[*total.to_json()[:2], 0]], StoreError, "not what its task has sent"),
        ([TAG], [], UsageError, "not one sum for each"),
        ([TAG, TAG], None, UsageError, "different ones of one try"),
        ([TAG, TAG._replace(attempt=1)], None, UsageError, "different ones of one try"),
    ]:
        with pytest.raises(error, match=text) as found:
            staging.taken(tags, sums)
        assert error is UsageError or found.value.code == "CLUSTER.STAGING"
        assert holds(staging) == before
    half.abandon()
    staged = staging.taken([TAG], [total.to_json()])
    assert numbers(staged.rows()) == [1]
    staged.release()


def test_pieces_of_one_batch_have_the_same_columns(staging: PieceStaging) -> None:
    send(staging, TAG)
    staging.begin(TAG._replace(task=1), pa.schema([("other", pa.int64())])).finish()
    with pytest.raises(StoreError, match="not the same columns"):
        staging.taken([TAG, TAG._replace(task=1)])
    staging.taken([TAG]).release()


def test_only_the_try_that_is_awaited_is_taken(staging: PieceStaging) -> None:
    tries = [Attempt(3, 7, attempt) for attempt in range(3)]
    for each in tries:
        send(staging, PieceId(*each, 1), ("rows", numbered(each.attempt)))
    staging.drop_others(*tries[1])
    assert sum(holds(staging)) == len(message(numbered(1)))
    for each in (tries[0], tries[2], Attempt(4, 0, 0)):
        with pytest.raises(ClosedError, match="takes no pieces of this try"):
            staging.begin(PieceId(*each, 2), SCHEMA)
    send(staging, PieceId(*tries[1], 2), ("rows", numbered(5)))
    staged = staging.taken([PieceId(*tries[1], task) for task in (1, 2)])
    assert numbers(staged.rows()) == [1, 5]
    with pytest.raises(ClosedError, match="takes no pieces of this try"):
        staging.begin(PieceId(*tries[1], 3), SCHEMA)
    staging.drop_others(*tries[1])  # once more, after it was given up
    send(staging, PieceId(*tries[1], 1), ("rows", numbered(8)))
    assert numbers(staged.rows()) == [1, 5], "what was taken is no piece any more"
    staged.release()
    staged = staging.taken([PieceId(*tries[1], 1)])
    assert numbers(staged.rows()) == [8], "and what has its name now is another"
    staged.release()
    staging.drop_others(3, -1, -1)
    assert holds(staging) == (0, 0)


def test_closing_ends_everything(staging: PieceStaging) -> None:
    send(staging, TAG, ("rows", numbered(1)))
    staged = staging.taken([TAG])
    piece = staging.begin(TAG._replace(batch_id=8), SCHEMA)
    piece.add("rows", message(numbered(1)))
    for _ in range(2):
        staging.close()
        assert holds(staging) == (0, 0)
    with pytest.raises(ClosedError):
        piece.add("rows", message(numbered(1)))
    with pytest.raises(ClosedError):
        staged.rows()
    with pytest.raises(ClosedError, match="staging of rows is closed"):
        staging.begin(TAG._replace(batch_id=9), SCHEMA)
    with pytest.raises(ClosedError, match="staging of rows is closed"):
        staging.taken([])


def test_wrong_message_ends_the_piece(staging: PieceStaging) -> None:
    whole = message(numbered(*range(50)))
    text = message(pa.record_batch([["abcdefghijk"], [1]], schema=SCHEMA))
    ends, beyond = (struct.pack("<ii", 0, end) + b"abcdefghijk" for end in (11, 1 << 20))
    assert text.count(ends) == 1
    wider = message(pa.record_batch({"user": ["a"]}))
    cuts = [whole[:size] for size in (10, len(whole) // 2, len(whole) - 1)]
    for wrong in (b"", b"x" * 100, bytes(1000), *cuts, wider, text.replace(ends, beyond)):
        assert_refused(staging, "rows", wrong, StoreError)
    assert_refused(staging, "others", whole, UsageError)


def assert_refused(staging: PieceStaging, kind: Any, data: bytes, error: type[Exception]) -> None:
    piece = staging.begin(TAG, SCHEMA)
    piece.add("rows", message(numbered(1, 2, 3)))
    with pytest.raises(error, match=r"a message of a piece .*task 42"):
        piece.add(kind, data)
    assert holds(staging) == (0, 0)
    with pytest.raises(ClosedError, match="not open any more"):
        piece.finish()


def test_dictionaries_are_refused_wherever_they_are() -> None:
    flat = pa.dictionary(pa.int8(), pa.string())
    for kind in (flat, pa.list_(pa.struct([("a", flat)])), pa.map_(pa.string(), flat)):
        with pytest.raises(UsageError, match="dictionary column"):
            PieceStaging().begin(TAG, pa.schema([("a", kind)]))


def test_bounds_are_numbers_of_bytes() -> None:
    for wrong in (-1, 1.5, None, True):
        for bound in ("memory", "quota"):
            with pytest.raises(UsageError, match="numbers of bytes"):
                PieceStaging(**{bound: wrong})  # type: ignore[arg-type]


def test_sums_tell_messages_apart_by_kind_order_and_borders() -> None:
    def total(*parts: tuple[Kind, bytes, int]) -> PieceSum:
        sums = PieceSums()
        for part in parts:
            sums.add(*part)
        return sums.total

    different = [
        total(("rows", b"ab", 1), ("rows", b"c", 1)),
        total(("rows", b"c", 1), ("rows", b"ab", 1)),
        total(("rows", b"a", 1), ("rows", b"bc", 1)),
        total(("rows", b"ab", 1), ("broadcast", b"c", 1)),
        total(("broadcast", b"ab", 1), ("rows", b"c", 1)),
        total(("rows", b"ab", 1), ("rows", b"d", 1)),
        total(("rows", b"ab", 0), ("rows", b"c", 2)),
    ]
    assert len({each.checksum for each in different}) == len(different)
    assert different[0][:2] == (2, 3)
    assert different[3][:2] == (1, 3), "broadcast rows are not those of one host"


def test_memory_is_used_to_the_last_byte_and_then_each_piece_has_one_file(tmp_path: Path) -> None:
    data = message(numbered(1))
    staging = PieceStaging(memory=3 * len(data), folder=str(tmp_path))
    first, second = staging.begin(TAG, SCHEMA), staging.begin(TAG._replace(task=1), SCHEMA)
    for piece in (first, second, first):
        piece.add("rows", data)
    assert holds(staging) == (3 * len(data), 0)
    assert list(tmp_path.iterdir()) == []
    for piece in (first, second, first):
        piece.add("rows", data)
    assert holds(staging) == (3 * len(data), 3 * len(data))
    (own,) = tmp_path.iterdir()
    assert own.stat().st_mode & 0o777 == 0o700
    assert sorted(path.stat().st_size for path in files_in(tmp_path)) == [len(data), 2 * len(data)]
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in files_in(tmp_path))
    second.abandon()
    assert holds(staging) == (2 * len(data), 2 * len(data))
    first.add("rows", message(numbered(2)))  # stays in order: behind what is on disk
    assert holds(staging) == (2 * len(data), 3 * len(data))
    first.finish()
    staged = staging.taken([TAG])
    assert not staged.is_in_memory
    assert numbers(staged.rows()) == [1, 1, 1, 1, 2]
    staged.release()
    assert files_in(tmp_path) == []
    staging.close()
    assert list(tmp_path.iterdir()) == []


def test_files_lie_where_the_system_has_temporary_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    staging = PieceStaging(memory=0)
    send(staging, TAG, ("rows", numbered(1)))
    assert len(files_in(tmp_path)) == 1
    staging.close()
    assert list(tmp_path.iterdir()) == []


def test_files_of_killed_processes_are_removed_and_nothing_else(tmp_path: Path) -> None:
    ended = gone()
    orphan = tmp_path / f"statebackend-staging-{ended}-x"
    others = {tmp_path / name for name in ("statebackend-staging-", "statebackend-staging-x", f"{ended}")}
    for each in (orphan, *others):
        each.mkdir()
        (each / "1.piece").touch()
    staging = PieceStaging(memory=0, folder=str(tmp_path))
    send(staging, TAG, ("rows", numbered(1)))
    (own,) = {*tmp_path.iterdir()} - {orphan, *others}
    remove_orphans(str(tmp_path))
    assert {*tmp_path.iterdir()} == {own, *others}
    staging.close()
    assert {*tmp_path.iterdir()} == others


def test_files_are_open_only_while_something_is_done_with_them(tmp_path: Path) -> None:
    staging = PieceStaging(memory=0, folder=str(tmp_path))
    before = len(os.listdir("/dev/fd"))
    tags = [TAG._replace(task=task) for task in range(20)]
    for tag in tags:
        send(staging, tag, ("rows", numbered(tag.task)))
    staging.begin(TAG._replace(task=99), SCHEMA).add("rows", message(numbered(1)))
    staged = staging.taken(tags)
    half_way: Any = staged.batches()
    next(half_way)
    half_way.close()
    assert numbers(staged.rows()) == list(range(20))
    assert len(os.listdir("/dev/fd")) == before
    staging.close()


@pytest.mark.parametrize(
    ("call", "number", "code"),
    [
        ("write", errno.ENOSPC, "CLUSTER.STAGING_FULL"),
        ("write", errno.EDQUOT, "CLUSTER.STAGING_FULL"),
        ("write", errno.EIO, "CLUSTER.STAGING"),
        ("close", errno.EIO, "CLUSTER.STAGING"),
        ("open", errno.EMFILE, "CLUSTER.STAGING"),
        ("mkdir", errno.EROFS, "CLUSTER.STAGING"),
    ],
)
def test_every_call_that_the_system_refuses_costs_the_piece_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int, code: str
) -> None:
    data = message(numbered(1))
    staging = PieceStaging(memory=len(data), folder=str(tmp_path))
    send(staging, TAG._replace(task=1), ("rows", numbered(7)))
    piece = staging.begin(TAG, SCHEMA)
    real, calls = getattr(os, call), []

    def refuses(*arguments: Any, **options: Any) -> Any:
        calls.append(call)
        if call == "write" and len(calls) == 1:
            return real(arguments[0], arguments[1][:5])  # a part of it, first
        if call == "close":
            real(*arguments)
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, refuses)
        with pytest.raises(StoreError, match=f"{os.strerror(number)}.*task 42") as found:
            add_and_finish(piece, data)
    assert calls
    assert (found.value.code, found.value.errno) == (code, number)
    assert holds(staging) == (len(data), 0)
    assert files_in(tmp_path) == []
    send(staging, TAG, ("rows", numbered(8)))
    staged = staging.taken([TAG._replace(task=1), TAG])
    assert numbers(staged.rows()) == [7, 8]
    staging.close()
    assert list(tmp_path.iterdir()) == []


def add_and_finish(piece: Piece, data: bytes) -> None:
    piece.add("rows", data)
    piece.finish()


def test_a_file_that_cannot_be_removed_is_so_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    staging = PieceStaging(memory=0, folder=str(tmp_path))
    send(staging, TAG, ("rows", numbered(1)))

    def refuses(path: str) -> None:
        raise OSError(errno.EBUSY, path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", refuses)
        staging.drop(*TAG.of_try)
    assert holds(staging) == (0, 0)
    staging.close()
    assert list(tmp_path.iterdir()) == []


def test_damage_on_disk_is_found_wherever_it_is(tmp_path: Path, rng: random.Random) -> None:
    staging = PieceStaging(memory=0, folder=str(tmp_path))
    send(staging, TAG, ("rows", numbered(*range(5))), ("broadcast", numbered(9)), ("rows", numbered(6)))
    staged = staging.taken([TAG])
    (file,) = files_in(tmp_path)
    whole = file.read_bytes()
    for _ in range(200):
        at = rng.randrange(len(whole))
        damaged = whole[:at] + bytes([whole[at] ^ (1 << rng.randrange(8))]) + whole[at + 1 :]
        file.write_bytes(rng.choice([damaged, whole[:at]]))
        with pytest.raises(StoreError, match="damaged") as found:
            read_all(staged)
        assert found.value.code == "CLUSTER.STAGING"
    file.write_bytes(whole)
    assert read_all(staged) == ([0, 1, 2, 3, 4, 6], [9])
    file.unlink()
    with pytest.raises(StoreError, match="No such file") as found:
        read_all(staged)
    assert found.value.code == "CLUSTER.STAGING"
    staging.close()
    assert list(tmp_path.iterdir()) == []


def read_all(staged: StagedRows) -> tuple[list[int], list[int]]:
    return numbers(staged.rows()), numbers(staged.broadcast())


def test_a_disk_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    staging = PieceStaging(memory=0, folder=str(tmp_path))
    send(staging, TAG, ("rows", numbered(1)))
    staged = staging.taken([TAG])
    real = os.pread

    def refuses(file: int, size: int, at: int) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "pread", refuses)
    with pytest.raises(StoreError, match="reading staged rows"):
        staged.rows()
    monkeypatch.setattr(os, "pread", lambda file, size, at: real(file, min(size, 7), at))
    assert numbers(staged.rows()) == [1], "in as many parts as the system likes"
    staging.close()


class Model:
    """What a staging should hold, after the same calls."""

    def __init__(self, memory: int, quota: int) -> None:
        self.memory, self.quota = memory, quota
        #: Of each piece, what was sent, and the bytes in memory and on disk.
        self.open: dict[PieceId, tuple[list[tuple[Kind, pa.RecordBatch]], list[int]]] = {}
        self.finished: dict[PieceId, tuple[list[tuple[Kind, pa.RecordBatch]], list[int]]] = {}
        self.taken: dict[int, list[int]] = {}
        self.over = Attempt(-1, -1, -1)

    def holds(self) -> tuple[int, int]:
        held = [*(each[1] for each in [*self.open.values(), *self.finished.values()]), *self.taken.values()]
        return sum(each[0] for each in held), sum(each[1] for each in held)

    def add(self, tag: PieceId, kind: Kind, rows: pa.RecordBatch, size: int) -> bool:
        """Note a message; False if there is no room."""
        sent, held = self.open[tag]
        in_memory, on_disk = self.holds()
        if not held[1] and in_memory + size <= self.memory:
            held[0] += size
        elif on_disk + size <= self.quota:
            held[1] += size
        else:
            del self.open[tag]
            return False
        sent.append((kind, rows))
        return True

    def end(self, until: Attempt) -> None:
        self.over = max(self.over, until)
        for pieces in (self.open, self.finished):
            for tag in [tag for tag in pieces if tag.of_try <= until]:
                del pieces[tag]


@pytest.mark.parametrize(("memory", "quota"), [(1 << 20, 0), (5000, 20_000), (0, 1 << 20), (2000, 3000)])
def test_any_order_of_calls_leaves_what_the_model_holds(
    memory: int, quota: int, tmp_path: Path, rng: random.Random
) -> None:
    staging, model = PieceStaging(memory=memory, quota=quota, folder=str(tmp_path)), Model(memory, quota)
    pieces: dict[PieceId, Piece] = {}
    taken: dict[int, tuple[StagedRows, list[tuple[Kind, pa.RecordBatch]]]] = {}
    for step in range(1500):
        now = Attempt(1, step // 100, step // 40 % 3)
        tag = PieceId(
            *now._replace(attempt=max(0, now.attempt - rng.choice([0, 0, 0, 1]))), rng.randint(0, 5)
        )
        choice = rng.random()
        if choice < 0.25:
            if tag.of_try <= model.over or tag in model.open or tag in model.finished:
                with pytest.raises((ClosedError, UsageError)):
                    staging.begin(tag, SCHEMA)
            else:
                pieces[tag] = staging.begin(tag, SCHEMA)
                model.open[tag] = ([], [0, 0])
        elif choice < 0.7 and model.open:
            tag = rng.choice(list(model.open))
            kind: Kind = rng.choice(["rows", "rows", "broadcast"])
            rows = some_rows(rng)
            fits = model.add(tag, kind, rows, len(message(rows)))
            with contextlib.nullcontext() if fits else pytest.raises(StoreError, match="do not fit") as found:
                pieces[tag].add(kind, message(rows))
            assert fits or (found.value.code, bool(found.value.hint)) == ("CLUSTER.STAGING_FULL", True)
        elif choice < 0.85 and model.open:
            tag = rng.choice(list(model.open))
            pieces[tag].finish()
            model.finished[tag] = model.open.pop(tag)
        elif choice < 0.88 and pieces:
            tag = rng.choice(list(pieces))
            pieces[tag].abandon()
            model.open.pop(tag, None)
            for more in (pieces[tag].finish, lambda tag=tag: pieces[tag].add("rows", message(numbered(2)))):
                with pytest.raises(ClosedError, match="not open any more"):
                    more()
        elif choice < 0.91:
            staging.drop(*tag.of_try)
            model.end(tag.of_try)
        elif choice < 0.96 and model.finished:
            of_try = rng.choice(list(model.finished)).of_try
            tags = [each for each in model.finished if each.of_try == of_try and rng.random() < 0.8]
            rng.shuffle(tags)
            staged = staging.taken(tags, [pieces[each].sum.to_json() for each in tags])  # type: ignore[union-attr]
            sent = [part for each in tags for part in model.finished[each][0]]
            held = [model.finished.pop(each)[1] for each in tags]
            model.taken[step] = [sum(each[0] for each in held), sum(each[1] for each in held)]
            taken[step] = (staged, sent)
            if tags:
                model.end(of_try)
        elif taken:
            at = rng.choice(list(taken))
            staged, sent = taken.pop(at)
            assert_rows(staged, sent)
            staged.release()
            del model.taken[at]
        assert holds(staging) == model.holds(), f"after step {step}"
        assert sum(path.stat().st_size for path in files_in(tmp_path)) == staging.bytes_on_disk
        assert staging.bytes_in_memory <= memory
        assert staging.bytes_on_disk <= quota
    for staged, sent in taken.values():
        assert_rows(staged, sent)
    staging.close()
    assert holds(staging) == (0, 0)
    assert list(tmp_path.iterdir()) == []


def assert_rows(staged: StagedRows, sent: list[tuple[Kind, pa.RecordBatch]]) -> None:
    for kind in ("rows", "broadcast"):
        found, wanted = list(staged.batches(kind)), [rows for each, rows in sent if each == kind]
        assert len(found) == len(wanted)
        assert all(one.equals(other) for one, other in zip(found, wanted, strict=True))
    assert staged.num_rows == sum(rows.num_rows for kind, rows in sent if kind == "rows")


class Tasks:
    """Threads that send pieces of the current try, one after the other, until they are told to end."""

    def __init__(self, staging: PieceStaging, rng: random.Random) -> None:
        self.staging = staging
        self.current = Attempt(1, 0, 0)
        #: Of each piece that is finished, its sums and what was sent.
        self.sent: dict[PieceId, tuple[PieceSum, list[tuple[Kind, pa.RecordBatch]]]] = {}
        self.failures: list[BaseException] = []
        self.changed = threading.Condition()
        self.ended = False
        self.threads = [
            threading.Thread(target=self.run, args=(number, random.Random(rng.random())))
            for number in range(4)
        ]

    def run(self, number: int, rng: random.Random) -> None:
        at = number
        while not self.ended:
            at += len(self.threads)
            try:
                self.send(PieceId(*self.current, at), rng)
            except ClosedError:
                continue  # the try is over
            except BaseException as error:  # noqa: BLE001 - told by the test, whatever it is
                if not isinstance(error, StoreError) or error.code != "CLUSTER.STAGING_FULL":
                    self.failures.append(error)

    def send(self, tag: PieceId, rng: random.Random) -> None:
        piece, sent = self.staging.begin(tag, SCHEMA), []
        for _ in range(rng.randint(0, 6)):
            kind: Kind = rng.choice(["rows", "broadcast"])
            rows = some_rows(rng)
            piece.add(kind, message(rows))
            sent.append((kind, rows))
        if rng.random() < 0.2:
            piece.abandon()
            return
        total = piece.finish()
        with self.changed:
            self.sent[tag] = total, sent
            self.changed.notify()

    def some_of(self, of_try: Attempt, rng: random.Random) -> list[PieceId]:
        """Some of the finished pieces of a try, once there are a few."""

        def finished() -> list[PieceId]:
            return [tag for tag in self.sent if tag.of_try == of_try]

        with self.changed:
            assert self.changed.wait_for(lambda: len(finished()) > 3 or self.failures, timeout=30)
            return [tag for tag in finished() if rng.random() < 0.8]


@pytest.mark.parametrize(
    ("memory", "is_awaited", "ending"),
    [(1 << 20, True, "closed"), (3000, True, "given up"), (3000, False, "closed"), (0, False, "given up")],
)
def test_tasks_that_send_at_once_while_tries_come_and_go(
    memory: int, is_awaited: bool, ending: str, tmp_path: Path, rng: random.Random
) -> None:
    staging = PieceStaging(memory=memory, quota=100_000, folder=str(tmp_path))
    tasks = Tasks(staging, rng)
    for thread in tasks.threads:
        thread.start()
    try:
        for batch_id in range(1, 16):
            now, following = tasks.current, Attempt(1, batch_id, 0)
            tags = tasks.some_of(now, rng)
            choice = rng.random()
            if choice < 0.6:
                staged = staging.taken(tags, [tasks.sent[tag][0] for tag in tags])
                tasks.current = following
                assert_rows(staged, [part for tag in tags for part in tasks.sent[tag][1]])
                staged.release()
            elif choice < 0.8 or not is_awaited:
                staging.drop(*now)
            tasks.current = following
            if is_awaited:
                staging.drop_others(*following)
        if ending == "closed":
            staging.close()
            assert holds(staging) == (0, 0)
    finally:
        tasks.ended = True
        for thread in tasks.threads:
            thread.join()
    assert tasks.failures == []
    staging.drop_others(1, -1, -1)
    assert holds(staging) == (0, 0), "all of it was given back"
    assert files_in(tmp_path) == []
    staging.close()
    assert list(tmp_path.iterdir()) == []


def test_a_piece_that_is_dropped_while_it_writes_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batch is given up by one thread while another is in the system's call."""
    staging = PieceStaging(memory=0, folder=str(tmp_path))
    piece = staging.begin(TAG, SCHEMA)
    dropping: list[threading.Thread] = []
    real = os.write

    def write(file: int, data: memoryview) -> int:
        dropping.append(threading.Thread(target=staging.close))
        dropping[0].start()
        return real(file, data)

    monkeypatch.setattr(os, "write", write)
    with contextlib.suppress(StateBackendError):
        piece.add("rows", message(numbered(1)))
    monkeypatch.undo()
    dropping[0].join()
    assert holds(staging) == (0, 0)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ClosedError, match="not open any more"):
        piece.finish()
