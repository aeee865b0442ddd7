"""Reads operator state from a checkpoint: first settles the share of the instance, then reads only that.

>>> import tempfile
>>> from statebackend.checkpoint import CheckpointStore
>>> with tempfile.TemporaryDirectory() as folder, CheckpointStore(folder) as store:
...     restored_contents(store.open_for_writing().commit(0), 0, 1)
{}
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pyarrow as pa

from statebackend.checkpoint import Checkpoint, StateSnapshot
from statebackend.checkpoint.format import DataFileReader, read_data_file
from statebackend.errors import CorruptCheckpointError, SerializationError
from statebackend.operator_state.element_columns import column_type, to_bytes
from statebackend.operator_state.operator_snapshots import PART, type_roles
from statebackend.operator_state.redistribution import (
    BROADCAST,
    SPLIT,
    UNION,
    OperatorContents,
    redistribute,
)

__all__ = ["operator_snapshots", "restored_contents"]


def restored_contents(checkpoint: Checkpoint, subtask_index: int, parallelism: int) -> OperatorContents:
    """The share of instance ``subtask_index`` of ``parallelism`` in the operator state of a checkpoint.

    Skips snapshots of keyed state. O(rows that the instance gets), and the index of every file.
    """
    snapshots = operator_snapshots(checkpoint)
    if not snapshots:
        return {}
    with ExitStack() as opened:
        saved = [_Saved(checkpoint, snapshot, opened) for snapshot in snapshots]
        share = redistribute(_numbered(saved), parallelism)[subtask_index]
        return {name: _read_state(name, state, saved) for name, state in share.items()}


def operator_snapshots(checkpoint: Checkpoint) -> list[StateSnapshot]:
    """The snapshots of operator state: one of each instance, in order."""
    found = [each for each in checkpoint.snapshots if each.extra.get("part") == PART]
    found.sort(key=lambda each: each.subtask_index)
    wanted = [(number, len(found)) for number in range(len(found))]
    if [(each.subtask_index, each.parallelism) for each in found] != wanted:
        raise CorruptCheckpointError(
            "the checkpoint does not hold the operator state of every instance once",
            code="CORRUPT_CHECKPOINT.INCOMPLETE",
            detail=checkpoint.manifest.name,
            hint="commit the snapshots of all instances together",
        )
    return found


class _Saved:
    """The snapshot of one instance, with its file open."""

    def __init__(self, checkpoint: Checkpoint, snapshot: StateSnapshot, opened: ExitStack) -> None:
        self._reader: DataFileReader | None = None
        self.where = checkpoint.manifest.name
        if len(snapshot.files) > 1:
            raise self._corrupt("operator state of an instance is in more than one file")
        for file in snapshot.files:
            self.where = file.name
            self._reader = read_data_file(opened.enter_context(checkpoint.open_file(file)), file.name)
        self.types: dict[str, dict[str, Any]] = {}
        self.modes: dict[str, str] = {}
        for state in snapshot.states:
            self._add(state)

    def _add(self, state: dict[str, Any]) -> None:
        name, mode, types = state["name"], state["kind"], state.get("types")
        if mode not in (SPLIT, UNION, BROADCAST):
            raise self._corrupt("operator state is of an unknown kind", name)
        roles = type_roles(mode)
        if not isinstance(types, dict) or set(types) != set(roles.values()) or name in self.types:
            raise self._corrupt("operator state is not described as it should be", name)
        if self._reader is not None:
            with self.reading(name):
                wanted = pa.schema([(each, column_type(types[role]).arrow) for each, role in roles.items()])
            if name not in self._reader.states or self._reader.schema(name) != wanted:
                raise self._corrupt("the file does not hold a state as its snapshot describes it", name)
        self.types[name], self.modes[name] = types, mode

    def count(self, name: str) -> int:
        """The number of rows of a state."""
        return 0 if self._reader is None else int(self._reader.rows_of(name)[1].sum())

    def read(self, name: str, start: int, stop: int) -> Iterator[list[list[bytes | None]]]:
        """Rows from ``start`` to ``stop`` of a state, batch by batch: each column as stored values."""
        if self._reader is None or start >= stop:
            return
        types = [self.types[name][role] for role in type_roles(self.modes[name]).values()]
        at = 0
        for rows in self._reader.read(name):
            first, last = max(start - at, 0), min(stop - at, rows.batch.num_rows)
            if first < last:
                batch = rows.batch.slice(first, last - first)
                if batch.column(0).null_count:  # elements, or map keys
                    raise self._corrupt("what a file holds has a null where there can be none", name)
                with self.reading(name):
                    columns = [to_bytes(*pair) for pair in zip(batch.columns, types, strict=True)]
                yield columns
            at += rows.batch.num_rows

    @contextmanager
    def reading(self, name: str) -> Iterator[None]:
        """Report data that matches its checksums but cannot be read: this library did not write it."""
        try:
            yield
        except (SerializationError, OverflowError, pa.ArrowException) as error:
            raise self._corrupt("what a file holds cannot be read as the declared type", name) from error

    def _corrupt(self, message: str, name: str | None = None) -> CorruptCheckpointError:
        return CorruptCheckpointError(
            message, detail=self.where if name is None else f"operator state {name!r}, {self.where}"
        )


def _numbered(saved: list[_Saved]) -> list[OperatorContents]:
    """The contents of the old instances, with numbers in place of the elements, which are not read yet.

    Elements of a state are numbered across all instances; the entries of a broadcast state are the number of the
    instance.
    """
    numbered: list[OperatorContents] = [{} for _ in saved]
    before: dict[str, int] = {}
    for number, (each, contents) in enumerate(zip(saved, numbered, strict=True)):
        for name, mode in each.modes.items():
            config = {
                "kind": "map" if mode == BROADCAST else "list",
                "types": each.types[name],
                "ttl": False,
            }
            contents[name] = {"mode": mode, "config": config}
            if mode == BROADCAST:
                contents[name]["entries"] = number
            else:
                first = before.get(name, 0)
                before[name] = first + each.count(name)
                contents[name]["elements"] = range(first, before[name])
    return numbered


def _read_state(name: str, state: dict[str, Any], saved: list[_Saved]) -> dict[str, Any]:
    if state["mode"] == BROADCAST:
        source = saved[state["entries"]]
        entries: list[Any] = []
        for keys, values in source.read(name, 0, source.count(name)):
            entries += zip(keys, values, strict=True)
        return {**state, "entries": entries}
    numbers = state["elements"]  # consecutive, without a gap
    elements: list[Any] = []
    at = 0
    for source in saved:
        if name not in source.modes or not len(numbers):
            continue
        count = source.count(name)
        for (column,) in source.read(name, max(numbers[0] - at, 0), min(numbers[-1] + 1 - at, count)):
            elements += column
        at += count
    return {**state, "elements": elements}
