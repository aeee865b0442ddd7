"""Links between processes: what they carry, what they refuse, and how they end."""

from __future__ import annotations

import array
import os
import pickle
import queue
import random
import select
import socket
import struct
import threading
import tracemalloc
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from raw_links import HELLO, LONG, SECRET, Served, frame, rest_of, wait_until

from statebackend.cluster import wire
from statebackend.cluster.wire import (
    MAX_BODY,
    MAX_HEADER,
    Link,
    LinkClosed,
    LinkError,
    Listener,
    WireError,
    connect,
)
from statebackend.errors import UsageError

pytestmark = pytest.mark.usefixtures("nothing_left_open")


def test_headers_and_bodies_arrive_as_they_were_sent(pair: tuple[Link, Link], rng: random.Random) -> None:
    near, far = pair
    several: list[Any] = [rng.randbytes(3 << 20), b"", bytearray(777), memoryview(rng.randbytes(1 << 20))]
    numbers = np.arange(12, dtype="<i8").reshape(3, 4)
    bodies: list[tuple[Any, bytes]] = [
        ((), b""),
        (b"", b""),
        (b"abc", b"abc"),
        (several, b"".join(several)),
        (tuple(several), b"".join(several)),
        (deque([b"a", b"b"]), b"ab"),
        ([bytes([n % 251]) for n in range(3000)], bytes(n % 251 for n in range(3000))),
        (array.array("i", [1, 2]), array.array("i", [1, 2]).tobytes()),
        (memoryview(array.array("i", [1, 2])), array.array("i", [1, 2]).tobytes()),
        (numbers, numbers.tobytes()),
        (np.empty((0, 3)), b""),
        (pa.py_buffer(b"arrow"), b"arrow"),
    ]
    nested = {"a": [1, None, True, 0.5]}
    header = {"text": "é\ud800\0", "nested": nested, "body": 2**60, "self": 1, "timeout": 2}
    for number, (body, expected) in enumerate(bodies):
        # In a thread: what is larger than the system's buffers waits to be read.
        sender = threading.Thread(target=near.send, args=(f"op{number}", body), kwargs=header)
        sender.start()
        found = far.receive(LONG)
        sender.join(LONG)
        assert found.header == {"op": f"op{number}", **header}
        assert bytes(found.body) == expected
        far.send("seen", number=number)
        assert near.receive(LONG) == ({"op": "seen", "number": number}, b"")
    text = "t" * (MAX_HEADER - len('{"op":"a","text":""}'))  # the largest
    sender = threading.Thread(target=near.send, args=("a",), kwargs={"text": text})
    sender.start()
    assert far.receive(LONG).header["text"] == text
    sender.join(LONG)


def test_a_body_of_any_size_around_the_parts_it_is_read_in(pair: tuple[Link, Link]) -> None:
    near, far = pair
    part = wire._FIRST_PART
    for size in [1, part - 1, part, part + 1, 2 * part, 2 * part + 1, 7 * part + 3]:
        body = bytes([size % 256]) * size
        sender = threading.Thread(target=near.send, args=("rows", body))
        sender.start()
        assert far.receive(LONG).body == body
        sender.join(LONG)


