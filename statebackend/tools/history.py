"""Tools that take a store back, or give it another time: for a stream whose rows, or whose clock, were wrong."""

from __future__ import annotations

import dataclasses
import datetime
import itertools
import logging
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from statebackend.checkpoint import Checkpoint, CheckpointStore
from statebackend.checkpoint.store.sealed import MAX_INTEGER
from statebackend.errors import CorruptCheckpointError, UsageError, usage
from statebackend.runtime.batch_identity import BatchRecord
from statebackend.runtime.start_checks import checked_first_batch
from statebackend.tools.results import Reset, Rewound, TakenBack, Times
from statebackend.tools.stream_rewind import SparkCheckpoint, stream_not_rewindable

_log = logging.getLogger(__name__)

#: Seconds.
_LETS_GO = 2
_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.timezone.utc)


def rewind(
    store: str | os.PathLike[str] | CheckpointStore,
    *,
    to: int | None,
    checkpoint_location: str | os.PathLike[str] | None,
    sink: Any = None,
    dry_run: bool = False,
) -> Rewound:
    """Take a query back to checkpoint ``to``, so that the batches after it run again; None: to before the first one.

    Use it for a stream that has planned a batch again (`BATCH_GAP.OTHER_ROWS`), or whose function was wrong. The query
    must not run meanwhile. ``checkpoint_location`` is Spark's, in a folder of this machine. The rewind takes it back
    too: its files of later batches move to the folder ``.rewound`` in it. With None, take the stream back yourself. If
    the store, a sink or the stream cannot go back, nothing changes. After a kill, call it again.

    The rewind removes the batches from the store, and says of each what its sinks have published. That stays, unless
    ``sink`` is ``"recorded"``, the sink of the job, or the dict of its sinks. ``"recorded"`` means the sinks of
    `sb.spark.sinks` that the batches went to; credentials come from the environment. Another sink needs a method
    ``take_back(batch_id, incarnation)``. It is called for each batch, newest first, and the batch is dropped once all
    have returned. With ``to=None``, that needs a store that still has its first batch: a sink cannot be told of dropped
    batches. O(files that are dropped); with ``sink``, each checkpoint that becomes the newest is read.

    With ``dry_run`` it only reads, also while the query runs, and returns the same result. It calls no sink.
    """
    take_backs = [] if sink == "recorded" else _take_backs(sink)
    if to is not None and type(to) is not int:
        raise usage.checkpoint_id("to is the id of a checkpoint, an int, or None for before the first")
    with writing(store, dry_run=dry_run) as opened:
        committed = opened.checkpoints()
        is_alone = sink is None and checkpoint_location is None  # the store then looks itself
        if to is not None and (dry_run or not is_alone or to not in committed):
            opened.open(
                to
            ).verify()  # before a sink or the stream goes back to a state that cannot be restored
        taken_back = [_taken_back(opened, each) for each in committed if to is None or each > to]
        if sink == "recorded":
            take_backs = _recorded(taken_back)
        if take_backs and to is None:
            _check_complete(opened, committed)
        stream = None if checkpoint_location is None else _stream_of(opened, checkpoint_location)
        lost = _lost_entries(stream, opened, committed, to)
        moved = [] if stream is None else stream.files_after(to, lost)
        result = Rewound(to, taken_back, [str(path) for path in moved], [*lost])
        _warn_of_left(sink, taken_back)
        if dry_run:
            return result
        if stream is not None:
            stream.write(lost)
            stream.move(moved, opened.incarnation)
        newest = opened.incarnation  # the loop changes it
        for at, batch in reversed(list(enumerate(taken_back))) if take_backs else []:
            incarnations = _incarnations(
                taken_back, at, newest, None if to is None else _taken_back(opened, to)
            )
            removed = [_removed_of(take_back, batch.batch_id, incarnations) for take_back in take_backs]
            if batch.incarnation is None and not any(removed):
                _log.warning(
                    "batch %d: its manifest cannot be read, and no sink has found anything of it under %s",
                    batch.batch_id,
                    " or ".join(incarnations) or "any incarnation that is known",
                )
            taken_back[at] = dataclasses.replace(batch, removed=tuple(itertools.chain(*removed)))
            # One at a time: an error, or a kill, leaves at most the newest batch half undone, and a store that
            # delivers just this one again. Where the one before is damaged, both go together.
            with suppress(CorruptCheckpointError):
                opened.rewind(taken_back[at - 1].batch_id if at else to)
        opened.rewind(to)
        return result


