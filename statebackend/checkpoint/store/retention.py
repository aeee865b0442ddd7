"""Which checkpoints and which of their files a store keeps, and removing the others.

A checkpoint that is dropped takes along all files that are not shared.
Dropping has happened with the entry of the log that keeps less. So removing may be cut off anywhere, and repeated by
the next commit or the next opening; a writer that was overtaken can do no harm by it.
"""

from __future__ import annotations

import datetime
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress

from statebackend.checkpoint.files import StoreFiles
from statebackend.checkpoint.files.layout import entry_name, parse_entry_name
from statebackend.checkpoint.files.store_files import FencedError, map_in_threads, storing
from statebackend.checkpoint.store.log import CheckpointKey, read_entry
from statebackend.checkpoint.store.log_writer import LogWriter
from statebackend.checkpoint.store.manifest import Manifest
from statebackend.checkpoint.store.pins import held_by_pins
from statebackend.errors import CorruptCheckpointError

_log = logging.getLogger(__name__)

#: How many checkpoints are kept, or for how long, or ``"auto"``. The last two keep the newest two in any case.
Retain = int | datetime.timedelta | str
_FEWEST = 2
#: ``"auto"`` keeps the newest checkpoints, as many as Spark keeps batches, and one for each of the last hours.
AUTO = "auto"
_NEWEST = 100
_HOURS = 24
#: The files that ``"auto"`` keeps in addition to the newest checkpoint take this many times the state, and these bytes.
_TIMES_STATE = 3
_BYTES_MORE = 10**9


