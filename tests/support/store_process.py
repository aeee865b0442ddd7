"""Processes that write to a store on a real disk and are killed, for `processes` to serve."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from processes import JOBS, KillingCalls, serve
from store_story import Told, give_up, open_store, take, tell

from statebackend.checkpoint import StateSnapshot
from statebackend.checkpoint.files import PosixFiles
from statebackend.errors import CommitConflictError


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


if __name__ == "__main__":
    serve()
