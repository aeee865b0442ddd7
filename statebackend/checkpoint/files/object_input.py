"""Reading an object by ranges, as Arrow reads files: a few bytes of a footer, then batches one after the other.

A request to an object store takes as long as the transfer of some hundred kilobytes, so none is made for less, unless
there is no more. What the last request brought is kept, and the end of the object, which Arrow reads first.

>>> file = RangedFile(lambda start, end: bytes(range(start, end)), 200)
>>> file.seek(100), bytes(file.read(3)), file.tell()
(100, b'def', 103)
"""

from __future__ import annotations

import io
from collections.abc import Callable

from statebackend.checkpoint.files.interface import Buffer

__all__ = ["RangedFile"]

#: The fewest bytes to ask for.
LEAST = 1 << 20
#: The most to ask for unwanted. A request that goes on where the one before ended asks for twice as much as that one.
MOST_AHEAD = 4 << 20


class RangedFile(io.RawIOBase):
    """A seekable file of ``size`` bytes over ``fetch(start, end)``, which makes one request.

    >>> made = []
    >>> file = RangedFile(lambda start, end: made.append((start, end)) or bytes(end - start), 3 << 20)
    >>> _ = file.seek(-10, 2), file.read(), file.seek(0), file.read(4), file.read(4)
    >>> made
    [(2097152, 3145728), (0, 1048576)]
    """

    def __init__(self, fetch: Callable[[int, int], Buffer], size: int) -> None:
        self._fetch = fetch
        self._size = size
        self._at = 0
        #: Where the last request ended, and how much it asked for at least.
        self._next = -1
        self._ahead = LEAST
        #: Pieces of the object by where they begin: the one read last, and its end.
        self._last: tuple[int, memoryview] = (0, memoryview(b""))
        self._tail: tuple[int, memoryview] = (size, memoryview(b""))

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        if start + offset < 0:
            raise ValueError("there is nothing before the start of a file")
        self._at = start + offset
        return self._at

    def readall(self) -> bytes:
        return bytes(self.read())

    def readinto(self, buffer: Buffer) -> int:
        target = memoryview(buffer).cast("B")
        found = memoryview(self.read(len(target)))
        target[: len(found)] = found
        return len(found)

    def read(self, size: int | None = -1, /) -> Buffer:
        """The next bytes: as many as asked for, unless the object ends."""
        end = self._size if size is None or size < 0 else min(self._at + size, self._size)
        pieces = []
        while self._at < end:
            piece = self._piece(self._at, end)
            if not piece:
                break  # the object is shorter than it should be
            pieces.append(piece)
            self._at += len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _piece(self, start: int, end: int) -> memoryview:
        """Some bytes from ``start`` on, at most until ``end``."""
        for begin, held in (self._last, self._tail):
            if begin <= start < begin + len(held):
                return held[start - begin : end - begin]
        goes_on = start == self._next
        self._ahead = min(2 * self._ahead, MOST_AHEAD) if goes_on else LEAST
        until = min(max(end, start + self._ahead), self._size)
        ends = until == self._size and not goes_on
        # Whoever looks at the end will look a little before it next.
        begin = min(start, max(until - LEAST, 0)) if ends else start
        held = memoryview(self._fetch(begin, until)).cast("B")
        self._next = until
        if len(held) <= MOST_AHEAD:
            if ends:
                self._tail = begin, held
            else:
                self._last = begin, held
        return held[start - begin : end - begin]

    def close(self) -> None:
        self._last = self._tail = (0, memoryview(b""))
        super().close()
