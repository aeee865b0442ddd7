"""Links: connections of two ends that have proved themselves, and the frames that they exchange.

A frame is a prefix, a header and a body::

    "SBF" version | header length, 4 bytes | body length, 8 bytes | header | body

Lengths are big-endian and bounded. The header is a JSON object in ASCII with a string ``op``; the body is bytes, which
this module never looks into. Nothing is unpickled. Memory is taken as bytes come in, not as a prefix announces them.
"""

from __future__ import annotations

import json
import socket
import struct
import threading
import time
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any, ClassVar, Final, NamedTuple

from statebackend.cluster.handshake import VERSION, check_role, check_secret, prove_to_peer
from statebackend.cluster.streams import Buffer, LinkClosed, LinkError, Stream, WireError, flat, place
from statebackend.errors import UsageError

__all__ = ["MAX_BODY", "MAX_HEADER", "Link", "Message", "connect"]

#: The largest header and body that are sent and received, in bytes.
MAX_HEADER: Final = 16 << 20
MAX_BODY: Final = 256 << 20

_MAGIC = b"SBF" + bytes([VERSION])
_PREFIX = struct.Struct("!4sIQ")

#: How much is allocated before anything has come; what follows doubles it.
_FIRST_PART = 1 << 20


class Message(NamedTuple):
    """What one frame says.

    >>> Message({"op": "end", "rows": 3}).header["op"]
    'end'
    """

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

    def send(self, op: str, body: Buffer | Sequence[Buffer] = (), /, **header: Any) -> None:
        """Send one frame; return when the system has taken it. Blocks while the peer does not read.

        Several buffers are one body, and are not copied. Frames of several threads do not mix: one waits for another.
        `UsageError`, with nothing sent, if the frame is too large or the header is no JSON. After any other error no
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
        `WireError` for what is no frame. Both close the link.
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
        """Hand the descriptor of the socket over to the caller, for what comes after the last frame."""
        return self._stream.detach()

    def __enter__(self) -> Link:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _lengths(self, prefix: memoryview) -> tuple[int, int]:
        magic, header, body = _PREFIX.unpack(prefix)
        if magic != _MAGIC:
            raise self._garbled("what was received is no frame")
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
            raise self._garbled("the header of a frame is no object with an op", f"{len(data)} bytes")
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
    """Connect to a `Listener`, and let both ends prove themselves, all within ``timeout`` seconds; `LinkError` if not.

    >>> with socket.create_server(("127.0.0.1", 0)) as server:
    ...     nobody = server.getsockname()
    >>> connect(nobody, b"of the query", role="task")
    Traceback (most recent call last):
    statebackend.cluster.streams.LinkError: cannot connect: Connection refused (127.0.0.1:...). Hint: ...
    """
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
            # A connection to a port of this machine that nobody listens on may meet itself, if the system gives it
            # that very port to come from.
            raise LinkError("cannot connect: nobody listens", code="CLUSTER.CONNECT", detail=place(address))
        prove_to_peer(stream, secret, role, deadline)
    except BaseException:
        stream.close()
        raise
    return Link(stream)


def _frame(op: str, body: Buffer | Sequence[Buffer], header: dict[str, Any]) -> Iterable[Buffer]:
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


def _buffers(body: Buffer | Sequence[Buffer]) -> Iterable[Buffer]:
    try:
        # Whatever is a buffer is one, though bytes and arrays are sequences too.
        return [memoryview(body)]  # type: ignore[arg-type]
    except TypeError:
        return body  # type: ignore[return-value]


def _refuse(constant: str) -> Any:
    raise ValueError("not JSON, though Python writes it")
