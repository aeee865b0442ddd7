"""Real processes on a real disk: killed at every step and at random, and two that want the same store."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import store_process
from processes import Server, server
from store_process import told_by
from store_story import Told, check_checkpoints, check_nothing_left, check_recovery, open_store

from statebackend.checkpoint.files import PosixFiles
from statebackend.checkpoint.store.reader import CheckpointReader


@pytest.fixture(scope="module")
def processes() -> Iterator[Server]:
    with server(store_process) as running:
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
