"""The origin of a committed batch. A number is no identity, so the manifest also records which rows the batch had.

The manifest stores it as its ``batch``. Format 1 stored it in ``progress``, under ``"origin"``.

>>> planned = plan_identity(1_700_000_000_000, [{"logOffset": 3}])
>>> Origin(planned, ("user",), "1" * 32).to_json()["identity"]
{'kind': 'plan', 'time': 1700000000000, 'offsets': [{'logOffset': 3}]}
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import pyarrow as pa

from statebackend.checkpoint import Manifest
from statebackend.errors import CorruptCheckpointError
from statebackend.runtime.digest import rows_digest
from statebackend.runtime.progress import Figures, Json

__all__ = ["Identity", "Incoming", "Origin", "figures_of", "plan_identity", "rows_identity"]

#: What tells the rows of a batch from others, as `plan_identity` or `rows_identity` gives it.
Identity: TypeAlias = dict[str, Json]

_MEMBER = "origin"
#: The members of an identity of each kind.
_MEMBERS = {"plan": {"kind", "time", "offsets"}, "rows": {"kind", "rows", "digest"}}


class Incoming(NamedTuple):
    """A batch to come: how to get its rows, and what is known of it before that.

    >>> Incoming(lambda: pa.table({"user": ["a"]})).read().num_rows
    1
    """

    read: Callable[[], pa.Table]
    #: The engine's plan for it, as `plan_identity` gives it; None if the plan cannot be read.
    planned: Identity | None = None
    #: Makes the engine compute the batch and throw the rows away, so that state in the engine's own plan moves on;
    #: `read` does so too.
    execute: Callable[[], None] | None = None


class Origin(NamedTuple):
    """The rows of a batch, the columns that keyed them, and the incarnation of the store.

    >>> Origin(key=("user",))
    Origin(identity=None, key=('user',), incarnation=None, stream=None, location=None)
    """

    identity: Identity | None = None
    key: tuple[str, ...] | None = None
    incarnation: str | None = None
    #: The engine's own id of the stream that planned it, which ``name=`` does not change.
    stream: str | None = None
    #: The folder in which the engine keeps its place in the stream: Spark's checkpointLocation.
    location: str | None = None

    def to_json(self) -> dict[str, object]:
        """The JSON form.

        >>> Origin().to_json()
        {'identity': None, 'key': None, 'incarnation': None, 'stream': None, 'location': None}
        """
        return self._asdict()

    @classmethod
    def of(cls, manifest: Manifest) -> Origin:
        """Read the origin from a manifest; an older version, or a commit that is not a query's, wrote none.

        >>> Origin.of(Manifest(7, 3, "0" * 32, batch={"key": ["user"]}, sequence=12)).key
        ('user',)
        """
        is_old = manifest.sequence is None
        found = manifest.progress.get(_MEMBER) if is_old else manifest.batch
        if found is None or found == {}:
            return cls(incarnation=manifest.incarnation)
        if not _is_understood(found):
            raise CorruptCheckpointError(
                "what a manifest says of its batch is of a version that this one does not know",
                code="CORRUPT_CHECKPOINT.VERSION",
                detail=f"progress.{_MEMBER}" if is_old else "batch",
                hint="use the version of the library that wrote it",
            )
        known = {name: found[name] for name in cls._fields if found.get(name) is not None}
        if "key" in known:
            known["key"] = tuple(known["key"])
        return cls(**{"incarnation": manifest.incarnation, **known})


def _is_understood(found: object) -> bool:
    if not isinstance(found, dict):
        return False
    key, identity = found.get("key"), found.get("identity")
    return (
        all(isinstance(found.get(name), (str, type(None))) for name in ("incarnation", "stream", "location"))
        and (key is None or (isinstance(key, (list, tuple)) and all(isinstance(each, str) for each in key)))
        and (
            identity is None
            or (isinstance(identity, dict) and _MEMBERS.get(str(identity.get("kind"))) == identity.keys())
        )
    )


def figures_of(manifest: Manifest) -> Figures:
    """The progress of a manifest as users see it.

    >>> figures_of(Manifest(7, 3, "0" * 32, progress={"batchId": 7, "origin": {}}))
    {'batchId': 7}
    """
    return {name: value for name, value in manifest.progress.items() if name != _MEMBER}


def plan_identity(time: int, offsets: list[Json]) -> Identity:
    """The identity of a batch by its engine's plan: the end of each source, and the time of that decision.

    The time distinguishes plans with equal offsets: Spark's file source only numbers the entries of its own log.

    >>> plan_identity(1000, [])["kind"]
    'plan'
    """
    return {"kind": "plan", "time": time, "offsets": offsets}


def rows_identity(table: pa.Table) -> Identity:
    """The identity of a batch by its rows, in any order; O(bytes).

    >>> rows_identity(pa.table({"a": [1, 2]})) == rows_identity(pa.table({"a": [2, 1]}))
    True
    """
    return {"kind": "rows", "rows": table.num_rows, "digest": rows_digest(table)}
