"""A backend whose process is killed at any moment: what was committed is there, and the disk is tidied up."""

from __future__ import annotations

import random
import signal
from collections import Counter
from pathlib import Path

import pytest
import rocks_process
from processes import server
from rocks_process import (
    STEPS,
    Whereabouts,
    apply_to_model,
    contents,
    new_model,
    open_keyed,
    without_empty,
)

from statebackend.checkpoint import CheckpointReader

#: From the beginning of a step on. Some take less than a millisecond, so that most kills come soon.
LONGEST_MICROSECONDS = 25_000
#: Where kills have to have happened: one in so many of them, at least.
FEWEST = {"writes": 100, "release": 100, "flush": 100, "compacting": 100, "writing files": 100, "commit": 100}


@pytest.mark.slow
@pytest.mark.parametrize("checkpoints", ["rows", "native"])
@pytest.mark.parametrize("is_long", [False, pytest.param(True, marks=pytest.mark.stress)], ids=["20", "long"])
def test_nothing_that_was_committed_is_lost(
    tmp_path: Path, rng: random.Random, is_long: bool, checkpoints: str, request: pytest.FixtureRequest
) -> None:
    """The long run kills five times for each of ``--kills``: 1,000 times."""
    kills = 5 * request.config.getoption("kills") if is_long else 20
    model, of_batch, caught = new_model(), -1, Counter[str]()
    whereabouts = Whereabouts(tmp_path)
    (tmp_path / "local").mkdir()  # the first process may be killed before it makes it
    reader = CheckpointReader(tmp_path / "state")
    with server(rocks_process) as processes:
        for number in range(kills):
            step = STEPS[number % len(STEPS)]
            batch = 0 if step == "restore" else rng.randrange(3)
            after = int(LONGEST_MICROSECONDS * rng.random() ** 5)
            (answer,) = processes.ask(
                "rocks", tmp_path, step=step, batch=batch, microseconds=after, checkpoints=checkpoints
            )
            assert answer["status"] == -signal.SIGKILL
            caught.update(whereabouts.left() or ["before its first step"])
            told = max((batch for _, batch in answer["said"]), default=of_batch)
            newest = reader.latest()
            committed = -1 if newest is None else newest
            assert committed >= max(told, of_batch), "a commit that was told is lost"
            while of_batch < committed:
                of_batch += 1
                apply_to_model(model, of_batch)
            if newest is not None:
                for backend in ("heap", "rocksdb") if number % 10 == 0 else ("heap",):
                    with open_keyed(tmp_path / "reader", backend, reader.open(newest), checkpoints) as keyed:
                        assert contents(keyed) == without_empty(model), (number, step, newest)
            left = [each for each in (tmp_path / "local").iterdir() if list(each.iterdir())]
            assert len(left) <= 1, "each process has removed what the one before it has left"
    assert of_batch > kills / 2, "they were killed before they did anything"
    print(f"{kills} kills, {of_batch + 1} batches committed, killed at {dict(caught)}")
    for where, fewest in FEWEST.items():
        assert caught[where] >= kills // fewest, f"too few kills at {where!r} to tell"
    assert list((tmp_path / "reader" / "local").iterdir()) == []
