"""The writer dies, or the power fails, or a call fails, before every single call of a long story.

On a simulated disk: what was not synced is lost, kept, or lost and kept by chance.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from simulated_disk import Dead, Disk, Folder, SimulatedCalls
from store_story import (
    QUERY,
    RETAIN,
    Told,
    check_checkpoints,
    check_nothing_left,
    check_recovery,
    open_store,
    take,
    tell,
)

from statebackend.checkpoint import CheckpointStore
from statebackend.checkpoint.files import PosixFiles
from statebackend.checkpoint.store.checkpoint_reader import CheckpointReader
from statebackend.errors import CommitConflictError, StateBackendError, StoreError, UsageError
from statebackend.tools import repair
from statebackend.tools.verification import Inventory

ROOT = "/disk/made/by/the/store"


def new_disk() -> Disk:
    disk = Disk()
    disk.root.entries["disk"] = Folder()
    disk.root.sync()
    return disk


def files_on(disk: Disk, calls: SimulatedCalls | None = None) -> PosixFiles:
    return PosixFiles(ROOT, SimulatedCalls(disk) if calls is None else calls)


def listing(disk: Disk) -> Callable[[], list[str]]:
    start = len(ROOT) + 1
    return lambda: [path[start:] for path in disk.walk() if len(path) > start]


def calls_of_the_story() -> list[str]:
    calls = SimulatedCalls(new_disk())
    tell(lambda: files_on(calls.disk, calls), Told())
    return calls.made


STORY = calls_of_the_story()
Chosen = Callable[[Sequence[Any]], Sequence[Any]]


@pytest.fixture
def chosen(day_rng: random.Random, is_stress: bool) -> Chosen:
    """Chooses a third of the places by the day; all of them with ``--stress``."""
    return lambda places: places if is_stress else day_rng.sample(places, -(-len(places) // 3))


def run_until(disk: Disk, at: int, what: object) -> tuple[Told, SimulatedCalls, BaseException | None]:
    calls = SimulatedCalls(disk, lambda number, name: what if number == at else None)
    told = Told()
    try:
        tell(lambda: files_on(disk, calls), told)
    except (Dead, StateBackendError) as error:
        return told, calls, error
    return told, calls, None


def test_the_story_uses_every_call() -> None:
    seldom = {"rename_exclusive", "sync_file"}  # a file system without links; what sinks publish
    assert set(STORY) == {n for n in vars(SimulatedCalls) if not n.startswith("_")} - seldom
    assert len(STORY) > 200


@pytest.mark.sampled(1)
@pytest.mark.parametrize("policy", ["kept", "lost", "mixed"])
def test_killed_before_every_call(policy: str) -> None:
    for at in range(len(STORY)):
        for seed in range(2 if policy == "mixed" else 1):
            disk = new_disk()
            told, _, error = run_until(disk, at, "die")
            assert isinstance(error, Dead)
            left = disk.crash(policy, seed * 1000 + at)
            try:
                check_recovery(files_on(left), listing(left), told)
            except BaseException as failure:
                raise AssertionError(f"call {at} ({STORY[at]}), {policy}, seed {seed}") from failure


@pytest.mark.stress
def test_killed_twice(rng) -> None:  # type: ignore[no-untyped-def]
    """A crash, and a second one anywhere while the store is being opened and used again."""
    for _ in range(20_000):
        first, second, seed = rng.randrange(len(STORY)), rng.randrange(150), rng.getrandbits(30)
        disk = new_disk()
        run_until(disk, first, "die")
        disk = disk.crash("mixed", seed)
        again = Told(CheckpointReader("/", _files=files_on(disk)).latest())
        calls = SimulatedCalls(disk, lambda number, name, at=second: "die" if number == at else None)
        try:
            store = open_store(files_on(disk, calls))
            for checkpoint_id in range(0 if again.committed is None else again.committed + 1, 9):
                take(store, checkpoint_id, again)
        except Dead:
            pass
        disk = disk.crash("mixed", seed + 1)
        check_recovery(files_on(disk), listing(disk), again)


@pytest.mark.parametrize("policy", ["kept", "lost", "mixed"])
def test_a_repair_that_is_killed_can_be_repeated(policy: str) -> None:
    """Killed at each of its calls: then the log is damaged as before, or it is repaired."""

    def damaged() -> Disk:
        disk, told = new_disk(), Told()
        store = open_store(files_on(disk))
        for checkpoint_id in range(3):
            take(store, checkpoint_id, told)
        store.close()
        newest = max(
            int(name.partition(".")[0]) for name in files_on(disk).names("checkpoints") if ".json" in name
        )
        file = disk.file(f"{ROOT}/checkpoints/{newest}.json")
        file.data[9] ^= 1
        file.durable = bytes(file.data)
        return disk

    def repaired(files: PosixFiles) -> None:
        assert repair(CheckpointStore("/", retain=RETAIN, _files=files)).to == 1

    calls = SimulatedCalls(damaged())
    repaired(files_on(calls.disk, calls))
    for at in range(len(calls.made)):
        disk = damaged()
        dying = SimulatedCalls(disk, lambda number, name, at=at: "die" if number == at else None)
        with pytest.raises(Dead):
            repaired(files_on(disk, dying))
        disk = disk.crash(policy, at)
        repaired(files_on(disk))
        store = open_store(files_on(disk))
        assert store.latest() == 1
        take(store, 2, Told(1))
        store.close()
        inventory = Inventory.of(CheckpointReader("/", _files=files_on(disk)))
        assert (inventory.latest(intact=True), inventory.damaged_entries()) == (2, [])


#: What only looks, or whose failing is put off: the story may go on to its end.
ANSWERS = ["fail", "lie", errno.ENOSPC]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("answer", ANSWERS, ids=str)
@pytest.mark.parametrize("policy", ["kept", "lost"])
def test_every_call_fails_once(answer: object, policy: str, chosen: Chosen) -> None:
    """The process goes on, as told by the error it got; then the power fails."""
    for at in chosen(range(len(STORY))):
        disk = new_disk()
        told, calls, error = run_until(disk, at, answer)
        where = f"call {at} ({STORY[at]}), {answer}"
        try:
            if error is not None:
                assert isinstance(error, StateBackendError), where
                if told.tried is not None and not told.rewinds and error.code != "STORE.UNKNOWN":
                    # Any other error of a commit: the checkpoint is not there.
                    told.tried = None
            calls.plan = lambda number, name: None
            check_checkpoints(CheckpointReader("/", _files=files_on(disk, calls)), told)
            # A commit that was answered survives whatever is lost after it.
            check_checkpoints(CheckpointReader("/", _files=files_on(disk.crash("lost"))), told)
            left = disk.crash(policy, at)
            check_recovery(files_on(left), listing(left), told)
        except BaseException as failure:
            raise AssertionError(f"{where}, {policy}: {error}") from failure


@pytest.mark.parametrize("answer", ANSWERS, ids=str)
def test_a_failed_commit_is_repeated_as_the_error_says(answer: object) -> None:
    """Whatever fails while a checkpoint is taken: abort and take it again, opening the store anew if need be."""
    clean = SimulatedCalls(new_disk())
    store = open_store(files_on(clean.disk, clean))
    told = Told()
    take(store, 0, told)
    take(store, 1, told)
    take(store, 2, told)
    start = len(clean.made)
    take(store, 3, told)
    for at in range(start, len(clean.made)):
        disk = new_disk()
        calls = SimulatedCalls(disk, lambda number, name, at=at: answer if number == at else None)
        store, told = open_store(files_on(disk, calls)), Told()
        for checkpoint_id in range(3):
            take(store, checkpoint_id, told)
        reopened = False
        try:
            take(store, 3, told)
        except StoreError as error:
            store.abort(3)
            if not store.is_open_for_writing:
                with pytest.raises(StoreError, match=error.message):
                    store.begin_snapshot(3)
                store.open_for_writing()
                reopened = True
            if store.latest() == 2:
                take(store, 3, told)
        take(store, 4, told)
        left = disk.crash("lost")
        check_checkpoints(CheckpointReader("/", _files=files_on(left)), Told(4))
        epoch = store.epoch
        assert (epoch > 1) is reopened
        store.close()
        check_recovery(files_on(left), listing(left), Told(4))


def test_a_failed_sync_of_a_data_file_is_final() -> None:
    """The file is removed and not synced again; the next attempt writes another."""
    disk = new_disk()
    calls = SimulatedCalls(disk)
    store, told = open_store(files_on(disk, calls)), Told()
    take(store, 0, told)
    started = len(calls.made)
    calls.plan = lambda number, name: "fail" if name == "sync" else None
    with pytest.raises(StoreError, match="input/output error") as caught:
        take(store, 1, told)
    assert caught.value.errno == errno.EIO
    assert calls.made[started:].count("sync") == 1
    assert calls.made[-2:] == ["close", "remove"]
    calls.plan = lambda number, name: None
    store.abort(1)
    take(store, 1, told)
    left = disk.crash("lost")
    check_checkpoints(CheckpointReader("/", _files=files_on(left)), told)


def test_a_failed_sync_of_the_manifest_publishes_nothing() -> None:
    disk = new_disk()
    calls = SimulatedCalls(disk)
    store, told = open_store(files_on(disk, calls)), Told()
    take(store, 0, told)
    seen = 0

    def second_sync_fails(number: int, name: str) -> str | None:
        nonlocal seen
        seen += name == "sync"
        return "fail" if name == "sync" and seen == 2 else None

    calls.plan = second_sync_fails
    with pytest.raises(StoreError, match="nothing was committed"):
        take(store, 1, told)
    assert store.checkpoints() == [0]
    store.abort(1)
    take(store, 1, told)
    assert store.checkpoints() == [0, 1]


def test_an_interrupt_during_a_commit_leaves_no_doubt_behind() -> None:
    """A KeyboardInterrupt anywhere in a commit: the store says that it must be opened again."""

    class Interrupt(BaseException):
        pass

    clean = SimulatedCalls(new_disk())
    store = open_store(files_on(clean.disk, clean))
    take(store, 0, Told())
    for at in range(len(clean.made)):
        disk = new_disk()

        def plan(number: int, name: str, at: int = at) -> None:
            if number == at:
                raise Interrupt

        calls = SimulatedCalls(disk, plan)
        told = Told()
        store = CheckpointStore("/", retain=RETAIN, _files=files_on(disk, calls))

        def run(store: CheckpointStore = store, told: Told = told) -> None:
            store.open_for_writing(query=QUERY, key_type=int, max_parallelism=128)
            take(store, 0, told)

        with pytest.raises(Interrupt):
            run()
        calls.plan = lambda number, name: None
        if store.is_open_for_writing:
            store.abort(0)
            if store.latest() is None:
                take(store, 0, told)
        check_checkpoints(store, told)
        # The lock goes with the process.
        calls.is_dead = True
        check_recovery(files_on(disk), listing(disk), told)


def without_links(number: int, name: str) -> object:
    return errno.EPERM if name == "link" else None


def test_a_file_system_without_links(chosen: Chosen) -> None:
    disk = new_disk()
    calls = SimulatedCalls(disk, without_links)
    told = Told()
    tell(lambda: files_on(disk, calls), told)
    assert calls.made.count("rename_exclusive") == calls.made.count("link") > 5
    for at in chosen(range(len(calls.made))):
        disk = new_disk()
        dying = SimulatedCalls(disk, lambda n, name, at=at: "die" if n == at else without_links(n, name))
        told = Told()
        with pytest.raises(Dead):
            tell(lambda disk=disk, dying=dying: files_on(disk, dying), told)
        left = disk.crash("mixed", at)
        check_recovery(files_on(left), listing(left), told)


def with_nothing_exclusive(number: int, name: str) -> object:
    return {"link": errno.ENOTSUP, "rename_exclusive": errno.EINVAL}.get(name)


def test_a_file_system_that_can_do_neither_is_refused() -> None:
    disk = new_disk()
    calls = SimulatedCalls(disk, with_nothing_exclusive)
    with pytest.raises(UsageError, match="cannot keep a second writer out") as caught:
        open_store(files_on(disk, calls))
    assert caught.value.code == "USAGE.SINGLE_WRITER"
    assert "single_writer=True" in str(caught.value.hint)
    assert CheckpointReader("/", _files=files_on(disk)).checkpoints() == []
    left = [name for name in listing(disk)() if "metadata" in name]
    assert left == [], "nothing of the attempt stays"


def test_a_file_system_that_can_do_neither_with_a_single_writer(chosen: Chosen) -> None:
    """Killed at every call: what is committed is there, and ids are taken once."""

    def files(calls: SimulatedCalls) -> PosixFiles:
        return PosixFiles(ROOT, calls, single_writer=True)

    disk = new_disk()
    calls = SimulatedCalls(disk, with_nothing_exclusive)
    told = Told()
    tell(lambda: files(calls), told)
    assert calls.made.count("rename_exclusive") == calls.made.count("link") > 5
    for at in chosen(range(len(calls.made))):
        disk = new_disk()
        dying = SimulatedCalls(
            disk, lambda n, name, at=at: "die" if n == at else with_nothing_exclusive(n, name)
        )
        told = Told()
        with pytest.raises(Dead):
            tell(lambda dying=dying: files(dying), told)
        left = disk.crash("mixed", at)
        check_recovery(files_on(left), listing(left), told)


@pytest.mark.parametrize("number", [errno.EIO, errno.EEXIST], ids=["lost", "asked twice"])
def test_the_answer_of_a_link_is_lost(number: int) -> None:
    """Over NFS the link is made, and an error comes back, or "it exists" to the second asking."""

    class Network(SimulatedCalls):
        def link(self, source: str, target: str) -> None:
            super().link(source, target)
            raise OSError(number, "the answer was lost")

    disk = new_disk()
    store, told = open_store(files_on(disk, Network(disk))), Told()
    for checkpoint_id in range(3):
        take(store, checkpoint_id, told)
    assert store.checkpoints() == [1, 2]
    check_checkpoints(CheckpointReader("/", _files=files_on(disk.crash("lost"))), told)


def test_a_link_that_comes_late_finds_nothing_to_link() -> None:
    """The error of a link that is still under way: the checkpoint is reported missing, and stays so."""
    disk = new_disk()
    late: list[tuple[str, str]] = []

    class Network(SimulatedCalls):
        def link(self, source: str, target: str) -> None:
            if target.endswith("checkpoints/3.json"):
                late.append((source, target))
                raise TimeoutError(errno.ETIMEDOUT, "timed out")
            super().link(source, target)

    calls = Network(disk)
    store, told = open_store(files_on(disk, calls)), Told()
    take(store, 0, told)
    with pytest.raises(StoreError, match="timed out"):
        take(store, 1, told)
    with pytest.raises(FileNotFoundError):
        SimulatedCalls.link(calls, *late[0])
    assert store.checkpoints() == [0]


def test_a_second_writer_opens_before_every_call_of_a_commit() -> None:
    """Whichever step the first is at: exactly one of them commits the id, and the other is told."""
    clean = SimulatedCalls(new_disk())
    store = open_store(files_on(clean.disk, clean))
    for checkpoint_id in range(3):
        take(store, checkpoint_id, Told())
    start = len(clean.made)
    take(store, 3, Told())
    outcomes = set()
    for at in range(start, len(clean.made) + 1):
        disk = new_disk()
        second: list[CheckpointStore] = []

        def plan(number: int, name: str, at: int = at, disk: Disk = disk, second: list = second) -> None:
            if number == at:
                second.append(open_store(files_on(disk)))

        calls = SimulatedCalls(disk, plan)
        first = open_store(files_on(disk, calls))
        told = Told()
        for checkpoint_id in range(3):
            take(first, checkpoint_id, told)
        try:
            take(first, 3, told)
            won = True
        except CommitConflictError:
            won = False
            first.abort(3)
        calls.plan = lambda number, name: None
        other = second[0] if second else open_store(files_on(disk))
        outcomes.add(won)
        assert (3 in other.checkpoints()) is won, (at, clean.made[at])
        with pytest.raises(CommitConflictError, match="another writer"):
            first.commit(9, [])
        # What the second read when it opened is what there is: it commits the next id without conflict.
        told = Told(3 if won else 2)
        for checkpoint_id in range(4 if won else 3, 8):
            take(other, checkpoint_id, told)
        check_checkpoints(other, told)
        other.close()
        left = disk.crash("lost")
        check_recovery(files_on(left), listing(left), told)
    assert outcomes == {True, False}


def test_a_second_writer_dies_while_it_fences_one_that_commits(chosen: Chosen) -> None:
    """At every step of its opening, begun at every step of the first's commit, which then goes on."""
    clean = SimulatedCalls(new_disk())
    store = open_store(files_on(clean.disk, clean))
    take(store, 0, Told())
    start = len(clean.made)
    take(store, 1, Told())
    steps, end = range(start, len(clean.made)), len(clean.made)
    open_store(files_on(clean.disk, clean))
    outcomes = set()
    for at, death in chosen(list(itertools.product(steps, range(len(clean.made) - end)))):
        disk = new_disk()

        def plan(number: int, name: str, at: int = at, death: int = death, disk: Disk = disk) -> None:
            if number == at:
                dying = SimulatedCalls(disk, lambda number, name: "die" if number == death else None)
                with contextlib.suppress(Dead):
                    open_store(files_on(disk, dying))

        calls = SimulatedCalls(disk, plan)
        first, told = open_store(files_on(disk, calls)), Told()
        take(first, 0, told)
        try:
            take(first, 1, told)
            outcomes.add(True)
        except CommitConflictError:
            told.tried = None
            outcomes.add(False)
        left = disk.crash("kept")
        check_recovery(files_on(left), listing(left), told)
    assert outcomes == {True, False}


