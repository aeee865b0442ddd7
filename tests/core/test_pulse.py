"""The pulse, against plain sockets that say what they like, and over many of them."""

from __future__ import annotations

import gc
import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import pairwise
from typing import Any

import pytest
from processes import run
from raw_links import LONG, exactly, open_files, rest_of, wait_until

from statebackend._core.pulse import Pulse
from statebackend.runtime.output import BatchOutput

pytestmark = pytest.mark.checked

#: Seconds of the patience that runs out here.
SHORT = 0.4
SIZE = 24


BOTH_ENDS = pytest.mark.parametrize("asks", [True, False], ids=["driver", "host"])


def message(kind: bytes, at: int, progress: int = 0) -> bytes:
    return struct.pack("=8sqq", kind, at, progress)


def tick(at: int) -> bytes:
    return message(b"SB tick\x01", at)


def answer(at: int, progress: int = -1) -> bytes:
    return message(b"SB life\x01", at, progress)


def parsed(found: bytes) -> tuple[bytes, int, int]:
    kind, at, progress = struct.unpack("=8sqq", found)
    return kind, at, progress


@pytest.fixture
def made() -> Iterator[list[Any]]:
    """What is to be stopped or closed at the end."""
    kept: list[Any] = []
    yield kept
    for each in kept:
        (each.stop if isinstance(each, Pulse) else each.close)()


@pytest.fixture
def end(made: list[Any]) -> Callable[..., tuple[Pulse, socket.socket]]:
    """Makes one end of a pulse, and a plain socket at the other."""

    def make(**options: Any) -> tuple[Pulse, socket.socket]:
        near, far = socket.socketpair()
        near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)  # the least that the system has
        far.settimeout(LONG)
        pulse = Pulse(near.detach(), **options)
        made[:] = [*made, pulse, far]
        return pulse, far

    return make


@pytest.fixture
def pair(made: list[Any]) -> Callable[..., tuple[Pulse, Pulse]]:
    """Makes both ends: of the driver, and of a host."""

    def make(patience: float = SHORT) -> tuple[Pulse, Pulse]:
        near, far = socket.socketpair()
        both = (
            Pulse(near.detach(), patience=patience, asks=True),
            Pulse(far.detach(), patience=patience, asks=False),
        )
        made[:] = [*made, *both]
        return both

    return make


def test_pulse_lives_while_both_ends_do(pair: Callable[..., tuple[Pulse, Pulse]]) -> None:
    driver, host = pair()
    time.sleep(3 * SHORT)
    assert (driver.over, host.over) == (None, None)


@BOTH_ENDS
def test_pulse_is_closed_when_the_peer_closes(end: Callable[..., Any], asks: bool) -> None:
    pulse, far = end(patience=LONG, asks=asks)
    far.close()
    wait_until(lambda: pulse.over == "closed")


@BOTH_ENDS
def test_pulse_is_silent_when_the_patience_is_over_and_ends_the_connection(
    end: Callable[..., Any], asks: bool
) -> None:
    began = time.monotonic()
    pulse, far = end(patience=SHORT, asks=asks)
    wait_until(lambda: pulse.over == "silent")
    assert time.monotonic() - began >= SHORT
    said = rest_of(far)
    assert (len(said) > 0) == asks
    assert len(said) % SIZE == 0


@BOTH_ENDS
def test_cut_ends_the_pulse_at_both_ends(pair: Callable[..., tuple[Pulse, Pulse]], asks: bool) -> None:
    driver, host = pair(LONG)
    (driver if asks else host).cut()
    wait_until(lambda: (driver.over, host.over) == ("closed", "closed"))


@BOTH_ENDS
def test_stop_ends_the_peer_at_once_and_is_idempotent(
    pair: Callable[..., tuple[Pulse, Pulse]], asks: bool
) -> None:
    stopped, other = pair(LONG)[:: 1 if asks else -1]
    stopped.stop()
    stopped.stop()
    stopped.cut()
    assert (stopped.over, stopped.stands_for, stopped.function_runs) == ("closed", 0.0, False)
    wait_until(lambda: other.over == "closed")


def test_why_the_pulse_was_over_is_known_after_stop(end: Callable[..., Any]) -> None:
    pulse, far = end(patience=LONG, asks=False)
    far.send(b"x" * SIZE)
    wait_until(lambda: pulse.over is not None)
    pulse.stop()
    assert pulse.over == "garbled"


# --- what the peer says ---


