"""Two writers, stopped and resumed between every two requests, on both kinds of store; the lock of a living writer."""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from processes import started
from simulated_disk import Disk, SimulatedCalls
from simulated_objects import Bucket, SimulatedObjectCalls
from store_files import commit
from store_story import QUERY
from watched_calls import WatchedCalls

import statebackend as sb
from statebackend.checkpoint import CheckpointStore
from statebackend.checkpoint.files import PosixFiles, StoreFiles
from statebackend.checkpoint.files.object_store import ObjectFiles
from statebackend.checkpoint.store.checkpoint_reader import CheckpointReader
from statebackend.errors import CommitConflictError, CorruptCheckpointError

# --- what the two do ---


#: Called before each request of a process, with its number and its name.
Plan = Callable[[int, str], object]


#: The files of a place, as a new process sees them.
Place = Callable[[Plan], StoreFiles]


def undisturbed(number: int, name: str) -> None:
    return None


def opened(files: StoreFiles, retain: int = 3) -> CheckpointStore:
    return unopened(files, retain).open_for_writing(query=QUERY, key_type=int, max_parallelism=128)


def unopened(files: StoreFiles, retain: int = 3) -> CheckpointStore:
    return CheckpointStore("/", retain=retain, _files=files)


def commit_it(store: CheckpointStore) -> None:
    """On the files of the checkpoint before, as a snapshot has them, which is not read."""
    with store._lock:
        files = list(store._newest.all_files.values())
    commit(store, 4, *files)


#: What the first does, on a store with the checkpoints 1, 2 and 3, of which the last two share files.
ACTIONS: dict[str, Callable[[CheckpointStore], None]] = {
    "opening": lambda store: store.open_for_writing(query=QUERY, key_type=int, max_parallelism=128) and None,
    "commit": commit_it,
    "retention": lambda store: commit(store, 4) and None,
    "rewind": lambda store: store.rewind(2) and None,
    "restart": lambda store: store.restart(begins_at=0),
    "time": lambda store: store.set_time(7),
}


def goes_on(store: CheckpointStore) -> None:
    newest = store.latest()
    for checkpoint_id in range(0 if newest is None else newest + 1, 3 if newest is None else newest + 4):
        commit(store, checkpoint_id)


def goes_back(store: CheckpointStore) -> None:
    """To the oldest that is kept: it alone names some files, which the first may be about to remove."""
    there = store.checkpoints()
    if there:
        store.rewind(there[0])
        commit(store, there[0] + 1, *store.open(there[0]).files.values())


#: What the second does once it has opened the store.
ANSWERS: dict[str, Callable[[CheckpointStore], None]] = {
    "goes on": goes_on,
    "goes back": goes_back,
    "looks": lambda store: None,
}


def make(files: StoreFiles) -> CheckpointStore:
    store = opened(files)
    first = commit(store, 1)
    second = commit(store, 2, first)
    commit(store, 3, second)
    return store


def check_whole(files: StoreFiles) -> None:
    reader = CheckpointReader("/", _files=files)
    assert reader.latest(intact=True) == reader.latest()
    for each in reader.checkpoints():
        reader.open(each).verify()


def requests_of(new_place: Callable[[], Place], action: str) -> range:
    """The numbers of the requests that the first makes for an action, undisturbed."""
    made: list[str] = []
    store = prepared(new_place(), action, lambda number, name: made.append(name))
    before = len(made)
    ACTIONS[action](store)
    return range(before, len(made))


def prepared(place: Place, action: str, plan: Plan) -> CheckpointStore:
    if action == "opening":
        make(place(undisturbed)).close()
        return unopened(place(plan))
    if action != "retention":
        return make(place(plan))
    make(place(undisturbed)).close()
    return opened(place(plan), retain=1)  # its next commit drops all others, with their files


