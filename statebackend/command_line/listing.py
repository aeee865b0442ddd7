"""The commands that look at the checkpoints of a store: ``ls`` and ``verify``."""

from __future__ import annotations

import argparse
from typing import Any

from statebackend import tools
from statebackend.checkpoint import Checkpoint, CheckpointReader
from statebackend.command_line.console import DONE, FAILED, Console
from statebackend.command_line.layout import size_text, span_text, table, time_text
from statebackend.errors import CorruptCheckpointError, UsageError
from statebackend.runtime.batch_identity import BatchRecord
from statebackend.tools.stream_rewind import SparkCheckpoint


def reader(options: argparse.Namespace) -> CheckpointReader:
    """The store that a command reads."""
    return CheckpointReader(options.store, encryption=options.cipher)


def verify(options: argparse.Namespace, console: Console) -> int:
    report = tools.verify(reader(options))
    console.show(report)
    return DONE if report.ok else FAILED


def ls(options: argparse.Namespace, console: Console) -> int:
    store = reader(options)
    store.open_latest()  # raises the error for a store that is not there
    rows: list[dict[str, Any]] = []
    location = options.checkpoint_location
    for each in store.checkpoints():
        try:
            checkpoint = store.open(each)
        except CorruptCheckpointError as error:
            rows.append({"id": each, "damaged": error.code})
            continue
        except UsageError:
            continue  # its writer has dropped it
        rows.append(_row(checkpoint))
        if options.checkpoint_location is None:
            location = BatchRecord.of(checkpoint.manifest).location or location
    reach = [_reach("store", [(row["id"], row.get("time")) for row in rows])]
    spark = None if location is None else _spark_reach(location, is_asked=bool(options.checkpoint_location))
    if spark is not None:
        reach.append(_reach("Spark", spark))
        both = sorted({row["id"] for row in rows} & {batch for batch, _ in spark})
        reach.append(_reach("rewind", [(row["id"], row.get("time")) for row in rows if row["id"] in both]))
    shown = [
        table([_shown(row) for row in rows], console.width),
        "",
        table([_shown_reach(each) for each in reach]),
    ]
    console.show({"checkpoints": rows, "reach": reach}, "\n".join(shown))
    return DONE


def _row(checkpoint: Checkpoint) -> dict[str, Any]:
    manifest = checkpoint.manifest
    identity = BatchRecord.of(manifest).identity or {}
    planned = identity.get("time")
    took = manifest.written - planned if isinstance(planned, int) and manifest.written is not None else None
    return {
        "id": checkpoint.id,
        "time": checkpoint.now if manifest.written is None else manifest.written,
        "rows": manifest.progress.get("numInputRows"),
        "entries": manifest.progress.get("numRowsTotal"),
        "bytes": sum({file.name: file.size for each in checkpoint.snapshots for file in each.files}.values()),
        #: From Spark's plan of the batch to its commit.
        "duration": took,
    }


def _shown(row: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": row["id"],
        "time (UTC)": row.get("damaged") or time_text(row["time"]),
        "rows": row.get("rows"),
        "entries": row.get("entries"),
        "bytes": size_text(row.get("bytes")),
        "duration": span_text(row.get("duration")),
    }


def _spark_reach(location: str, *, is_asked: bool) -> list[tuple[int, int | None]] | None:
    """The batches after which Spark's log can go on; None if the recorded log cannot be read from here."""
    try:
        return SparkCheckpoint(location).batches()
    except UsageError:
        if is_asked:
            raise
        return None


def _reach(name: str, batches: list[tuple[int, int | None]]) -> dict[str, Any]:
    """How far back something goes, from its newest batch."""
    times = [time for _, time in batches if time is not None]
    return {
        "of": name,
        "oldest": batches[0][0] if batches else None,
        "newest": batches[-1][0] if batches else None,
        "span": times[-1] - times[0] if times else None,
    }


def _shown_reach(reach: dict[str, Any]) -> dict[str, Any]:
    return {**reach, "span": span_text(reach["span"])}
