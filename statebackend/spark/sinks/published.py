"""The sink that publishes the committed files themselves, so that nothing is written twice.

>>> parquet("/data/out").target("main", 7, "0" * 32)
'/data/out/batch-00000007-main-00000000000000000000000000000000.parquet'
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from urllib.parse import quote

import pyarrow as pa

from statebackend.checkpoint.files import Place, open_place
from statebackend.errors import UsageError
from statebackend.runtime.progress import Figures
from statebackend.spark.sinks.committed import CommittedSink, Delivery

__all__ = ["ParquetSink", "parquet"]


def parquet(
    path: str | os.PathLike[str],
    *,
    partition_by: str | Sequence[str] = (),
    options: Mapping[str, str] | None = None,
) -> CommittedSink:
    """A sink that publishes the output of each batch as one Parquet file in ``path``: the committed file itself.

    Pass it as ``sink=``. On the file system of the checkpoint, the file gets a second name; else it is copied, which in
    one bucket the service does. It appears whole and durable, once for each batch, over kills and replays, so that
    Spark, pandas and whatever else lists the folder read whole batches, and a second query can stream from it. A batch
    without rows has no file. The name holds the batch, the output and the incarnation of the store.

    ``path`` is a path, or a ``file://``, ``s3://``, ``gs://`` or ``abfss://`` address, whose ``options`` are obstore's.
    O(1) for a link, else O(bytes). A batch is one file, so ``partition_by`` is refused.

    >>> parquet("/data/out")
    <sink parquet[/data/out]>
    """
    if partition_by:
        raise UsageError(
            "the sink that publishes files cannot partition them",
            code="USAGE.NOT_AVAILABLE",
            detail="a batch is one file, the committed one, so that readers see it whole",
            hint="use sb.spark.sinks.delta(table, partition_by=...), or a function that writes with Spark",
        )
    return ParquetSink(open_place(path, options))


class ParquetSink(CommittedSink):
    """See `parquet`.

    >>> ParquetSink(open_place("s3://KEY:SECRET@bucket/out")).description
    'parquet[s3://bucket/out]'
    """

    def __init__(self, place: Place) -> None:
        self._place = place

    @property
    def description(self) -> str:
        return f"parquet[{self._place.uri}]"

    def check(self, output: str, schema: pa.Schema, most_files: int = 1) -> None:
        if most_files > 1:
            raise self._of_several_files(output, f"up to {most_files} files, one of each host")

    def _of_several_files(self, output: str, how_many: str) -> UsageError:
        return UsageError(
            "an output of several files cannot be published as a whole",
            code="USAGE.NOT_AVAILABLE",
            detail=f"output {output!r}, {how_many}, {self.description}",
            hint="use sb.spark.sinks.delta, or a function that writes with Spark",
        )

    def prepare(self, schema: pa.Schema) -> None:
        self._place.prepare()

    def target(self, output: str, batch_id: int, incarnation: str) -> str:
        return self._place.address(_name(output, batch_id, incarnation))

    def deliver(self, delivery: Delivery) -> Figures:
        if len(delivery.files) > 1:
            # Committed by a run that had another sink.
            raise self._of_several_files(delivery.output, f"{len(delivery.files)} files")
        how: list[str] = []
        for file in delivery.files:
            name = _name(delivery.output, delivery.context.batch_id, delivery.context.incarnation)
            how.append(delivery.committed.checkpoint.publish(file, self._place, name))
        return {
            "numFiles": len(delivery.files),
            "numBytes": sum(file.size for file in delivery.files),
            "how": how[0] if how else "nothing",
        }

    def take_back(self, batch_id: int, incarnation: str) -> list[str]:
        begins, ends = _around(batch_id, incarnation)
        removed = []
        for name in self._place.names():
            if name.startswith(begins) and name.endswith(ends):
                self._place.remove(name)
                removed.append(self._place.address(name))
        return removed


def _name(output: str, batch_id: int, incarnation: str) -> str:
    """The name of the file, the same whenever the batch comes. Names in order are batches in order."""
    begins, ends = _around(batch_id, incarnation)
    return begins + quote(output, safe="") + ends


def _around(batch_id: int, incarnation: str) -> tuple[str, str]:
    return f"batch-{batch_id:08}-", f"-{incarnation}.parquet"
