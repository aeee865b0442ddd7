"""Connecting, and the proofs of both ends: by an implementation that shares no code, and by those who cheat."""

from __future__ import annotations

import random
import secrets
import select
import socket
import struct
from types import SimpleNamespace

import pytest
from raw_links import (
    CLIENT_SAYS,
    HELLO,
    HOST,
    LONG,
    OTHER_SECRET,
    SECRET,
    SERVER_SAYS,
    FakeServer,
    Relay,
    Served,
    end_writing,
    exactly,
    frame,
    proof,
    raw_to,
    rest_of,
    told,
    wait_until,
)

from statebackend.cluster import handshake
from statebackend.cluster.wire import MAX_ROLE, Link, LinkClosed, LinkError, Listener, WireError, connect
from statebackend.errors import UsageError

pytestmark = pytest.mark.usefixtures("nothing_left_open")


def test_addresses_are_known_at_both_ends(pair: tuple[Link, Link], served: Served) -> None:
    near, far = pair
    assert near.peer == far.local == served.address
    assert near.local == far.peer
    assert repr(near) == f"<link to {HOST}:{served.address[1]}>"


def test_links_are_quick_and_find_dead_machines(pair: tuple[Link, Link]) -> None:
    for link in pair:
        assert link._stream._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert link._stream._socket.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert not link._stream._socket.get_inheritable()


@pytest.mark.parametrize("address", [(HOST, 1), (HOST, 70_000), ("x" * 70, 1), ("", 1)])
def test_connect_fails_at_an_address_without_a_listener(address: tuple[str, int]) -> None:
    with pytest.raises(LinkError, match="cannot connect") as caught:
        connect(address, SECRET, role="task", timeout=LONG)
    assert caught.value.code == "CLUSTER.CONNECT"


def test_a_connection_that_meets_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    def itself(address: tuple[str, int], timeout: float) -> socket.socket:
        made = socket.socket()
        made.bind((HOST, 0))
        made.connect(made.getsockname())
        return made

    monkeypatch.setattr(socket, "create_connection", itself)
    with pytest.raises(LinkError, match="no listener at the port"):
        connect((HOST, 1), SECRET, role="task")


def test_a_role_that_is_none_is_refused_and_the_longest_arrives(served: Served) -> None:
    for role in ("", "t" * (MAX_ROLE + 1), "é", "a\0", "a\nb"):
        with pytest.raises(UsageError, match="a role must"):
            connect((HOST, 1), SECRET, role=role)
    for end in served.connect("r" * MAX_ROLE):
        end.close()


def test_an_empty_secret_is_refused() -> None:
    with pytest.raises(UsageError):
        connect((HOST, 1), b"", role="task")
    with pytest.raises(UsageError):
        Listener(b"", lambda link, role: None)


def test_a_handshake_is_as_specified(served: Served, rng: random.Random) -> None:
    """Byte by byte, from an implementation that shares no code."""
    with raw_to(served.address) as raw:
        raw.sendall(HELLO)
        assert exactly(raw, 4) == HELLO
        server_nonce, client_nonce = exactly(raw, 32), rng.randbytes(32)
        raw.sendall(
            b"task".ljust(32, b"\0") + client_nonce + proof("client", client_nonce, server_nonce, b"task")
        )
        assert exactly(raw, 32) == proof("server", client_nonce, server_nonce, b"task")
        raw.sendall(frame({"op": "rows", "n": 1}, b"body"))
        link, role = served.links.get(timeout=LONG)
        assert role == "task"
        assert link.receive(LONG) == ({"op": "rows", "n": 1}, b"body")
        link.send("seen", b"it")
        assert exactly(raw, 16 + 13 + 2) == struct.pack("!4sIQ", b"SBF\x01", 13, 2) + b'{"op":"seen"}it'


def test_the_secret_is_never_sent(served: Served) -> None:
    with Relay(served.address) as relay:
        connect(relay.address, SECRET, role="task").close()
    assert [len(relay.said[who]) for who in ("client", "server")] == [CLIENT_SAYS, SERVER_SAYS]
    assert all(SECRET not in said and SECRET.hex().encode() not in said for said in relay.said.values())


