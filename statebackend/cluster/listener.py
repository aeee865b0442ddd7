"""Accepts connections, lets them prove themselves, and serves those that have, each in a thread of its own.

Whoever can reach the port can cost a listener ``max_waiting`` threads for ``handshake_timeout`` seconds, and no more.
"""

from __future__ import annotations

import errno
import logging
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from types import TracebackType

from statebackend.cluster.handshake import accept_peer, check_secret
from statebackend.cluster.links import Link
from statebackend.cluster.streams import LinkClosed, LinkError, Stream, place
from statebackend.errors import UsageError

__all__ = ["Listener"]

_log = logging.getLogger(__name__)

#: Seconds that `close` waits for threads, all together.
_JOIN = 10.0

#: Seconds that a peer has to close a link that has been served; until then what it sends is dropped.
_FINISH = 5.0

#: Seconds to pause where the system cannot accept: the connection waits on, and asking again at once would be a spin.
_PAUSE = 0.1


class Listener:
    """Calls ``serve(link, role)`` for each peer that proves itself, and closes the link when it returns or raises.

    Binds the first of ``ports`` that is free; 0 is any. At most ``max_waiting`` connections at once have not proved
    themselves yet, each for ``handshake_timeout`` seconds; others wait with the system until one of these has, or has
    gone. ``address`` is the bound one, and ``refused`` counts the connections that were: without a handshake, with a
    wrong secret, or for what is no frame.

    >>> from statebackend.cluster.links import connect
    >>> with Listener(b"of the query", lambda link, role: link.send("hello", role=role)) as listener:
    ...     with connect(listener.address, b"of the query", role="task") as link:
    ...         link.receive().header
    {'op': 'hello', 'role': 'task'}
    """

    def __init__(
        self,
        secret: bytes,
        serve: Callable[[Link, str], None],
        *,
        bind: str = "127.0.0.1",
        ports: Sequence[int] = (0,),
        max_waiting: int = 64,
        handshake_timeout: float = 10.0,
    ) -> None:
        self._secret = check_secret(secret)
        self._serve = serve
        self._max_waiting = max_waiting
        self._handshake_timeout = handshake_timeout
        self.refused = 0
        #: Guards everything below, and ``refused``.
        self._lock = threading.Lock()
        self._is_closing = threading.Event()
        #: Connections that have not proved themselves, and the condition that there may be another.
        self._waiting = 0
        self._has_room = threading.Condition(self._lock)
        self._streams: dict[threading.Thread, Stream] = {}
        #: Threads that have nothing left to do but end.
        self._ended: list[threading.Thread] = []
        #: The codes of refusals that the log has as warnings; others like them are for debugging.
        self._told: set[str] = set()
        with ExitStack() as made:
            self._socket = made.enter_context(_bound(bind, ports))
            self.address: tuple[str, int] = self._socket.getsockname()[:2]
            # Not every system wakes who waits for a listening socket that is closed; the end of a pair wakes on all.
            self._wakes, self._waker = map(made.enter_context, socket.socketpair())
            self._selector = made.enter_context(selectors.DefaultSelector())
            self._selector.register(self._socket, selectors.EVENT_READ)
            self._selector.register(self._wakes, selectors.EVENT_READ)
            self._acceptor = threading.Thread(
                target=self._accept, name=self._thread_name("accepts"), daemon=True
            )
            self._acceptor.start()
            #: What the thread that accepts closes at its end; only its waker is closed by others.
            self._sockets = made.pop_all()

    def __repr__(self) -> str:
        return f"<listener at {place(self.address)}>"

    def close(self) -> None:
        """Accept nothing more, close all links, and wait a while for their threads. Idempotent, from any thread."""
        this = threading.current_thread()
        with self._lock:
            was_closing = self._is_closing.is_set()
            self._is_closing.set()
            self._has_room.notify_all()
            self._waker.close()
            streams = list(self._streams.values())
            threads = [self._acceptor, *self._streams, *self._ended]
        for stream in streams:
            stream.close()
        if was_closing and this in threads:
            return  # whoever closes already waits for this thread
        deadline = time.monotonic() + _JOIN
        for thread in threads:
            if thread is not this:
                thread.join(max(deadline - time.monotonic(), 0.0))
        left = sum(thread.is_alive() and thread is not this for thread in threads)
        if left:
            _log.warning("%s is closed, but %d of its threads have not ended", self, left)

    def __enter__(self) -> Listener:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- the thread that accepts ---

    def _accept(self) -> None:
        while not self._is_closing.is_set():
            with self._has_room:
                self._has_room.wait_for(
                    lambda: self._is_closing.is_set() or self._waiting < self._max_waiting
                )
            self._selector.select()
            try:
                connected, _ = self._socket.accept()
            except (BlockingIOError, ConnectionAbortedError):
                continue  # it is the end, or the client has gone meanwhile
            except OSError as error:
                self._tell("ACCEPT", f"cannot accept: {error.strerror}")
                self._is_closing.wait(_PAUSE)
            else:
                self._take(connected)
        self._sockets.close()

    def _take(self, connected: socket.socket) -> None:
        try:
            stream = Stream(connected)
        except LinkError as error:
            self._refuse(error)
            return
        refusal: LinkError | None = None
        with self._lock:
            ended, self._ended = self._ended, []
            if self._is_closing.is_set():
                stream.close()
            else:
                thread = threading.Thread(
                    target=self._run, args=(stream,), name=self._thread_name(place(stream.peer)), daemon=True
                )
                try:
                    thread.start()
                except RuntimeError:
                    refusal = LinkClosed(
                        "no thread can start", code="CLUSTER.TOO_MANY", detail=place(stream.peer)
                    )
                else:
                    self._streams[thread] = stream
                    self._waiting += 1
        if refusal is not None:
            self._refuse(refusal)
            stream.close()
        for each in ended:
            each.join()

    # --- the thread of a connection ---

    def _run(self, stream: Stream) -> None:
        try:
            role = self._admit(stream)
            if role is not None:
                self._talk(stream, role)
        finally:
            stream.close()
            this = threading.current_thread()
            with self._lock:
                del self._streams[this]
                self._ended.append(this)

    def _admit(self, stream: Stream) -> str | None:
        try:
            return accept_peer(stream, self._secret, time.monotonic() + self._handshake_timeout)
        except LinkError as error:
            self._refuse(error)
            return None
        finally:
            with self._has_room:
                self._waiting -= 1
                self._has_room.notify()

    def _talk(self, stream: Stream, role: str) -> None:
        link = Link(stream)
        try:
            self._serve(link, role)
            stream.finish(_FINISH)
        except LinkError as error:
            _log.info("a link of role %s has ended: %s", role, error)
        except BaseException:  # noqa: BLE001 - it ends this thread alone, and is told nowhere else
            _log.exception("a link of role %s is closed for an error", role)
        if link.is_garbled:
            self._refuse(None)

    def _refuse(self, why: LinkError | None) -> None:
        with self._lock:
            if self._is_closing.is_set():
                return
            self.refused += 1
        if why is not None:
            self._tell(why.code, f"refused a connection: {why}")

    def _tell(self, kind: str, what: str) -> None:
        """A warning for the first of its kind: peers may not fill the log."""
        with self._lock:
            level = logging.DEBUG if kind in self._told else logging.WARNING
            self._told.add(kind)
        _log.log(level, "%s: %s", self, what)

    def _thread_name(self, what: str) -> str:
        return f"statebackend-link {self.address[1]}: {what}"


def _bound(bind: str, ports: Sequence[int]) -> socket.socket:
    """A socket that listens on the first port that is free."""
    family = socket.AF_INET6 if ":" in bind else socket.AF_INET
    taken: OSError | None = None
    for port in ports:
        try:
            made = socket.create_server((bind, port), family=family)
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise _cannot_listen(bind, error) from error
            taken = error
        except OverflowError as error:
            raise UsageError("there is no such port", detail=f"port {port}") from error
        else:
            made.setblocking(False)
            return made
    if taken is None:
        raise UsageError("a listener needs ports", hint="ports=(0,) is any that is free")
    raise _cannot_listen(bind, taken) from taken


def _cannot_listen(bind: str, error: OSError) -> LinkError:
    return LinkError(
        f"cannot listen: {error.strerror or type(error).__name__}",
        code="CLUSTER.LISTEN",
        detail=bind,
        hint="bind an address of this machine, and give more ports than may be taken",
    )
