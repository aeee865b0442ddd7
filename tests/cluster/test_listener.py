"""Listeners: who is served, who is refused, how they end, and hostile bytes, which change and cost nothing."""

from __future__ import annotations

import logging
import os
import queue
import random
import resource
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, suppress

import pytest
from raw_links import (
    CLIENT_SAYS,
    HELLO,
    HOST,
    LONG,
    SECRET,
    Relay,
    Served,
    end_writing,
    exactly,
    frame,
    open_sockets,
    proof,
    raw_to,
    rest_of,
    told,
    wait_until,
)

from statebackend.cluster import wire
from statebackend.cluster.streams import Stream
from statebackend.cluster.wire import Link, LinkClosed, LinkError, Listener, WireError, connect
from statebackend.errors import UsageError

pytestmark = pytest.mark.usefixtures("nothing_left_open")


def test_only_so_many_may_prove_themselves_at_once_and_others_wait() -> None:
    threads = threading.active_count()
    with Served(max_waiting=3) as served, ExitStack() as opened:
        proved = [served.connect() for _ in range(8)]  # these do not wait
        waiting = [opened.enter_context(raw_to(served.address)) for _ in range(3)]
        wait_until(lambda: served.listener._waiting == 3)
        with ThreadPoolExecutor(8) as others:
            coming = [others.submit(connect, served.address, SECRET, role="task") for _ in range(8)]
            assert not wait(coming, timeout=0.2).done
            assert served.listener.refused == 0
            # That accepts, that serve, that wait, ours.
            assert threading.active_count() <= threads + 1 + 8 + 3 + 8
            waiting[0].close()
            for each in coming:
                each.result(LONG).close()
            for _ in coming:
                served.links.get(timeout=LONG)[0].close()
        assert served.listener.refused == 1, "the one that went"
        for each, number in zip([end for both in proved for end in both], range(99), strict=False):
            each.send("alive", number=number)
        for near, far in proved:
            assert near.receive(LONG).header["number"] == far.receive(LONG).header["number"] + 1
            near.close()


def test_error_of_a_server_is_logged_and_ends_its_link_alone(caplog: pytest.LogCaptureFixture) -> None:
    def serve(link: Link, role: str) -> None:
        if role == "bad":
            raise ZeroDivisionError("of the function")
        if role == "exit":
            raise SystemExit
        link.send("hello")

    with Listener(SECRET, serve) as made:
        for role in ("bad", "exit"):
            with connect(made.address, SECRET, role=role) as link, pytest.raises(LinkClosed):
                link.receive(LONG)
        with connect(made.address, SECRET, role="good") as link:
            assert link.receive(LONG).header["op"] == "hello"
    logged = [each.exc_info for each in caplog.records if each.levelno >= logging.ERROR]
    assert [each[0] for each in logged if each] == [ZeroDivisionError, SystemExit]
    assert made.refused == 0


@pytest.mark.parametrize("catches", [False, True])
def test_a_proved_peer_that_sends_no_frames_is_counted(catches: bool) -> None:
    def serve(link: Link, role: str) -> None:
        try:
            link.receive(LONG)
        except WireError:
            if not catches:
                raise

    with Listener(SECRET, serve) as made, connect(made.address, SECRET, role="task") as link:
        link._stream.write([bytes(100)])
        with pytest.raises(LinkClosed):
            link.receive(LONG)
        wait_until(lambda: made.refused == 1)


def test_closing_ends_everything_at_once() -> None:
    with Served() as served, ExitStack() as opened:
        near, far = served.connect()
        waiting = opened.enter_context(raw_to(served.address))
        wait_until(lambda: served.listener._waiting == 1)
        served.done.set()
        began = time.monotonic()
        served.listener.close()
        assert time.monotonic() - began < LONG / 2
        assert not [each for each in threading.enumerate() if each.name.startswith("statebackend-link")]
        for link in (near, far):
            with pytest.raises(LinkClosed):
                link.receive(LONG)
            link.close()
        assert rest_of(waiting) == b""
        served.listener.close()
        assert served.listener.refused == 0
        with pytest.raises(LinkError):
            connect(served.address, SECRET, role="task")


def test_a_listener_is_closed_by_those_it_serves() -> None:
    """Several at once, which must not wait for each other."""
    both = threading.Barrier(3)
    took: queue.Queue[float] = queue.Queue()

    def serve(link: Link, role: str) -> None:
        both.wait(LONG)
        began = time.monotonic()
        made.close()
        took.put(time.monotonic() - began)

    made = Listener(SECRET, serve)
    ends = [connect(made.address, SECRET, role="task") for _ in range(3)]
    assert all(took.get(timeout=LONG) < wire._JOIN / 2 for _ in ends)
    made.close()
    for end in ends:
        end.close()


def test_closing_waits_for_a_limited_time(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "_JOIN", 0.01)
    with Served() as served:
        near, _ = served.connect()
        served.listener.close()
        assert "of its threads have not ended" in told(caplog)[0]
        wait_until(lambda: not served.listener._acceptor.is_alive())  # it may take longer than that, too
        served.listener.close()
        assert "1 of its threads have not ended" in told(caplog)[1]
        near.close()


def test_the_first_port_that_is_free() -> None:
    serve: Callable[[Link, str], None] = lambda link, role: None  # noqa: E731
    with Listener(SECRET, serve) as first:
        taken = first.address[1]
        with Listener(SECRET, serve, ports=(taken, 0)) as second:
            assert second.address[1] != taken
        with pytest.raises(LinkError, match="cannot listen") as caught:
            Listener(SECRET, serve, ports=[taken, taken])
        assert caught.value.code == "CLUSTER.LISTEN"
    with Listener(SECRET, serve, ports=range(taken, taken + 1)) as again:
        assert again.address == (HOST, taken)
        assert repr(again) == f"<listener at {HOST}:{taken}>"
    with pytest.raises(LinkError, match="cannot listen"):
        Listener(SECRET, serve, bind="192.0.2.1")
    for ports in ((), (70_000,)):
        with pytest.raises(UsageError):
            Listener(SECRET, serve, ports=ports)