def test_a_client_without_the_secret(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(3):
        with pytest.raises(LinkClosed, match="closed instead of proving itself") as caught:
            connect(served.address, OTHER_SECRET, role="task")
        assert caught.value.code == "CLUSTER.SECRET"
    wait_until(lambda: served.listener.refused == 3)
    assert served.links.empty()
    (warning,) = told(caplog)  # of three
    assert "the peer does not know the secret" in warning


def test_a_server_without_the_secret() -> None:
    def act(raw: socket.socket) -> None:
        server_nonce = secrets.token_bytes(32)
        raw.sendall(exactly(raw, 4) + server_nonce)
        said = exactly(raw, 96)
        raw.sendall(proof("server", said[32:64], server_nonce, b"task", OTHER_SECRET))
        assert rest_of(raw) == b""

    with FakeServer(act) as fake, pytest.raises(WireError, match="does not know the secret") as caught:
        connect(fake.address, SECRET, role="task")
    assert caught.value.code == "CLUSTER.SECRET"


def test_a_proof_is_none_when_it_is_sent_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client's own proof to the client; even if both nonces were the same."""

    def act(raw: socket.socket) -> None:
        raw.sendall(exactly(raw, 4) + bytes(32))
        raw.sendall(exactly(raw, 96)[64:])
        assert rest_of(raw) == b""

    for nonce in (secrets.token_bytes, bytes):
        monkeypatch.setattr(handshake, "secrets", SimpleNamespace(token_bytes=nonce))
        with FakeServer(act) as fake, pytest.raises(WireError, match="does not know the secret"):
            connect(fake.address, SECRET, role="task")


def test_the_servers_proof_is_none_for_the_server(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even if it made the same nonces again."""
    monkeypatch.setattr(handshake, "secrets", SimpleNamespace(token_bytes=bytes))
    with Relay(served.address) as relay:
        connect(relay.address, SECRET, role="task").close()
    with raw_to(served.address) as raw:
        raw.sendall(relay.said["client"][:68] + relay.said["server"][36:])
        assert len(rest_of(raw)) == 36
    wait_until(lambda: served.listener.refused == 1)
    served.links.get(timeout=LONG)  # the first connection, which a thread of its own hands out
    assert served.links.empty()


def test_proof_is_given_only_for_a_proof(served: Served, rng: random.Random) -> None:
    """A listener tells a preamble and a nonce, new each time, to whoever has no proof, and its proof to nobody."""
    nonces = set()
    for number in range(30):
        with raw_to(served.address) as raw:
            raw.sendall(HELLO)
            nonce = exactly(raw, 36)[4:]
            wrong = proof("server", nonce, nonce, b"task") if number % 2 else rng.randbytes(32)
            raw.sendall(b"task".ljust(32, b"\0") + nonce + wrong)
            assert rest_of(raw) == b""
            nonces.add(nonce)
    assert len(nonces) == 30
    wait_until(lambda: served.listener.refused == 30)
    assert served.links.empty()


@pytest.mark.parametrize("repeats_nonces", [False, True])
def test_a_handshake_proves_nothing_a_second_time(
    served: Served, repeats_nonces: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the nonces that see to this: were they repeated, it would be taken, and so this test can fail."""
    if repeats_nonces:
        monkeypatch.setattr(handshake, "secrets", SimpleNamespace(token_bytes=bytes))
    with Relay(served.address) as relay, connect(relay.address, SECRET, role="task") as link:
        link.send("rows", b"body")
        served.links.get(timeout=LONG)[0].receive(LONG)
        link.close()
    with raw_to(served.address) as raw:
        raw.sendall(relay.said["client"])
        end_writing(raw)
        if repeats_nonces:
            assert served.links.get(timeout=LONG)[0].receive(LONG).body == b"body"
            return
        assert len(rest_of(raw)) == 36
    wait_until(lambda: served.listener.refused == 1)
    assert served.links.empty()

    def act(raw: socket.socket) -> None:
        raw.sendall(relay.said["server"])
        rest_of(raw)

    with FakeServer(act) as fake, pytest.raises(WireError, match="does not know the secret"):
        connect(fake.address, SECRET, role="task")


@pytest.mark.parametrize(("says", "size"), [("client", CLIENT_SAYS), ("server", SERVER_SAYS)])
def test_no_byte_of_a_handshake_can_be_changed(says: str, size: int) -> None:
    """The role among them. Only the server's proof comes when the client is served already; the client then is not."""
    with Served() as served:
        for at in range(size):
            with Relay(served.address, says=says, at=at) as relay, pytest.raises(LinkError):
                connect(relay.address, SECRET, role="task", timeout=LONG)
            if says == "server" and at >= 36:
                served.links.get(timeout=LONG)[0].close()
        assert served.links.empty()
        refused = 36 if says == "server" else size
        wait_until(lambda: served.listener.refused >= refused)
        assert served.listener.refused == refused


def test_a_role_that_no_client_would_have(served: Served) -> None:
    for role in (b"", b"a\0b", b"\xff", b"a\n", b"\0a"):
        with raw_to(served.address) as raw:
            raw.sendall(HELLO)
            nonce = exactly(raw, 36)[4:]
            raw.sendall(role.ljust(32, b"\0") + bytes(32) + proof("client", bytes(32), nonce, role))
            assert rest_of(raw) == b""
    wait_until(lambda: served.listener.refused == 5)
    assert served.links.empty()


def test_ends_of_different_versions_tell_each_other(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    with raw_to(served.address) as raw:
        raw.sendall(b"SBL\x07")
        assert rest_of(raw) == HELLO
    wait_until(lambda: served.listener.refused == 1)
    wait_until(lambda: bool(told(caplog)))
    assert "version 7 there and 1 here" in told(caplog)[0]

    def act(raw: socket.socket) -> None:
        exactly(raw, 4)
        raw.sendall(b"SBL\x07")

    with FakeServer(act) as fake, pytest.raises(WireError, match="version 7 there and 1 here") as caught:
        connect(fake.address, SECRET, role="task")
    assert caught.value.code == "CLUSTER.VERSION"


def test_a_server_of_another_protocol() -> None:
    with (
        FakeServer(lambda raw: raw.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")) as fake,
        pytest.raises(LinkError, match="another protocol"),
    ):
        connect(fake.address, SECRET, role="task")


def test_one_byte_at_a_time_gets_no_more_time() -> None:
    """The whole handshake has a deadline, not each of its reads."""
    with Served(handshake_timeout=0.3) as served, raw_to(served.address) as raw:
        sent = 0
        for byte in HELLO + bytes(CLIENT_SAYS):
            try:
                raw.sendall(bytes([byte]))
                sent += 1
                raw.settimeout(0.1)  # the pace; and its end is seen at once
                if not raw.recv(100):
                    break
            except TimeoutError:
                pass
            except ConnectionError:
                break
        assert sent < CLIENT_SAYS / 2
        wait_until(lambda: served.listener.refused == 1)


def test_a_slow_server_gets_no_more_time() -> None:
    sent = []

    def act(raw: socket.socket) -> None:
        for byte in HELLO + bytes(64):
            raw.sendall(bytes([byte]))
            sent.append(byte)
            if select.select([raw], [], [], 0.1)[0] and not raw.recv(100):
                break

    with FakeServer(act) as fake, pytest.raises(LinkClosed, match="in time") as caught:
        connect(fake.address, SECRET, role="task", timeout=0.3)
    assert caught.value.code == "CLUSTER.STALLED"
    assert len(sent) < SERVER_SAYS / 2


def test_silence_is_refused_in_time(caplog: pytest.LogCaptureFixture) -> None:
    with Served(handshake_timeout=0.05) as served, raw_to(served.address) as raw:
        assert rest_of(raw) == b""
        wait_until(lambda: served.listener.refused == 1)
    with socket.create_server((HOST, 0)) as silent, pytest.raises(LinkClosed, match="in time"):
        connect(silent.getsockname(), SECRET, role="task", timeout=0.05)