def _stream_of(store: CheckpointStore, location: str | os.PathLike[str]) -> SparkCheckpoint:
    """The checkpointLocation of the query that wrote the store."""
    stream = SparkCheckpoint(location)
    for newest in reversed(store.checkpoints()):
        with suppress(CorruptCheckpointError):
            check_stream(stream, store.open(newest), store.uri)
            break
    return stream


def _lost_entries(
    stream: SparkCheckpoint | None, store: CheckpointStore, committed: list[int], to: int | None
) -> dict[str, str]:
    """The entries of Spark's logs that a rewind writes again, from the manifests of a batch and the next one."""
    if stream is None or to is None:
        return {}
    logs = [(each, BatchRecord.of(store.open(each).manifest).log) for each in committed if each >= to][:2]
    return stream.lost_entries(to, {batch: log for batch, log in logs if log is not None})


def check_stream(stream: SparkCheckpoint, checkpoint: Checkpoint, store: str) -> None:
    """Raise if a checkpoint was written by a query with another checkpointLocation."""
    wrote = BatchRecord.of(checkpoint.manifest).stream
    if wrote not in (None, stream.id):
        raise stream_not_rewindable(
            "the checkpointLocation belongs to another query than the store",
            f"{stream.folder}: query {stream.id}; {store}: query {wrote}",
            "give the checkpointLocation of the query that wrote the store",
        )


def _recorded(taken_back: Sequence[TakenBack]) -> list[Callable[..., object]]:
    """`_take_backs` of all sinks that the manifests of the batches name."""
    from statebackend.spark import sinks

    made: dict[str, Callable[..., object]] = {}
    for batch in taken_back:
        for output, where in batch.targets.items():
            found = re.fullmatch(r"(parquet|delta)\[(.+)\], .*", where)
            if found is None:
                raise UsageError(
                    "a function that is a sink cannot be found again from the store",
                    code="USAGE.NO_SINK",
                    detail=f"output {output!r}, sink {where}",
                    hint="pass the sinks with sink=, or sink=None, and remove by hand what this one has done",
                )
            made[f"{found[1]} {found[2]}"] = getattr(sinks, found[1])(found[2]).take_back
    return list(made.values())


def _take_backs(sink: Any) -> list[Callable[..., object]]:
    """The methods of a sink, or of a dict of sinks, that take a batch back."""
    if sink is None:
        return []
    found = []
    for each in sink.values() if isinstance(sink, Mapping) else [sink]:
        take_back = getattr(each, "take_back", None)
        if not callable(take_back):
            raise usage.sink(
                "the sink cannot take a batch back",
                detail=f"a {type(each).__name__} has no method take_back(batch_id, incarnation)",
                hint="leave sink= out, and remove by hand what the sink did for the batches that are named",
            )
        found.append(take_back)
    return found


def _warn_of_left(sink: Any, taken_back: Sequence[TakenBack]) -> None:
    """Tell which outputs stay published although other sinks take theirs back: their rows come again."""
    if not isinstance(sink, Mapping):
        return
    left = {name: where for batch in taken_back for name, where in batch.targets.items() if name not in sink}
    for name, where in left.items():
        _log.warning("output %r stays in %s: sink= has no sink for it, and its batches run anew", name, where)


def _check_complete(store: CheckpointStore, committed: list[int]) -> None:
    """Raise if sinks may have batches that are older than the oldest checkpoint, which cannot be undone."""
    began = store._log().state.begins_at or 0
    if committed and committed[0] > began:
        raise UsageError(
            "the store no longer has the first batches, so a sink cannot take them back",
            code="USAGE.NO_CHECKPOINT",
            detail=f"{store.uri}; its oldest checkpoint is {committed[0]}, and it began with batch {began}",
            hint="remove by hand what the sink has, then rewind without sink=",
        )


def _removed_of(take_back: Callable[..., object], batch_id: int, incarnations: Sequence[str]) -> list[str]:
    """What a sink has removed of a batch, under the first incarnation of which it has any."""
    for incarnation in incarnations:
        removed = take_back(batch_id, incarnation)
        if isinstance(removed, (list, tuple)) and removed:
            return [str(each) for each in removed]
    return []


def _incarnations(taken_back: Sequence[TakenBack], at: int, newest: str, kept: TakenBack | None) -> list[str]:
    """The incarnation of a batch. Where its manifest cannot be read, those that it may have, the newer one first.

    Incarnations follow one another, so it belongs to the batch after it, or of the one before. Of the newer one there
    can be a batch of this number only if it is this one; of the older one there may also be one that was undone.
    """
    known = taken_back[at].incarnation
    if known is not None:
        return [known]
    after = next((each.incarnation for each in taken_back[at + 1 :] if each.incarnation), newest)
    older = reversed(taken_back[:at] if kept is None else [kept, *taken_back[:at]])
    before = next((each.incarnation for each in older if each.incarnation), after)
    return list(dict.fromkeys([after, before]))


