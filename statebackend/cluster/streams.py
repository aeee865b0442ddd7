"""Connected TCP sockets that one thread reads, another writes and any may close; and the errors at their end.

Sockets are non-blocking, and each call waits for itself: a timeout set on the socket would be for the reader and the
writer. A descriptor is closed by the last thread that leaves the stream, never under one that waits in a call:
its number might belong to another connection by then.
"""

from __future__ import annotations

import select
import socket
import threading
import time
from collections import deque
from collections.abc import Iterable
from itertools import islice
from typing import Any

from statebackend.checkpoint.files.store_files import BytesLike
from statebackend.errors import StateBackendError, UsageError

#: How many buffers the system takes in one call: IOV_MAX of Linux and macOS.
_BUFFERS_AT_ONCE = 1024

#: The longest wait that is handed to the system, which counts milliseconds in 32 bits; waits are begun again.
_LONGEST_WAIT = 86_400.0

#: Seconds without traffic before the system asks whether the peer is there, between questions, and how many.
_KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPALIVE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 6}

#: A write to a peer that has gone is an error also where the application has given SIGPIPE its deadly default back.
_NO_SIGNAL = getattr(socket, "MSG_NOSIGNAL", 0)


class LinkError(StateBackendError, ConnectionError):
    """A connection to a peer failed: it cannot be reached, is lost, or is not to be talked to."""

    default_code = "CLUSTER"


class LinkClosed(LinkError):
    """The connection has ended, in order or not, or this side has closed it."""

    default_code = "CLUSTER.CLOSED"


class WireError(LinkError):
    """The peer sends what is not part of the protocol, or has not the secret."""

    default_code = "CLUSTER.WIRE"


def place(address: tuple[Any, ...]) -> str:
    """An address as errors name it."""
    return ":".join(str(part) for part in address[:2])


class Stream:
    """A connected socket, which it owns. Reads and writes raise `LinkClosed` where the system has lost the connection.

    ``peer`` is the address at the other end, and ``local`` that at this one.
    """

    def __init__(self, connected: socket.socket) -> None:
        try:
            self.peer: tuple[str, int] = connected.getpeername()[:2]
            self.local: tuple[str, int] = connected.getsockname()[:2]
            connected.setblocking(False)
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in _KEEPALIVE.items():
                if hasattr(socket, name):
                    connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        except OSError as error:  # the peer has gone already
            connected.close()
            raise _lost(error, "a new connection") from error
        self._socket = connected
        self._state = threading.Lock()
        self._inside = 0
        self._is_closed = False

    def read(self, into: memoryview, patience: float | None = None) -> int:
        """Read what there is; 0 at the end. `TimeoutError` if nothing comes within ``patience`` seconds."""
        self._enter()
        try:
            while True:
                try:
                    count = self._socket.recv_into(into)
                except BlockingIOError:
                    pass
                except OSError as error:
                    raise self._ended(error) from error
                else:
                    # After its own end a stream may still have bytes, and then an end that looks like the peer's.
                    self._check_open()
                    return count
                self._wait(select.POLLIN, patience)
        finally:
            self._leave()

    def write(self, pieces: Iterable[BytesLike], patience: float | None = None) -> None:
        """Write all of it, pieces unjoined. `TimeoutError` if the peer takes nothing for ``patience`` seconds.

        After an error, any part may have been sent.
        """
        left = deque(view for view in map(flat, pieces) if len(view))
        self._enter()
        try:
            while left:
                try:
                    sent = self._socket.sendmsg(list(islice(left, _BUFFERS_AT_ONCE)), (), _NO_SIGNAL)
                except BlockingIOError:
                    self._wait(select.POLLOUT, patience)
                    continue
                except OSError as error:
                    raise self._ended(error) from error
                while left and sent >= len(left[0]):
                    sent -= len(left.popleft())
                if sent:
                    left[0] = left[0][sent:]
        finally:
            self._leave()

    def finish(self, patience: float) -> None:
        """Tell the peer that this is all, and drop what still comes, for ``patience`` seconds or until it closes.

        A socket that is closed with bytes unread resets the connection, and that may take what was written with it.
        """
        deadline = time.monotonic() + patience
        dropped = memoryview(bytearray(65_536))
        try:
            self._end_writing()
            while (left := deadline - time.monotonic()) > 0 and self.read(dropped, left):
                pass
        except (LinkError, TimeoutError):
            pass  # the peer has gone, or stays forever: both is an end

    def close(self) -> None:
        """End the connection and wake whoever waits in it. Idempotent, from any thread; raises nothing."""
        with self._state:
            if self._is_closed:
                return
            self._is_closed = True
            try:
                self._socket.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # the peer was first
            if not self._inside:
                self._socket.close()

    def detach(self) -> int:
        """Hand the descriptor of the socket over to the caller: the stream is closed, and the connection goes on."""
        with self._state:
            self._check_open()
            if self._inside:
                raise UsageError("another thread reads or writes", detail=place(self.peer))
            self._is_closed = True
            return self._socket.detach()

    def _end_writing(self) -> None:
        self._enter()
        try:
            self._socket.shutdown(socket.SHUT_WR)
        except OSError as error:
            raise self._ended(error) from error
        finally:
            self._leave()

    def _enter(self) -> None:
        with self._state:
            self._check_open()
            self._inside += 1

    def _leave(self) -> None:
        with self._state:
            self._inside -= 1
            if self._is_closed and not self._inside:
                self._socket.close()

    def _check_open(self) -> None:
        if self._is_closed:
            raise LinkClosed("this side has closed the link", detail=place(self.peer))

    def _wait(self, event: int, patience: float | None) -> None:
        """Wait until a call may do something again, or the connection has ended."""
        waiting = select.poll()
        waiting.register(self._socket, event)
        wait = _LONGEST_WAIT if patience is None else min(max(patience, 0.0), _LONGEST_WAIT)
        if not waiting.poll(wait * 1000) and patience is not None and patience <= wait:
            raise TimeoutError("nothing moves on the link")
        self._check_open()

    def _ended(self, error: OSError) -> LinkClosed:
        if self._is_closed:
            return LinkClosed("this side has closed the link", detail=place(self.peer))
        return _lost(error, place(self.peer))


def flat(data: BytesLike) -> memoryview:
    """The bytes of an object as they lie; `TypeError` if they are not in one place."""
    view = memoryview(data)
    # An empty view of several dimensions cannot be cast.
    return view.cast("B") if view.nbytes else memoryview(b"")


def _lost(error: OSError, where: str) -> LinkClosed:
    return LinkClosed(f"the connection is lost: {error.strerror or type(error).__name__}", detail=where)
