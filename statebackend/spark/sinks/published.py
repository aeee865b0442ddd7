"""The sink that publishes the committed files themselves, so that nothing is written twice.

>>> parquet("/data/out").target("main", 7, "0" * 32)
'/data/out/batch-00000007-main-00000000000000000000000000000000.parquet'
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from urllib.parse import quote

import pyarrow as pa
import pyarrow.parquet as pq

from statebackend.checkpoint.files import Place, open_place
from statebackend.errors import UsageError
from statebackend.runtime.partitions import columns_in, folder_of, names_partitions, partition_in
from statebackend.runtime.progress import Figures
from statebackend.spark.sinks.committed import CommittedSink, Delivery, check_partition_by, other_types
from statebackend.spark.sinks.sink_log import Listed, SinkLog

__all__ = ["ParquetSink", "parquet"]

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
    Spark, pandas and whatever else lists the folder read whole batches, and a second query can stream from it. A batch
    without rows has no file. The name holds the batch, the output and the incarnation of the store.

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
    return ParquetSink(open_place(path, options), names)


class ParquetSink(CommittedSink):
    """See `parquet`.

    >>> ParquetSink(open_place("s3://KEY:SECRET@bucket/out")).description
    'parquet[s3://bucket/out]'
    """

    def __init__(self, place: Place, partition_by: Sequence[str] = ()) -> None:
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
                continue  # somebody has removed or changed it
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
        if not self._has_log:
            return self._place.address(_name(output, batch_id, incarnation))
        folders = "".join(f"{name}=*/" for name in self.partition_by)
        return self._place.address(folders + _name(output, batch_id, incarnation, "@*"))

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
            listed = [Listed(name, self._place.size(name) or 0) for name in names]
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
        log.begin(Listed(name, self._place.size(name) or 0) for name in self._published())

    def _published(self, folder: str = "") -> Iterator[str]:
        """All files that readers may take for rows, those of partitions, too."""
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

    >>> from statebackend.spark.sinks.calling import SinkContext
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
