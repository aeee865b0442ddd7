"""The sink that publishes the committed files themselves, so that nothing is written twice, and its log.

The log has the form of Spark's own file sink: its readers see what it names, and no other files.

    out/_spark_metadata/0            "v1", then a line of JSON for each file of a batch
                       /1
                        ...
                       /9.compact    all files so far: every tenth entry
                       /10

So the files of a batch appear together, with its entry. Entries are created exclusively, one after the other, and never
change. Files are taken out by going on to the next compact entry, which leaves them out: the entries before it no
longer count. The format is Spark's (`FileStreamSinkLog`); an interval of ten is its default.

>>> parquet("/data/out").target("main", 7, "0" * 32)
'parquet[/data/out], batch-00000007-main-00000000000000000000000000000000.parquet'
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple
from urllib.parse import quote, unquote

import pyarrow as pa
import pyarrow.parquet as pq

from statebackend.checkpoint.files import TargetFolder, open_target_folder
from statebackend.errors import StoreError, UsageError
from statebackend.runtime.batch_progress import Figures
from statebackend.runtime.output import columns_in, folder_of, names_partitions, partition_in
from statebackend.spark.sinks.committed_sink import CommittedSink, Delivery, check_partition_by, other_types

FOLDER = "_spark_metadata"
#: Says that the log is one of this library. Spark's readers pass over names that are not numbers.
_MARK = "statebackend"
_VERSION = "v1"
_INTERVAL = 10
_COMPACT = ".compact"
#: Spark's notes on files of a local file system, which are never read.
_BLOCK_SIZE = 33_554_432


class LoggedFile(NamedTuple):
    """A file: its name in the place, with slashes, and its bytes."""

    name: str
    size: int


class SinkLog:
    def __init__(self, place: TargetFolder) -> None:
        self._place = place

    def is_kept(self) -> bool:
        """Return True if the place has a log. `UsageError` if that is not one of this library."""
        names = self._place.names(FOLDER)
        if names and _MARK not in names:
            raise UsageError(
                "the folder belongs to a file sink of Spark, whose log names its files",
                code="USAGE.PUBLISHED",
                detail=f"{self._place.uri}/{FOLDER}",
                hint="publish to another folder",
            )
        return bool(names)

    def begin(self, there: Iterable[LoggedFile]) -> None:
        """Have a log, which names what is there already if it is new."""
        if not self.is_kept():
            self._place.prepare(FOLDER)
            self._create(_MARK, b"")
        if not self._numbers():
            self._create(_entry(0), _content([self._line(file) for file in there]))

    def add(self, files: Sequence[LoggedFile], age: Callable[[str], int | None]) -> bool:
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
                self._create(_entry(number), _content(lines))
            except FileExistsError:
                continue  # another writer's, which may be of this batch
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
            self._create(_entry(number), _content([]))
            number += 1
        self._create(_entry(number), _content(kept))
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
                detail=f"{self._place.uri}/{FOLDER}/{_entry(missing)} is missing",
                hint="bring the file back from a copy; readers of Spark fail without it, too",
            )
        return counting

    def _lines(self, numbers: Sequence[int]) -> Iterator[str]:
        for number in numbers:
            with self._place.open_input(f"{FOLDER}/{_entry(number)}") as file:
                version, *lines = file.read().decode().split("\n")
            if version != _VERSION:
                raise StoreError(
                    "the log of published files has another version",
                    code="STORE.PUBLISHED_LOG",
                    detail=f"{self._place.uri}/{FOLDER}/{_entry(number)}: {version[:20]!r}",
                )
            yield from lines

    def _line(self, file: LoggedFile) -> str:
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


def _entry(number: int) -> str:
    """The name of an entry.

    >>> _entry(8), _entry(9)
    ('8', '9.compact')
    """
    return f"{number}{_COMPACT}" if _is_compact(number) else str(number)


def _content(lines: Iterable[str]) -> bytes:
    return "\n".join([_VERSION, *lines]).encode()


#: The names of published files, as `_name` makes them.
_PUBLISHED = re.compile(
    r"batch-(?P<batch>\d+)-(?P<output>[^@]+)(?:@\d+)?-(?P<incarnation>[0-9a-f]+)\.parquet", re.ASCII
)


def parquet(
    path: str | os.PathLike[str],
    *,
    partition_by: str | Sequence[str] = (),
    options: Mapping[str, str] | None = None,
) -> CommittedSink:
    """A sink that publishes the output of each batch as Parquet in ``path``: the committed file itself.

    Pass it as ``sink=``. On the file system of the checkpoint, the file gets a second name; else it is copied, which in
    one bucket the service does. It appears whole and durable, once for each batch, over kills and replays, so that
    Spark, pandas and other programs that list the folder read whole batches, and a second query can stream from it. A
    batch without rows makes no file. The name holds the batch, the output and the incarnation of the store.

    A batch has several files on executors, one of each host, and with ``partition_by``, one of each value of these
    columns, in folders ``column=value``, cut before the batch is committed. Then a log in the form of Spark's own file
    sink names the files of a batch at once, and Spark's readers see whole batches. Others do not know that log: they
    may see a part of the newest batch.

    ``path`` is a path, or a ``file://``, ``s3://``, ``gs://`` or ``abfss://`` address, whose ``options`` are obstore's.
    O(1) for a link, else O(bytes).

    >>> parquet("/data/out")
    <sink parquet[/data/out]>
    """
    names = (partition_by,) if isinstance(partition_by, str) else tuple(partition_by)
    return ParquetSink(open_target_folder(path, options), names)


class ParquetSink(CommittedSink):
    """See `parquet`."""

    def __init__(self, place: TargetFolder, partition_by: Sequence[str] = ()) -> None:
        self._place = place
        self.partition_by = tuple(partition_by)
        #: True if a batch may have several files.
        self._has_log = bool(self.partition_by)

    @property
    def address(self) -> str:
        return self._place.uri

    @property
    def description(self) -> str:
        return f"parquet[{self._place.uri}]"

    def check(self, output: str, schema: pa.Schema, most_files: int = 1) -> None:
        check_partition_by(self.description, output, schema, self.partition_by, names_partitions)
        self._has_log |= most_files > 1

    def prepare(self, schema: pa.Schema) -> None:
        self._place.prepare()
        self._check_layout()
        log = SinkLog(self._place)
        self._check_types(schema, log)
        if self._has_log or log.is_kept():  # whoever began it may have been killed before it named anything
            self._begin(log)

    def _check_layout(self) -> None:
        """Raise unless what is there is in the same partitions, or in none: readers take one kind of table."""
        begins = f"{folder_of(self.partition_by[0])}=" if self.partition_by else None
        for name in self._place.names():
            is_folder = "=" in name and not name.endswith(".parquet")
            if (is_folder and not name.startswith(begins or name + "/")) or (
                begins is not None and name.endswith(".parquet")
            ):
                raise UsageError(
                    "the folder has files that are partitioned in another way",
                    code="USAGE.PUBLISHED",
                    detail=f"{self._place.address(name)}; partition_by {', '.join(self.partition_by) or 'nothing'}",
                    hint="publish to another folder",
                )

    def _check_types(self, schema: pa.Schema, log: SinkLog) -> None:
        """Raise if a column of the output has another type in a published file: readers take all files for one table.

        Each column is compared with the newest file that has it. So a start opens one file, unless a column is new.
        """
        unseen = columns_in(schema)
        names = log.names() if log.is_kept() else self._place.names()
        for name in sorted(filter(_batch_of, names), key=_batch_of, reverse=True):
            if not unseen:
                return
            try:
                with self._place.open_input(name) as source:
                    there = columns_in(pq.read_schema(source))
            except (FileNotFoundError, pa.ArrowInvalid):
                continue  # it was removed or changed
            differing = other_types(unseen, there, self._place.address(name))
            if differing:
                raise UsageError(
                    "the folder has files whose columns have other types",
                    code="USAGE.OTHER_SCHEMA",
                    detail=f"{self.description}; {'; '.join(differing)}",
                    hint="give the columns their earlier types or other names by schema=, or publish to another folder",
                )
            unseen = {column: kind for column, kind in unseen.items() if column not in there}

    def target(self, output: str, batch_id: int, incarnation: str) -> str:
        folders = "".join(f"{name}=*/" for name in self.partition_by)
        name = _name(output, batch_id, incarnation, "@*" if self._has_log else "")
        return f"{self.description}, {folders}{name}"

    def deliver(self, delivery: Delivery) -> Figures:
        log = SinkLog(self._place)
        is_logged = log.is_kept()
        if not is_logged and len(delivery.files) > 1:  # of a run on executors, and delivered after it
            self._begin(log)
            is_logged = True
        names = [self._file_name(delivery, number) for number in range(len(delivery.files))]
        how: list[str] = []
        for file, name in zip(delivery.files, names, strict=True):
            if "/" in name:
                self._place.prepare(name.rpartition("/")[0])
            how.append(delivery.committed.checkpoint.publish(file, self._place, name))
        if is_logged and names:
            listed = [LoggedFile(name, self._place.size(name) or 0) for name in names]
            if log.add(listed, partial(_age, delivery)):
                how.append("named")
        return {
            "numFiles": len(delivery.files),
            "numBytes": sum(file.size for file in delivery.files),
            "how": next((each for each in how if each != "there"), "there" if how else "nothing"),
        }

    def _file_name(self, delivery: Delivery, number: int) -> str:
        """The name of a file of a batch, with the folders of its partition."""
        file, context = delivery.files[number], delivery.context
        which = f"@{number}" if len(delivery.files) > 1 else ""
        name = _name(delivery.output, context.batch_id, context.incarnation, which)
        if not self.partition_by:
            return name
        with delivery.committed.checkpoint.open_file(file) as source:
            return f"{partition_in(pq.read_schema(source))}/{name}"

    def take_back(self, batch_id: int, incarnation: str) -> list[str]:
        begins, ends = _around(batch_id, incarnation)

        def is_of_batch(name: str) -> bool:
            name = name.rpartition("/")[2]
            return name.startswith(begins) and name.endswith(ends)

        log = SinkLog(self._place)
        if log.is_kept():
            log.take_out(is_of_batch)
        removed = []
        for name in filter(is_of_batch, self._published()):
            self._place.remove(name)
            removed.append(self._place.address(name))
        return removed

    def _begin(self, log: SinkLog) -> None:
        """Have a log, which names what has been published without one."""
        log.begin(LoggedFile(name, self._place.size(name) or 0) for name in self._published())

    def _published(self, folder: str = "") -> Iterator[str]:
        """All files that readers may take for rows, also in partitions."""
        for base in self._place.names(folder):
            name = f"{folder}/{base}" if folder else base
            if base.endswith(".parquet"):
                yield name
            elif "=" in base:
                yield from self._published(name)


def _name(output: str, batch_id: int, incarnation: str, which: str = "") -> str:
    """The name of a file, the same whenever the batch comes. Names in order are batches in order."""
    begins, ends = _around(batch_id, incarnation)
    return begins + quote(output, safe="") + which + ends


def _around(batch_id: int, incarnation: str) -> tuple[str, str]:
    return f"batch-{batch_id:08}-", f"-{incarnation}.parquet"


def _batch_of(name: str) -> int:
    """The batch of a published file, counted from 1; 0 for a file of another name.

    >>> _batch_of("day=mon/" + _name("main", 7, "0" * 32)), _batch_of("a.parquet")
    (8, 0)
    """
    found = _PUBLISHED.fullmatch(name.rpartition("/")[2])
    return 0 if found is None else int(found["batch"]) + 1


def _age(delivery: Delivery, name: str) -> int | None:
    """How many batches later than one that is delivered a published file is; None if it is of another output or store.

    >>> from statebackend.spark.sinks.committed_sink import SinkContext
    >>> context = SinkContext(8, 1, "0" * 32, False)
    >>> of_8 = Delivery("late", (), pa.schema([]), None, context)
    >>> [_age(of_8, _name(output, 7, "0" * 32, "@3")) for output in ("late", "main")]
    [-1, None]
    """
    context = delivery.context
    found = _PUBLISHED.fullmatch(name.rpartition("/")[2])
    if found is None or found["output"] != quote(delivery.output, safe=""):
        return None
    return int(found["batch"]) - context.batch_id if found["incarnation"] == context.incarnation else None
