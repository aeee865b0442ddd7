"""How both ends of a connection prove that they know the secret, without sending it.

::

    client                                                server
      |  --- preamble ----------------------------------->  |
      |  <-- preamble, nonce -----------------------------  |
      |  --- role, nonce, proof "client" ---------------->  |  closes, unless the proof is right
      |  <-- proof "server" ------------------------------  |
    closes, unless the proof is right

A proof is the HMAC-SHA256, under the secret, of a label, the role and both nonces. Every field has a fixed length, so
that no two handshakes give the same bytes to it. Each end has its own label and makes its nonce again: a returned
message of the other end is not a proof to it, nor when it is sent a second time. The server proves nothing to a
client that has not, and so reveals no proof.

The preamble, three letters and the version of the protocol, comes alone and first: ends of different versions, can
tell each other so.

This has a limit: an attacker who changes messages on the network may let both ends prove themselves and then speak in
their place. Where the network is not to be trusted, connections need TLS.
"""

from __future__ import annotations

import hmac
import secrets
import time
from typing import Final

from statebackend.cluster.streams import LinkClosed, LinkError, Stream, WireError, place
from statebackend.errors import UsageError

#: The version of the protocol: of the handshake and of the frames.
VERSION: Final = 1

#: How many characters the role of a peer may have.
MAX_ROLE: Final = 32

_LETTERS = b"SBL"
_PREAMBLE = _LETTERS + bytes([VERSION])
_NONCE = _PROOF = 32

_CLIENT = b"statebackend link, proof of the client\0"
_SERVER = b"statebackend link, proof of the server\0"

_SAME_SECRET = "both ends need the secret of the same query"


def check_secret(secret: bytes) -> bytes:
    """Return the secret; `UsageError` if it is none. It should come from `secrets.token_bytes`."""
    if not secret:
        raise UsageError("a secret must not be empty", hint="use secrets.token_bytes(32)")
    return secret


def check_role(role: str) -> str:
    """Return the role; `UsageError` if it is not one."""
    if not (0 < len(role) <= MAX_ROLE and role.isascii() and role.isprintable()):
        raise UsageError(f"a role must have 1 to {MAX_ROLE} printable ASCII characters")
    return role


def prove_to_peer(stream: Stream, secret: bytes, role: str, deadline: float) -> None:
    """The client's part, until ``deadline`` of the monotonic clock; `LinkError` if the server does not prove itself."""
    try:
        _write(stream, _PREAMBLE, deadline)
        _check_preamble(stream, _read(stream, len(_PREAMBLE), deadline))
        server_nonce = _read(stream, _NONCE, deadline)
        client_nonce = secrets.token_bytes(_NONCE)
        named = role.encode("ascii").ljust(MAX_ROLE, b"\0")
        proof = _proof(secret, _CLIENT, named, client_nonce, server_nonce)
        _write(stream, named + client_nonce + proof, deadline)
        try:
            answer = _read(stream, _PROOF, deadline)
        except LinkClosed as error:
            raise LinkClosed(
                "the peer closed instead of proving itself",
                code="CLUSTER.SECRET",
                detail=place(stream.peer),
                hint=_SAME_SECRET,
            ) from error
        _check_proof(stream, answer, _proof(secret, _SERVER, named, client_nonce, server_nonce))
    except TimeoutError:
        raise _too_slow(stream) from None


def accept_peer(stream: Stream, secret: bytes, deadline: float) -> str:
    """The server's part; return the client's role. `LinkError` if it has not proved itself when ``deadline`` comes."""
    try:
        preamble = _read(stream, len(_PREAMBLE), deadline)
        if preamble != _PREAMBLE and preamble.startswith(_LETTERS):
            _write(stream, _PREAMBLE, deadline)  # so that the other end can tell what is wrong
        _check_preamble(stream, preamble)
        server_nonce = secrets.token_bytes(_NONCE)
        _write(stream, _PREAMBLE + server_nonce, deadline)
        answer = _read(stream, MAX_ROLE + _NONCE + _PROOF, deadline)
        named, client_nonce = answer[:MAX_ROLE], answer[MAX_ROLE:-_PROOF]
        _check_proof(stream, answer[-_PROOF:], _proof(secret, _CLIENT, named, client_nonce, server_nonce))
        try:
            role = check_role(named.rstrip(b"\0").decode("latin-1"))
        except UsageError as error:
            raise WireError("the peer lacks a proper role", detail=place(stream.peer)) from error
        _write(stream, _proof(secret, _SERVER, named, client_nonce, server_nonce), deadline)
    except TimeoutError:
        raise _too_slow(stream) from None
    return role


def _proof(secret: bytes, label: bytes, role: bytes, client_nonce: bytes, server_nonce: bytes) -> bytes:
    return hmac.digest(secret, label + _PREAMBLE + role + client_nonce + server_nonce, "sha256")


def _check_proof(stream: Stream, found: bytes, right: bytes) -> None:
    if not hmac.compare_digest(found, right):
        raise WireError(
            "the peer does not know the secret",
            code="CLUSTER.SECRET",
            detail=place(stream.peer),
            hint=_SAME_SECRET,
        )


def _check_preamble(stream: Stream, found: bytes) -> None:
    if not found.startswith(_LETTERS):
        raise WireError("the peer speaks another protocol", detail=place(stream.peer))
    if found != _PREAMBLE:
        raise WireError(
            "the peer speaks another version of the protocol",
            code="CLUSTER.VERSION",
            detail=f"{place(stream.peer)}, version {found[-1]} there and {VERSION} here",
            hint="install the same version of the library everywhere",
        )


def _read(stream: Stream, size: int, deadline: float) -> bytes:
    """Read exactly this much. The deadline is for the whole handshake, however small the steps that it takes."""
    data = bytearray(size)
    count = 0
    while count < size:
        more = stream.read(memoryview(data)[count:], _left(deadline))
        if not more:
            raise LinkClosed("the peer closed during the handshake", detail=place(stream.peer))
        count += more
    return bytes(data)


def _write(stream: Stream, data: bytes, deadline: float) -> None:
    # Each piece fits into the empty buffer of a new socket: it never takes more than one step.
    stream.write([data], _left(deadline))


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def _too_slow(stream: Stream) -> LinkError:
    return LinkClosed(
        "the peer did not finish the handshake in time", code="CLUSTER.STALLED", detail=place(stream.peer)
    )
