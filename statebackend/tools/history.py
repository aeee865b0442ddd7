"""Tools that take a store back, or give it another time: for a stream whose rows, or whose clock, were wrong.

>>> import tempfile
>>> from statebackend.checkpoint import CheckpointStore
>>> folder = tempfile.TemporaryDirectory()
>>> with CheckpointStore(folder.name).open_for_writing() as store:
...     for batch_id in (6, 7):
...         _ = store.commit(batch_id, now=1000, progress={"numOutputRows": 10 * batch_id})
>>> rewind(folder.name, to=6)
Rewound(to=6, taken_back=[TakenBack(batch_id=7, rows=70, ...)])
>>> set_time(folder.name, now=5000).now
5000
>>> folder.cleanup()
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from statebackend.checkpoint import Checkpoint, CheckpointStore
from statebackend.checkpoint.store.json_checks import MAX_INTEGER
from statebackend.errors import CorruptCheckpointError, UsageError
from statebackend.runtime.origin import Origin

__all__ = ["Rewound", "TakenBack", "rewind", "set_time"]

_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.timezone.utc)


class TakenBack(NamedTuple):
    """A batch that `rewind` has removed from a store.

    Its sink may have been called: with ``rows`` rows, and with a `SinkContext` of this ``incarnation``.

    >>> TakenBack(7, 70, "0" * 32).rows
    70
    """

    batch_id: int
    #: None, like the incarnation, if the manifest cannot be read.
    rows: int | None
    incarnation: str | None


class Rewound(NamedTuple):
    """The result of `rewind`.

    >>> Rewound(6, []).taken_back
    []
    """

    #: The newest checkpoint now; None if there is none.
    to: int | None
    #: Oldest first.
    taken_back: list[TakenBack]


def rewind(store: str | os.PathLike[str] | CheckpointStore, *, to: int | None, sink: Any = None) -> Rewound:
    """Take a store back to checkpoint ``to``, so that the batches after it run anew; None: to before the first one.

    Use it for a stream that has planned a batch anew (`BATCH_GAP.OTHER_ROWS`), or whose function was wrong. The query
    must not run meanwhile. It removes the batches from the store, but not the effects of their sink. For these,
    ``sink`` may have a method ``take_back(batch_id, incarnation)``: it is called for each batch, newest first, before
    anything is dropped. O(files that are dropped).
    """
    take_back = None if sink is None else getattr(sink, "take_back", None)
    if sink is not None and not callable(take_back):
        raise UsageError(
            "the sink cannot take a batch back",
            detail=f"a {type(sink).__name__} has no method take_back(batch_id, incarnation)",
            hint="leave sink= out, and remove by hand what the sink did for the batches that are named",
        )
    if to is not None and type(to) is not int:
        raise UsageError("to is the id of a checkpoint, an int, or None for before the first")
    with _writing(store) as opened:
        committed = opened.checkpoints()
        if to is not None and to not in committed:
            opened.rewind(to)  # which names the existing ones
        taken_back = [_taken_back(opened, each) for each in committed if to is None or each > to]
        if take_back is not None:
            if to is not None:
                opened.open(to).verify()  # before a sink takes back what cannot be restored
            for batch in reversed(taken_back):
                take_back(batch.batch_id, batch.incarnation)
        opened.rewind(to)
        return Rewound(to, taken_back)


def _taken_back(store: CheckpointStore, batch_id: int) -> TakenBack:
    try:
        checkpoint = store.open(batch_id)
    except CorruptCheckpointError:
        return TakenBack(batch_id, None, None)
    manifest = checkpoint.manifest
    incarnation = Origin.of(manifest).incarnation or manifest.store
    return TakenBack(checkpoint.id, manifest.progress.get("numOutputRows"), incarnation)


def set_time(store: str | os.PathLike[str] | CheckpointStore, *, now: int | datetime.datetime) -> Checkpoint:
    """Give the newest checkpoint another time, in milliseconds or as an aware datetime; return the checkpoint.

    Use it after a clock was wrong, or for a query that paused for longer than `max_clock_jump`. Time continues from
    ``now``, forward or back: from the next batch on it decides what expires and which timers are due. The query must
    not run meanwhile.
    """
    if isinstance(now, datetime.datetime):
        if now.tzinfo is None:
            raise UsageError("a datetime without a time zone is no moment", hint="now.replace(tzinfo=...)")
        now = (now - _EPOCH) // datetime.timedelta(milliseconds=1)
    if type(now) is not int or abs(now) > MAX_INTEGER:
        raise UsageError("now is a number of milliseconds since 1970, or a datetime")
    with _writing(store) as opened:
        newest = opened.open_latest()
        opened.set_time(now)
        return opened.open(newest.id)


@contextmanager
def _writing(store: str | os.PathLike[str] | CheckpointStore) -> Iterator[CheckpointStore]:
    """Open the store for writing; it must exist, and nobody else may be writing to it."""
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
            hint="give the checkpoint= of the query",
        )
    with made.open_for_writing(refuse_live=True) as opened:
        yield opened
