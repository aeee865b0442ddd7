"""The part that the keyed backends on compiled stores share: heap and rocksdb."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from statebackend._core.handles.row_loop import call_each
from statebackend.checkpoint.keyed.chain import ChangePoints, Point
from statebackend.checkpoint.keyed.checkpointed_backend import CheckpointedKeyedBackend
from statebackend.columns.codec_factory import key_codec
from statebackend.columns.stored_columns import Array
from statebackend.keys import VOID, TimeWindow, canonical_batch, encode_namespace
from statebackend.state import checked_budget, clocks

#: One batch of a snapshot holds at most about this many rows and bytes.
BATCH_ROWS = 65_536
BATCH_BYTES = 64 << 20
#: Up to so many changes since a checkpoint are remembered, however small the state is.
MOST_CHANGES = 1_000_000


class CompiledKeyedBackend(CheckpointedKeyedBackend):
    """A keyed backend whose compiled key context comes first in the class."""

    _states: dict[str, Any]

    # Of the key context.
    codec: Any
    _open: Any

    def _open_context(self, store: Any) -> None:
        self._open(
            store,
            key_codec(self._encoder.declared_type),
            self._max_parallelism,
            self._key_group_range.start,
            self._key_group_range.end,
            self._clock,
            clocks.read,
            type(self._clock) is clocks.SystemClock,  # a subclass may tell another time
            encode_namespace,
            frozenset({type(VOID), TimeWindow, int, str, bytes}),
        )

    def groups_of(self, canonical: Any) -> np.ndarray[Any, np.dtype[np.uint16]]:
        """The key groups of a column of keys, an array or (offsets, data); raises if one is not served here."""
        groups: np.ndarray[Any, np.dtype[np.uint16]]
        groups = self.codec.plan.key_groups(canonical, self._max_parallelism)
        own = self._key_group_range
        foreign = np.flatnonzero((groups < own.start) | (groups > own.end))
        if len(foreign):
            self.refuse_group(int(groups[foreign[0]]))
        return groups

    def _check_groups(self, canonical_keys: Sequence[Any]) -> None:
        if canonical_keys:
            self.groups_of(canonical_batch(canonical_keys, self._encoder.kind))

    def _call_each(self, *arguments: Any) -> list[Any]:
        results: list[Any] = call_each(self, *arguments)
        return results

    def advance(self, budget: int = 1000) -> int:
        """Remove up to ``budget`` expired values, map entries and lists from states with ``cleanup_idle``.

        Returns their number. On rocksdb it looks at a number of rows that the budget bounds, and the next call goes on.
        """
        self._check_open()
        budget = checked_budget(budget)
        self._log.drop_outgrown_point()
        done = 0
        saved = self._save_key()
        self._now = self._work_time()
        try:
            self._let_expire()
            for state in self._states.values():
                config = state.descriptor.ttl_config if state.ttl else None
                if config is not None and config.cleanup_idle and done < budget:
                    done += self._clean_idle(state, budget - done)
        finally:
            self._restore_key(saved)
        return done

    def _let_expire(self) -> bool:
        """Tell background work by which time values may go; return False if there will be more to tell."""
        return True

    def _clean_idle(self, state: Any, budget: int) -> int:
        """Remove up to ``budget`` expired values, map entries and lists of a state; return their number."""
        raise NotImplementedError


class CompiledPoints(ChangePoints):
    """Points that a backend remembers changes since."""

    def is_outgrown(self, point: Point) -> bool:
        changes = self.changes_since(point) if self.is_valid(point) else 0
        return changes > MOST_CHANGES and not self.holds((changes + 1) // 2)


def cuts(sizes: Array, limit: int) -> list[int]:
    """The first row of each run of rows, if every run has about ``limit`` bytes, or rows."""
    ends = sizes.cumsum()
    if len(ends) and ends[-1] <= limit:
        return [0]
    return np.flatnonzero(np.diff((ends - 1) // limit, prepend=-1)).tolist()


def group_ranges(sizes: Array, first_group: int) -> Iterator[tuple[int, int]]:
    """Ranges of key groups that each hold about a batch of rows; empty key groups at both ends are left out."""
    filled = sizes.nonzero()[0]
    for start, end in itertools.pairwise([*cuts(sizes[filled], BATCH_ROWS), len(filled)]):
        yield first_group + int(filled[start]), first_group + int(filled[end - 1])
