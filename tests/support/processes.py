"""Python processes of their own: run to their end, heard while they run, and killed at a chosen place.

A program is code, or a module that is run as one. It finds the modules that this process finds, whichever build is
tested. `run` waits for its end, `run_command` does the same for any command, and `started` kills the program at the end
of a block. A `server` forks a process for each request in a few milliseconds: it has imported the library once, and
starts no thread.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from watched_calls import WatchedCalls

#: Code, or a module.
Program = str | ModuleType
Say = Callable[[object], None]


def environment(**more: str) -> dict[str, str]:
    """The environment of this process, with its path for modules."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **more}


def _command(program: Program, arguments: Sequence[object], options: Sequence[str]) -> list[str]:
    what = ["-c", program] if isinstance(program, str) else [str(program.__file__)]
    return [sys.executable, *options, *what, *map(str, arguments)]


def run(
    program: Program,
    *arguments: object,
    options: Sequence[str] = (),
    variables: Mapping[str, str] = {},
    **more: Any,
) -> subprocess.CompletedProcess[Any]:
    """Run a program to its end; ``more`` as for `run_command`."""
    return run_command(*_command(program, arguments, options), env=environment(**variables), **more)


def run_command(
    *command: object, status: int | None = 0, timeout: float | None = 600, **more: Any
) -> subprocess.CompletedProcess[Any]:
    """Run a command to its end, which has to be of this status; it speaks in bytes if it is given bytes."""
    text = not isinstance(more.get("input"), bytes)
    done = subprocess.run(
        [*map(str, command)], capture_output=True, text=text, timeout=timeout, check=False, **more
    )
    assert status is None or done.returncode == status, f"{done.stdout[-4000:]}{done.stderr[-4000:]}"
    return done


@contextmanager
def started(
    program: Program, *arguments: object, variables: Mapping[str, str] = {}, **more: Any
) -> Iterator[subprocess.Popen[str]]:
    """A program whose output can be read while it runs; it is killed at the end of the block."""
    pipes = {"stdout": subprocess.PIPE, "text": True, "env": environment(**variables)}
    with subprocess.Popen(_command(program, arguments, ()), **{**pipes, **more}) as process:
        try:
            yield process
        finally:
            process.kill()


def gone() -> int:
    """The id of a process that has ended."""
    return int(run("import os; print(os.getpid())").stdout)


# ------------------------------------------------------------------------------------ killed at a call


class KillingCalls(WatchedCalls):
    """Real calls; before the one with number ``at`` the process kills itself."""

    def __init__(self, at: int) -> None:
        super().__init__(lambda number, *_: os.kill(os.getpid(), signal.SIGKILL) if number == at else None)


# ------------------------------------------------------------------------------------ a server, which forks

#: By name: what a child does with a request. A module that is served adds its own.
JOBS: dict[str, Callable[[dict[str, Any], Say], None]] = {}


def _start(request: dict[str, Any]) -> tuple[int, int]:
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


def _wait(pid: int, ear: int) -> dict[str, Any]:
    with open(ear, "rb") as pipe:
        said = [json.loads(line) for line in pipe.read().splitlines()]
    _, status = os.waitpid(pid, 0)
    return {"pid": pid, "said": said, "status": os.waitstatus_to_exitcode(status)}


def serve() -> None:
    """Answer requests from stdin, one JSON object a line, each with one."""
    for line in sys.stdin:
        request = json.loads(line)
        children = [_start(request) for _ in range(request.get("children", 1))]
        if "microseconds" in request:
            # From the first thing it says, so that the kill falls into its work and not into its start.
            select.select([children[0][1]], [], [], 120)
            select.select([], [], [], request["microseconds"] / 1e6)
            os.kill(children[0][0], signal.SIGKILL)
        print(json.dumps([_wait(*child) for child in children]), flush=True)


class Server:
    """The other end, in the tests."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def ask(self, job: str, root: Path, **more: Any) -> list[dict[str, Any]]:
        to, answers = self._process.stdin, self._process.stdout
        to.write(json.dumps({"job": job, "root": str(root), **more}) + "\n")
        to.flush()
        return json.loads(answers.readline())  # type: ignore[no-any-return]


@contextmanager
def server(program: ModuleType) -> Iterator[Server]:
    """``program`` adds to `JOBS` and calls `serve`."""
    with started(program, stdin=subprocess.PIPE) as process:
        yield Server(process)
