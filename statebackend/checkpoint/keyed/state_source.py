"""The source of a state's rows: a checkpoint, a savepoint, or a view of a running query.

`sb.tools.state` reads every source by this interface. An object that has a source, such as a query or a `Harness`,
returns it, or a checkpoint or savepoint, from a method ``_state_source()``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from statebackend.checkpoint.keyed.compaction import numbered
from statebackend.checkpoint.keyed.description import StateDescription
from statebackend.errors import usage
from statebackend.keys import key_encoder
from statebackend.types import Type

#: Key groups are worked out for at most so many keys of a `range`; more keys are nearly always in all key groups.
_MOST_LISTED = 10_000


@dataclass(frozen=True)
class Selection:
    """The columns and keys to read. A source may use it to read less, and passes each batch through `of`."""

    #: Columns of data files, such as ``"key"`` and ``"value"``. None: all columns.
    columns: frozenset[str] | None = None
    keys: pa.Array | range | None = None
    #: The key groups of the keys, ascending. None: all key groups.
    key_groups: NDArray[np.int64] | None = None

    def of(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The selected rows of a batch. Columns stay, because the source may need them. O(rows)."""
        if self.keys is None:
            return batch
        return batch.filter(self.mask(batch["key"]))

    def mask(self, keys: pa.Array) -> pa.Array:
        """True for each key that is selected. O(rows)."""
        if not isinstance(self.keys, range):
            return is_among(keys, self.keys)
        values = keys.to_numpy(zero_copy_only=False)
        low, high = sorted((self.keys[0], self.keys[-1])) if self.keys else (0, -1)
        return pa.array((values >= low) & (values <= high) & ((values - low) % self.keys.step == 0))


def is_among(column: pa.Array, values: pa.Array) -> pa.Array:
    """True for each row whose value is among ``values``, which have the same type. O(rows of both)."""
    if not pa.types.is_nested(column.type):
        return pc.is_in(column, value_set=values)
    numbers = numbered([pa.chunked_array([values, column], column.type)])
    found = np.zeros(numbers.max(initial=-1) + 1, bool)
    found[numbers[: len(values)]] = True
    return pa.array(found[numbers[len(values) :]])


def selection_of(keys: Any, key_type: Type | None, max_parallelism: int | None, where: str) -> Selection:
    """The selection of some keys: a column, a list of values, or a `range` of integers. O(keys)."""
    if key_type is None:
        raise usage.no_key_type(
            "cannot select keys: the type of the keys is unknown",
            detail=where,
            hint="open its store with open_for_writing(key_type=..., max_parallelism=...)",
        )
    # Importing the library loads nothing compiled.
    from statebackend._core.key_groups import HashPlan
    from statebackend.columns.nested_columns import decoded_keys, encoded_keys

    if isinstance(keys, range):
        if not pa.types.is_integer(key_type.arrow):
            raise usage.argument(f"cannot select a range of {key_type.ddl()} keys; expected integer keys")
        if len(keys) > _MOST_LISTED:
            return Selection(keys=keys)
        keys = list(keys)
    encoder = key_encoder(key_type)
    canonical = encoded_keys(encoder, keys)
    column = decoded_keys(encoder, canonical)
    groups = None
    if max_parallelism is not None:
        groups = np.unique(HashPlan(encoder.hash_plan).key_groups(canonical, max_parallelism)).astype(
            np.int64
        )
    return Selection(keys=column.cast(key_type.arrow), key_groups=groups)


class StateSource(ABC):
    """One moment of state. Its keyed states are read in batches, any number of times and from any thread."""

    #: The checkpoint, savepoint or query, for messages.
    where: str
    #: None if it is unknown.
    key_type: Type | None
    max_parallelism: int | None
    #: The times by which state of this moment has expired; None without a time.
    now: int | None
    watermark: int | None

    @abstractmethod
    def states(self) -> Mapping[str, StateDescription]:
        """The keyed states by name. Timers are among them."""

    @abstractmethod
    def read(self, name: str, selection: Selection) -> Iterator[pa.RecordBatch]:
        """The rows of a keyed state, each entry once, in any number of batches and in any order of keys.

        The columns are as in data files without ``op``: at least the selected columns, with encoded namespaces.
        Expired entries are included. Closing the iterator frees its resources.
        """

    def rows(self, name: str) -> int | None:
        """The number of rows that `read` gives, if that is known without reading."""
        return None

    def most_rows(self, name: str) -> int:
        """The number of rows or more, as far as it is known without reading."""
        return self.rows(name) or 0

    def namespaces(self, name: str) -> pa.Array | None:
        """The distinct encoded namespaces of a state, and perhaps more; None if all are `VOID`. O(rows)."""
        distinct = pa.array([], pa.binary())
        for batch in self.read(name, Selection(frozenset({"namespace"}))):
            if "namespace" in batch.schema.names:
                distinct = pc.unique(pa.concat_arrays([distinct, batch["namespace"]]))
        return distinct if len(distinct) else None

    def operator_states(self) -> Mapping[str, dict[str, Any]]:
        """The operator states by name, as checkpoints describe them."""
        return {}

    def read_operator(self, name: str) -> Iterator[pa.RecordBatch]:
        """The rows of an operator state, with the column ``subtask`` first."""
        raise NotImplementedError
