"""The storage of the reference backend: nested dicts of values that are replaced, never changed.

>>> journal = Journal()
>>> table = NestedTable(journal)
>>> at = EntryKey(3, b"", 7)
>>> table.put(at, "old")
>>> point = journal.open()
>>> table.put(at, "new")
>>> journal.undo_to(point)
>>> table.get(at), len(table)
('old', 1)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple


class EntryKey(NamedTuple):
    """The place of an entry: its key group, encoded namespace, and key in canonical form."""

    group: int
    namespace: bytes
    key: Any


class Journal:
    """Records what each write replaced, while marks are open."""

    def __init__(self) -> None:
        self.old: list[tuple[NestedTable, EntryKey, Any]] = []
        self.is_open = False

    def open(self) -> int:
        """Begin to record, if not begun; return the point to undo to."""
        self.is_open = True
        return len(self.old)

    def undo_to(self, point: int) -> None:
        """Restore what was there, newest first."""
        self.is_open = False
        while len(self.old) > point:
            table, at, stored = self.old.pop()
            if stored is None:
                table.remove(at)
            else:
                table.put(at, stored)
        self.is_open = True

    def before(self, point: int) -> dict[NestedTable, dict[EntryKey, Any]]:
        """The values that were there at the point, for all places written since, by table and place."""
        found: dict[NestedTable, dict[EntryKey, Any]] = {}
        for table, at, stored in self.old[point:]:
            found.setdefault(table, {}).setdefault(at, stored)
        return found

    def forget(self) -> None:
        """Forget everything: no mark is open any more."""
        self.is_open = False
        self.old.clear()


class NestedTable:
    """The entries of one state: key group → namespace → key → what is stored, which is never None."""

    def __init__(self, journal: Journal) -> None:
        self._groups: dict[int, dict[bytes, dict[Any, Any]]] = {}
        self._journal = journal

    def get(self, at: EntryKey) -> Any:
        """The value stored there; None if there is none."""
        return self._groups.get(at.group, {}).get(at.namespace, {}).get(at.key)

    def put(self, at: EntryKey, stored: Any) -> None:
        """Store a value in place of the old one."""
        if self._journal.is_open:
            self._journal.old.append((self, at, self.get(at)))
        self._groups.setdefault(at.group, {}).setdefault(at.namespace, {})[at.key] = stored

    def load(self, at: EntryKey, stored: Any) -> None:
        """Store a value, or with None remove it, as if it had always been so: no journal records it."""
        was_open, self._journal.is_open = self._journal.is_open, False
        try:
            if stored is None:
                self.remove(at)
            else:
                self.put(at, stored)
        finally:
            self._journal.is_open = was_open

    def remove(self, at: EntryKey) -> None:
        """Remove the value there, and dicts that become empty."""
        stored = self.get(at)
        if stored is None:
            return
        if self._journal.is_open:
            self._journal.old.append((self, at, stored))
        namespaces = self._groups[at.group]
        keys = namespaces[at.namespace]
        del keys[at.key]
        if not keys:
            del namespaces[at.namespace]
        if not namespaces:
            del self._groups[at.group]

    def places_of_key(self, group: int, key: Any) -> list[EntryKey]:
        """The places where a key has entries, in all namespaces."""
        found = self._groups.get(group, {}).items()
        return [EntryKey(group, namespace, key) for namespace, keys in found if key in keys]

    def __iter__(self) -> Iterator[tuple[EntryKey, Any]]:
        for group, namespaces in self._groups.items():
            for namespace, keys in namespaces.items():
                for key, stored in keys.items():
                    yield EntryKey(group, namespace, key), stored

    def __len__(self) -> int:
        return sum(len(keys) for namespaces in self._groups.values() for keys in namespaces.values())
