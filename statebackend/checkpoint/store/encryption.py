"""Encryption at rest: a cipher of the user's, called for one block of a data file after the other.

The plain text of a file is cut into blocks of 64 KB, of which the last may be shorter. An encrypted block is
longer by the same number of bytes for every block, its *overhead*. So the place of a block in the file follows from
its number, and a reader decrypts the blocks that it needs and no others. Sizes and checksums in manifests are of stored
bytes: whether a file is as it was written can be told without a key.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import pyarrow as pa

from statebackend.checkpoint.files.layout import METADATA
from statebackend.checkpoint.files.store_files import BytesLike, SeekableFile
from statebackend.checkpoint.store.sealed import JsonObject, integer, members_of
from statebackend.errors import CorruptCheckpointError, UsageError

#: Bytes of plain text in a block of a new store. Each store keeps the number that it was made with.
BLOCK = 64 << 10
#: Blocks that are read from the store in one call, if so many are asked for: 4 MB.
_AT_ONCE = 64


class BlockCipher(Protocol):
    """The cipher of a store: an object with these two methods, which any thread may call. It must be picklable.

    ``name`` is the name of the file in the store, which no other file has ever had, and ``offset`` the place of the
    block in the plain text of the file. A cipher that authenticates both keeps blocks from being exchanged.
    """

    def encrypt(self, name: str, offset: int, block: bytes, /) -> bytes:
        """The block as it is stored: longer than ``block`` by the same number of bytes for every block."""

    def decrypt(self, name: str, offset: int, block: bytes, /) -> bytes:
        """The plain text of a stored block; raise anything if it is not what `encrypt` gave for this place."""


class Encryption:
    """A cipher, and the sizes that the store was made with. Picklable, if the cipher is."""

    def __init__(self, cipher: BlockCipher, block: int, overhead: int) -> None:
        self.cipher = cipher
        self.block = block
        self.overhead = overhead

    @classmethod
    def probed(cls, cipher: BlockCipher) -> Encryption:
        """The encryption of a new store: finds the overhead by encrypting zeros."""
        # A cipher that pads to whole blocks differs between these two.
        short, long = (_encrypted(cipher, METADATA, 0, bytes(length)) for length in (1, 16))
        overhead = len(short) - 1
        if overhead < 0 or len(long) - 16 != overhead:
            raise _uneven(METADATA, 0)
        return cls(cipher, BLOCK, overhead)

    def __repr__(self) -> str:
        # Nothing of the cipher: it may show its key.
        return f"<{type(self).__name__}, blocks of {self.block} bytes, {self.overhead} more as stored>"

    def to_json(self) -> JsonObject:
        """The sizes, as the metadata of the store hold them."""
        return {"block": self.block, "overhead": self.overhead}

    def encrypt(self, name: str, offset: int, block: bytes) -> bytes:
        """A block as it is stored; `UsageError` if it has another overhead than the store's."""
        stored = _encrypted(self.cipher, name, offset, block)
        if len(stored) != len(block) + self.overhead:
            raise _uneven(name, offset)
        return stored

    def decrypt(self, name: str, offset: int, stored: bytes) -> bytes:
        """The plain text of a stored block; `CorruptCheckpointError` if the cipher refuses it."""
        try:
            block: object = self.cipher.decrypt(name, offset, stored)
        except Exception as error:
            raise CorruptCheckpointError(
                "a block of a file cannot be decrypted",
                detail=f"{name}, offset {offset} of its plain text, {type(error).__name__}",
                hint="it was changed or comes from elsewhere, or the cipher has another key than the one that wrote it",
            ) from error
        if not isinstance(block, (bytes, bytearray)) or len(block) != len(stored) - self.overhead:
            raise CorruptCheckpointError(
                "a block of a file was decrypted to something of another length",
                detail=f"{name}, offset {offset} of its plain text",
                hint="decrypt must return exactly the bytes that encrypt was given",
            )
        return bytes(block)

    def plain_size(self, name: str, size: int) -> int:
        """The length of the plain text of a file that has ``size`` bytes as stored."""
        n_blocks, rest = divmod(size, self.block + self.overhead)
        if 0 < rest <= self.overhead:
            raise CorruptCheckpointError("the file does not end with a block", detail=f"{name}, {size} bytes")
        return n_blocks * self.block + max(rest - self.overhead, 0)

    def plain(self, name: str, stored: BytesLike) -> bytes:
        view = memoryview(stored)
        self.plain_size(name, len(view))
        step = self.block + self.overhead
        starts = range(0, len(view), step)
        return b"".join(
            self.decrypt(name, number * self.block, bytes(view[at : at + step]))
            for number, at in enumerate(starts)
        )

    def open(self, name: str, source: pa.NativeFile) -> pa.NativeFile:
        """The plain text of a stored file as a seekable ``pyarrow.NativeFile``, which closes ``source`` with itself.

        A read costs the blocks that it touches; memory: up to 4 MB as stored, and the last block.
        """
        try:
            return pa.PythonFile(_PlainText(self, name, source), mode="r")
        except BaseException:
            source.close()
            raise


