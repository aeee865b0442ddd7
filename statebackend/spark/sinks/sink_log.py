"""The log of published files, in the form of Spark's own file sink: its readers see what it names, and no other files.

    out/_spark_metadata/0            "v1", then a line of JSON for each file of a batch
                       /1
                        ...
                       /9.compact    all files so far: every tenth entry
                       /10

So the files of a batch appear together, with its entry. Entries are created exclusively, one after the other, and never
change. Files are taken out by going on to the next compact entry, which leaves them out: the entries before it no
longer count. The format is Spark's (`FileStreamSinkLog`); an interval of ten is its default.

>>> import tempfile
>>> from statebackend.checkpoint.files import open_place
>>> with tempfile.TemporaryDirectory() as folder:
...     log = SinkLog(open_place(folder))
...     log.begin([])
...     log.add([Listed("day=1/a", 10)], lambda name: 0 if name == "day=1/a" else None)
...     log.add([Listed("day=1/a", 10)], lambda name: 0 if name == "day=1/a" else None)
...     log.names()
True
False
['day=1/a']
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple
from urllib.parse import quote, unquote

from statebackend.checkpoint.files import Place
from statebackend.errors import StoreError, UsageError

__all__ = ["FOLDER", "Listed", "SinkLog"]

FOLDER = "_spark_metadata"
#: Says that the log is one of this library. Spark's readers pass over names that are no numbers.
_MARK = "statebackend"
_VERSION = "v1"
_INTERVAL = 10
_COMPACT = ".compact"
#: What Spark notes of files of a local file system; nobody reads it.
_BLOCK_SIZE = 33_554_432


class Listed(NamedTuple):
    """A file: its name in the place, with slashes, and its bytes."""

    name: str
    size: int


class SinkLog:
    """The log of a place.

    >>> from statebackend.checkpoint.files import open_place
    >>> SinkLog(open_place("/nowhere")).is_kept()
    False
    """

    def __init__(self, place: Place) -> None:
        self._place = place

    def is_kept(self) -> bool:
        """Return True if the place has a log. `UsageError` if that is not one of this library."""
        names = self._place.names(FOLDER)
        if names and _MARK not in names:
            raise UsageError(
                "the folder is that of a file sink of Spark, whose log names its files",
                code="USAGE.PUBLISHED",
                detail=f"{self._place.uri}/{FOLDER}",
                hint="publish to another folder",
            )
        return bool(names)

    def begin(self, there: Iterable[Listed]) -> None:
        """Have a log, which names what is there already if it is new."""
        if not self.is_kept():
            self._place.prepare(FOLDER)
            self._create(_MARK, b"")
        if not self._numbers():
            self._create(_name(0), _content([self._line(file) for file in there]))

    def add(self, files: Sequence[Listed], age: Callable[[str], int | None]) -> bool:
        """Name the files of a batch, durably, unless they are named already: return False then.

        ``age`` tells of a file that is named: 0 if it is of this batch, less if of one before it, None if neither.
        Batches come in their order, so the search goes back to one before it. Another writer of the same batch may be
        under way: of both, one adds it. O(files), and every tenth time O(files that are named).
        """
        while True:
            numbers = self._numbers()
            if self._has(numbers, age):
                return False
            number = numbers[-1] + 1 if numbers else 0
            lines = [self._line(file) for file in files]
            if _is_compact(number):
                lines = [*self._lines(numbers), *lines]
            try:
                self._create(_name(number), _content(lines))
            except FileExistsError:
                continue  # somebody else's, which may be of this batch
            if _is_compact(number):
                self._drop_before(number - _INTERVAL)
            return True

    def _has(self, numbers: Sequence[int], age: Callable[[str], int | None]) -> bool:
        for number in reversed(numbers):
            for line in reversed(list(self._lines([number]))):
                found = age(self._name_in(line))
                if found is not None and found <= 0:
                    return found == 0
        return False

    def take_out(self, is_of_batch: Callable[[str], bool]) -> None:
        """Name the files of a batch no longer. Nobody may write meanwhile. O(files that are named)."""
        numbers = self._numbers()
        lines = list(self._lines(numbers))
        kept = [line for line in lines if not is_of_batch(self._name_in(line))]
        if len(kept) == len(lines):
            return
        number = numbers[-1] + 1
        while not _is_compact(number):
            self._create(_name(number), _content([]))
            number += 1
        self._create(_name(number), _content(kept))
        self._drop_before(number - _INTERVAL)

    def names(self) -> list[str]:
        """The files that readers see."""
        return [self._name_in(line) for line in self._lines(self._numbers())]

    # --- entries ---

    def _numbers(self) -> list[int]:
        """The entries that count, in order: from the newest compact one on."""
        found = sorted(
            int(name.removesuffix(_COMPACT))
            for name in self._place.names(FOLDER)
            if name.removesuffix(_COMPACT).isdecimal()
        )
        compact = [number for number in found if _is_compact(number)]
        first = compact[-1] if compact else 0
        counting = [number for number in found if number >= first]
        if counting and counting != list(range(first, found[-1] + 1)):
            missing = min(set(range(first, found[-1] + 1)) - set(counting))
            raise StoreError(
                "the log of published files has a gap",
                code="STORE.PUBLISHED_LOG",
                detail=f"{self._place.uri}/{FOLDER}/{_name(missing)} is missing",
                hint="bring the file back from a copy; readers of Spark fail without it, too",
            )
        return counting

    def _lines(self, numbers: Sequence[int]) -> Iterator[str]:
        for number in numbers:
            with self._place.open_input(f"{FOLDER}/{_name(number)}") as file:
                version, *lines = file.read().decode().split("\n")
            if version != _VERSION:
                raise StoreError(
                    "the log of published files has another version",
                    code="STORE.PUBLISHED_LOG",
                    detail=f"{self._place.uri}/{FOLDER}/{_name(number)}: {version[:20]!r}",
                )
            yield from lines

    def _line(self, file: Listed) -> str:
        noted = {
            "path": self._root() + quote(file.name, safe="/="),
            "size": file.size,
            "isDir": False,
            "modificationTime": time.time_ns() // 1_000_000,
            "blockReplication": 1,
            "blockSize": _BLOCK_SIZE,
            "action": "add",
        }
        return json.dumps(noted, separators=(",", ":"))

    def _name_in(self, line: str) -> str:
        return unquote(str(json.loads(line)["path"]).removeprefix(self._root()))

    def _root(self) -> str:
        uri = self._place.uri
        return f"file://{quote(uri)}/" if uri.startswith("/") else f"{uri}/"

    def _create(self, name: str, content: bytes) -> None:
        self._place.create(f"{FOLDER}/{name}", content)

    def _drop_before(self, number: int) -> None:
        """Remove entries that no reader needs. The compact entry before the newest stays: it tells the interval."""
        for name in self._place.names(FOLDER):
            if name.removesuffix(_COMPACT).isdecimal() and int(name.removesuffix(_COMPACT)) < number:
                self._place.remove(f"{FOLDER}/{name}")


def _is_compact(number: int) -> bool:
    return number % _INTERVAL == _INTERVAL - 1


def _name(number: int) -> str:
    """The name of an entry.

    >>> _name(8), _name(9)
    ('8', '9.compact')
    """
    return f"{number}{_COMPACT}" if _is_compact(number) else str(number)


def _content(lines: Iterable[str]) -> bytes:
    return "\n".join([_VERSION, *lines]).encode()
