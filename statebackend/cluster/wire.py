"""Connections between the driver, hosts and tasks: plain TCP, both ends proved, sizes bounded, nothing unpickled.

From the ground up: `streams` are sockets that threads may share, `handshake` is how two ends prove themselves. Here are
links, which exchange frames, and listeners, which accept links and serve each in its own thread. A frame is a
prefix, a header and a body::

    "SBF" version | header length, 4 bytes | body length, 8 bytes | header | body

Lengths are big-endian and bounded. The header is a JSON object in ASCII with a string ``op``; the body is bytes, which
this module never looks into. Memory is taken as bytes come in, not as a prefix announces them. A peer that reaches
the port can cost a listener ``max_waiting`` threads for ``handshake_timeout`` seconds, and no more.
"""

from __future__ import annotations

import errno
import json
import logging
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any, ClassVar, Final, NamedTuple

from statebackend.checkpoint.files.store_files import BytesLike as BytesLike
from statebackend.cluster.handshake import (
    MAX_ROLE as MAX_ROLE,
    VERSION as VERSION,
    accept_peer,
    check_role,
    check_secret,
    prove_to_peer,
)
from statebackend.cluster.streams import (
    LinkClosed as LinkClosed,
    LinkError as LinkError,
    Stream,
    WireError as WireError,
    flat,
    place,
)
from statebackend.errors import UsageError

_log = logging.getLogger(__name__)

#: The largest header and body that are sent and received, in bytes.
MAX_HEADER: Final = 16 << 20
MAX_BODY: Final = 256 << 20

_MAGIC = b"SBF" + bytes([VERSION])
_PREFIX = struct.Struct("!4sIQ")

#: How much is allocated before anything has come; the next doubles it.
_FIRST_PART = 1 << 20


class Message(NamedTuple):
    """The content of one frame."""

    #: Always has a string ``op``.
    header: dict[str, Any]
    body: bytes | bytearray | memoryview = b""


class Link:
    """A connection to a peer that has proved that it knows the secret. Made by `connect` and by a `Listener`.

    Any threads send, one at a time receives, and any closes. ``peer`` is the address at the other end, ``local`` that
    at this one; where addresses are translated on the way, the other end sees others.
    """

    #: Seconds after which a peer is lost that stops in the middle of a frame.
    STALL: ClassVar[float] = 60.0

    def __init__(self, stream: Stream) -> None:
        self.peer, self.local = stream.peer, stream.local
        #: Whether the peer has sent what is not a frame.
        self.is_garbled = False
        self._stream = stream
        self._sending = threading.Lock()
        self._receiving = threading.Lock()
        #: Whether a part of a frame may have been sent without the rest.
        self._is_cut = False

    def __repr__(self) -> str:
        return f"<link to {place(self.peer)}>"

    def send(self, op: str, body: BytesLike | Sequence[BytesLike] = (), /, **header: Any) -> None:
        """Send one frame; return when the system has taken it. Blocks while the peer does not read.

        Several buffers are one body, and are not copied. Frames of several threads do not mix: one waits for another.
        `UsageError`, with nothing sent, if the frame is too large or the header is not JSON. After any other error no
        frame follows; if the connection was lost, `receive` still returns what the peer had said before.
        """
        pieces = _frame(op, body, header)
        with self._sending:
            if self._is_cut:
                raise LinkClosed("a frame was cut short, and none can follow", detail=place(self.peer))
            self._is_cut = True
            try:
                self._stream.write(pieces)
            except LinkError:
                raise  # perhaps the peer has said why it closed: that can still be received
            except BaseException:
                self.close()
                raise
            self._is_cut = False

    def receive(self, timeout: float | None = None) -> Message:
        """Return the next frame. `TimeoutError` if none begins within ``timeout`` seconds; the link is as it was.

        `LinkClosed` if the connection has ended, or if the peer stops in the middle of a frame for `STALL` seconds;
        `WireError` for bytes that are not a frame. Both close the link.
        """
        if not self._receiving.acquire(blocking=False):
            raise UsageError("another thread receives from this link", detail=place(self.peer))
        try:
            prefix = memoryview(bytearray(_PREFIX.size))
            count = self._stream.read(prefix, timeout)
            if not count:
                raise LinkClosed("the peer has closed the link", detail=place(self.peer))
            self._fill(prefix[count:])
            header_length, body_length = self._lengths(prefix)
            header = self._header(self._read(header_length))
            return Message(header, self._read(body_length))
        except TimeoutError:
            raise
        except BaseException:
            # Where the next frame begins is not known any more.
            self.close()
            raise
        finally:
            self._receiving.release()

    def close(self) -> None:
        """Close the connection, and wake whoever sends or receives. Idempotent, from any thread."""
        self._stream.close()

    def detach(self) -> int:
        """Hand the descriptor of the socket over to the caller, for the bytes after the last frame."""
        return self._stream.detach()

    def __enter__(self) -> Link:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def _lengths(self, prefix: memoryview) -> tuple[int, int]:
        magic, header, body = _PREFIX.unpack(prefix)
        if magic != _MAGIC:
            raise self._garbled("the received bytes are not a frame")
        if header > MAX_HEADER or body > MAX_BODY:
            raise self._garbled(
                "a frame is larger than any may be", f"header of {header} bytes, body of {body}"
            )
        return header, body

    def _header(self, data: bytearray) -> dict[str, Any]:
        try:
            header = json.loads(data.decode("ascii"), parse_constant=_refuse)
        except (ValueError, RecursionError):
            # Not chained: the cause holds what was received.
            raise self._garbled("the header of a frame is not JSON", f"{len(data)} bytes") from None
        if not isinstance(header, dict) or not isinstance(header.get("op"), str):
            raise self._garbled("the header of a frame is not an object with an op", f"{len(data)} bytes")
        return header

    def _garbled(self, message: str, detail: str = "") -> WireError:
        self.is_garbled = True
        return WireError(message, detail=", ".join(filter(None, (place(self.peer), detail))))

    def _read(self, length: int) -> bytearray:
        data = bytearray(min(length, _FIRST_PART))
        start = 0
        while True:
            # Released before the array grows, which it cannot under a view.
            with memoryview(data) as whole, whole[start:] as part:
                self._fill(part)
            start = len(data)
            if start == length:
                return data
            data += bytes(min(start, length - start))

    def _fill(self, into: memoryview) -> None:
        """Read the rest of something that has begun."""
        count = 0
        while count < len(into):
            try:
                with into[count:] as rest:
                    more = self._stream.read(rest, self.STALL)
            except TimeoutError:
                raise LinkClosed(
                    "the peer has stopped in the middle of a frame",
                    code="CLUSTER.STALLED",
                    detail=f"{place(self.peer)}, for {self.STALL:g} s",
                ) from None
            if not more:
                raise LinkClosed("the peer closed in the middle of a frame", detail=place(self.peer))
            count += more