def test_a_first_writer_goes_on_before_every_call_of_the_second_opening() -> None:
    """The first commits, with retention, at any step of the second's opening: what both read stays true."""
    clean = SimulatedCalls(new_disk())
    told = Told()
    store = open_store(files_on(clean.disk, clean))
    for checkpoint_id in range(4):
        take(store, checkpoint_id, told)
    before = len(clean.made)
    open_store(files_on(clean.disk, clean))
    outcomes = set()
    for at in range(len(clean.made) - before):
        disk = new_disk()
        first, told = open_store(files_on(disk)), Told()
        for checkpoint_id in range(4):
            take(first, checkpoint_id, told)
        committed: list[bool] = []

        def plan(
            number: int,
            name: str,
            at: int = at,
            first: Any = first,
            told: Any = told,
            committed: Any = committed,
        ) -> None:
            if number == at:
                try:
                    take(first, 4, told)
                    committed.append(True)
                except CommitConflictError:
                    told.tried = None
                    committed.append(False)

        second = open_store(files_on(disk, SimulatedCalls(disk, plan)))
        outcomes.update(committed)
        check_checkpoints(second, told)
        for checkpoint_id in range(5 if committed[0] else 4, 8):
            take(second, checkpoint_id, told)
        second.close()
        check_checkpoints(second, told)
        third = open_store(files_on(disk))
        check_nothing_left(third, listing(disk)(), third.epoch)
    assert outcomes == {True, False}


