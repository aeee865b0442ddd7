"""Starts the JVM of the Flink peer and reads what it prints: to its end, or round by round.

The JVM prints a header, then one line of JSON per measurement. In a `Session` it waits before each round for
a byte on its standard input and prints a line when the round has ended, so that the rounds of several
processes can take turns.
"""

from __future__ import annotations

import json
import subprocess
import threading
from pathlib import Path
from types import TracebackType
from typing import Any

Measurement = dict[str, Any]

# What a round of a session prints before its last round; the record of the measurement comes after it.
_ROUND, _HEADER = "round", "header"


class PeerFailed(RuntimeError):
    """The JVM ended with an error, ran too long, or did not measure what it was asked to."""


def run_to_end(
    command: list[str], timeout: float, suite: str, folder: Path
) -> tuple[dict[str, Any], list[Measurement]]:
    """Run a JVM and return its header and its measurements."""
    try:
        # A JVM that dies leaves a report where it was started: not in the folder of the caller.
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout, check=False, cwd=folder
        )
    except subprocess.TimeoutExpired:
        raise PeerFailed(f"the {suite} suite of the Flink peer ran longer than {timeout:.0f} s") from None
    if done.returncode != 0:
        raise PeerFailed(_ending(suite, done.returncode, done.stderr, done.stdout))
    # Other lines are messages of the JVM.
    records = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if not records or records[0].get("record") != _HEADER or len(records) < 2:
        raise PeerFailed(f"the {suite} suite of the Flink peer printed no measurement")
    return records[0], records[1:]


class Session:
    """One operation in a JVM that runs a round when it is told to; a context manager that ends the JVM.

    ``rounds`` is how many there are, the warm-up included; ``run_round`` runs the next one and returns its
    nanoseconds; after the last one ``measurement`` returns what a run to the end would have.
    """

    def __init__(self, command: list[str], timeout: float, suite: str, folder: Path, rounds: int) -> None:
        self.rounds = rounds
        self._timeout, self._suite = timeout, suite
        self._errors = folder / "stderr.txt"
        # Into a file: a pipe that nobody reads would fill up and stop the JVM.
        with open(self._errors, "w", encoding="utf-8") as errors:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                bufsize=1,
                cwd=folder,
            )
        self._timed_out = False
        #: What the measurement was made in.
        self.surroundings: dict[str, Any] = {}
        try:
            self.header = self._read(_HEADER)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the JVM if it has not ended yet."""
        if self._process.poll() is None:
            self._process.kill()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                try:
                    stream.close()
                except BrokenPipeError:
                    pass  # a byte that the JVM did not live to read
        self._process.wait()

    def run_round(self) -> int:
        """Run the next round; the nanoseconds of its timed part."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write("\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._failure() from None
        return int(self._read(_ROUND)["nanos"])

    def measurement(self) -> Measurement:
        """What the JVM measured; to be called once, after the last round."""
        return {**self._read(None), **self.surroundings}

    def _read(self, kind: str | None) -> dict[str, Any]:
        """The next record, which must be of this kind."""
        assert self._process.stdout is not None
        watchdog = threading.Timer(self._timeout, self._out_of_time)
        watchdog.start()
        try:
            for line in self._process.stdout:
                if line.startswith("{"):
                    record: dict[str, Any] = json.loads(line)
                    if record.get("record") != kind:
                        raise PeerFailed(f"the {self._suite} suite of the Flink peer is out of step")
                    return record
        finally:
            watchdog.cancel()
        raise self._failure()

    def _out_of_time(self) -> None:
        self._timed_out = True
        self._process.kill()

    def _failure(self) -> PeerFailed:
        status = self._process.wait()
        if self._timed_out:
            return PeerFailed(
                f"a round of the {self._suite} suite of the Flink peer ran longer than {self._timeout:.0f} s"
            )
        return PeerFailed(_ending(self._suite, status, self._errors.read_text(encoding="utf-8"), ""))


def _ending(suite: str, status: int, stderr: str, stdout: str) -> str:
    # Flink's logging announces that it has no back end, which explains nothing; a killed JVM says nothing.
    lines = [line for line in stderr.splitlines() if not line.startswith("SLF4J:")]
    reason = "\n".join(lines)[-4000:] or stdout.strip()[-4000:] or "no message"
    return f"the {suite} suite of the Flink peer ended with status {status}:\n{reason}"
