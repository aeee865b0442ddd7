"""A keyed state in dicts, and the data files that say it: bases, and what has changed since."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pyarrow as pa

import statebackend as sb
from statebackend.checkpoint import CheckpointStore, StateSnapshot, StoredFile
from statebackend.checkpoint.format import COLUMNS, GroupedBatch, Op, Section, write_data_file
from statebackend.keys import encode_namespace
from statebackend.types import of

GROUPS = 16


def group_of(key: Any) -> int:
    return sum(repr(key).encode()) % GROUPS


class Model:
    """A keyed state in dicts, and the rows that say what has changed since they were last written."""

    def __init__(
        self, kind: str, key_type: Any, value_type: Any, *, map_key_type: Any = int, ttl: bool = False
    ) -> None:
        self.kind, self.ttl = kind, ttl
        self.types = {"key": of(key_type), "map_key": of(map_key_type), "value": of(value_type)}
        #: By (key, namespace): a value, a list of (element, timestamp), or a dict.
        self.now: dict[Any, Any] = {}
        self.written: dict[Any, Any] = {}
        self.cleared: set[Any] = set()
        self.has_namespaces = False

    def change(
        self, rng: random.Random, keys: Sequence[Any], namespaces: Sequence[Any], make: Any, time: int
    ) -> None:
        place = rng.choice(keys), rng.choice(namespaces)
        self.has_namespaces |= place[1] is not sb.VOID
        if rng.random() < 0.2:
            self.now.pop(place, None)
            self.cleared.add(place)
        elif self.kind == "map":
            entries = self.now.setdefault(place, {})
            for _ in range(rng.randrange(1, 4)):
                entries[rng.randrange(6)] = (None if rng.random() < 0.2 else make(rng), time)
            if rng.random() < 0.3:
                entries.pop(rng.choice(list(entries)))
            if not entries:
                del self.now[place]
        elif self.kind == "list":
            elements = [(make(rng), time) for _ in range(rng.randrange(1, 4))]
            if place in self.now and rng.random() < 0.7:
                self.now[place] = self.now[place] + elements
            else:
                self.now[place] = elements
        else:
            self.now[place] = (make(rng), time)

    def rows(self, is_base: bool) -> list[dict[str, Any]]:
        """Rows of a base, or of what has changed; from now on they count as written."""
        before = {} if is_base else self.written
        rows: list[dict[str, Any]] = []
        for place in {**before, **self.now}:
            old, new = before.get(place), self.now.get(place)
            if self.kind == "map":
                if old is not None and (place in self.cleared or new is None):
                    rows.append(self._row(place, Op.CLEAR))
                    old = None
                for map_key in {**(old or {}), **(new or {})}:
                    if map_key not in (new or {}):
                        rows.append(self._row(place, Op.REMOVE, map_key))
                    elif map_key not in (old or {}) or old[map_key] != new[map_key]:
                        rows.append(self._row(place, Op.PUT, map_key, new[map_key]))
            elif new is None:
                rows.append(self._row(place, Op.REMOVE))
            elif self.kind == "list" and old is not None and new[: len(old)] == old:
                if len(new) > len(old):
                    rows.append(self._row(place, Op.APPEND, None, new[len(old) :]))
            elif old != new:
                rows.append(self._row(place, Op.PUT, None, new))
        self.written = {place: dict(v) if self.kind == "map" else v for place, v in self.now.items()}
        self.cleared = set()
        phase = {Op.CLEAR: 0, Op.REMOVE: 0, Op.PUT: 1, Op.APPEND: 2}
        rows.sort(key=lambda row: (group_of(row["key"]), phase[row["op"]]))
        return rows

    def _row(self, place: Any, op: Op, map_key: Any = None, value: Any = None) -> dict[str, Any]:
        key, namespace = place
        row = {"key": key, "namespace": encode_namespace(namespace), "map_key": map_key, "op": op}
        if value is None:
            return {**row, "value": None, "timestamp": None}
        if self.kind == "list":
            return {**row, "value": [v for v, _ in value], "timestamp": [t for _, t in value]}
        return {**row, "value": value[0], "timestamp": value[1]}

    def schema(self, *, has_ops: bool) -> pa.Schema:
        is_list = self.kind == "list"
        value = self.types["value"].arrow
        types = {
            "key": self.types["key"].arrow,
            "namespace": pa.binary() if self.has_namespaces else None,
            "map_key": self.types["map_key"].arrow if self.kind == "map" else None,
            "value": pa.list_(value) if is_list else value,
            "timestamp": (pa.list_(pa.int64()) if is_list else pa.int64()) if self.ttl else None,
            "op": pa.uint8() if has_ops else None,
        }
        return pa.schema([(name, types[name]) for name in COLUMNS if types[name] is not None])

    def section(self, name: str, *, is_base: bool, within: range = range(GROUPS)) -> Section:
        rows = [row for row in self.rows(is_base) if group_of(row["key"]) in within]
        schema = self.schema(has_ops=any(row["op"] != Op.PUT for row in rows))
        given = [{each: row[each] for each in schema.names} for row in rows]
        batch = pa.RecordBatch.from_pylist(given, schema)
        grouped = GroupedBatch.of(batch, [group_of(row["key"]) for row in rows])
        return Section(name, schema, [grouped] if rows else [])

    def described(self, name: str) -> dict[str, Any]:
        roles = {"list": ["element"], "map": ["key", "value"], "folding": ["accumulator"]}.get(
            self.kind, ["value"]
        )
        types = {role: self.types["map_key" if role == "key" else "value"].config() for role in roles}
        return {"name": name, "kind": self.kind, "types": types, "ttl": self.ttl}

    def expected(self) -> list[tuple[Any, ...]]:
        found = []
        for (key, namespace), stored in self.now.items():
            if self.kind == "map":
                found += [(key, namespace, map_key, value, time) for map_key, (value, time) in stored.items()]
            elif self.kind == "list":
                found.append((key, namespace, None, [v for v, _ in stored], [t for _, t in stored]))
            else:
                found.append((key, namespace, None, *stored))
        return sorted(found, key=repr)


def shown(table: pa.Table, ttl: bool) -> list[tuple[Any, ...]]:
    """The rows of a table in the form of `Model.expected`; windows come back as what they were."""
    rows = []
    for row in table.to_pylist():
        namespace = row.get("namespace")
        if isinstance(namespace, dict):
            namespace = sb.TimeWindow(**namespace)
        key = row["key"] if "key" in row else (row["a"], row["b"])  # the fields of a key that is a row
        time = row["timestamp"] if ttl else None
        rows.append(
            (key, sb.VOID if namespace is None else namespace, row.get("map_key"), row["value"], time)
        )
    return sorted(rows, key=repr)


def without_times(expected: list[tuple[Any, ...]], ttl: bool) -> list[tuple[Any, ...]]:
    return expected if ttl else sorted(((*row[:-1], None) for row in expected), key=repr)


def write(
    store: CheckpointStore, checkpoint_id: int, kind: str, sections: list[Section], **options: Any
) -> StoredFile:
    with store.begin_snapshot(checkpoint_id).create(kind, **options) as file:
        write_data_file(file, sections)
        return file.finish()


def keyed_snapshot(
    store: CheckpointStore,
    checkpoint_id: int,
    files: Sequence[StoredFile],
    states: list[dict[str, Any]],
    key_type: Any = int,
    **options: Any,
) -> StateSnapshot:
    return StateSnapshot(
        checkpoint_id,
        store.epoch,
        files=tuple(files),
        states=tuple(states),
        extra={"part": "keyed", "key_type": of(key_type).config()},
        **options,
    )
