"""Both ends of links, without the code that is tested: plain sockets, frames and proofs as specified, fake servers."""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import os
import queue
import select
import socket
import stat
import struct
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import pytest

from statebackend.cluster.wire import (
    Link,
    Listener,
    connect,
)

SECRET, OTHER_SECRET = b"of this query", b"of another query"
HOST = "127.0.0.1"
#: Seconds in which whatever must happen has happened; nothing that passes waits for so long.
LONG = 20.0

HELLO = b"SBL\x01"
#: How many bytes each end says in a handshake.
CLIENT_SAYS, SERVER_SAYS = 4 + 32 + 32 + 32, 4 + 32 + 32


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LONG
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def open_files() -> int:
    return len(os.listdir("/proc/self/fd" if sys.platform == "linux" else "/dev/fd"))


def open_sockets() -> set[tuple[int, int]]:
    """Those of this process, each by what no other has."""
    found = set()
    for number in os.listdir("/proc/self/fd" if sys.platform == "linux" else "/dev/fd"):
        with suppress(OSError):  # that of the listing
            status = os.fstat(int(number))
            if stat.S_ISSOCK(status.st_mode):
                found.add((status.st_dev, status.st_ino))
    return found


class Served:
    """A listener that hands out its links, and serves each until it ends."""

    def __init__(self, secret: bytes = SECRET, **options: Any) -> None:
        self.links: queue.Queue[tuple[Link, str]] = queue.Queue()
        self.done = threading.Event()
        self.listener = Listener(secret, self._serve, **options)
        self.address = self.listener.address

    def _serve(self, link: Link, role: str) -> None:
        self.links.put((link, role))
        self.done.wait()

    def connect(self, role: str = "task") -> tuple[Link, Link]:
        """Both ends of a new link."""
        near = connect(self.address, SECRET, role=role)
        far, told = self.links.get(timeout=LONG)
        assert told == role
        return near, far

    def __enter__(self) -> Served:
        return self

    def __exit__(self, *_: object) -> None:
        self.done.set()
        self.listener.close()


def raw_to(address: tuple[str, int]) -> socket.socket:
    made = socket.create_connection(address, LONG)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return made


def rest_of(raw: socket.socket) -> bytes:
    """All that still comes, up to the end, whether that is in order or not."""
    found = b""
    try:
        while data := raw.recv(65_536):
            found += data
    except ConnectionError:
        pass
    return found


def end_writing(raw: socket.socket) -> None:
    with suppress(OSError):  # the other end may have closed already
        raw.shutdown(socket.SHUT_WR)


def exactly(raw: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size:
        data = raw.recv(size - len(found))
        assert data, "the end came too soon"
        found += data
    return found


def frame(header: object, body: bytes = b"", magic: bytes = b"SBF\x01") -> bytes:
    """A frame as the specification has it; ``header`` is bytes, or an object for JSON."""
    head = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("!4sIQ", magic, len(head), len(body)) + head + body


def proof(side: str, client_nonce: bytes, server_nonce: bytes, role: bytes, secret: bytes = SECRET) -> bytes:
    """A proof as the specification has it."""
    label = f"statebackend link, proof of the {side}\0".encode() + HELLO
    return hmac.new(
        secret, label + role.ljust(32, b"\0") + client_nonce + server_nonce, hashlib.sha256
    ).digest()


T = TypeVar("T", bound="FakeServer")


class FakeServer:
    """Accepts one connection, and answers it as ``act`` says, on a thread of its own."""

    def __init__(self, act: Callable[[socket.socket], None]) -> None:
        self._socket = socket.create_server((HOST, 0))
        self.address = self._socket.getsockname()
        self._act = act
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        with self._socket.accept()[0] as raw, suppress(ConnectionError):
            raw.settimeout(LONG)
            self._act(raw)

    def __enter__(self: T) -> T:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.join(LONG)
        self._socket.close()


class Relay(FakeServer):
    """Stands between a client and a listener, keeps what each says, and changes the byte at a place of it."""

    def __init__(self, address: tuple[str, int], *, says: str = "", at: int = 0) -> None:
        self.said = {"client": bytearray(), "server": bytearray()}
        self._target, self._says, self._at = address, says, at
        super().__init__(self._between)

    def _between(self, client: socket.socket) -> None:
        with raw_to(self._target) as server:
            ends = {client: ("client", server), server: ("server", client)}
            while True:
                for end in select.select(list(ends), [], [], LONG)[0]:
                    who, other = ends[end]
                    data = bytearray(end.recv(65_536))
                    if not data:
                        return
                    at = self._at - len(self.said[who])
                    self.said[who] += data
                    if who == self._says and 0 <= at < len(data):
                        data[at] ^= 1
                    other.sendall(data)


def told(caplog: pytest.LogCaptureFixture, level: int = logging.WARNING) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.levelno >= level]
