"""Removing what the log of a store no longer keeps: entries of dropped checkpoints, and files that nobody names.

Dropping has happened by then, with the entry that keeps less. So removing may be cut off anywhere, and repeated by the
next commit or the next opening; a writer that was overtaken can do no harm by it.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Collection, Iterable

from statebackend.checkpoint.files import StoreFiles
from statebackend.checkpoint.files.interface import Fenced
from statebackend.checkpoint.files.layout import entry_name, parse_entry_name
from statebackend.checkpoint.store.at_once import at_once
from statebackend.checkpoint.store.data_files import storing
from statebackend.checkpoint.store.log import read_entry
from statebackend.checkpoint.store.log_state import Key, LogState
from statebackend.checkpoint.store.log_writer import LogWriter
from statebackend.checkpoint.store.pins import held_by_pins
from statebackend.checkpoint.store.retention import Retention
from statebackend.errors import CorruptCheckpointError

__all__ = ["Removal"]

_log = logging.getLogger(__name__)


class Removal:
    """Removes for the writer of a store; ``built_on`` tells what snapshots in flight may build on.

    >>> from statebackend.checkpoint.files import open_files
    >>> files = open_files("/nowhere")
    >>> removal = Removal(files, LogWriter(files), Retention(), list)
    >>> removal.note([])
    """

    def __init__(
        self,
        files: StoreFiles,
        writer: LogWriter,
        retention: Retention,
        built_on: Callable[[], Iterable[Collection[str]]],
    ) -> None:
        self._files = files
        self._writer = writer
        self._retention = retention
        self._built_on = built_on
        #: Checkpoints that the log no longer keeps, and whose manifests are still there.
        self._dropped: list[Key] = []
        #: Those whose manifests were removed since the newest entry: until another one is durable, a crash may bring
        #: them back.
        self._removed: list[Key] = []

    def clear_away(self) -> None:
        """Remove what earlier writers have left behind: dropped checkpoints, and files that no checkpoint names."""
        self._dropped = self._dropped_before()
        named = self._retention.named()
        with storing("removing files that no checkpoint names"):
            try:
                self.remove()
            except Fenced:
                raise self._writer.fenced() from None
            if named is None:
                return
            is_held = held_by_pins(self._files, time.time())
            removed = self._files.remove_leftovers(
                lambda name: name in named or is_held(name), self._writer.epoch
            )
        if removed:
            _log.info("removed %d files that no checkpoint names from %s", removed, self._files.uri)

    def _dropped_before(self) -> list[Key]:
        """The checkpoints that the log does not keep, and whose manifests are there: their removal was cut off."""
        state = self._writer.state
        kept = {key.name for key in state.kept}
        dropped = []
        for base_name in self._writer.names:
            sequence = parse_entry_name(base_name)
            if sequence is not None and sequence > state.swept and entry_name(sequence) not in kept:
                key = self._committed_by(entry_name(sequence))
                if key is not None:
                    dropped.append(key)
        return dropped

    def _committed_by(self, name: str) -> Key | None:
        try:
            return read_entry(self._files, name).key
        except (FileNotFoundError, CorruptCheckpointError):
            return None

    def swept(self, state: LogState, dropped: Iterable[Key]) -> LogState:
        """The state of the next entry, which says up to where no manifest of a dropped checkpoint is left."""
        left = [key.sequence for key in (*self._removed, *self._dropped, *dropped)]
        swept = min(left, default=self._writer.next_sequence + 1) - 1
        return dataclasses.replace(state, swept=swept)

    def note(self, dropped: Iterable[Key]) -> None:
        """Note the checkpoints and outputs that the newest entry, which is durable, keeps no longer."""
        self._removed = []
        for key in dropped:
            self._retention.dropped(key)
            self._dropped.append(key)
        self.note_outputs()

    def note_outputs(self) -> None:
        """Note the outputs that the newest entry keeps no longer."""
        for key in self._retention.keys_with_outputs():
            if not self._writer.state.has_outputs(key):
                self._retention.outputs_dropped(key)

    def remove(self) -> None:
        """Remove what the log no longer keeps. Cut off anywhere, it can be repeated, by the next opening, too."""
        epoch = self._writer.epoch
        while self._dropped:
            self._files.retire([self._dropped[0].name], epoch)
            self._removed.append(self._dropped.pop(0))
        waiting = sorted(self._retention.removable(self._built_on()))
        if not waiting:
            return
        is_held = held_by_pins(self._files, time.time())
        removed: list[str] = []

        def retire(name: str) -> None:
            self._files.retire([name], epoch)
            removed.append(name)

        try:
            # Those that are held are tried again after the next commit.
            at_once(retire, [name for name in waiting if not is_held(name)])
        finally:
            for name in removed:
                self._retention.removed(name)