def meet(place: Place, action: str, answer: str, at: int) -> str:
    """The first is stopped before its request ``at``. Return who has won."""
    second: list[CheckpointStore] = []

    def plan(number: int, name: str) -> None:
        if number == at:
            second.append(opened(place(undisturbed)))
            ANSWERS[answer](second[0])

    first = prepared(place, action, plan)
    told = False
    try:
        ACTIONS[action](first)
    except CommitConflictError:
        told = True
    except CorruptCheckpointError:
        raise AssertionError(f"{action} found damage") from None
    check_whole(place(undisturbed))
    winners = []
    for name, store in (("first", first), ("second", second[0])):
        if name == "first" and told:
            continue
        try:
            store.check_held()
            goes_on(store)
            winners.append(name)
        except CommitConflictError:
            pass
    check_whole(place(undisturbed))
    assert len(winners) == 1, (winners, told)
    assert told or winners == ["first"] or not first.is_open_for_writing, "the first does not know"
    third = opened(place(undisturbed))
    goes_on(third)
    third.close()
    check_whole(place(undisturbed))
    return winners[0]


# --- the tests ---


def on_disk() -> Place:
    disk = Disk()
    return lambda plan: PosixFiles("/store", SimulatedCalls(disk, plan))


def in_bucket() -> Place:
    bucket = Bucket()
    return lambda plan: ObjectFiles("s3://bucket/store", SimulatedObjectCalls(bucket, plan))


@pytest.mark.parametrize("answer", ANSWERS)
@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("new_place", [on_disk, in_bucket])
def test_one_wins_and_the_other_knows(new_place: Callable[[], Place], action: str, answer: str) -> None:
    requests = requests_of(new_place, action)
    assert requests
    assert "second" in {meet(new_place(), action, answer, at) for at in requests}


DRIVER = """
import os, sys, time
import statebackend as sb
store = sb.CheckpointStore(sys.argv[1]).open_for_writing()
store.commit(0)
child = os.fork()
if child == 0:
    print(os.getpid(), flush=True)  # by the child itself: it has done by now what is done after a fork
    time.sleep(600)
    os._exit(0)
time.sleep(600)
"""


def test_a_forked_child_does_not_keep_the_lock_of_a_driver_that_died(tmp_path: Path) -> None:
    with started(DRIVER, tmp_path) as driver:
        child = int(driver.stdout.readline())
        try:
            with pytest.raises(sb.UsageError, match="another query is writing"):
                sb.CheckpointStore(tmp_path).open_for_writing(refuse_live=True)
            driver.kill()
            driver.wait()
            os.kill(child, 0)  # it lives
            with sb.CheckpointStore(tmp_path).open_for_writing(refuse_live=True) as store:
                store.commit(1)
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_child_leaves_the_lock_to_its_parent(tmp_path: Path) -> None:
    with sb.CheckpointStore(tmp_path).open_for_writing() as store:
        child = os.fork()
        if child == 0:
            os._exit(0)  # its copies of what is open are closed
        os.waitpid(child, 0)
        time.sleep(0)
        with pytest.raises(sb.UsageError, match="another query is writing"):
            sb.CheckpointStore(tmp_path).open_for_writing(refuse_live=True)
        store.commit(0)


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF])
def test_without_locks_a_live_writer_is_fenced_instead_of_refused(tmp_path: Path, code: int) -> None:
    def before(number: int, name: str, *arguments: Any) -> None:
        if name == "lock_folder" and os.path.isdir(arguments[0]):
            raise OSError(code, os.strerror(code), arguments[0])

    def opened() -> sb.CheckpointStore:
        files = PosixFiles(str(tmp_path), WatchedCalls(before))
        return sb.CheckpointStore(tmp_path, _files=files).open_for_writing(refuse_live=True)

    first = opened()
    first.commit(0)
    second = opened()
    second.commit(1)
    with pytest.raises(sb.CommitConflictError):
        first.commit(1)
    second.close()
    first.close()