def test_frames_of_many_threads_do_not_mix(pair: tuple[Link, Link], rng: random.Random) -> None:
    near, far = pair
    plans = [[rng.choice([0, 1, 100, 70_000, 700_000]) for _ in range(60)] for _ in range(6)]

    def send(who: int) -> None:
        for number, size in enumerate(plans[who]):
            body = [bytes([who]) * (size // 2), bytes([who]) * (size - size // 2)]
            near.send("rows", body, who=who, number=number)

    senders = [threading.Thread(target=send, args=(who,)) for who in range(len(plans))]
    for each in senders:
        each.start()
    found: list[list[int]] = [[] for _ in plans]
    for _ in range(sum(map(len, plans))):
        header, body = far.receive(LONG)
        assert header["number"] == len(found[header["who"]])
        assert bytes(body) == bytes([header["who"]]) * len(body)
        found[header["who"]].append(len(body))
    for each in senders:
        each.join(LONG)
    assert found == plans


def test_both_ends_send_and_receive_at_once(pair: tuple[Link, Link]) -> None:
    body = [bytes(1 << 20)] * 8

    def send(link: Link) -> None:
        for _ in range(5):
            link.send("rows", body)

    senders = [threading.Thread(target=send, args=(link,)) for link in pair]
    for each in senders:
        each.start()
    counts = [0, 0]
    while sum(counts) < 10:
        for at, link in enumerate(pair):
            if counts[at] < 5:
                with suppress(TimeoutError):
                    assert len(link.receive(0.001).body) == 8 << 20
                    counts[at] += 1
    for each in senders:
        each.join(LONG)


def test_late_frame_does_not_end_the_link(pair: tuple[Link, Link]) -> None:
    near, far = pair
    for timeout in (0, -1, 0.01, 0):
        with pytest.raises(TimeoutError) as caught:
            near.receive(timeout)
        assert not isinstance(caught.value, LinkError)
    far.send("late")
    assert near.receive(LONG).header["op"] == "late"


def test_a_frame_that_has_begun_may_take_longer(bare: Any) -> None:
    raw, link = bare()
    whole = frame({"op": "slow"}, b"body")
    found: list[wire.Message] = []
    for cut in (1, 15, 16, 20, len(whole) - 1):
        raw.sendall(whole[:cut])
        assert select.select([link._stream._socket], [], [], LONG)[0]
        reader = threading.Thread(target=lambda: found.append(link.receive(0)))
        reader.start()
        wait_until(lambda: link._stream._inside == 1)  # it waits for the rest, or is about to
        raw.sendall(whole[cut:])
        reader.join(LONG)
    assert found == [({"op": "slow"}, b"body")] * 5


@pytest.mark.parametrize("cut", [1, 15, 16, 20, 29, 31])
def test_a_peer_that_stops_or_ends_in_the_middle_of_a_frame_is_lost(
    bare: Any, cut: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Link, "STALL", 0.05)
    part = frame({"op": "rows"}, b"body")[:cut]
    raw, link = bare()
    raw.sendall(part)
    with pytest.raises(LinkClosed, match="stopped in the middle") as caught:
        link.receive(LONG)
    assert caught.value.code == "CLUSTER.STALLED"
    with pytest.raises(LinkClosed, match="this side has closed"):
        link.receive(LONG)
    assert rest_of(raw) == b""
    raw, link = bare()
    raw.sendall(part)
    raw.close()
    with pytest.raises(LinkClosed, match="closed in the middle of a frame"):
        link.receive(LONG)


def test_the_end_of_a_peer_in_order_or_not(bare: Any) -> None:
    for resets in (False, True):
        raw, link = bare()
        raw.sendall(frame({"op": "last"}))
        assert link.receive(LONG).header["op"] == "last"
        if resets:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        raw.close()
        with pytest.raises(LinkClosed, match="connection is lost" if resets else "the peer has closed"):
            link.receive(LONG)
        with pytest.raises(LinkClosed):
            link.send("rows")


NOT_FRAMES = {
    "zeros": bytes(16),
    "another protocol": b"GET / HTTP/1.1\r\n\r\n",
    "another version": frame({"op": "a"}, magic=b"SBF\x02"),
    "the magic of handshakes": frame({"op": "a"}, magic=HELLO),
    "a header that is too large": struct.pack("!4sIQ", b"SBF\x01", MAX_HEADER + 1, 0),
    "a body that is too large": struct.pack("!4sIQ", b"SBF\x01", 2, MAX_BODY + 1),
    "the largest lengths": struct.pack("!4sIQ", b"SBF\x01", 2**32 - 1, 2**64 - 1),
    "no header": frame(b""),
    "no JSON": frame(b"{op}"),
    "a pickle": frame(pickle.dumps({"op": "a"})),
    "bytes that are no text": frame(b'{"op":"\xff"}'),
    "UTF-16": frame('{"op":"a"}'.encode("utf-16")),
    "a list": frame(["op"]),
    "a string": frame("op"),
    "no op": frame({"po": "a"}),
    "an op that is no string": frame({"op": 1}),
    "an op that is null": frame({"op": None}),
    "NaN": frame(b'{"op":"a","b":NaN}'),
    "more than one value": frame(b'{"op":"a"} {"op":"a"}'),
    "depth": frame(b'{"op":"a","b":' + b"[" * 100_000),
}


@pytest.mark.parametrize("garbage", NOT_FRAMES.values(), ids=NOT_FRAMES)
def test_wrong_frame_closes_the_link(bare: Any, garbage: bytes) -> None:
    raw, link = bare()
    raw.sendall(frame({"op": "first"}) + garbage + frame({"op": "a"}) * 2)
    assert link.receive(LONG).header == {"op": "first"}
    with pytest.raises(WireError) as caught:
        link.receive(LONG)
    assert caught.value.code == "CLUSTER.WIRE"
    assert caught.value.__cause__ is None
    assert link.is_garbled
    with pytest.raises(LinkClosed):
        link.receive(LONG)
    with pytest.raises(LinkClosed):
        link.send("rows")


def test_a_claim_of_size_costs_nothing(bare: Any) -> None:
    for claim in ((2, MAX_BODY), (MAX_HEADER, 0)):
        for comes in (0, 3 << 20):
            raw, link = bare()
            head = struct.pack("!4sIQ", b"SBF\x01", *claim)
            sender = threading.Thread(target=lambda: (raw.sendall(head + bytes(comes)), raw.close()))  # noqa: B023
            if claim[0] == 2:
                head = frame({"op": ""})[:4] + struct.pack("!IQ", 9, MAX_BODY) + b'{"op":""}'
            tracemalloc.start()
            sender.start()
            with pytest.raises(LinkClosed, match="middle"):
                link.receive(LONG)
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            sender.join(LONG)
            assert peak < (2 << 20) + 5 * comes


def test_failed_send_leaves_the_link_as_it_was(pair: tuple[Link, Link]) -> None:
    near, far = pair
    recursive: list[Any] = []
    recursive.append(recursive)
    refusals: list[Callable[[], None]] = [
        lambda: near.send("rows", [bytes(1 << 20)] * 256 + [b"1"]),
        lambda: near.send("rows", text="t" * MAX_HEADER),
        lambda: near.send("rows", op="twice"),
        lambda: near.send("rows", value={1, 2}),
        lambda: near.send("rows", value=float("nan")),
        lambda: near.send("rows", value=recursive),
        lambda: near.send("rows", "text"),  # type: ignore[arg-type]
        lambda: near.send("rows", [b"a", "text"]),  # type: ignore[list-item]
        lambda: near.send("rows", 7),  # type: ignore[arg-type]
        lambda: near.send("rows", memoryview(b"abcd")[::2]),
    ]
    for refused in refusals:
        with pytest.raises(UsageError):
            refused()
    near.send("fine")
    assert far.receive(LONG) == ({"op": "fine"}, b"")


def test_errors_never_hold_a_value(pair: tuple[Link, Link], bare: Any) -> None:
    class Private:
        def __repr__(self) -> str:
            return "private"

    texts = []
    for value in (Private(), {Private()}, float("inf")):
        with pytest.raises(UsageError) as refused:
            pair[0].send("rows", value=value)
        texts.append(f"{refused.value!r}{refused.value.__cause__}")
    raw, link = bare()
    raw.sendall(frame(b'{"op":"private'))
    with pytest.raises(WireError) as caught:
        link.receive(LONG)
    texts.append(f"{caught.value!r}{caught.value.__cause__}")
    assert refused.value.__suppress_context__
    assert caught.value.__suppress_context__
    assert not any("private" in text or "inf" in text for text in texts)


def test_close_wakes_who_receives(served: Served, rng: random.Random) -> None:
    for number in range(40):
        near, far = served.connect()
        ends: queue.Queue[object] = queue.Queue()

        def read(link: Link, into: queue.Queue[object]) -> None:
            try:
                into.put(link.receive(LONG if rng.random() < 0.5 else None))
            except LinkClosed as error:
                into.put(error)

        readers = [threading.Thread(target=read, args=(link, ends)) for link in (near, far)]
        for each in readers:
            each.start()
        if number % 2:  # often before the readers wait, and always after
            wait_until(lambda: near._stream._inside == far._stream._inside == 1)  # noqa: B023
        near.close()
        assert all(isinstance(ends.get(timeout=LONG), LinkClosed) for _ in readers)
        near.close()
        far.close()
        for each in readers:
            each.join(LONG)


def test_close_wakes_who_sends(pair: tuple[Link, Link]) -> None:
    near, _ = pair
    ends: queue.Queue[Exception] = queue.Queue()

    def send() -> None:
        try:
            near.send("rows", [bytes(1 << 20)] * 100)
        except LinkClosed as error:
            ends.put(error)

    sender = threading.Thread(target=send)
    sender.start()
    wait_until(lambda: near._is_cut and not select.select([], [near._stream._socket], [], 0)[1])
    near.close()
    assert "this side has closed" in str(ends.get(timeout=LONG))
    sender.join(LONG)


def test_a_descriptor_is_closed_by_the_last_who_uses_it(bare: Any) -> None:
    _, link = bare()
    number = link._stream._socket.fileno()
    end: queue.Queue[BaseException] = queue.Queue()

    def read() -> None:
        try:
            link.receive()
        except LinkClosed as error:
            end.put(error)

    link._stream._enter()  # another thread, between its calls
    reader = threading.Thread(target=read)
    reader.start()
    link.close()
    end.get(timeout=LONG)
    reader.join(LONG)
    assert link._stream._socket.fileno() == number
    os.fstat(number)
    link._stream._leave()
    assert link._stream._socket.fileno() == -1


def test_only_one_thread_receives(pair: tuple[Link, Link]) -> None:
    near, far = pair
    found: queue.Queue[str] = queue.Queue()
    reader = threading.Thread(target=lambda: found.put(near.receive(LONG).header["op"]))
    reader.start()
    wait_until(near._receiving.locked)
    with pytest.raises(UsageError, match="another thread receives"):
        near.receive(0)
    far.send("for the first")
    assert found.get(timeout=LONG) == "for the first"
    reader.join(LONG)


def test_nothing_follows_half_a_frame(pair: tuple[Link, Link], monkeypatch: pytest.MonkeyPatch) -> None:
    near, far = pair
    write = near._stream.write

    def interrupted(pieces: Any) -> None:
        write([b"".join(map(bytes, pieces))[:-1]])
        raise KeyboardInterrupt

    monkeypatch.setattr(near._stream, "write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        near.send("rows", b"body")
    monkeypatch.undo()
    with pytest.raises(LinkClosed, match="cut short"):
        near.send("rows", b"body")
    with pytest.raises(LinkClosed, match="middle"):
        far.receive(LONG)


@pytest.mark.parametrize("patience", [0.0, LONG])
def test_who_still_sends_hears_why_the_other_has_ended(
    patience: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "_FINISH", patience)
    with (
        Listener(SECRET, lambda link, role: link.send("refused", why="too late")) as made,
        connect(made.address, SECRET, role="task") as link,
    ):
        # Where the other end has patience, nothing of this is an error, although nobody reads it.
        with suppress(LinkClosed) if not patience else nullcontext():
            for _ in range(32):
                link.send("rows", bytes(1 << 20))
        assert link.receive(LONG).header == {"op": "refused", "why": "too late"}
        with pytest.raises(LinkClosed):
            link.receive(LONG)
        with pytest.raises(LinkClosed):
            link.send("rows", b"more")


def test_errors_of_links_are_connection_errors_and_travel() -> None:
    for cls in (LinkError, LinkClosed, WireError):
        error = cls("it ended", detail="there", hint="look")
        assert isinstance(error, ConnectionError)
        copy = pickle.loads(pickle.dumps(error))
        assert (type(copy), str(copy)) == (cls, f"it ended (there). Hint: look [{cls.default_code}]")
