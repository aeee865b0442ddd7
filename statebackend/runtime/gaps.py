"""The errors for disagreements between stream and state: the name of each, and what to do about it.

>>> print(gap(9, 6, "/data/state").code)
BATCH_GAP.STATE_BEHIND
"""

from __future__ import annotations

from statebackend.errors import BatchGapError
from statebackend.runtime.origin import Identity

__all__ = ["gap", "other_rows", "other_stream"]

_ANEW = "on_gap='restart_from_empty' goes on without the old state"


def gap(
    batch_id: int,
    last: int | None,
    uri: str,
    *,
    first_batch: int | None = None,
    has_acted: bool = False,
) -> BatchGapError:
    """The error for a batch that does not follow what is committed.

    ``has_acted`` means that ``on_gap`` would have helped, but has acted before.

    >>> gap(3, None, "/data/state", first_batch=2).code
    'BATCH_GAP.NO_STATE'
    """
    anew = _ANEW
    if has_acted:
        anew = f"on_gap has acted already; to let it act again, pass first_batch={batch_id} with it"
    if last is None and first_batch is not None:
        return BatchGapError(
            f"the stream is at batch {batch_id}, and the job is to begin with batch {first_batch}",
            code="BATCH_GAP.NO_STATE",
            detail=uri,
            hint=f"let first_batch be the batch that the state to begin with belongs before: {batch_id} if it holds "
            f"all rows up to batch {batch_id - 1}",
        )
    if last is None:
        return BatchGapError(
            f"the stream is at batch {batch_id}, and there is no state",
            code="BATCH_GAP.NO_STATE",
            detail=uri,
            hint="state was removed, or its path changed: give the right checkpoint=, or begin the query anew "
            f"with a new checkpointLocation, or pass first_batch={batch_id} (with restore_from=, to begin with a "
            f"savepoint); {anew}",
        )
    if batch_id > last:
        return BatchGapError(
            f"state is behind the stream: it holds batch {last}, and batch {batch_id} is to come",
            code="BATCH_GAP.STATE_BEHIND",
            detail=uri,
            hint="state was restored from an older copy: restore the stream's checkpointLocation of the same "
            f"moment; {anew}",
        )
    return BatchGapError(
        f"the stream is behind state: batch {batch_id} is to come, and batch {last} is committed",
        code="BATCH_GAP.STREAM_BEHIND",
        detail=uri,
        hint="the stream's checkpointLocation was restored from an older copy, or removed: restore the state of the "
        f"same moment, or sb.tools.rewind to batch {batch_id - 1} if it is retained; {anew}",
    )


def other_rows(
    batch_id: int, uri: str, then: Identity, now: Identity | None, previous: int | None
) -> BatchGapError:
    """The error for a batch with the number of the newest committed one, and other rows.

    ``previous`` is the checkpoint to go back to; None if it is not retained or there is none. The message shows no
    offsets, because a user's own source may put anything into them.

    >>> print(other_rows(3, "/data/state", {"kind": "plan", "time": 1, "offsets": [7]}, None, 2).detail)
    /data/state, batch 3; committed: planned at 1; to come: not known
    """
    if previous is not None or batch_id == 0:
        back = f"take the batch back with sb.tools.rewind(store, to={previous}), after which it runs with the new rows"
    else:
        back = (
            f"bring checkpoint {batch_id - 1}, which is not retained, back from a copy of the store; or begin with no "
            f"state at all: sb.tools.rewind(store, to=None), then first_batch={batch_id}"
        )
    if now is None:
        hint = "what Spark has planned cannot be read here, as through Spark Connect: run this batch once the way the "
        hint += f"query ran before; or {back}"
    else:
        hint = "Spark has planned the batch anew: its offset log was lost or changed, or its checkpointLocation is "
        hint += "another, or the frame gives other rows each time. Bring the checkpointLocation back as it was; or "
        hint += back
    return BatchGapError(
        f"batch {batch_id} is committed, and what is to come under this number is not the same rows",
        code="BATCH_GAP.OTHER_ROWS",
        detail=f"{uri}, batch {batch_id}; committed: {_told(then)}; to come: {_told(now)}",
        hint=f"{hint}. Its sink may have been called already with the old ones",
    )


def other_stream(batch_id: int, uri: str, then: str | None, now: str | None) -> BatchGapError:
    """The error for a batch with the right number that another stream planned, at another checkpointLocation.

    >>> other_stream(3, "/data/state", "file:/a", "file:/b").code
    'BATCH_GAP.OTHER_ROWS'
    """
    return BatchGapError(
        f"batch {batch_id} is that of another stream than what is committed",
        code="BATCH_GAP.OTHER_ROWS",
        detail=f"{uri}; checkpointLocation of what is committed: {then}; of this batch: {now}",
        hint="the query has the name= of another one, and its own id and checkpointLocation: bring its "
        "checkpointLocation back; or give it a name and a checkpoint of its own (restore_from= and first_batch= let it "
        "begin with the state of this one); or begin with no state: sb.tools.rewind(store, to=None)",
    )


def _told(identity: Identity | None) -> str:
    if identity is None:
        return "not known"
    if identity.get("kind") == "plan":
        return f"planned at {identity['time']}"
    return f"{identity.get('rows')} rows, digest {identity.get('digest')}"
