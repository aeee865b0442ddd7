"""Deltas merged into one have the effect of all of them, one after the other."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from statebackend.checkpoint.format import Op
from statebackend.checkpoint.keyed import chain
from statebackend.checkpoint.keyed.compaction import applied, merged
from statebackend.checkpoint.keyed.row_source import RANK

pytestmark = pytest.mark.checked

OPS = {
    "value": [Op.PUT, Op.PUT, Op.REMOVE],
    "map": [Op.PUT, Op.PUT, Op.PUT, Op.REMOVE, Op.CLEAR],
    "list": [Op.PUT, Op.APPEND, Op.APPEND, Op.APPEND, Op.REMOVE],
}


def rows_of(
    kind: str, rng: random.Random, n: int, *, with_namespace: bool, is_base: bool = False
) -> pa.Table:
    rows: list[dict[str, Any]] = []
    for _ in range(n):
        op = Op.PUT if is_base else rng.choice(OPS[kind])
        row: dict[str, Any] = {"key": rng.randrange(6), "op": op.value}
        if with_namespace:
            row["namespace"] = rng.choice([b"", b"w"])
        has_value = op in (Op.PUT, Op.APPEND)
        if kind == "map":
            row["map_key"] = None if op == Op.CLEAR else rng.randrange(4)
        if kind == "list":
            row["value"] = [rng.randrange(1000) for _ in range(rng.randrange(1, 4))] if has_value else None
            row["timestamp"] = [value + 5 for value in row["value"]] if has_value else None
        else:
            row["value"] = rng.randrange(1000) if has_value else None
            row["timestamp"] = row["value"]
        rows.append(row)
    value = pa.list_(pa.int64()) if kind == "list" else pa.int64()
    types: dict[str, pa.DataType] = {"key": pa.int64()}
    if with_namespace:
        types["namespace"] = pa.binary()
    if kind == "map":
        types["map_key"] = pa.int64()
    types |= {"value": value, "timestamp": value, "op": pa.uint8()}
    if is_base:  # every place once
        names = [name for name in ("key", "namespace", "map_key") if name in types]
        rows = list({tuple(row[name] for name in names): row for row in rows}.values())
    return pa.Table.from_pylist(rows, pa.schema(types))


def as_state(kind: str, table: pa.Table) -> Any:
    """What the rows mean: entries of one map in their order, anything else in none."""
    state: dict[Any, Any] = {}
    for row in table.to_pylist():
        place = (row["key"], row.get("namespace", b""))
        held = (row["value"], row["timestamp"])
        if kind == "map":
            state.setdefault(place, []).append((row["map_key"], held))
        else:
            assert place not in state
            state[place] = held
    return state


@pytest.mark.parametrize("kind", OPS)
def test_merging_changes_nothing(kind: str, rng: random.Random) -> None:
    for _ in range(120):
        base = rows_of(kind, rng, rng.randrange(12), with_namespace=rng.random() < 0.5, is_base=True)
        with_namespace = rng.random() < 0.5
        deltas = [
            rows_of(kind, rng, rng.randrange(15), with_namespace=with_namespace and at > 0)
            for at in range(rng.randrange(1, 5))
        ]
        joined = merged(kind, pa.concat_tables(deltas, promote_options="default"))
        assert "namespace" not in joined.schema.names or joined["namespace"].null_count == 0
        expected = as_state(kind, applied(kind, [base, *deltas]))
        assert as_state(kind, applied(kind, [base, joined])) == expected
        assert joined.num_rows <= sum(each.num_rows for each in deltas)
        ranks = RANK[joined["op"].to_numpy()]
        assert np.all(np.diff(ranks) >= 0)
        # To merge what was merged with what comes next has the same effect, too.
        later = rows_of(kind, rng, 8, with_namespace=with_namespace)
        again = merged(kind, pa.concat_tables([joined, later], promote_options="default"))
        assert as_state(kind, applied(kind, [base, again])) == as_state(
            kind, applied(kind, [base, *deltas, later])
        )


def test_files_are_few_and_written_seldom(rng: random.Random) -> None:
    """Of 100,000 deltas each byte is written once for each tier, and no more than seven files of a tier stay."""
    for size in (1_000, 5_000, 8_000, 9_000):
        sizes: list[int] = []
        written = given = longest = 0
        for _ in range(20_000):
            own = int(size * rng.uniform(0.5, 1.5))
            given += own
            sizes.append(own)
            run = chain.run_to_merge(sizes, 1 << 40)
            if run is not None:
                made = sum(sizes[at] for at in run)
                written += made
                sizes[run.start : run.stop] = [made]
            longest = max(longest, len(sizes))
        assert longest <= 60
        assert written / given <= 8