def _encrypted(cipher: BlockCipher, name: str, offset: int, block: bytes) -> bytes:
    stored = cipher.encrypt(name, offset, block)
    if not isinstance(stored, (bytes, bytearray)):
        raise UsageError(
            f"the cipher encrypts a block to a {type(stored).__name__}, and not to bytes",
            code="USAGE.ENCRYPTION",
        )
    return bytes(stored)


def _uneven(name: str, offset: int) -> UsageError:
    return UsageError(
        "the cipher makes some blocks longer by another number of bytes than others",
        code="USAGE.ENCRYPTION",
        detail=f"{name}, offset {offset}",
        hint="what encrypt returns is longer than the block by one number of bytes for all blocks of a store: use a "
        "cipher without padding, such as AES-GCM, and put the nonce, and the id of the key if there is one, in front",
    )


class EncryptedBlocks:
    """Cuts the plain text of one file, which comes in pieces, into blocks, and encrypts them."""

    def __init__(self, encryption: Encryption, name: str) -> None:
        self._encryption = encryption
        self._name = name
        self._offset = 0
        self._rest = bytearray()

    def of(self, data: BytesLike) -> Iterator[bytes]:
        """The blocks that become full with ``data``, as they are stored. Take all of them before the next call."""
        view, size = memoryview(data), self._encryption.block
        at = 0
        while len(self._rest) + len(view) - at >= size:
            end = at + size - len(self._rest)
            block = bytes(self._rest) + view[at:end]
            self._rest.clear()
            at = end
            yield self._encrypted(block)
        self._rest += view[at:]

    def rest(self) -> Iterator[bytes]:
        if self._rest:
            block = bytes(self._rest)
            self._rest.clear()
            yield self._encrypted(block)

    def _encrypted(self, block: bytes) -> bytes:
        stored = self._encryption.encrypt(self._name, self._offset, block)
        self._offset += len(block)
        return stored


