"""The timers of a heap backend as checkpoints see them: rows of a map state, wherever a timer is stored.

>>> from statebackend.backends.heap import HeapBackend
>>> keyed = HeapBackend().create_keyed_backend(int)
>>> keyed.set_current_key(1)
>>> keyed.timers.register(30); keyed.timers.register(10)
>>> written, = keyed._written_states()
>>> written.schema.names, [len(table) for table in written.tables]
(['key', 'map_key', 'value'], [1, 1])
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from statebackend._core.snapshots.changes import changed_entries, entries_before
from statebackend.backends.heap.state_rows import Copied, LeftOut, Part, WrittenState
from statebackend.checkpoint.format import Op
from statebackend.columns.stored_columns import Array

if TYPE_CHECKING:
    from statebackend._core.handles.time_index import TimerHandle
    from statebackend.backends.heap.keyed import HeapKeyedBackend

__all__ = ["WrittenTimers"]


class WrittenTimers(WrittenState):
    """The timers of one domain: those in the entries of their keys, and those of the map state beside them."""

    def __init__(self, backend: HeapKeyedBackend, handle: TimerHandle) -> None:
        super().__init__(backend, handle)
        self._of_keys = [table for table in (handle.plain, handle.spaced) if table is not None]
        self.tables = [*self._of_keys, *self.tables]

    @property
    def has_namespaces(self) -> bool:
        return len(self._of_keys) > 1

    def parts_of(self, view: Any, first: int, last: int, left_out: LeftOut | None) -> list[Part]:
        parts: list[Part] = [
            _TimersOfKeys(self, view.rows(table, first, last), None, left_out) for table in self._of_keys
        ]
        return parts + super().parts_of(view, first, last, left_out)

    def changes_since(self, mark: Any) -> list[Copied]:
        """The changes since a mark: first all timers that have gone, as others may have come in their places."""
        removed, put = [], []
        for table in self._of_keys:
            before = entries_before(table, mark)
            removed.append(Copied(self, Op.REMOVE, before.keys(), before.groups, _times(before.columns())))
            rows = changed_entries(table, mark)
            columns = rows.take(rows.is_live).columns()
            put.append(Copied(self, Op.PUT, columns, rows.groups[rows.is_live], _times(columns)))
        for maps in self.maps:
            rows = changed_entries(maps.entries, mark)
            gone, there = rows.take(~rows.is_live), rows.take(rows.is_live)
            removed.append(Copied(self, Op.REMOVE, gone.keys_above(), gone.groups, gone.keys()))
            put.append(Copied(self, Op.PUT, there.keys_above(), there.groups, there.columns()))
        return removed + put


def _times(columns: dict[str, Array]) -> dict[str, Array]:
    """The columns that entries of the map state would have: the time for a map key, nothing for a value."""
    times = columns["value"].view("<i8")[:, 0]
    return {"key": np.ascontiguousarray(times), "value": np.zeros(len(times), dtype=bool)}


class _TimersOfKeys(Part):
    """Timers in the entries of their keys."""

    def take(self, rows: Any) -> Part:
        return _TimersOfKeys(self.state, self._entries.take(rows), None, self._left_out)

    def copied(self) -> Copied:
        columns = self._entries.columns()
        return Copied(self.state, None, columns, self.groups, _times(columns), self._left_out)
