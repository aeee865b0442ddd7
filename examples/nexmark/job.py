"""What a job is, for those who run all six: its function in both forms, its query, and the SQL that says the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

import statebackend as sb

#: The two forms of a job.
ROWS, COLUMNS = "rows", "columns"
FORMS = (ROWS, COLUMNS)


class Job(NamedTuple):
    """A job in both forms. Options are those of `sb.spark.stateful`."""

    title: str
    #: By form: the function, and the options that this form alone has.
    functions: Mapping[str, Callable[[], sb.KeyedProcessFunction | sb.BatchProcessFunction]]
    keys: Mapping[str, Any]
    #: The condition on events, and the columns that the job gets of them.
    where: str
    columns: tuple[str, ...]
    schema: Any
    #: By output, the SQL for what it is to be over all events, given the views `EVENTS` and `BATCHES`.
    sql: Mapping[str, str]
    options: Mapping[str, Any] = {}
    #: Columns by which a later row of the main output replaces an earlier one; None: each stands for itself.
    replaced_by: tuple[str, ...] | None = None

    @property
    def outputs(self) -> tuple[str, ...]:
        """The names of its outputs."""
        return tuple(self.schema) if isinstance(self.schema, dict) else ("main",)


def groups(keys: pa.Array) -> tuple[pa.Array, Any]:
    """The distinct values of a column, and for each row the number of its value among them."""
    encoded = keys.dictionary_encode()
    return encoded.dictionary, encoded.indices.to_numpy(zero_copy_only=False)


def begins(sorted_groups: Any) -> Any:
    """Where a group begins, in rows that are sorted by group."""
    first = np.ones(len(sorted_groups), np.bool_)
    first[1:] = sorted_groups[1:] != sorted_groups[:-1]
    return first


def elements(lists: pa.ListArray) -> tuple[pa.StructArray, Any]:
    """The elements of all lists, and for each the number of its list."""
    return lists.flatten(), pa.compute.list_parent_indices(lists).to_numpy(zero_copy_only=False)