class _PlainText(SeekableFile):
    """The plain text of a stored file, for one thread at a time."""

    def __init__(self, encryption: Encryption, name: str, source: pa.NativeFile) -> None:
        self._stored_size = source.size()
        super().__init__(encryption.plain_size(name, self._stored_size))
        self._encryption = encryption
        self._name = name
        self._source = source
        #: The last block that was decrypted, by its number.
        self._last: tuple[int, bytes] = (-1, b"")
        #: Stored blocks that were read and not yet decrypted, from the one of this number on.
        self._ahead: tuple[int, memoryview] = (0, memoryview(b""))

    def read(self, size: int | None = -1, /) -> bytes:
        return bytes(self._next(size))

    def read_buffer(self, size: int, /) -> pa.Buffer:
        """The same without a copy; Arrow calls it where it can."""
        return pa.py_buffer(self._next(size))

    def readinto(self, buffer: BytesLike, /) -> int:
        return self._fill(memoryview(buffer).cast("B"))

    def close(self) -> None:
        if not self.closed and hasattr(self, "_source"):
            self._source.close()
        super().close()

    def _next(self, size: int | None) -> bytearray:
        left = max(self._size - self._at, 0)
        content = bytearray(left if size is None or size < 0 else min(size, left))
        self._fill(memoryview(content))
        return content

    def _fill(self, target: memoryview) -> int:
        """Fill a buffer with the plain text from here on, as far as there is any; return how many bytes."""
        size, start = self._encryption.block, self._at
        end = max(min(start + len(target), self._size), start)
        at = start
        while at < end:
            number, within = divmod(at, size)
            piece = memoryview(self._block(number, (end - 1) // size))[within : within + end - at]
            target[at - start : at - start + len(piece)] = piece
            at += len(piece)
        self._ahead = (0, memoryview(b""))
        self._at = end
        return end - start

    def _block(self, number: int, last: int) -> bytes:
        """The plain text of a block; those up to ``last`` will be asked for next."""
        if self._last[0] != number:
            offset = number * self._encryption.block
            self._last = number, self._encryption.decrypt(self._name, offset, self._stored(number, last))
        return self._last[1]

    def _stored(self, number: int, last: int) -> bytes:
        step = self._encryption.block + self._encryption.overhead
        first, stored = self._ahead
        if not first <= number < first + -(-len(stored) // step):
            start = number * step
            end = min((min(last, number + _AT_ONCE - 1) + 1) * step, self._stored_size)
            self._source.seek(start)
            stored = memoryview(self._source.read_buffer(end - start))
            if len(stored) != end - start:
                raise CorruptCheckpointError(
                    "the file is cut short", detail=f"{self._name}, bytes {start + len(stored)} to {end}"
                )
            first = number
            self._ahead = first, stored
        return bytes(stored[(number - first) * step : (number - first + 1) * step])


# --- the store and its cipher ---


def check_cipher(cipher: object) -> None:
    """Raise unless the object can be the cipher of a store, or is None."""
    if cipher is not None and not all(
        callable(getattr(cipher, name, None)) for name in ("encrypt", "decrypt")
    ):
        raise UsageError(
            "encryption is an object with the methods encrypt(name, offset, block) and decrypt(name, offset, block)",
            code="USAGE.ENCRYPTION",
            detail=f"a {type(cipher).__name__} has not both",
        )


def check_sizes(recorded: object) -> None:
    """Check the ``encryption`` of metadata; `Malformed` if it is not the sizes of blocks."""
    sizes = members_of(recorded, "the encryption", {"block", "overhead"})
    integer(sizes["block"], "the size of a block", 1)
    integer(sizes["overhead"], "the overhead of a block")


def check_same_encryption(existing: JsonObject | None, wanted: JsonObject | None, uri: str) -> None:
    """Raise unless a store with these sizes may be opened with a cipher of those; None: no encryption, no cipher."""
    if existing is not None and wanted is None:
        raise UsageError(
            "the store is encrypted, and no cipher was given",
            code="USAGE.ENCRYPTION",
            detail=uri,
            hint="pass sb.CheckpointStore(uri, encryption=cipher), with the cipher that it was made with, instead of "
            "the address alone",
        )
    if existing is None and wanted is not None:
        raise UsageError(
            "the store was made without encryption, and a cipher was given for it",
            code="USAGE.ENCRYPTION",
            detail=uri,
            hint="a store cannot be encrypted in place: begin a new one with encryption= and start= this one, "
            "or copy it through a savepoint; then remove this one",
        )
    if existing is not None and wanted is not None and existing["overhead"] != wanted["overhead"]:
        raise UsageError(
            "the store was made with another cipher",
            code="USAGE.ENCRYPTION",
            detail=f"blocks are {existing['overhead']} bytes longer as stored there, {wanted['overhead']} here, {uri}",
            hint="open it with the cipher that it was made with",
        )


def agreed(recorded: JsonObject | None, cipher: BlockCipher | None, uri: str) -> Encryption | None:
    """The encryption of a store, by its metadata and the cipher that was given; `UsageError` if only one has any."""
    if cipher is None or recorded is None:
        check_same_encryption(recorded, None if cipher is None else {}, uri)
        return None
    return Encryption(
        cipher, integer(recorded["block"], "block", 1), integer(recorded["overhead"], "overhead")
    )
