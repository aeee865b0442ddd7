"""A rewind in a process that is killed, for `processes` to serve, and a sink of the user's own that can take it."""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deltalake  # noqa: F401 - before the children are forked, so that none of them is killed while it imports
from processes import JOBS, serve

import statebackend as sb
from statebackend.spark.sinks import delta, parquet

#: The calls that change a disk, as Python audits them. Those of Delta's own code are not among them.
CHANGES = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link"}
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT


class OwnFiles:
    """A sink that is no sink of the library: a file for each batch and incarnation."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)

    def __call__(self, frame: Any, batch_id: int, context: Any) -> None:
        rows = [tuple(row) for row in frame.collect()]
        (self.folder / f"{batch_id}-{context.incarnation}").write_text(json.dumps(rows))

    def take_back(self, batch_id: int, incarnation: str) -> list[str]:
        path = self.folder / f"{batch_id}-{incarnation}"
        removed = [str(path)] if path.exists() else []
        path.unlink(missing_ok=True)
        return removed


SINKS: dict[str, Callable[[Path], Any]] = {"parquet": parquet, "delta": delta, "function": OwnFiles}


def rewind(request: dict[str, Any], say: Callable[[object], None]) -> None:
    """Rewind a query; before the change with number ``changes``, the process kills itself."""
    root, numbers = Path(request["root"]), itertools.count()

    def heard(event: str, arguments: tuple[Any, ...]) -> None:
        is_change = event in CHANGES or (event == "open" and bool(arguments[2] & WRITES))
        if is_change and next(numbers) == request.get("changes"):
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(heard)
    say("begun")
    began = time.monotonic()
    sink = OwnFiles(root / "out") if request["sink"] == "function" else "recorded"
    sb.tools.rewind(root / "state", to=request["to"], checkpoint_location=root / "stream", sink=sink)
    say({"changes": next(numbers), "microseconds": int(1e6 * (time.monotonic() - began))})


JOBS["rewind"] = rewind


if __name__ == "__main__":
    serve()
