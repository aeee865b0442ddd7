"""The origin of a committed batch. A number is no identity, so the manifest also records which rows the batch had.

The manifest stores it as its ``batch``.

>>> planned = plan_identity(1_700_000_000_000, [{"logOffset": 3}])
>>> Origin(planned, ("user",), "1" * 32).to_json()["identity"]
{'kind': 'plan', 'time': 1700000000000, 'offsets': [{'logOffset': 3}]}
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import pyarrow as pa

from statebackend.checkpoint import Manifest
from statebackend.errors import CorruptCheckpointError
from statebackend.runtime.digest import merged_digest, rows_digest
from statebackend.runtime.pieces import RowsInPieces
from statebackend.runtime.progress import Json

__all__ = ["Identity", "Incoming", "Origin", "plan_identity", "rows_identity"]

#: What tells the rows of a batch from others, as `plan_identity` or `rows_identity` gives it.
Identity: TypeAlias = dict[str, Json]

_TEXTS = ("incarnation", "stream", "location", "time")
#: The members of an identity of each kind.
_MEMBERS = {"plan": {"kind", "time", "offsets"}, "rows": {"kind", "rows", "digest"}}


class Incoming(NamedTuple):
    """A batch to come: how to get its rows, and what is known of it before that.

    >>> Incoming(lambda: pa.table({"user": ["a"]})).read().num_rows
    1
    """

    #: All at once, or a piece at a time.
    read: Callable[[], pa.Table | RowsInPieces]
    #: The engine's plan for it, as `plan_identity` gives it; None if the plan cannot be read.
    planned: Identity | None = None
    #: Makes the engine compute the batch and throw the rows away, so that state in the engine's own plan moves on;
    #: `read` does so too.
    execute: Callable[[], None] | None = None
    #: Where an execution that does not bring the rows here takes them from: what the engine calls a batch.
    source: Any = None
    #: Finds the identity of the batch by its rows without bringing them here; None: by those that `read` gives.
    identify: Callable[[], Identity] | None = None

    def identity_by_rows(self) -> Identity:
        """The identity of the batch by its rows; the engine computes it for that. O(bytes).

        >>> Incoming(lambda: pa.table({"user": ["a"]})).identity_by_rows()["rows"]
        1
        """
        return rows_identity(self.read()) if self.identify is None else self.identify()


class Origin(NamedTuple):
    """The rows of a batch, the columns that keyed them, and the incarnation of the store.

    >>> Origin(key=("user",)).key
    ('user',)
    """

    identity: Identity | None = None
    key: tuple[str, ...] | None = None
    incarnation: str | None = None
    #: The engine's own id of the stream that planned it, which ``name=`` does not change.
    stream: str | None = None
    #: The folder in which the engine keeps its place in the stream: Spark's checkpointLocation.
    location: str | None = None
    #: What told the time: ``"clock"``, or ``"rows"`` as well.
    time: str | None = None
    #: What the batch becomes in the sink of each output, by the name of the output, for somebody who looks for it.
    targets: dict[str, str] | None = None
    #: When rows with a time last came, by the clock, in milliseconds; None if the job does not ask.
    rows_at: int | None = None

    def to_json(self) -> dict[str, object]:
        """The JSON form.

        >>> sorted(Origin().to_json())
        ['identity', 'incarnation', 'key', 'location', 'rows_at', 'stream', 'targets', 'time']
        """
        return self._asdict()

    @classmethod
    def of(cls, manifest: Manifest) -> Origin:
        """Read the origin from a manifest; a commit that is not a query's has none.

        >>> Origin.of(Manifest(7, 3, "0" * 32, batch={"key": ["user"]}, sequence=12)).key
        ('user',)
        """
        found = manifest.batch
        if not _is_understood(found):
            raise CorruptCheckpointError(
                "what a manifest says of its batch is of a version that this one does not know",
                code="CORRUPT_CHECKPOINT.VERSION",
                detail="batch",
                hint="use the version of the library that wrote it",
            )
        known = {name: found[name] for name in cls._fields if found.get(name) is not None}
        if "key" in known:
            known["key"] = tuple(known["key"])
        return cls(**{"incarnation": manifest.incarnation, **known})


def _is_understood(found: object) -> bool:
    if not isinstance(found, dict):
        return False
    key, identity, targets = found.get("key"), found.get("identity"), found.get("targets")
    return (
        all(isinstance(found.get(name), (str, type(None))) for name in _TEXTS)
        and (targets is None or isinstance(targets, dict))
        and type(found.get("rows_at")) in (int, type(None))
        and (key is None or (isinstance(key, (list, tuple)) and all(isinstance(each, str) for each in key)))
        and (
            identity is None
            or (isinstance(identity, dict) and _MEMBERS.get(str(identity.get("kind"))) == identity.keys())
        )
    )


def plan_identity(time: int, offsets: list[Json]) -> Identity:
    """The identity of a batch by its engine's plan: the end of each source, and the time of that decision.

    The time distinguishes plans with equal offsets: Spark's file source only numbers the entries of its own log.

    >>> plan_identity(1000, [])["kind"]
    'plan'
    """
    return {"kind": "plan", "time": time, "offsets": offsets}


def rows_identity(rows: pa.Table | RowsInPieces) -> Identity:
    """The identity of a batch by its rows, in any order and in any pieces; O(bytes).

    >>> rows_identity(pa.table({"a": [1, 2]})) == rows_identity(pa.table({"a": [2, 1]}))
    True
    """
    count, digests = 0, []
    for piece in [rows] if isinstance(rows, pa.Table) else rows.pieces():
        count += piece.num_rows
        digests.append(rows_digest(piece))
    return {"kind": "rows", "rows": count, "digest": merged_digest(digests)}
