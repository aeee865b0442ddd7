"""The state of a store as each entry of its log has it: what is kept, what was done beside commits, what is set.

An entry has it whole, so the newest entry alone says everything, however long the log is. What an entry no longer keeps
has been dropped by its coming into being; removing the files follows, and may be cut off and repeated.

>>> state = LogState("0" * 32).committed(Key(6, entry_name(2)), []).committed(Key(7, entry_name(3)), [])
>>> state = state.committed(Key(8, entry_name(4)), [state.kept[0]])
>>> [key.checkpoint_id for key in state.kept]
[7, 8]
>>> LogState.from_json(state.to_json()) == state
True
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

from statebackend.checkpoint.files.layout import entry_name, parse_entry_name, split
from statebackend.checkpoint.store.metadata import STORE_ID
from statebackend.checkpoint.store.sealed import (
    Checked,
    JsonObject,
    Malformed,
    instance,
    integer,
    made,
    match,
    members_of,
    time_of,
)

#: The outputs of so many of the newest checkpoints are kept. A replay needs that of the newest; the one before stays
#: for readers that are slow.
_OUTPUTS = 2
#: A member that entries had at first; it is empty in every store that was never of format 1.
_OLD = "kept_of_format_1"


class Key(NamedTuple):
    """A checkpoint by its id and by the name of the file that commits it."""

    checkpoint_id: int
    name: str

    @property
    def sequence(self) -> int:
        """The sequence of its entry."""
        return parse_entry_name(split(self.name)[1]) or 0


class Run(NamedTuple):
    """Checkpoints with ids and sequences in a row."""

    first_id: int
    first_sequence: int
    length: int

    def checkpoints(self) -> list[Key]:
        """Its checkpoints, by ascending ids."""
        return [
            Key(self.first_id + step, entry_name(self.first_sequence + step)) for step in range(self.length)
        ]

    @property
    def newest(self) -> Key:
        """The last of its checkpoints."""
        last = self.length - 1
        return Key(self.first_id + last, entry_name(self.first_sequence + last))

    def has(self, key: Key) -> bool:
        """Return True if a checkpoint is one of them."""
        step = key.checkpoint_id - self.first_id
        return 0 <= step < self.length and key.name == entry_name(self.first_sequence + step)

    def is_followed_by(self, key: Key) -> bool:
        """Return True if the run with this checkpoint at its end is one, too."""
        after = (self.first_id + self.length, self.first_sequence + self.length)
        return after == (key.checkpoint_id, key.sequence)

    def without(self, dropped: Collection[Key]) -> list[Run]:
        """The runs that are left without some checkpoints, at either end or in the middle; O(dropped).

        >>> Run(7, 12, 4).without([Key(7, "checkpoints/12.json"), Key(9, "checkpoints/14.json")])
        [Run(first_id=8, first_sequence=13, length=1), Run(first_id=10, first_sequence=15, length=1)]
        """
        steps = sorted(key.checkpoint_id - self.first_id for key in dropped if self.has(key))
        left = []
        for before, step in itertools.pairwise([-1, *steps, self.length]):
            if step - before > 1:
                left.append(
                    Run(self.first_id + before + 1, self.first_sequence + before + 1, step - before - 1)
                )
        return left


class Times(NamedTuple):
    """Times that were set for a checkpoint after it was committed; None: as it was committed."""

    now: int | None = None
    watermark: int | None = None


class Restart(NamedTuple):
    """A restart from empty: the incarnation that it began, its first batch, and the ``first_batch`` it was made for."""

    incarnation: str
    begins_at: int
    first_batch: int | None = None


@dataclass(frozen=True)
class LogState(Checked):
    """What is kept, and what follows from all that was done to the store."""

    #: The incarnation of checkpoints that are committed from now on; at first, the id of the store.
    incarnation: str
    #: The checkpoints that are there, by ascending ids, as runs.
    runs: tuple[Run, ...] = ()
    #: All restarts, oldest first.
    restarts: tuple[Restart, ...] = ()
    #: The times that were set for kept checkpoints, by id.
    times: tuple[tuple[int, Times], ...] = ()
    #: The states that were dropped from kept checkpoints, by id; None: from the source of the first batch.
    dropped_states: tuple[tuple[int | None, str], ...] = ()
    #: The outputs of checkpoints that were committed before this sequence are dropped.
    outputs_from: int = 0
    #: No dropped checkpoint has left a manifest at or before this sequence.
    swept: int = 0

    def _check(self) -> None:
        match(self.incarnation, STORE_ID, "the incarnation is not 32 hexadecimal digits")
        ends = [(run.first_id, run.first_id + run.length - 1) for run in self.runs]
        if any(older[1] >= newer[0] for older, newer in itertools.pairwise(ends)):
            raise Malformed("the checkpoints that are kept are not in order")
        integer(self.outputs_from, "outputs_from")
        integer(self.swept, "swept")

    # --- what follows from it ---

    @property
    def kept(self) -> tuple[Key, ...]:
        """The checkpoints that are there, by ascending ids; O(checkpoints)."""
        return tuple(key for run in self.runs for key in run.checkpoints())

    @property
    def newest(self) -> Key | None:
        """The newest checkpoint; None if there is none."""
        return self.runs[-1].newest if self.runs else None

    def keeps(self, key: Key) -> bool:
        """Return True if a checkpoint is there."""
        return any(run.has(key) for run in self.runs)

    @property
    def newest_restart(self) -> Restart | None:
        """The restart that began the present incarnation; None if none did."""
        restart = self.restarts[-1] if self.restarts else None
        return restart if restart is not None and restart.incarnation == self.incarnation else None

    @property
    def begins_at(self) -> int | None:
        """The batch that the newest restart began with, even if a rewind came since; None if there was none."""
        return self.restarts[-1].begins_at if self.restarts else None

    def has_restarted_for(self, first_batch: int | None) -> bool:
        """Return True if a restart was made for this value of ``first_batch``."""
        return any(restart.first_batch == first_batch for restart in self.restarts)

    def times_of(self, checkpoint_id: int) -> Times:
        """The times that were set for a checkpoint."""
        return dict(self.times).get(checkpoint_id, Times())

    def dropped_states_of(self, checkpoint_id: int | None) -> frozenset[str]:
        """The states that were dropped from a checkpoint or, for None, from the source of the first batch."""
        return frozenset(name for each, name in self.dropped_states if each == checkpoint_id)

    def has_outputs(self, key: Key) -> bool:
        """Return True if the outputs of a checkpoint are still there."""
        return key.sequence >= self.outputs_from

    # --- what becomes of it ---

    def committed(self, key: Key, dropped: Collection[Key]) -> LogState:
        """The state after a commit that drops some checkpoints, the oldest ones; O(runs + dropped)."""
        before = self.without(dropped)
        last = before.runs[-1] if before.runs else None
        if last is not None and last.is_followed_by(key):
            runs = (*before.runs[:-1], last._replace(length=last.length + 1))
        else:
            runs = (*before.runs, Run(key.checkpoint_id, key.sequence, 1))
        second = before.newest
        oldest = 0 if second is None else second.sequence
        return dataclasses.replace(before, runs=runs, outputs_from=max(self.outputs_from, oldest))

    def without(self, dropped: Collection[Key]) -> LogState:
        """The state without some checkpoints."""
        runs = [run for each in self.runs for run in each.without(dropped)]
        ids = {key.checkpoint_id for key in dropped}
        times = tuple(each for each in self.times if each[0] not in ids)
        states = tuple(each for each in self.dropped_states if each[0] not in ids)
        return dataclasses.replace(self, runs=tuple(runs), times=times, dropped_states=states)

    def rewound(self, incarnation: str, dropped: Collection[Key]) -> LogState:
        """The state after going back to before some checkpoints; before all of them, no state is dropped any more."""
        left = dataclasses.replace(self.without(dropped), incarnation=incarnation)
        return left if left.runs else dataclasses.replace(left, dropped_states=())

    def restarted(self, restart: Restart) -> LogState:
        """The state after a restart from empty."""
        left = dataclasses.replace(self, runs=(), times=(), dropped_states=())
        return dataclasses.replace(left, incarnation=restart.incarnation, restarts=(*self.restarts, restart))

    def with_times(self, checkpoint_id: int, times: Times) -> LogState:
        """The state after times were set for a checkpoint."""
        others = [each for each in self.times if each[0] != checkpoint_id]
        return dataclasses.replace(self, times=(*others, (checkpoint_id, times)))

    def with_dropped_state(self, checkpoint_id: int | None, name: str) -> LogState:
        """The state after a state was dropped from a checkpoint or, for None, from the source of the first batch."""
        names = dict.fromkeys((*self.dropped_states, (checkpoint_id, name)))
        return dataclasses.replace(self, dropped_states=tuple(names))

    # --- its JSON form ---

    def to_json(self) -> JsonObject:
        """The JSON form. Checkpoints with ids and sequences in a row are one member of ``kept``.

        >>> state = LogState("0" * 32)
        >>> for number in (5, 6, 7, 9):
        ...     state = state.committed(Key(number, entry_name(number + 2)), [])
        >>> state.to_json()["kept"]
        [[5, 7, 3], [9, 11, 1]]
        """
        return {
            "incarnation": self.incarnation,
            "kept": [list(run) for run in self.runs],
            "restarts": [list(restart) for restart in self.restarts],
            "times": [[checkpoint_id, *times] for checkpoint_id, times in self.times],
            "dropped_states": [list(each) for each in self.dropped_states],
            "outputs_from": self.outputs_from,
            "swept": self.swept,
            "unknown": [],
        }

    @classmethod
    def from_json(cls, data: object) -> LogState:
        """Read the JSON form, which is part of an entry."""
        # Versions before 0.1.0 put damaged entries into "unknown".
        names = {"incarnation", "kept", "restarts", "times", "outputs_from", "swept", "unknown"}
        members = members_of(data, "the state of the log", names, {_OLD, "dropped_states"})
        if members.get(_OLD):
            raise Malformed("checkpoints of format 1 are kept")
        runs = [Run(*each) for each in _rows(members, "kept", 3)]
        if any(run.length < 1 for run in runs):
            raise Malformed("a run of checkpoints is empty")
        restarts = [_restart(*each) for each in _lists(members, "restarts", 3)]
        times = [
            (integer(each[0], "a checkpoint"), Times(time_of(each[1]), time_of(each[2])))
            for each in _lists(members, "times", 3)
        ]
        states = [
            (None if each[0] is None else integer(each[0], "a checkpoint"), instance(each[1], str, "a state"))
            for each in _lists({"dropped_states": [], **members}, "dropped_states", 2)
        ]
        return made(
            cls,
            incarnation=members["incarnation"],
            runs=tuple(runs),
            restarts=tuple(restarts),
            times=tuple(times),
            dropped_states=tuple(states),
            outputs_from=members["outputs_from"],
            swept=members["swept"],
        )


def _restart(incarnation: object, begins_at: object, first_batch: object) -> Restart:
    found = match(incarnation, STORE_ID, "an incarnation is not 32 hexadecimal digits")
    first = None if first_batch is None else integer(first_batch, "a first batch")
    return Restart(found[0], integer(begins_at, "the batch of a restart"), first)


def _lists(members: JsonObject, name: str, length: int) -> list[list[object]]:
    lists = [instance(each, list, f"a member of {name}") for each in instance(members[name], list, name)]
    if any(len(each) != length for each in lists):
        raise Malformed(f"a member of {name} has not {length} parts")
    return lists


def _rows(members: JsonObject, name: str, length: int) -> list[list[int]]:
    return [[integer(part, f"a part of {name}") for part in each] for each in _lists(members, name, length)]
