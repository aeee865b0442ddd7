"""Hosts of real queries whose process ends, or whose function raises an exit: the error says which it was."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from spark_streams import Collecting, Stream, numbers

import statebackend as sb

pytestmark = [pytest.mark.spark, pytest.mark.slow]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("how", "says", "calls"),
    [
        ("killed", ["HOST.LOST", "the process of host 0 was ended by signal 9 (SIGKILL)", "is short"], 2),
        ("left", ["HOST.LOST", "the process of host 0 ended with exit status 3"], 2),
        ("interrupted", ["HOST.FUNCTION", "KeyboardInterrupt: as told"], 1),
    ],
)
def test_error_says_how_the_process_of_a_host_has_ended(
    stream: Stream, tmp_path: Path, how: str, says: list[str], calls: int
) -> None:
    notes, mended = tmp_path / "notes", tmp_path / "mended"

    class Ending(sb.KeyedProcessFunction):
        """Of this test, so that Spark ships its code."""

        def open(self, ctx: sb.FunctionContext) -> None:
            self.total = ctx.get_reducing_state(sb.ReducingStateDescriptor("total", "sum", int))

        def process_element(self, row: Any, ctx: sb.FunctionContext) -> Any:
            self.total.add(row.n)
            if row.n == 2 and not mended.exists():
                with notes.open("a") as file:
                    file.write("called\n")
                if how == "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                if how == "left":
                    os._exit(3)
                raise KeyboardInterrupt("as told")
            yield row.user, self.total.get()

    for n in (1, 2):
        stream.add(numbers(("a", n)))
    sink = Collecting()
    options = {"run_on": sb.spark.Executors(1, max_attempts=2, start_timeout="1 minute")}
    raised = stream.fails(stream.batches(Ending(), sink, **options))
    for said in says:
        assert said in raised
    assert len(notes.read_text().splitlines()) == calls
    assert sb.CheckpointStore(stream.state, single_writer=True).latest() == 0
    mended.touch()
    stream.run(stream.batches(Ending(), sink, **options))
    assert sink.calls == [(0, [("a", 1)]), (1, [("a", 3)])]