class Retention:
    """The checkpoints of a store, the files that each names, and the files that dropped ones have left behind.

    It removes for the writer of the store; ``built_on`` tells what snapshots in flight may build on.
    """

    def __init__(
        self, files: StoreFiles, writer: LogWriter, built_on: Callable[[], Iterable[Collection[str]]]
    ) -> None:
        self._files = files
        self._writer = writer
        self._built_on = built_on
        self._named: dict[CheckpointKey, frozenset[str] | None] = {}
        #: Those outputs of each that are still kept.
        self._outputs: dict[CheckpointKey, frozenset[str]] = {}
        #: When each was committed, in seconds since 1970.
        self._at: dict[CheckpointKey, float] = {}
        #: How many readable manifests name each file, and the sizes of these files without outputs.
        self._uses: Counter[str] = Counter()
        self._sizes: dict[str, int] = {}
        self._unreadable = 0
        #: Files that no checkpoint names any longer.
        self._waiting: set[str] = set()
        #: Checkpoints that the log no longer keeps, and whose manifests are still there.
        self._dropped: list[CheckpointKey] = []
        #: Those whose manifests were removed since the newest entry: until another one is durable, a crash may bring
        #: them back.
        self._removed: list[CheckpointKey] = []

    def committed(
        self,
        key: CheckpointKey,
        sizes: Mapping[str, int] | None,
        at: float = 0.0,
        outputs: Collection[str] = (),
    ) -> None:
        """Note an existing checkpoint, committed at that time, which names files of these sizes, and outputs.

        None for ``sizes`` if its manifest cannot be read.
        """
        own = self._named[key] = None if sizes is None else frozenset(sizes)
        self._sizes.update(sizes or {})
        self._outputs[key] = frozenset(outputs)
        self._at[key] = at
        self._uses.update(own or ())
        self._uses.update(self._outputs[key])
        self._unreadable += own is None

    @property
    def newest(self) -> CheckpointKey | None:
        """The checkpoint with the largest id, or None."""
        return max(self._named, default=None)

    def names_of(self, key: CheckpointKey | None) -> frozenset[str]:
        """The files that a checkpoint names, without outputs; none for None or one that cannot be read."""
        return (None if key is None else self._named.get(key)) or frozenset()

    def named(self) -> set[str] | None:
        """All files that the checkpoints name; None if a manifest cannot be read."""
        return None if self._unreadable else set(self._uses)

    def is_known(self, name: str) -> bool:
        """Return True if a readable manifest names the file."""
        return name in self._uses

    def excess(self, retain: Retain, now: float, newest: Manifest) -> list[CheckpointKey]:
        """The checkpoints to drop, oldest first, once ``newest`` is committed at that time."""
        older = list(self._named)  # noted by ascending ids
        if isinstance(retain, int):
            return older[: max(len(older) + 1 - retain, 0)]
        droppable = older[: max(len(older) + 1 - _FEWEST, 0)]
        if isinstance(retain, datetime.timedelta):
            oldest = now - retain.total_seconds()
            return [key for key in droppable if self._at[key] < oldest]
        hours = {int(now // 3600)}
        first_hour = max(hours) - _HOURS
        dropped = set()
        for back, key in enumerate(reversed(older), start=2):
            hour = int(self._at[key] // 3600)
            if back > _NEWEST and (hour in hours or hour <= first_hour):
                dropped.add(key)
            hours.add(hour)
        dropped |= self._beyond_room([key for key in older if key not in dropped], newest)
        return [key for key in droppable if key in dropped]

    def _beyond_room(self, kept: list[CheckpointKey], newest: Manifest) -> set[CheckpointKey]:
        """The oldest of these checkpoints, which exceed the limit of space together with the newer ones."""
        sizes = sizes_of(newest)
        state = sum(
            file.size for name, file in newest.all_files.items() if name in sizes and file.kind != "delta"
        )
        room = _TIMES_STATE * state + _BYTES_MORE
        if sum(self._sizes.values()) <= room:
            return set()
        seen = set(sizes)
        for at in reversed(range(len(kept))):
            own = self.names_of(kept[at]) - seen
            room -= sum(self._sizes[name] for name in own)
            if room < 0:
                return set(kept[: at + 1])
            seen |= own
        return set()

    def swept(self, dropped: Iterable[CheckpointKey]) -> int:
        """The sequence up to which no manifest of a dropped checkpoint is left, once the next entry is written."""
        left = [key.sequence for key in (*self._removed, *self._dropped, *dropped)]
        return min(left, default=self._writer.next_sequence + 1) - 1

    def dropped(self, keys: Iterable[CheckpointKey]) -> None:
        """Note the checkpoints and outputs that the newest entry, which is durable, keeps no longer."""
        self._removed = []
        for key in keys:
            own = self._named.pop(key)
            self._at.pop(key)
            self._unreadable -= own is None
            self._no_longer(own or frozenset())
            self._no_longer(self._outputs.pop(key))
            self._dropped.append(key)
        self.drop_outputs()

    def drop_outputs(self) -> None:
        """Note the outputs that the log no longer keeps. Idempotent."""
        for key, outputs in self._outputs.items():
            if not self._writer.state.has_outputs(key):
                self._outputs[key] = frozenset()
                self._no_longer(outputs)

    def _no_longer(self, names: frozenset[str]) -> None:
        for name in names:
            self._uses[name] -= 1
            if not self._uses[name]:
                del self._uses[name]
                self._sizes.pop(name, None)
                self._waiting.add(name)

    # --- removing ---

    def clear_away(self) -> None:
        """Remove what earlier writers have left behind: dropped checkpoints, and files that no checkpoint names."""
        self._dropped = self._dropped_before()
        named = self.named()
        with storing("removing files that no checkpoint names"):
            try:
                self.remove()
            except FencedError:
                raise self._writer.fenced() from None
            if named is None:
                return
            is_held = held_by_pins(self._files, time.time())
            removed = self._files.remove_leftovers(
                lambda name: name in named or is_held(name), self._writer.epoch
            )
        if removed:
            _log.info("removed %d files that no checkpoint names from %s", removed, self._files.uri)

    def _dropped_before(self) -> list[CheckpointKey]:
        """The checkpoints that the log does not keep, and whose manifests are there: their removal was cut off."""
        state = self._writer.state
        kept = {key.name for key in state.kept}
        dropped = []
        for base_name in self._writer.names:
            sequence = parse_entry_name(base_name)
            if sequence is not None and sequence > state.swept and entry_name(sequence) not in kept:
                with suppress(FileNotFoundError, CorruptCheckpointError):
                    key = read_entry(self._files, entry_name(sequence)).key
                    if key is not None:
                        dropped.append(key)
        return dropped

    def remove(self) -> None:
        """Remove what the log no longer keeps. Cut off anywhere, it can be repeated, by the next opening too."""
        epoch = self._writer.epoch
        while self._dropped:
            self._files.retire([self._dropped[0].name], epoch)
            self._removed.append(self._dropped.pop(0))
        if self._unreadable or not self._waiting:  # a manifest that cannot be read may name anything
            return
        # A file that a remaining manifest names stops waiting: dropping that manifest brings it back here.
        self._waiting -= {name for name in self._waiting if name in self._uses}
        waiting = sorted(self._waiting.difference(*self._built_on()))
        if not waiting:
            return
        is_held = held_by_pins(self._files, time.time())
        removed: list[str] = []

        def retire(name: str) -> None:
            self._files.retire([name], epoch)
            removed.append(name)

        try:
            # Those that are held are tried again after the next commit.
            map_in_threads(retire, [name for name in waiting if not is_held(name)])
        finally:
            self._waiting.difference_update(removed)


def sizes_of(manifest: Manifest) -> dict[str, int]:
    """The files that a manifest names, without outputs, and their sizes."""
    outputs = manifest.output_names
    return {name: file.size for name, file in manifest.all_files.items() if name not in outputs}
