"""Records of changes to a store other than commits: a restart, a rewind, another time, a dropped state.

An entry of the log has a record of what it did.

>>> Record("rewind", 3, "checkpoints/12.json", incarnation="1" * 32, keeps=6).keeps
6
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from statebackend.checkpoint.files.layout import entry_name
from statebackend.checkpoint.store.json_checks import (
    Checked,
    Malformed,
    instance,
    integer,
    made,
    match,
    members_of,
    time_of,
)
from statebackend.checkpoint.store.log_state import Key
from statebackend.checkpoint.store.metadata import STORE_ID
from statebackend.checkpoint.store.sealed import JsonObject

__all__ = ["RECORD_KINDS", "Record"]

RECORD_KINDS = ("restart", "rewind", "time", "drop")


@dataclass(frozen=True)
class Record(Checked):
    """One change to a store, made by the writer of ``epoch``; ``name`` is that of the file that has it.

    A ``restart`` dropped every checkpoint so that the stream could begin at batch ``begins_at``; it happens once for
    each value of ``first_batch``. A ``rewind`` dropped the checkpoints after ``keeps``, or all, with what was dropped
    from the source. A ``time`` gave the checkpoint ``upon`` the times ``now`` and ``watermark``; None left one as it
    was. A ``drop`` dropped ``dropped_state`` from the checkpoint ``upon`` or, for None, from the source of the first
    batch.

    >>> Record("time", 3, "checkpoints/12.json", now=1000, upon=Key(7, "checkpoints/9.json")).to_json()["now"]
    1000
    """

    kind: str
    epoch: int
    name: str
    incarnation: str | None = None
    keeps: int | None = None
    begins_at: int | None = None
    first_batch: int | None = None
    now: int | None = None
    watermark: int | None = None
    upon: Key | None = None
    dropped_state: str | None = None

    def _check(self) -> None:
        if self.kind not in RECORD_KINDS:
            raise Malformed(f"the kind of a record is not one of {', '.join(RECORD_KINDS)}")
        integer(self.epoch, "the epoch", 1)
        if self.incarnation is not None:
            match(self.incarnation, STORE_ID, "the incarnation is not 32 hexadecimal digits")
        for what in ("keeps", "begins_at", "first_batch"):
            if self._given(what) is not None:
                integer(self._given(what), what)
        if self.upon is not None:
            integer(self.upon.checkpoint_id, "the checkpoint that a record changes")
            instance(self.upon.name, str, "the name of the checkpoint that a record changes")
        if self.dropped_state is not None:
            instance(self.dropped_state, str, "the name of a dropped state")
        time_of(self.now)
        time_of(self.watermark)
        found = {
            "incarnation": self.incarnation is not None,
            "time": (self.now, self.watermark) != (None, None),
            "state": self.dropped_state is not None,
        }
        wanted = {"time": "time", "drop": "state"}.get(self.kind, "incarnation")
        has_upon = self.upon is not None
        if [name for name in found if found[name]] != [wanted] or (
            self.kind != "drop" and has_upon != (self.kind == "time")
        ):
            raise Malformed("a record has members of another kind")

    def to_json(self) -> JsonObject:
        """Its members of the entry that has it.

        >>> sorted(Record("rewind", 3, "checkpoints/12.json", incarnation="1" * 32).to_json())
        ['begins_at', 'dropped_state', 'first_batch', 'incarnation', 'keeps', 'now', 'upon', 'watermark']
        """
        return {name: getattr(self, name) for name in _OWN}

    @classmethod
    def of_entry(cls, members: JsonObject) -> Record:
        """Read the record from the members of an entry."""
        own = members_of(members["record"], "the record", {*_OWN} - {"dropped_state"}, {"dropped_state"})
        if own["upon"] is not None:
            own["upon"] = Key(*_pair(own["upon"]))
        name = entry_name(integer(members["sequence"], "the sequence", 1))
        return made(cls, kind=members["kind"], epoch=members["epoch"], name=name, **own)


def _pair(value: object) -> list[Any]:
    pair = instance(value, list, "the checkpoint that a record changes")
    if len(pair) != 2:
        raise Malformed("the checkpoint that a record changes is not a pair")
    return pair


_OWN = ("incarnation", "keeps", "begins_at", "first_batch", "now", "watermark", "upon", "dropped_state")
