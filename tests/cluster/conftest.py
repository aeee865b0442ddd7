"""Links, and the check that nothing of them stays open; their tests ask for it."""

from __future__ import annotations

import gc
import random
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from host_worlds import World, ticks
from raw_links import HOST, Served, open_files, wait_until
from refusing_disks import small_disk

from statebackend.cluster.streams import Stream
from statebackend.cluster.wire import Link

__all__ = ["small_disk"]


@pytest.fixture
def nothing_left_open() -> Iterator[None]:
    """After each test there are no more threads and descriptors than before."""
    threads, files = threading.active_count(), open_files()
    yield

    def is_as_before() -> bool:
        return threading.active_count() <= threads and open_files() <= files

    if not is_as_before():
        gc.collect()
        wait_until(is_as_before)


@pytest.fixture
def served() -> Iterator[Served]:
    with Served() as made:
        yield made


@pytest.fixture
def pair(served: Served) -> Iterator[tuple[Link, Link]]:
    near, far = served.connect()
    with near, far:
        yield near, far


@pytest.fixture
def bare() -> Iterator[Callable[[], tuple[socket.socket, Link]]]:
    """Makes a plain socket and the link at its other end, that believes the socket has proved itself."""
    with ExitStack() as made:
        server = made.enter_context(socket.create_server((HOST, 0)))

        def make() -> tuple[socket.socket, Link]:
            raw = made.enter_context(socket.create_connection(server.getsockname()))
            return raw, made.enter_context(Link(Stream(server.accept()[0])))

        yield make


@pytest.fixture
def world(tmp_path: Path, rng: random.Random, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """At the end of each test, its query is closed, and what is left is looked at."""
    made = World(tmp_path, rng, monkeypatch)
    yield made
    ticks.clear()
    if made.query is not None:
        made.close()