def test_a_listener_outlives_a_want_of_descriptors(caplog: pytest.LogCaptureFixture) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with Served() as served, raw_to(served.address) as first:
        wait_until(lambda: served.listener._waiting == 1)
        with socket.socket() as raw:
            raw.settimeout(LONG)
            highest = max(map(int, os.listdir("/proc/self/fd" if sys.platform == "linux" else "/dev/fd")))
            free = [os.dup(0)]  # whatever is free below the limit is used up
            try:
                while free[-1] < highest:
                    free.append(os.dup(0))
                resource.setrlimit(resource.RLIMIT_NOFILE, (free[-1] + 1, hard))
                raw.connect(served.address)
                wait_until(lambda: any("cannot accept" in each for each in told(caplog)))
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
                for each in free:
                    os.close(each)
            raw.sendall(HELLO)
            assert exactly(raw, 4) == HELLO
        first.close()
        for end in served.connect():
            end.close()


def test_a_listener_outlives_a_want_of_threads(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", start)
        with raw_to(served.address) as raw:
            assert rest_of(raw) == b""
    assert served.listener.refused == 1
    for end in served.connect():
        end.close()


def mutated(data: bytes, rng: random.Random) -> bytes:
    """Other bytes than these, made of them."""
    made = bytearray(data)
    while True:
        at, size = rng.randrange(len(made) + 1), rng.randrange(1, 40)
        kind = rng.randrange(6)
        if kind == 0 and at < len(made):
            made[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del made[at : at + size]
        elif kind == 2:
            made[at:at] = rng.randbytes(size)
        elif kind == 3:
            made[at:at] = made[rng.randrange(len(made) + 1) :][:size]
        elif kind == 4:
            del made[at:]
        else:
            made[at : at + size] = rng.randbytes(size)
        if bytes(made) != data and rng.randrange(2):
            return bytes(made)


def test_hostile_bytes_are_refused_and_cost_nothing(
    rng: random.Random, is_stress: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Random ones, a recorded conversation as it was and changed, and handshakes of which something is wrong."""
    count = 1_000_000 if is_stress else 2000
    with Served(max_waiting=64) as served:
        with Relay(served.address) as relay, connect(relay.address, SECRET, role="task") as link:
            far, _ = served.links.get(timeout=LONG)
            for number in range(3):
                link.send("rows", rng.randbytes(50), number=number)
                far.receive(LONG)
        link.close()
        far.close()
        recorded = bytes(relay.said["client"])
        # The link that was recorded is being served until the end; without it there is nothing to compare with.
        before = open_sockets()

        for number in range(count):
            kind = rng.randrange(6)
            with raw_to(served.address) as raw, suppress(ConnectionError):
                if kind == 0:
                    raw.sendall(rng.randbytes(rng.randrange(300)))
                elif kind == 1:
                    raw.sendall(recorded if rng.randrange(50) == 0 else mutated(recorded, rng))
                elif kind == 2:
                    raw.sendall(HELLO + rng.randbytes(rng.randrange(200)))
                elif kind == 3:
                    raw.sendall(mutated(recorded[: rng.randrange(1, CLIENT_SAYS)], rng))
                else:
                    raw.sendall(HELLO)
                    nonce = exactly(raw, 36)[4:]
                    right = recorded[4:68] + proof("client", recorded[36:68], nonce, b"task")
                    wrong = right
                    while wrong.startswith(right):  # as where what was added lies behind it
                        wrong = mutated(right, rng)[:96] + recorded[CLIENT_SAYS:]
                    raw.sendall(wrong)
                end = rng.randrange(4)
                if end == 0:
                    raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                elif end != 1:
                    end_writing(raw)
                    assert len(rest_of(raw)) <= 36
            if number % 500 == 499:
                wait_until(lambda: served.listener.refused == number + 1)  # noqa: B023
                wait_until(lambda: len(served.listener._streams) == 1)
                assert open_sockets() <= before  # others that were open may be closed meanwhile
                assert len(served.listener._ended) <= 64 + 1
                assert threading.active_count() <= 70
        assert served.listener.refused == count
        assert served.links.empty()
        assert len(told(caplog)) <= 10
        for end_of_link in served.connect():
            end_of_link.close()


def test_hostile_frames_of_proved_peers_are_frames_or_errors(rng: random.Random, is_stress: bool) -> None:
    """Nothing else comes out of a link than messages and its own errors, whatever goes in."""
    count = 200_000 if is_stress else 1000
    frames = b"".join(frame({"op": "rows", "n": n, "t": "x" * n}, rng.randbytes(3 * n)) for n in range(6))
    ends: dict[type[LinkError], int] = dict.fromkeys((LinkClosed, WireError), 0)
    messages = 0
    with socket.create_server((HOST, 0)) as server:
        for _ in range(count):
            with (
                socket.create_connection(server.getsockname()) as raw,
                Link(Stream(server.accept()[0])) as link,
            ):
                raw.sendall(mutated(frames, rng))
                raw.close()
                try:
                    while True:
                        header, body = link.receive(LONG)
                        assert isinstance(header, dict)
                        assert isinstance(header["op"], str)
                        assert len(body) <= len(frames) + 1000
                        messages += 1
                except LinkError as error:
                    ends[type(error)] += 1
                assert link._stream._socket.fileno() == -1
    assert min(ends.values()) > count // 20
    assert messages > count
