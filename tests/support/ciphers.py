"""Ciphers for tests: AES-GCM, and some that misbehave. Picklable."""

from __future__ import annotations

import secrets
from typing import Any

from cryptography.hazmat.primitives.ciphers.aead import AESGCM

KEY = bytes(range(32))


class AesGcm:
    """Nonce, content, tag; name and offset are authenticated. It counts its calls."""

    def __init__(self, key: bytes = KEY) -> None:
        self.key = key
        self.encrypted = self.decrypted = 0

    def encrypt(self, name: str, offset: int, block: bytes) -> bytes:
        assert type(block) is bytes
        self.encrypted += 1
        nonce = secrets.token_bytes(12)
        return nonce + AESGCM(self.key).encrypt(nonce, block, f"{name} {offset}".encode())

    def decrypt(self, name: str, offset: int, block: bytes) -> bytes:
        assert type(block) is bytes
        self.decrypted += 1
        return AESGCM(self.key).decrypt(block[:12], block[12:], f"{name} {offset}".encode())


class Shifting:
    """As long as the plain text, with nothing to check it by."""

    def encrypt(self, name: str, offset: int, block: bytes) -> bytes:
        return bytes(each ^ 90 for each in block)

    decrypt = encrypt


class Padding(Shifting):
    """Pads to 16 bytes, as ciphers in other modes do."""

    def encrypt(self, name: str, offset: int, block: bytes) -> bytes:
        return block + bytes(16 - len(block) % 16)


class Growing(AesGcm):
    """Longer by one byte in every block after the first of a file."""

    def encrypt(self, name: str, offset: int, block: bytes) -> bytes:
        return super().encrypt(name, offset, block) + b"x" * bool(offset)


class Shortening(AesGcm):
    """Loses the last byte of what it decrypts."""

    def decrypt(self, name: str, offset: int, block: bytes) -> bytes:
        return super().decrypt(name, offset, block)[:-1]


class Leaking(AesGcm):
    """Its representation is its key; what it raises is no `Exception` that anybody expects."""

    def __repr__(self) -> str:
        return f"secret {self.key.hex()}"

    def decrypt(self, name: str, offset: int, block: bytes) -> Any:
        raise KeyError(name)