def connect(address: tuple[str, int], secret: bytes, *, role: str, timeout: float = 10.0) -> Link:
    """Connect to a `Listener`; both ends prove themselves, all within ``timeout`` seconds, or `LinkError`."""
    check_secret(secret)
    check_role(role)
    deadline = time.monotonic() + timeout
    try:
        connected = socket.create_connection(address, timeout)
    except (OSError, OverflowError, ValueError) as error:  # no such port, no name that can be looked up
        reason = getattr(error, "strerror", None) or type(error).__name__
        raise LinkError(
            f"cannot connect: {reason}",
            code="CLUSTER.CONNECT",
            detail=place(address),
            hint="the address must be one that can be reached from here, and its port be open in firewalls",
        ) from error
    stream = Stream(connected)
    try:
        if stream.local == stream.peer:
            # A connection to a port of this machine without a listener may meet itself, if the system gives it
            # that very port to come from.
            raise LinkError(
                "cannot connect: no listener at the port", code="CLUSTER.CONNECT", detail=place(address)
            )
        prove_to_peer(stream, secret, role, deadline)
    except BaseException:
        stream.close()
        raise
    return Link(stream)


def _frame(op: str, body: BytesLike | Sequence[BytesLike], header: dict[str, Any]) -> Iterable[BytesLike]:
    """The pieces of a frame, everything about them checked."""
    if "op" in header:
        raise UsageError("a frame has one op, its first argument", detail=f"op {op}")
    try:
        head = json.dumps({"op": op, **header}, separators=(",", ":"), allow_nan=False).encode("ascii")
    except (TypeError, ValueError, RecursionError) as error:
        # Not chained, and the message left out: some name the value.
        raise UsageError(
            "the header of a frame must be JSON", detail=f"op {op}, {type(error).__name__}"
        ) from None
    try:
        pieces = [flat(each) for each in _buffers(body)]
    except TypeError:
        raise UsageError("the body of a frame must be contiguous buffers", detail=f"op {op}") from None
    length = sum(map(len, pieces))
    for what, size, bound in (("header", len(head), MAX_HEADER), ("body", length, MAX_BODY)):
        if size > bound:
            raise UsageError(
                f"the {what} of a frame is too large",
                detail=f"op {op}, {size} bytes, at most {bound}",
                hint="send it in several frames",
            )
    return [_PREFIX.pack(_MAGIC, len(head), length), head, *pieces]


def _buffers(body: BytesLike | Sequence[BytesLike]) -> Iterable[BytesLike]:
    try:
        # Whatever is a buffer is one, though bytes and arrays are sequences too.
        return [memoryview(body)]  # type: ignore[arg-type]
    except TypeError:
        return body  # type: ignore[return-value]


def _refuse(constant: str) -> Any:
    raise ValueError("not JSON, though Python writes it")


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
    wrong secret, or for bytes that are not a frame.
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
        self._warned: set[str] = set()
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
            #: The sockets that the accepting thread closes at its end; only its waker is closed by others.
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

    def __exit__(self, *raised: object) -> None:
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
            level = logging.DEBUG if kind in self._warned else logging.WARNING
            self._warned.add(kind)
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
            raise UsageError("the port does not exist", detail=f"port {port}") from error
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
