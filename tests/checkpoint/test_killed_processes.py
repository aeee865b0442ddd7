"""Real processes on a real disk: killed at every step and at random, and two that want the same store.

This file is also the program of these processes.
"""

from __future__ import annotations

import os
import random
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from processes import JOBS, KillingCalls, Server, serve, server
from store_story import (
    Told,
    check_checkpoints,
    check_nothing_left,
    check_recovery,
    give_up,
    open_store,
    take,
    tell,
)

from statebackend.checkpoint import StateSnapshot
from statebackend.checkpoint.files import PosixFiles
from statebackend.checkpoint.store.checkpoint_reader import CheckpointReader
from statebackend.errors import CommitConflictError

# --- the program ---


class ToldAloud(Told):
    """Says every change at once: what was said before the kill is what the process knew."""

    def __init__(self, say: Callable[[object], None], committed: int | None = None) -> None:
        object.__setattr__(self, "_say", say)
        super().__init__(committed)

    def __setattr__(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)
        self._say([name, value])  # type: ignore[attr-defined]


def tell_story(request: dict[str, Any], say: Callable[[object], None]) -> None:
    calls = KillingCalls(request["at"])
    tell(lambda: PosixFiles(request["root"], calls), ToldAloud(say))
    say(["calls", calls.count])


def commit_for_ever(request: dict[str, Any], say: Callable[[object], None]) -> None:
    """Opens, commits on and on, gives some up, opens anew now and then; whoever wants it to stop kills it."""
    while True:
        store = open_store(PosixFiles(request["root"]))
        newest = store.latest()
        told = ToldAloud(say, newest)
        for checkpoint_id in range(0 if newest is None else newest + 1, 10**9):
            if checkpoint_id % 3 == 0:
                give_up(store, checkpoint_id)
            take(store, checkpoint_id, told, subtasks=1 + checkpoint_id % 2)
            if checkpoint_id % 7 == 0:
                break
        store.close()


def compete(request: dict[str, Any], say: Callable[[object], None]) -> None:
    """Commits, with another process doing the same; says which ids it has won."""
    for _ in range(request["rounds"]):
        try:
            store = open_store(PosixFiles(request["root"]), retain=1000)
            for _ in range(3):
                newest = store.latest()
                checkpoint_id = 0 if newest is None else newest + 1
                writer = store.begin_snapshot(checkpoint_id)
                with writer.create("base") as file:
                    file.write(b"won by %d" % os.getpid())
                    stored = file.finish()
                snapshot = StateSnapshot(checkpoint_id, store.epoch, files=(stored,))
                store.commit(checkpoint_id, [snapshot], progress={"pid": os.getpid()})
                say(["won", checkpoint_id])
        except CommitConflictError:
            say(["lost", 0])


JOBS.update(tell=tell_story, commit=commit_for_ever, compete=compete)


def told_by(answer: dict[str, Any]) -> Told:
    told = Told()
    for name, value in answer["said"]:
        if name in ("committed", "tried"):
            setattr(told, name, value)
    return told


# --- the tests ---


@pytest.fixture(scope="module")
def processes() -> Iterator[Server]:
    with server(sys.modules[__name__]) as running:
        yield running


def listing(root: Path) -> Callable[[], list[str]]:
    def walk() -> list[str]:
        found = []
        for path, folders, files in os.walk(root):
            inner = os.path.relpath(path, root)
            start = "" if inner == "." else inner + "/"
            found += [f"{start}{name}/" for name in folders] + [f"{start}{name}" for name in files]
        return found

    return walk


def test_killed_before_every_call(processes: Server, tmp_path: Path, is_stress: bool) -> None:
    (whole,) = processes.ask("tell", tmp_path / "whole", at=-1)
    assert whole["status"] == 0
    calls = dict(whole["said"])["calls"]
    assert calls > 200
    # Every call in the long run, every fifth otherwise: the simulated disk sees all of them each time.
    every = 1 if is_stress else 5
    for at in range(0, calls, every):
        root = tmp_path / str(at)
        (answer,) = processes.ask("tell", root, at=at)
        assert answer["status"] == -signal.SIGKILL
        check_recovery(PosixFiles(str(root)), listing(root), told_by(answer))


def test_killed_at_random(processes: Server, tmp_path: Path, rng: random.Random, is_stress: bool) -> None:
    """So often, and more often, and later, if there was not the time for enough commits in between."""
    root, times = tmp_path / "store", 4000 if is_stress else 40
    told, kills, longest = Told(), 0, 40_000
    while kills < times or (told.committed or 0) <= times / 4:
        assert kills < 5 * times, "too little was committed to tell"
        kills += 1
        if kills % times == 0:
            longest *= 4
        (answer,) = processes.ask("commit", root, microseconds=rng.randrange(longest))
        assert answer["status"] == -signal.SIGKILL
        if answer["said"]:
            told = told_by(answer)
        reader = CheckpointReader("/", _files=PosixFiles(str(root)))
        check_checkpoints(reader, told)
        store = open_store(PosixFiles(str(root)))
        check_nothing_left(store, listing(root)(), store.epoch)
        store.close()
        told = Told(reader.latest())


def test_two_processes_want_the_same_store(processes: Server, tmp_path: Path) -> None:
    """Each id is committed once, by the process that was told so; nothing that was committed is ever lost."""
    root = tmp_path / "store"
    answers = processes.ask("compete", root, children=2, rounds=40)
    assert [answer["status"] for answer in answers] == [0, 0]
    winner = {}
    for answer in answers:
        for what, checkpoint_id in answer["said"]:
            if what == "won":
                assert checkpoint_id not in winner
                winner[checkpoint_id] = answer["pid"]
    reader = CheckpointReader("/", _files=PosixFiles(str(root)))
    assert sorted(winner) == reader.checkpoints() == list(range(len(winner)))
    for checkpoint_id, pid in winner.items():
        checkpoint = reader.open(checkpoint_id)
        assert checkpoint.manifest.progress == {"pid": pid}
        ((name, stored),) = checkpoint.files.items()
        assert checkpoint.read_file(stored) == b"won by %d" % pid, name
    assert any(["lost", 0] in answer["said"] for answer in answers), "they never met"


if __name__ == "__main__":
    serve()