def _taken_back(store: CheckpointStore, batch_id: int) -> TakenBack:
    try:
        checkpoint = store.open(batch_id)
    except CorruptCheckpointError:
        return TakenBack(batch_id, None, None, {})
    manifest = checkpoint.manifest
    origin = BatchRecord.of(manifest)
    incarnation = origin.incarnation or manifest.store
    rows = manifest.progress.get("numOutputRows")
    return TakenBack(checkpoint.id, rows, incarnation, dict(origin.targets or {}))


def reset(
    store: str | os.PathLike[str] | CheckpointStore, *, first_batch: int, dry_run: bool = False
) -> Reset:
    """Restart a store from empty: the next batch is ``first_batch``, and the state lacks rows of earlier batches.

    Use it where stream and state disagree (`BATCH_GAP.NO_STATE`, `STATE_BEHIND`, `STREAM_BEHIND`), and an older state
    cannot be brought back. The remedy for `OTHER_ROWS` is `rewind`. The query must not run meanwhile. The store gets a
    new incarnation, and ``start=`` is ignored from then on. With ``dry_run``, nothing changes. O(dropped files)
    """
    checked_first_batch(first_batch)
    with writing(store, dry_run=dry_run) as opened:
        dropped = opened.checkpoints()
        if not dry_run:
            opened.restart(begins_at=first_batch)
    return Reset(first_batch, dropped)


def set_time(
    store: str | os.PathLike[str] | CheckpointStore,
    *,
    now: int | datetime.datetime | None = None,
    watermark: int | datetime.datetime | None = None,
    dry_run: bool = False,
) -> Times:
    """Give the newest checkpoint other times, in milliseconds or as aware datetimes; return its times.

    Use it after a clock was wrong, or a row whose time had run ahead, or for a query that paused for longer than
    `max_clock_jump`. The clock's time continues from ``now`` and the rows' from ``watermark``, forward or back: from
    the next batch on they decide what expires and which timers are due. None leaves a time as it is. The query must not
    run meanwhile. With ``dry_run`` nothing changes.
    """
    if now is None and watermark is None:
        raise usage.time("now is a number of milliseconds since 1970, or a datetime; so is watermark")
    clock, of_rows = _moment(now, "now"), _moment(watermark, "watermark")
    with writing(store, dry_run=dry_run) as opened:
        newest = opened.open_latest()
        if not dry_run:
            opened.set_time(clock, watermark=of_rows)
    return Times(
        newest.id, newest.now if clock is None else clock, newest.watermark if of_rows is None else of_rows
    )


def _moment(time: int | datetime.datetime | None, what: str) -> int | None:
    if isinstance(time, datetime.datetime):
        if time.tzinfo is None:
            raise usage.time("a datetime needs a time zone", hint=f"{what}.replace(tzinfo=...)")
        time = (time - _EPOCH) // datetime.timedelta(milliseconds=1)
    if time is not None and (type(time) is not int or abs(time) > MAX_INTEGER):
        raise usage.time(f"{what} is a number of milliseconds since 1970, or a datetime")
    return time


@contextmanager
def writing(
    store: str | os.PathLike[str] | CheckpointStore, *, dry_run: bool = False
) -> Iterator[CheckpointStore]:
    """Open the store for writing; it must exist, and have no other live writer. With ``dry_run`` it is not opened."""
    try:
        made = store.unopened() if isinstance(store, CheckpointStore) else CheckpointStore(store)
    except UsageError as error:
        if error.code == "USAGE.SINGLE_WRITER":
            error.hint = (
                "pass sb.CheckpointStore(..., single_writer=True), if you vouch that the query does not run"
            )
        raise
    if made.metadata() is None:
        raise UsageError(
            "there is no store",
            code="USAGE.NO_CHECKPOINT",
            detail=made.uri,
            hint="give the state= of the query",
        )
    with made if dry_run else _opened(made) as opened:
        yield opened


def _opened(store: CheckpointStore) -> CheckpointStore:
    """Open a store for writing. A query that has just ended in this process lets go of it within a second."""
    until = time.monotonic() + _LETS_GO
    while True:
        try:
            return store.open_for_writing(refuse_live=True)
        except UsageError as error:
            if error.code != "USAGE.STORE_IN_USE" or time.monotonic() > until:
                raise
        time.sleep(0.1)