@pytest.mark.parametrize(
    "said",
    [
        b"\0" * SIZE,
        b"GET / HTTP/1.1\r\nHost: here",
        answer(1),
        tick(0),
        tick(-1),
        tick(2) + tick(2),
        tick(2) + tick(1),
        tick(1) + b"\xff" * SIZE,
    ],
)
def test_host_refuses_wrong_ticks(end: Callable[..., Any], said: bytes) -> None:
    pulse, far = end(patience=LONG, asks=False)
    far.sendall(said)
    wait_until(lambda: pulse.over == "garbled")
    rest_of(far)


@pytest.mark.parametrize(
    "says",
    [
        lambda at: b"\0" * SIZE,
        lambda at: tick(at),
        lambda at: answer(at + 1),
        lambda at: answer(0),
        lambda at: answer(at) * 2,
    ],
    ids=["zeros", "its own tick", "a later one", "none", "twice"],
)
def test_driver_refuses_wrong_answers_to_its_tick(
    end: Callable[..., Any], says: Callable[[int], bytes]
) -> None:
    pulse, far = end(patience=LONG, asks=True)
    _, at, _ = parsed(exactly(far, SIZE))
    far.sendall(says(at))
    wait_until(lambda: pulse.over == "garbled")


def test_messages_may_come_in_parts_and_many_at_once(end: Callable[..., Any]) -> None:
    pulse, far = end(patience=LONG, asks=False)
    for byte in tick(5):
        far.send(bytes([byte]))
    assert parsed(exactly(far, SIZE)) == (b"SB life\x01", 5, -1)
    far.sendall(b"".join(map(tick, range(6, 1000))))
    at = 5
    while at < 999:  # one answer may be for many
        _, at, _ = parsed(exactly(far, SIZE))
    assert pulse.over is None


@BOTH_ENDS
def test_peer_that_never_finishes_a_message_is_silent(end: Callable[..., Any], asks: bool) -> None:
    pulse, far = end(patience=SHORT, asks=asks)
    said = answer(1) if asks else tick(1)
    for byte in said[:-1]:
        if pulse.over is not None:
            break
        with suppress(OSError):  # it ends meanwhile
            far.send(bytes([byte]))
        time.sleep(SHORT / 8)
    assert pulse.over == "silent"


def test_driver_asks_four_times_within_the_patience(end: Callable[..., Any]) -> None:
    patience = 4 * SHORT
    pulse, far = end(patience=patience, asks=True)
    times = []
    for _ in range(4):
        _, at, _ = parsed(exactly(far, SIZE))
        far.sendall(answer(at))
        times.append(at / 1e9)
    gaps = [after - before for before, after in pairwise(times)]
    assert min(gaps) >= patience / 4
    assert pulse.over is None


def test_driver_that_gets_late_answers_hears_them(end: Callable[..., Any]) -> None:
    """Each answer is to the tick before the newest: its peer is behind, and alive."""
    pulse, far = end(patience=SHORT, asks=True)
    _, before, _ = parsed(exactly(far, SIZE))
    for _ in range(12):
        _, at, _ = parsed(exactly(far, SIZE))
        far.sendall(answer(before))
        before = at
    assert pulse.over is None


def blocked_host(end: Callable[..., Any]) -> tuple[Pulse, socket.socket]:
    """A host whose answers nobody reads, to ticks 1 to 400."""
    pulse, far = end(patience=LONG, asks=False)
    for at in range(1, 401):
        far.sendall(tick(at))
        time.sleep(0.0005)
    return pulse, far


def test_host_that_could_not_answer_answers_the_newest_tick_later(end: Callable[..., Any]) -> None:
    pulse, far = blocked_host(end)
    told, at = 0, 0
    while at < 400:
        _, at, _ = parsed(exactly(far, SIZE))
        told += 1
    assert told < 400, "its answers had no room"
    assert pulse.over is None


def test_stop_does_not_wait_for_a_peer_that_reads_nothing(end: Callable[..., Any]) -> None:
    pulse, _ = blocked_host(end)
    began = time.monotonic()
    pulse.stop()
    assert time.monotonic() - began < LONG / 4


# --- progress ---


CALLS: list[Callable[[BatchOutput], None]] = [
    lambda given: given.output.take([("a",)]),  # a row
    lambda given: given.output.take(None),  # a row without output
    lambda given: given.add(None),  # a timer
    lambda given: given.add_batches(None),  # columns
]


