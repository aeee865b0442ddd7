"""A job whose process is killed at any step: what the sink has got, each batch once, is what one clean run gives."""

from __future__ import annotations

import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import stream_process
from processes import Server, server
from stream_process import BATCHES, check_stream


@pytest.fixture(scope="module")
def processes() -> Iterator[Server]:
    with server(stream_process) as running:
        yield running


#: Where the state is, by name.
BACKENDS = ["heap", "rocksdb"]
each_backend = pytest.mark.parametrize("backend", BACKENDS)


def finish(processes: Server, root: Path, **more: Any) -> None:
    (answer,) = processes.ask("stream", root, at=-1, **more)
    assert answer["status"] == 0


@each_backend
def test_killed_before_every_call(
    processes: Server, tmp_path: Path, backend: str, day_rng: random.Random, is_stress: bool
) -> None:
    """Before every call in the long run; otherwise before some, which are others each day."""
    (whole,) = processes.ask("stream", tmp_path / "whole", at=-1, backend=backend)
    assert whole["status"] == 0
    assert check_stream(tmp_path / "whole") == 0
    calls = dict(whole["said"])["calls"]
    after_sinks = [at for what, at in whole["said"] if what == "sink"]
    every = 1 if is_stress else 35 if backend == "heap" else 70
    again = 0
    for at in sorted({*range(day_rng.randrange(every), calls, every), *after_sinks}):
        root = tmp_path / str(at)
        (answer,) = processes.ask("stream", root, at=at, backend=backend)
        assert answer["status"] == -signal.SIGKILL
        finish(processes, root, backend=backend)
        again += check_stream(root)
    assert again >= len(after_sinks), "a kill right after the sink makes it be called again"


@each_backend
def test_one_stream_killed_again_and_again(
    processes: Server, tmp_path: Path, rng: random.Random, backend: str, is_stress: bool
) -> None:
    """After a few calls, or after many."""
    batches, calls = (800, 300) if is_stress else (2 * BATCHES, 150)
    kills = 0
    while True:
        at = rng.randrange(calls)
        (answer,) = processes.ask("stream", tmp_path, at=at, batches=batches, backend=backend)
        if answer["status"] == 0:
            break
        assert answer["status"] == -signal.SIGKILL
        kills += 1
    assert kills >= batches // 8
    finish(processes, tmp_path, batches=batches, backend=backend)
    check_stream(tmp_path, batches)
