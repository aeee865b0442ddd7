"""The work of a snapshot's writing thread: one data file, and the description of what was taken.

>>> from statebackend.state import ValueStateDescriptor
>>> taken = TakenStates((ValueStateDescriptor("b", int), ValueStateDescriptor("a", str)), ())
>>> [each.name for each in taken.descriptions()]
['a', 'b']
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from operator import is_
from typing import NamedTuple, Protocol

from statebackend.checkpoint.format import Section, write_data_file
from statebackend.checkpoint.keyed.chain import Flight
from statebackend.checkpoint.keyed.description import StateDescription
from statebackend.checkpoint.keyed.restored_states import PART, RestoredState
from statebackend.checkpoint.keyed.rows import RowSource
from statebackend.checkpoint.store.data_files import DataWriter
from statebackend.checkpoint.store.manifest import CheckedStates, StateSnapshot, StoredFile, checked_states
from statebackend.keys import KeyGroupRange
from statebackend.state import StateDescriptor
from statebackend.types import Type

__all__ = ["Releasable", "SnapshotWriting", "Taken", "TakenRows", "TakenStates"]


class Releasable(Protocol):
    """Something that keeps a moment of a backend alive."""

    def release(self) -> None:
        """Let go. Idempotent."""


class TakenStates:
    """The states that there were when a snapshot was taken. A state that is declared anew gets another descriptor.

    Snapshots share it until something is declared; what is known of it is computed once, on first use.
    """

    def __init__(self, declared: tuple[StateDescriptor, ...], undeclared: tuple[RestoredState, ...]) -> None:
        self.declared = declared
        #: What was restored and nobody has asked for.
        self.undeclared = undeclared

    def are(self, declared: tuple[StateDescriptor, ...], undeclared: tuple[RestoredState, ...]) -> bool:
        """Return True if these are the same objects."""
        return all(
            len(mine) == len(others) and all(map(is_, mine, others))
            for mine, others in ((self.declared, declared), (self.undeclared, undeclared))
        )

    def descriptions(self) -> list[StateDescription]:
        """All of them as a checkpoint describes them, by name."""
        return self._descriptions

    @cached_property
    def _descriptions(self) -> list[StateDescription]:
        described = [StateDescription.of(descriptor) for descriptor in self.declared]
        described += [restored.description for restored in self.undeclared]
        return sorted(described, key=lambda each: each.name)

    @cached_property
    def checked(self) -> CheckedStates:
        """The descriptions in the form of a `StateSnapshot`."""
        return checked_states(each.to_json() for each in self._descriptions)


class Taken(Protocol):
    """A moment on its way into files."""

    @property
    def source(self) -> Releasable:
        """What keeps the moment alive."""

    @property
    def key_groups(self) -> KeyGroupRange:
        """Of the snapshot."""

    def write(self, writer: DataWriter) -> tuple[StoredFile, ...]:
        """The files. The source is released, whatever happens."""


class TakenRows(NamedTuple):
    """The rows of one moment on their way into a file."""

    kind: str
    source: RowSource
    #: States that nobody has asked for, which a base holds too.
    undeclared: tuple[RestoredState, ...]
    key_groups: KeyGroupRange
    #: Told when the file is there: what has expired is counted where it was left out.
    wrote: Callable[[RowSource], None]

    def write(self, writer: DataWriter) -> tuple[StoredFile, ...]:
        """One data file with all rows, none if there are no rows. The source is released, whatever happens."""
        try:
            made = self._file(writer)
            self.wrote(self.source)
            return made
        finally:
            self.source.release()

    def sections(self) -> list[Section]:
        """All states that have rows, or might have."""
        return [*self.source.sections(), *(each.section() for each in self.undeclared if each.rows)]

    def _filled(self) -> list[Section]:
        """The sections of a file: a state that is known to have no rows costs nothing there."""
        return [each for each in self.sections() if each.batches != ()]

    def _file(self, writer: DataWriter) -> tuple[StoredFile, ...]:
        if self.source.is_empty and not any(each.rows for each in self.undeclared):
            return ()
        with writer.create(self.kind, key_groups=self.key_groups) as file:
            write_data_file(file, self._filled(), name=file.name, compression=writer.compression)
            return (file.finish(),)


class SnapshotWriting(NamedTuple):
    """A snapshot from the moment when it was taken."""

    checkpoint_id: int
    flight: Flight
    rows: Taken
    states: TakenStates
    key_type: Type
    max_parallelism: int

    def write(self) -> StateSnapshot:
        """Write its file and say what it is. If that fails, the snapshot is given up."""
        flight = self.flight
        try:
            made = self.rows.write(flight.target)
            files = made if flight.chain is None else (*flight.chain.files, *made)
            snapshot = self._described(files)
        except BaseException:
            flight.target.abort()
            raise
        flight.files = files
        return snapshot

    def _described(self, files: tuple[StoredFile, ...]) -> StateSnapshot:
        return StateSnapshot(
            self.checkpoint_id,
            self.flight.target.epoch,
            files=files,
            key_groups=self.rows.key_groups,
            states=self.states.checked,
            now=self.flight.now,
            extra={
                "part": PART,
                "key_type": self.key_type.config(),
                "max_parallelism": self.max_parallelism,
            },
        )
