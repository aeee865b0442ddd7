"""Two writers, stopped and resumed between every two requests, on every kind of store."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from object_servers import SERVERS, object_server
from simulated_disk import Disk, SimulatedCalls
from simulated_objects import Bucket, SimulatedObjectCalls
from two_writers import ACTIONS, ANSWERS, Place, Plan, meet, requests_of

from statebackend.checkpoint.files import PosixCalls, PosixFiles, StoreFiles
from statebackend.checkpoint.files.object_calls import ObjectCalls
from statebackend.checkpoint.files.objects import ObjectFiles

__all__ = ["object_server"]  # a fixture


def on_disk() -> Place:
    disk = Disk()
    return lambda plan: PosixFiles("/store", SimulatedCalls(disk, plan))


def in_bucket() -> Place:
    bucket = Bucket()
    return lambda plan: ObjectFiles("s3://bucket/store", SimulatedObjectCalls(bucket, plan))


def check_all(new_place: Callable[[], Place], action: str, answer: str, step: int = 1) -> None:
    requests = requests_of(new_place, action)
    assert requests
    winners = {meet(new_place(), action, answer, at) for at in requests[::step]}
    assert "second" in winners


@pytest.mark.parametrize("answer", ANSWERS)
@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("new_place", [on_disk, in_bucket])
def test_one_wins_and_the_other_knows(new_place: Callable[[], Place], action: str, answer: str) -> None:
    check_all(new_place, action, answer)


# ------------------------------------------------------------------------------------ real stores


class Counted:
    """Calls the plan before each request of the calls that it stands for."""

    def __init__(self, calls: Any, plan: Plan) -> None:
        self._calls = calls
        self._plan = plan
        self._numbers = itertools.count()

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._calls, name)

        def call(*arguments: Any) -> Any:
            self._plan(next(self._numbers), name)
            return found(*arguments)

        return call


def on_posix(tmp_path: Path) -> Callable[[], Place]:
    numbers = itertools.count()

    def new_place() -> Place:
        root = str(tmp_path / str(next(numbers)))
        return lambda plan: PosixFiles(root, Counted(PosixCalls(), plan))  # type: ignore[arg-type]

    return new_place


def on_server(where: tuple[str, dict[str, str]], folder: str) -> Callable[[], Place]:
    uri, options = where
    numbers = itertools.count()

    def new_place() -> Place:
        own = f"{uri}/{folder}/{next(numbers)}"

        def files(plan: Plan) -> StoreFiles:
            return ObjectFiles(own, Counted(ObjectCalls(own, options), plan))  # type: ignore[arg-type]

        return files

    return new_place


@pytest.mark.sampled(4)
@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("kind", ["POSIX", *SERVERS])
def test_one_wins_on_a_real_store(
    object_server: Callable[[str], tuple[str, dict[str, str]]],
    tmp_path: Path,
    kind: str,
    action: str,
    is_stress: bool,
) -> None:
    """Every second request; every one, and every answer, with --stress."""
    new_place = on_posix(tmp_path) if kind == "POSIX" else on_server(object_server(kind), f"{action}-two")
    for answer in ANSWERS if is_stress else ["goes back"]:
        check_all(new_place, action, answer, 1 if is_stress else 2)
