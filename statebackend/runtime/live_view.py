"""A view of the state of a running job, after one of its committed batches."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from statebackend.checkpoint import Checkpoint
from statebackend.checkpoint.format import GroupedBatch
from statebackend.checkpoint.keyed.checkpointed_backend import CheckpointedKeyedBackend
from statebackend.checkpoint.keyed.compaction import numbered
from statebackend.checkpoint.keyed.description import StateDescription, value_role
from statebackend.checkpoint.keyed.row_source import joined_batches, without_expired
from statebackend.checkpoint.keyed.state_source import Selection, StateSource, selection_of
from statebackend.errors import ClosedError, UsageError, usage
from statebackend.keys import VOID, encode_namespace
from statebackend.runtime.start_checks import no_state
from statebackend.types import from_config


def no_view(message: str, detail: str, hint: str) -> UsageError:
    return UsageError(
        f"cannot open a view of the state: {message}", code="USAGE.NO_VIEW", detail=detail, hint=hint
    )


class StateView:
    """The keyed state of a running query after the committed batch ``batch_id``. Made by `view` of a query.

    Any thread may read it while later batches run; reads of one view take turns. It keeps only the entries that are
    written or removed after it was made. Close it, best by a ``with`` block; the end of the query closes it too.
    """

    def __init__(self, keyed: Any, checkpoint: Checkpoint) -> None:
        if not isinstance(keyed, CheckpointedKeyedBackend):
            raise no_view(
                f"a {type(keyed).__name__} has no snapshots",
                f"batch {checkpoint.id}",
                "read the newest checkpoint with sb.tools.state(store, name)",
            )
        #: The committed batch.
        self.batch_id = checkpoint.id
        #: The times of the batch, by which state has expired.
        self.now, self.watermark = checkpoint.now, checkpoint.watermark
        self._key_type, self._max_parallelism = keyed.key_type, keyed.max_parallelism
        undeclared = set(keyed.undeclared_states())
        self._states = {each.name: each for each in keyed._described().by_name if each.name not in undeclared}
        self._lock = threading.Lock()
        self._is_closed = False
        self._rows = keyed.open_view()

    def __repr__(self) -> str:
        closed = ", closed" if self._is_closed else ""
        return f"StateView(batch {self.batch_id}{closed})"

    def __enter__(self) -> StateView:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the state. A scan in progress ends with `ClosedError`. Idempotent."""
        with self._lock:
            self._is_closed = True
            self._rows.release()

    def states(self) -> list[str]:
        """The names of the states that `get_many` and `sb.tools.state` read."""
        return [name for name, each in self._states.items() if not each.is_reserved]

    def get_many(self, name: str, keys: Any, *, namespace: object = VOID) -> pa.Array:
        """The value of each key, in an Arrow array; null for a key that has none, or whose value has expired.

        The state is a value, list, reducing or aggregating state; aggregating states give accumulators, and pickles are
        bytes. `sb.tools.state(view, name, keys=...)` reads map states. O(keys) on ``heap``; other backends scan the key
        groups of the keys.
        """
        state = self._state(name)
        if state.kind == "map":
            raise usage.state_kind(
                f"cannot get one value for a key of the map state {name!r}",
                hint="read its entries with sb.tools.state(view, name, keys=...)",
            )
        selection = selection_of(keys, self._key_type, self._max_parallelism, repr(self))
        assert isinstance(selection.keys, pa.Array)
        encoded = encode_namespace(namespace)
        with self._lock:
            self._check_open()
            rows, at = self._rows.find(name, selection.keys, encoded)
        if rows is None:
            schema = self._rows.schema_of(name)
            if schema is None:
                return pa.nulls(len(selection.keys), _value_type(state))
            rows, at = self._found(name, selection, encoded, schema)
        bound = state.expired_before(self.now, self.watermark)
        if bound is not None:
            rows, kept = without_expired(rows, bound)
            at = at[kept]
        index = np.full(len(selection.keys), -1, np.int64)
        index[at] = np.arange(len(at))
        return rows["value"].take(pa.array(index, mask=index < 0))

    def _found(
        self, name: str, selection: Selection, namespace: bytes, schema: pa.Schema
    ) -> tuple[pa.RecordBatch, NDArray[np.int64]]:
        """The rows of keys and a namespace, and the number of the key of each, by a scan."""
        parts = []
        for batch in self._read(name, selection):
            if "namespace" in batch.schema.names:
                batch = batch.filter(pa.compute.equal(batch["namespace"].fill_null(b""), namespace))
            parts.append(batch if not namespace or "namespace" in batch.schema.names else batch.slice(0, 0))
        keys = selection.keys
        assert isinstance(keys, pa.Array)
        rows = joined_batches(parts, schema)
        numbers = numbered([pa.chunked_array([rows["key"], keys], keys.type)])
        of_rows, of_keys = numbers[: rows.num_rows], numbers[rows.num_rows :]
        # A key may be asked for more than once.
        order = np.argsort(of_rows)
        place = np.searchsorted(of_rows, of_keys, sorter=order)
        is_there = (place < len(of_rows)) & np.isin(of_keys, of_rows)
        return rows.take(pa.array(order[place[is_there]])), np.flatnonzero(is_there)

    # --- for `sb.tools` ---

    def _state_source(self) -> StateSource:
        return _ViewSource(self)

    def _state(self, name: str) -> StateDescription:
        if name not in self._states:
            raise no_state(name, self.states(), repr(self))
        return self._states[name]

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClosedError("the view is closed", hint="open another one with view()")

    def _read(self, name: str, selection: Selection) -> Iterator[pa.RecordBatch]:
        """The rows of a state, a batch at a time. Between two batches the view may be closed."""
        with self._lock:
            self._check_open()
            batches = iter(self._rows.rows_of(name))
        wanted = selection.key_groups
        while True:
            with self._lock:
                self._check_open()
                rows: GroupedBatch | None = next(batches, None)
            if rows is None:
                return
            if wanted is None or np.isin(rows.key_group_of_rows(), wanted).any():
                yield selection.of(rows.batch)


def _value_type(state: StateDescription) -> pa.DataType:
    stored = from_config(state.types[value_role(state.kind)]).arrow
    return pa.list_(stored) if state.kind == "list" else stored


class _ViewSource(StateSource):
    """A view as `sb.tools.state` reads it."""

    def __init__(self, view: StateView) -> None:
        self._view = view
        self.where = repr(view)
        self.key_type, self.max_parallelism = view._key_type, view._max_parallelism
        self.now, self.watermark = view.now, view.watermark

    def states(self) -> Mapping[str, StateDescription]:
        return self._view._states

    def read(self, name: str, selection: Selection) -> Iterator[pa.RecordBatch]:
        return self._view._read(name, selection)
