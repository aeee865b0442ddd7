"""The process that runs a host ends with the worker that has forked it, and the worker knows how it has ended."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from processes import run, started
from raw_links import wait_until

PROGRAM = """
import faulthandler, json, os, signal, subprocess, sys, tempfile
from statebackend.cluster.failures import reported

def leaves_a_process():
    nowhere = subprocess.DEVNULL
    subprocess.Popen(["sleep", "60"], close_fds=False, stdout=nowhere, stderr=nowhere)
    os._exit(3)

def writes_a_report_and_dies():
    os.kill(os.getpid(), signal.SIGTERM)

def raises():
    raise SystemExit(7)

tempfile.tempdir = "/nowhere"

def crashes():
    os.kill(os.getpid(), signal.SIGSEGV)

# As PySpark does in a worker, where Spark is told to.
traces = open(os.path.join(os.environ["PYTHON_FAULTHANDLER_DIR"], str(os.getpid())), "w")
faulthandler.enable(traces)

print(json.dumps([
    reported(lambda: {"ended": "ö" * 100_000}),
    reported(leaves_a_process),
    reported(lambda: os.kill(os.getpid(), signal.SIGKILL)),
    reported(writes_a_report_and_dies),
    reported(lambda: os._exit(0)),
    reported(raises),
    reported(crashes),
]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere it is a temporary file")
def test_report_names_the_exit_status_or_the_signal(tmp_path: Path) -> None:
    done = run(PROGRAM, variables={"PYTHON_FAULTHANDLER_DIR": str(tmp_path)})
    *ends, failed, crashed = json.loads(done.stdout)
    assert ends == [
        {"ended": "ö" * 100_000},
        {"died": "ended with exit status 3"},
        {"died": "was ended by signal 9 (SIGKILL)"},
        {"died": "was ended by signal 15 (SIGTERM)"},
        {"died": "ended with exit status 0"},
    ]
    assert crashed["died"] == "was ended by signal 11 (SIGSEGV)"
    assert "Segmentation fault" in crashed["trace"]
    assert "in crashes" in crashed["trace"]
    assert (failed["failed"]["kind"], failed["failed"]["message"]) == ("SystemExit", "7")


WAITS = """
import os, signal, time
from statebackend.cluster.failures import reported

signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job inherits that it is ignored

def waits():
    print(os.getpid(), flush=True)
    time.sleep(600)

reported(waits)
"""


def is_there(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize("is_stopped", [False, True], ids=["running", "stopped"])
def test_host_process_ends_when_its_worker_is_killed(is_stopped: bool) -> None:
    """Spark kills the worker it knows, and nothing else."""
    with started(WAITS) as worker:
        host = int(worker.stdout.readline())
        assert is_there(host)
        if is_stopped:
            os.kill(host, signal.SIGSTOP)
    wait_until(lambda: not is_there(host))


def test_host_process_ends_when_its_worker_is_interrupted() -> None:
    with started(WAITS, stderr=subprocess.PIPE) as worker:
        host = int(worker.stdout.readline())
        while worker.poll() is None:  # Python drops an interrupt that comes within its own part of a fork
            worker.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.wait(5)
        assert "KeyboardInterrupt" in worker.stderr.read()
    wait_until(lambda: not is_there(host))
