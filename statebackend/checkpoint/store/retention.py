"""Bookkeeping of the checkpoints that a store keeps and of the files that it may remove; it touches no file.

A data file may be removed when three things hold: a checkpoint that named it has been dropped, no remaining one names
it, and no snapshot in flight builds on it. Outputs go earlier than states: they count as named only while their
checkpoint is one of the newest.

>>> six, seven, eight = (Key(each, f"checkpoints/{each}.json") for each in (6, 7, 8))
>>> kept = Retention()
>>> kept.committed(six, {"base", "delta-6"})
>>> kept.committed(seven, {"base", "delta-6", "delta-7"})
>>> kept.excess(2, 0.0, eight)
[Key(checkpoint_id=6, name='checkpoints/6.json')]
>>> kept.committed(eight, {"base-8"})
>>> kept.dropped(six)
>>> kept.removable([])                   # 7 names what 6 has named
set()
>>> kept.dropped(seven)
>>> sorted(kept.removable([{"base", "delta-6"}]))
['delta-7']
"""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Collection, Iterable

from statebackend.checkpoint.store.log_state import Key

__all__ = ["Retain", "Retention"]

#: How many checkpoints are kept, or for how long. By time, too, the newest two are kept.
Retain = int | datetime.timedelta
_FEWEST = 2


class Retention:
    """The checkpoints of a store, the files that each names, and the files that dropped ones have left behind.

    >>> Retention().newest is None
    True
    """

    def __init__(self) -> None:
        self._named: dict[Key, frozenset[str] | None] = {}
        #: Those outputs of each that are still kept.
        self._outputs: dict[Key, frozenset[str]] = {}
        #: When each was committed, in seconds since 1970.
        self._at: dict[Key, float] = {}
        #: How many readable manifests name each file.
        self._uses: Counter[str] = Counter()
        self._unreadable = 0
        self._waiting: set[str] = set()

    def committed(
        self, key: Key, names: Collection[str] | None, at: float = 0.0, outputs: Collection[str] = ()
    ) -> None:
        """Note a checkpoint that is there, was committed at that time, and names these files and, beside them, outputs.

        None for ``names`` if its manifest cannot be read.
        """
        own = self._named[key] = None if names is None else frozenset(names)
        self._outputs[key] = frozenset(outputs)
        self._at[key] = at
        self._uses.update(own or ())
        self._uses.update(self._outputs[key])
        self._unreadable += own is None

    @property
    def newest(self) -> Key | None:
        """The checkpoint with the largest id, or None."""
        return max(self._named, default=None)

    def keys_with_outputs(self) -> list[Key]:
        """The checkpoints whose outputs are kept.

        >>> Retention().keys_with_outputs()
        []
        """
        return [key for key, outputs in self._outputs.items() if outputs]

    def names_of(self, key: Key | None) -> frozenset[str]:
        """The files that a checkpoint names, without outputs; none for None or one that cannot be read.

        >>> Retention().names_of(None)
        frozenset()
        """
        return (None if key is None else self._named.get(key)) or frozenset()

    def named(self) -> set[str] | None:
        """All files that the checkpoints name; None if a manifest cannot be read.

        >>> Retention().named()
        set()
        """
        return None if self._unreadable else set(self._uses)

    def is_known(self, name: str) -> bool:
        """Return True if a readable manifest names the file.

        >>> Retention().is_known("data/3/a.arrow")
        False
        """
        return name in self._uses

    def excess(self, retain: Retain, now: float, newest: Key) -> list[Key]:
        """The checkpoints to drop, oldest first, once ``newest`` is committed at that time.

        >>> kept = Retention()
        >>> for number in range(4):
        ...     kept.committed(Key(number, "checkpoints/..."), [], at=10.0 * number)
        >>> [key.checkpoint_id for key in kept.excess(datetime.timedelta(seconds=25), 50.0, Key(4, ""))]
        [0, 1, 2]
        """
        ordered = [*self._named, newest]  # noted by ascending ids
        if not isinstance(retain, datetime.timedelta):
            return ordered[: max(len(ordered) - retain, 0)]
        oldest = now - retain.total_seconds()
        return [key for key in ordered[: max(len(ordered) - _FEWEST, 0)] if self._at[key] < oldest]

    def dropped(self, key: Key) -> None:
        """Note that a checkpoint has been dropped: what it alone named may be removed."""
        own = self._named.pop(key)
        self._at.pop(key)
        self._unreadable -= own is None
        self._no_longer(own or frozenset())
        self._no_longer(self._outputs.pop(key))

    def outputs_dropped(self, key: Key) -> None:
        """Note that the outputs of a checkpoint are no longer kept. Idempotent."""
        outputs, self._outputs[key] = self._outputs[key], frozenset()
        self._no_longer(outputs)

    def _no_longer(self, names: frozenset[str]) -> None:
        for name in names:
            self._uses[name] -= 1
            if not self._uses[name]:
                del self._uses[name]
                self._waiting.add(name)

    def removable(self, built_on: Iterable[Collection[str]]) -> set[str]:
        """The files to remove now; ``built_on`` are those that snapshots in flight build on."""
        if self._unreadable or not self._waiting:
            # A manifest that cannot be read may name anything.
            return set()
        # A file that a remaining manifest names stops waiting: dropping that manifest brings it back here.
        self._waiting -= {name for name in self._waiting if name in self._uses}
        return self._waiting.difference(*built_on)

    def removed(self, name: str) -> None:
        """Note that a file has been removed."""
        self._waiting.discard(name)
