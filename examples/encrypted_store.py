"""A store whose data files are encrypted, with AES-GCM and a key that is fetched where it is needed.

    pip install cryptography
    python examples/encrypted_store.py

The cipher is the program's own: the library calls it with one block of a file after the other.
"""

from __future__ import annotations

import os
import secrets
import tempfile
from pathlib import Path

from cryptography.hazmat.primitives.ciphers.aead import AESGCM

import statebackend as sb


class AesGcm:
    """AES-GCM: of each block, a random nonce of 12 bytes, what it was encrypted to, and a tag of 16 bytes.

    The tag covers the place of the block, too: one that was moved, or comes from another file, is refused. The object
    travels to other processes without its key; each fetches that for itself.
    """

    def __init__(self, variable: str) -> None:
        self.variable = variable
        self._aes: AESGCM | None = None

    def __getstate__(self) -> dict[str, object]:
        return {"variable": self.variable, "_aes": None}

    def _cipher(self) -> AESGCM:
        if self._aes is None:
            # Here: from the environment. A service that manages keys is asked in the same place.
            self._aes = AESGCM(bytes.fromhex(os.environ[self.variable]))
        return self._aes

    def encrypt(self, name: str, offset: int, block: bytes) -> bytes:
        nonce = secrets.token_bytes(12)
        return nonce + self._cipher().encrypt(nonce, block, f"{name} {offset}".encode())

    def decrypt(self, name: str, offset: int, block: bytes) -> bytes:
        return self._cipher().decrypt(block[:12], block[12:], f"{name} {offset}".encode())


def main() -> None:
    os.environ["STATE_KEY"] = AESGCM.generate_key(256).hex()
    folder = tempfile.TemporaryDirectory()
    store = sb.CheckpointStore(folder.name, encryption=AesGcm("STATE_KEY"))
    with store.open_for_writing(key_type=str, max_parallelism=128) as opened:
        keyed = sb.create_backend("heap").create_keyed_backend(str)
        city = keyed.get_value_state(sb.ValueStateDescriptor("city", str))
        city.update_many(["ann", "bob"], ["Casablanca", "Yokohama"])
        opened.commit(0, [keyed.snapshot(0, opened).result()])

    again = sb.create_backend("heap").create_keyed_backend(str, restore=store.open_latest())
    city = again.get_value_state(sb.ValueStateDescriptor("city", str))
    print(f"restored:        {city.get_many(['ann', 'bob']).to_pylist()}")

    files = [path for path in Path(folder.name, "data").rglob("*") if path.is_file()]
    print(f"in plain text:   {any(b'Casablanca' in path.read_bytes() for path in files)}")
    print(f"damaged:         {sb.tools.verify(store).problems}")
    try:
        sb.CheckpointStore(folder.name).open_latest()
    except sb.UsageError as error:
        print(f"without cipher:  {error.message}")

    os.environ["STATE_KEY"] = AESGCM.generate_key(256).hex()
    try:
        sb.tools.state(sb.CheckpointStore(folder.name, encryption=AesGcm("STATE_KEY")), "city").to_table()
    except sb.CorruptCheckpointError as error:
        print(f"with other key:  {error.message}")
    folder.cleanup()


if __name__ == "__main__":
    main()
