"""Bookkeeping of the manifests and files that a store may remove; it touches no file.

A data file may be removed when three things hold: a manifest that named it has been dropped for good, no remaining
manifest names it, and no snapshot in flight builds on it. A manifest is dropped for good once its folder has been
synced: before that, a crash may bring it back.

>>> kept = Retention()
>>> kept.committed((6, 1), {"base", "delta-6"})
>>> kept.committed((7, 1), {"base", "delta-6", "delta-7"})
>>> kept.committed((8, 1), {"base-8"})
>>> kept.excess(2, now=0.0)
[(6, 1)]
>>> kept.dropped((6, 1))
>>> kept.removable([])                   # not synced yet
set()
>>> kept.synced()
>>> kept.removable([])                   # 7 names what 6 has named
set()
>>> kept.dropped((7, 1)); kept.synced()
>>> sorted(kept.removable([{"base", "delta-6"}]))
['delta-7']
"""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Collection, Iterable

__all__ = ["Key", "Retain", "Retention"]

#: Id and epoch, which identify a manifest.
Key = tuple[int, int]
#: How many checkpoints are kept, or for how long. By time, too, the newest two are kept.
Retain = int | datetime.timedelta
_FEWEST = 2


class Retention:
    """The manifests of a store, the files that each names, and the files that dropped ones have left behind.

    >>> Retention().newest is None
    True
    """

    def __init__(self) -> None:
        self._named: dict[Key, frozenset[str] | None] = {}
        #: When each was committed, in seconds since 1970.
        self._at: dict[Key, float] = {}
        #: How many readable manifests name each file.
        self._uses: Counter[str] = Counter()
        self._unreadable = 0
        self._unsynced: set[str] = set()
        self._waiting: set[str] = set()

    def committed(self, key: Key, names: Collection[str] | None, at: float = 0.0) -> None:
        """Note a manifest that exists, was committed at that time, and names these files; None if it cannot be read."""
        own = self._named[key] = None if names is None else frozenset(names)
        self._at[key] = at
        self._uses.update(own or ())
        self._unreadable += own is None

    @property
    def newest(self) -> Key | None:
        """The manifest with the largest id, or None."""
        return max(self._named, default=None)

    def ids(self) -> set[int]:
        """The ids of all manifests that are there.

        >>> Retention().ids()
        set()
        """
        return {checkpoint_id for checkpoint_id, _ in self._named}

    def names_of(self, key: Key | None) -> frozenset[str]:
        """The files that a manifest names; none for None or one that cannot be read.

        >>> Retention().names_of(None)
        frozenset()
        """
        return (None if key is None else self._named.get(key)) or frozenset()

    def named(self) -> set[str] | None:
        """All files that the existing manifests name; None if one of them cannot be read.

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

    def excess(self, retain: Retain, now: float) -> list[Key]:
        """The manifests to drop, oldest first, so that those remain that are to be kept at that time.

        >>> kept = Retention()
        >>> for number in range(5):
        ...     kept.committed((number, 1), [], at=10.0 * number)
        >>> kept.excess(datetime.timedelta(seconds=25), now=50.0), kept.excess(datetime.timedelta(0), now=50.0)
        ([(0, 1), (1, 1), (2, 1)], [(0, 1), (1, 1), (2, 1)])
        """
        ordered = sorted(self._named)
        if not isinstance(retain, datetime.timedelta):
            return ordered[: max(len(ordered) - retain, 0)]
        oldest = now - retain.total_seconds()
        return [key for key in ordered[: max(len(ordered) - _FEWEST, 0)] if self._at[key] < oldest]

    def dropped(self, key: Key) -> None:
        """Note that a manifest has been dropped; its files wait for the next sync of the folder."""
        own = self._named.pop(key)
        self._at.pop(key)
        self._unreadable -= own is None
        for name in own or ():
            self._uses[name] -= 1
            if not self._uses[name]:
                del self._uses[name]
        self._unsynced |= own or frozenset()

    def synced(self) -> None:
        """Note that the folder of manifests has been synced: earlier drops are now for good."""
        self._waiting |= self._unsynced
        self._unsynced = set()

    def removable(self, pins: Iterable[Collection[str]]) -> set[str]:
        """The files to remove now; ``pins`` are the files that snapshots in flight build on."""
        if self._unreadable or not self._waiting:
            # A manifest that cannot be read may name anything.
            return set()
        # A file that a remaining manifest names stops waiting: dropping that manifest brings it back here.
        self._waiting -= {name for name in self._waiting if name in self._uses}
        return self._waiting.difference(*pins)

    def removed(self, names: Collection[str]) -> None:
        """Note that these files have been removed."""
        self._waiting.difference_update(names)

    @property
    def is_pending(self) -> bool:
        """True if files are left to remove, now or after a sync."""
        return bool(self._unsynced or self._waiting)