def test_openers_that_race_for_an_epoch() -> None:
    """A third writer opens, works and is replaced, at any step of a slow opening: epochs only grow."""
    clean = SimulatedCalls(new_disk())
    open_store(files_on(clean.disk, clean))
    for at in range(len(clean.made)):
        disk = new_disk()
        last: list[CheckpointStore] = []
        told = Told()

        def plan(
            number: int, name: str, at: int = at, disk: Any = disk, last: Any = last, told: Any = told
        ) -> None:
            if number == at:
                for checkpoint_id in range(3):
                    last.append(open_store(files_on(disk)))
                    take(last[-1], checkpoint_id, told)

        try:
            slow = open_store(files_on(disk, SimulatedCalls(disk, plan)))
        except CommitConflictError:
            slow = None
        if slow is not None and slow.epoch > last[-1].epoch:
            take(slow, 3, told)
            with pytest.raises(CommitConflictError):
                take(last[-1], 4, Told())
        else:
            if slow is not None:
                with pytest.raises(CommitConflictError):
                    take(slow, 3, Told())
            take(last[-1], 3, told)
        check_checkpoints(CheckpointReader("/", _files=files_on(disk)), told)
        left = disk.crash("kept")
        check_recovery(files_on(left), listing(left), told)


def test_checkpoint_seen_by_a_new_writer_survives(chosen: Chosen) -> None:
    """A process dies anywhere, the next one opens and builds on what it finds; then the power fails."""
    for at in chosen(range(len(STORY))):
        disk = new_disk()
        run_until(disk, at, "die")
        seen = open_store(files_on(disk)).latest()
        for policy in ("lost", "mixed"):
            left = disk.crash(policy, at)
            assert CheckpointReader("/", _files=files_on(left)).latest() == seen, (at, STORY[at])
            check_recovery(files_on(left), listing(left), Told(seen))
