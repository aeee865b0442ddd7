"""Processes that write to a store on a real disk and are killed: a server that forks one for each request.

Run as a program, it reads requests from stdin, one JSON object a line, and answers each with one. It imports
the library once and starts no thread, so that a fork costs a few milliseconds.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
if __name__ == "__main__" and not getattr(
    sys.flags, "safe_path", False
):  # another build may be what is tested
    sys.path.insert(0, str(Path(__file__).parents[2]))

from store_story import RETAIN, Told, give_up, open_store, take, tell

from statebackend.checkpoint import StateSnapshot
from statebackend.checkpoint.files import PosixCalls, PosixFiles
from statebackend.errors import CommitConflictError


class ToldAloud(Told):
    """Says every change at once: what was said before the kill is what the process knew."""

    def __init__(self, say: Callable[[object], None], committed: int | None = None) -> None:
        object.__setattr__(self, "_say", say)
        super().__init__(committed)

    def __setattr__(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)
        self._say([name, value])  # type: ignore[attr-defined]


class KillingCalls(PosixCalls):
    """Real calls; before the one with number ``at`` the process kills itself."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.count = 0


def _counted(name: str) -> Callable[..., Any]:
    def call(self: KillingCalls, *arguments: Any) -> Any:
        if self.count == self.at:
            os.kill(os.getpid(), signal.SIGKILL)
        self.count += 1
        return getattr(PosixCalls, name)(self, *arguments)

    return call


for _name in [name for name in vars(PosixCalls) if not name.startswith("_")]:
    setattr(KillingCalls, _name, _counted(_name))


# ------------------------------------------------------------------------------------ in the child


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


JOBS = {"tell": tell_story, "commit": commit_for_ever, "compete": compete}


# ------------------------------------------------------------------------------------ the server


def start(request: dict[str, Any]) -> tuple[int, int]:
    """A child that does the job; its id and the pipe on which it speaks."""
    ear, mouth = os.pipe()
    pid = os.fork()
    if pid:
        os.close(mouth)
        return pid, ear
    status = 1
    try:
        os.close(ear)
        JOBS[request["job"]](request, lambda what: os.write(mouth, json.dumps(what).encode() + b"\n"))
        status = 0
    except BaseException:  # noqa: BLE001 - nothing of the parent's may run in the child
        traceback.print_exc()
    finally:
        os._exit(status)


def wait(pid: int, ear: int) -> dict[str, Any]:
    with open(ear, "rb") as pipe:
        said = [json.loads(line) for line in pipe.read().splitlines()]
    _, status = os.waitpid(pid, 0)
    return {"pid": pid, "said": said, "status": os.waitstatus_to_exitcode(status)}


def serve() -> None:
    for line in sys.stdin:
        request = json.loads(line)
        children = [start(request) for _ in range(request.get("children", 1))]
        if "microseconds" in request:
            # From the first thing it says, so that the kill falls into its work and not into its start.
            select.select([children[0][1]], [], [], 120)
            select.select([], [], [], request["microseconds"] / 1e6)
            os.kill(children[0][0], signal.SIGKILL)
        print(json.dumps([wait(*child) for child in children]), flush=True)


class Server:
    """The other end, in the tests."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def ask(self, job: str, root: Path, **more: Any) -> list[dict[str, Any]]:
        to, answers = self._process.stdin, self._process.stdout
        assert to is not None
        assert answers is not None
        to.write(json.dumps({"job": job, "root": str(root), **more}) + "\n")
        to.flush()
        return json.loads(answers.readline())  # type: ignore[no-any-return]


@contextlib.contextmanager
def server(program: str = __file__) -> Iterator[Server]:
    """``program`` is a script that adds to `JOBS` and calls `serve`."""
    with subprocess.Popen(
        [sys.executable, program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield Server(process)
        finally:
            assert process.stdin is not None
            process.stdin.close()


def told_by(answer: dict[str, Any]) -> Told:
    told = Told()
    for name, value in answer["said"]:
        if name in ("committed", "tried"):
            setattr(told, name, value)
    return told


__all__ = ["RETAIN", "Server", "server", "told_by"]

if __name__ == "__main__":
    serve()