def test_driver_knows_how_long_no_call_has_returned(pair: Callable[..., tuple[Pulse, Pulse]]) -> None:
    driver, host = pair(4 * SHORT)
    assert driver.stands_for == 0.0
    host.function_runs = True
    assert host.function_runs
    for call in CALLS:
        wait_until(lambda: driver.stands_for > 1.5 * SHORT)
        call(BatchOutput({"main": None}))
        wait_until(lambda: 0.0 < driver.stands_for < SHORT)
    host.function_runs = False
    wait_until(lambda: driver.stands_for == 0.0)


# --- the process ---


def run_alone(program: str) -> subprocess.CompletedProcess[str]:
    before = "import ctypes, os, socket, time\nfrom statebackend._core.pulse import Pulse\n"
    return run(before + program, status=None, timeout=6 * LONG)


def test_process_ends_while_it_holds_the_gil() -> None:
    done = run_alone(
        "near, far = socket.socketpair()\n"
        "pulse = Pulse(near.detach(), patience=0.5, asks=False, ends_process=True)\n"
        "ctypes.PyDLL(None).sleep(1000)\n"
    )
    assert done.returncode == 1
    assert done.stderr.startswith("statebackend: the driver has gone")


def test_process_goes_on_after_stop() -> None:
    done = run_alone(
        "near, far = socket.socketpair()\n"
        "pulse = Pulse(near.detach(), patience=0.3, asks=False, ends_process=True)\n"
        "far.close()\n"
        "while pulse.over is None:\n"
        "    time.sleep(0.001)\n"
        "pulse.stop()\n"
        "time.sleep(1)\n"
        "print('on')\n"
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "on\n", "")


def test_process_exits_with_pulses_that_live() -> None:
    done = run_alone(
        "near, far = socket.socketpair()\n"
        "pulses = [Pulse(near.detach(), patience=30, asks=True), Pulse(far.detach(), patience=30, asks=False)]\n"
        "pulses.append(pulses)\n"
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_forked_child_leaves_the_pulse_to_its_parent() -> None:
    done = run_alone(
        "near, far = socket.socketpair()\n"
        "pulses = [Pulse(near.detach(), patience=0.5, asks=True), Pulse(far.detach(), patience=0.5, asks=False)]\n"
        "child = os.fork()\n"
        "if not child:\n"
        "    for pulse in pulses:\n"
        "        pulse.cut()\n"
        "        pulse.stop()\n"
        "    os._exit(7)\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7\n"
        "time.sleep(1)\n"
        "print([pulse.over for pulse in pulses])\n"
    )
    assert done.stdout == "[None, None]\n", done.stderr


def num_threads() -> int:
    return len(os.listdir("/proc/self/task")) if sys.platform == "linux" else 0


def test_thousands_of_pulses_leave_nothing() -> None:
    files, threads = open_files(), num_threads()
    for number in range(2000):
        near, far = socket.socketpair()
        driver = Pulse(near.detach(), patience=LONG, asks=True)
        if number % 3 == 0:
            far.close()
        host = None if number % 3 == 0 else Pulse(far.detach(), patience=LONG, asks=False)
        if number % 2:
            driver.stop()
        del driver, host
    gc.collect()
    wait_until(lambda: (open_files(), num_threads()) == (files, threads))


def test_number_without_a_socket_is_an_error() -> None:
    files = open_files()
    with pytest.raises(OSError, match="Bad file descriptor"):
        Pulse(1 << 20, patience=1.0, asks=True)
    reads, writes = os.pipe()
    os.close(writes)
    pulse = Pulse(reads, patience=1.0, asks=True)
    wait_until(lambda: pulse.over == "closed")
    pulse.stop()
    assert open_files() == files


#: Both processes are stopped for longer than the patience, as by a pause of their machine.
STOPPED = """
import os, signal, socket, time
from statebackend._core.pulse import Pulse

ends = socket.socketpair()
pids = []
for asks, end, other in ((True, *ends), (False, *ends[::-1])):
    pid = os.fork()
    if pid == 0:
        other.close()
        pulse = Pulse(end.detach(), patience=0.6, asks=asks)
        time.sleep(2.7)
        os.write(1, f"{pulse.over} ".encode())  # one write: print may write line and end apart
        time.sleep(0.6)
        os._exit(0)
    pids.append(pid)
for end in ends:
    end.close()
time.sleep(0.5)
for pid in pids:
    os.kill(pid, signal.SIGSTOP)
time.sleep(1.5)
for pid in reversed(pids):
    os.kill(pid, signal.SIGCONT)
    time.sleep(0.02)
for pid in pids:
    os.waitpid(pid, 0)
"""


def test_pulse_goes_on_when_both_processes_were_stopped() -> None:
    assert run(STOPPED).stdout.split() == ["None", "None"]
