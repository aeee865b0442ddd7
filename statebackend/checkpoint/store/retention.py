"""Bookkeeping of the manifests and files that a store may remove; it touches no file.

A data file may be removed when three things hold: a manifest that named it has been dropped for good, no remaining
manifest names it, and no snapshot in flight builds on it. A manifest is dropped for good once its folder has been
synced: before that, a crash may bring it back.

>>> kept = Retention()
>>> kept.committed((6, 1), {"base", "delta-6"})
>>> kept.committed((7, 1), {"base", "delta-6", "delta-7"})
>>> kept.committed((8, 1), {"base-8"})
>>> kept.excess(retain=2)
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

from collections.abc import Collection, Iterable

__all__ = ["Key", "Retention"]

#: Id and epoch, which identify a manifest.
Key = tuple[int, int]


class Retention:
    """The manifests of a store, the files that each names, and the files that dropped ones have left behind.

    >>> Retention().newest is None
    True
    """

    def __init__(self) -> None:
        self._named: dict[Key, frozenset[str] | None] = {}
        self._unsynced: set[str] = set()
        self._waiting: set[str] = set()

    def committed(self, key: Key, names: Collection[str] | None) -> None:
        """Note a manifest that exists and names these files; None if it cannot be read."""
        self._named[key] = None if names is None else frozenset(names)

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
        return None if None in self._named.values() else self.known()

    def known(self) -> set[str]:
        """All files that the readable manifests name.

        >>> Retention().known()
        set()
        """
        return set[str]().union(*filter(None, self._named.values()))

    def excess(self, retain: int) -> list[Key]:
        """The manifests to drop so that ``retain`` remain, oldest first."""
        ordered = sorted(self._named)
        return ordered[: max(len(ordered) - retain, 0)]

    def dropped(self, key: Key) -> None:
        """Note that a manifest has been dropped; its files wait for the next sync of the folder."""
        self._unsynced |= self._named.pop(key) or frozenset()

    def synced(self) -> None:
        """Note that the folder of manifests has been synced: earlier drops are now for good."""
        self._waiting |= self._unsynced
        self._unsynced = set()

    def removable(self, pins: Iterable[Collection[str]]) -> set[str]:
        """The files to remove now; ``pins`` are the files that snapshots in flight build on."""
        named = self.named()
        if named is None or not self._waiting:
            # A manifest that cannot be read may name anything.
            return set()
        # A file that a remaining manifest names stops waiting: dropping that manifest brings it back here.
        self._waiting -= named
        return self._waiting.difference(*pins)

    def removed(self, names: Collection[str]) -> None:
        """Note that these files have been removed."""
        self._waiting.difference_update(names)

    @property
    def is_pending(self) -> bool:
        """True if files are left to remove, now or after a sync."""
        return bool(self._unsynced or self._waiting)
