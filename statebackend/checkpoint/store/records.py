"""Records of changes to a store other than commits: a restart, a rewind, a new time. Each is a small sealed file.

A record is written before the manifests that it makes void are dropped, and is never removed. So a store always
knows its *incarnation*, which is new after every restart and rewind. Batches of an old incarnation may come again
under the same numbers, but they are other batches.

>>> records = Records("0" * 32, [Record("rewind", 3, 0, "0" * 32, incarnation="1" * 32, keeps=6)])
>>> records.incarnation == "1" * 32
True
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass

from statebackend.checkpoint.files.layout import record_name
from statebackend.checkpoint.store.json_checks import (
    FORMAT,
    Checked,
    Malformed,
    integer,
    made,
    match,
    members_of,
    parse,
    time_of,
)
from statebackend.checkpoint.store.metadata import STORE_ID
from statebackend.checkpoint.store.sealed import JsonObject

__all__ = ["RECORD_KINDS", "Record", "Records"]

RECORD_KINDS = ("restart", "rewind", "time")


@dataclass(frozen=True)
class Record(Checked):
    """One change to a store, made by the writer of ``epoch``.

    A ``restart`` dropped every checkpoint so that the stream could begin at batch ``begins_at``; it happens once for
    each value of ``first_batch``. A ``rewind`` dropped the checkpoints after ``keeps``, or all. A ``time`` gave the
    checkpoint ``upon``, by id and epoch, the time ``now``.

    >>> Record("time", 3, 0, "0" * 32, now=1000, upon=(7, 2)).name
    'checkpoints/record-3-0.json'
    """

    kind: str
    epoch: int
    number: int
    store: str
    incarnation: str | None = None
    keeps: int | None = None
    begins_at: int | None = None
    first_batch: int | None = None
    now: int | None = None
    upon: tuple[int, int] | None = None

    def _check(self) -> None:
        if self.kind not in RECORD_KINDS:
            raise Malformed(f"the kind of a record is not one of {', '.join(RECORD_KINDS)}")
        integer(self.epoch, "the epoch", 1)
        integer(self.number, "the number of the record")
        match(self.store, STORE_ID, "the id of the store is not 32 hexadecimal digits")
        if self.incarnation is not None:
            match(self.incarnation, STORE_ID, "the incarnation is not 32 hexadecimal digits")
        for what in ("keeps", "begins_at", "first_batch"):
            if self._given(what) is not None:
                integer(self._given(what), what)
        time_of(self.now)
        if self.upon is not None:
            upon = self._given("upon")
            if not isinstance(upon, (list, tuple)) or len(upon) != 2:
                raise Malformed("what a time is set upon is not an id and an epoch")
            self._set("upon", tuple(integer(each, "what a time is set upon") for each in upon))
        is_time = self.kind == "time"
        if (self.incarnation is None, self.now is None, self.upon is None) != (
            is_time,
            not is_time,
            not is_time,
        ):
            raise Malformed("a record has either an incarnation or a time")

    @property
    def name(self) -> str:
        """The name of its file in the store.

        >>> Record("restart", 3, 1, "0" * 32, incarnation="1" * 32).name
        'checkpoints/record-3-1.json'
        """
        return record_name(self.epoch, self.number)

    def to_json(self) -> JsonObject:
        """The content of its file.

        >>> Record("time", 3, 0, "0" * 32, now=1000, upon=(7, 2)).to_json()["format"]
        1
        """
        return {"format": FORMAT, **dataclasses.asdict(self)}

    @classmethod
    def parse(cls, data: bytes, name: str) -> Record:
        """Parse the bytes of the record called ``name``; `CorruptCheckpointError` if they are not one.

        >>> from statebackend.checkpoint.store.sealed import seal
        >>> record = Record("time", 3, 0, "0" * 32, now=1000, upon=(7, 2))
        >>> Record.parse(seal(record.to_json()), record.name) == record
        True
        """
        return parse(cls, data, name)

    @classmethod
    def _read(cls, data: object) -> Record:
        names = {field.name for field in dataclasses.fields(cls)}
        members = members_of(data, "the record", {*names, "format"})
        return made(cls, **{name: members[name] for name in names})


class Records:
    """All records of a store, oldest first, and the facts that follow from them.

    >>> Records("0" * 32).incarnation == "0" * 32
    True
    """

    def __init__(self, store: str, records: Iterable[Record] = ()) -> None:
        self._store = store
        self._records = list(records)

    def add(self, record: Record) -> None:
        """Add a record that has just been written."""
        self._records.append(record)

    def next_number(self, epoch: int) -> int:
        """The number of the next record of an epoch.

        >>> Records("0" * 32).next_number(3)
        0
        """
        return sum(record.epoch == epoch for record in self._records)

    @property
    def incarnation(self) -> str:
        """The incarnation of checkpoints that are committed from now on; at first, the id of the store."""
        made = [record.incarnation for record in self._records if record.incarnation is not None]
        return made[-1] if made else self._store

    @property
    def newest_restart(self) -> Record | None:
        """The restart that began the present incarnation; None if none did."""
        made = [record for record in self._records if record.incarnation is not None]
        return made[-1] if made and made[-1].kind == "restart" else None

    @property
    def begins_at(self) -> int | None:
        """The batch that the newest restart began with, even if a rewind came since; None if there was none."""
        batches = [record.begins_at for record in self._records if record.kind == "restart"]
        return batches[-1] if batches else None

    def has_restarted_for(self, first_batch: int | None) -> bool:
        """Return True if a restart was made for this value of ``first_batch``.

        >>> Records("0" * 32).has_restarted_for(None)
        False
        """
        return any(each.kind == "restart" and each.first_batch == first_batch for each in self._records)

    def time_of(self, key: tuple[int, int]) -> int | None:
        """The time that was set for the checkpoint of this id and epoch; None if none was.

        >>> Records("0" * 32, [Record("time", 3, 0, "0" * 32, now=1000, upon=(7, 2))]).time_of((7, 2))
        1000
        """
        times = [record.now for record in self._records if record.upon == key]
        return times[-1] if times else None
