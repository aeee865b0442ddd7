"""An auction site's events, as those of the Nexmark benchmark: people come, put things up for auction, and bid.

One stream has all three, and `kind` says which a row is; columns that a kind has not are null. Rows are written in the
order of their arrival, one file after the other. Most come up to `DISORDER` after their time; of bids one in a hundred
comes up to `MUCH_LATER`. `seq` numbers rows as they arrive.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

SECOND = 1000
START = 1_700_000_000_000
DISORDER = 4 * SECOND
MUCH_LATER = 40 * SECOND
#: The delay that lets no row be late; for a job that has late rows, one of `DISORDER` is enough.
PATIENT = MUCH_LATER + SECOND
#: How long an auction takes at most.
LONGEST = 60 * SECOND
CATEGORIES = 5
STATES = ["OR", "ID", "CA", "WA", "NV"]

SCHEMA = pa.schema(
    [
        ("seq", pa.int64()),
        ("kind", pa.string()),
        ("at", pa.int64()),
        ("person", pa.int64()),  # who comes, sells, or bids
        ("auction", pa.int64()),
        ("name", pa.string()),
        ("state", pa.string()),
        ("category", pa.int64()),
        ("expires", pa.int64()),
        ("price", pa.int64()),
    ]
)
DDL = ", ".join(f"{field.name} {'string' if field.type == pa.string() else 'bigint'}" for field in SCHEMA)


def generate(folder: Path, *, files: int, rows: int, seed: int = 7) -> None:
    """Write so many files with so many rows each into ``folder/in``."""
    table = events(files * rows, np.random.default_rng(seed))
    (folder / "in").mkdir(parents=True)
    for number in range(files):
        path = folder / "in" / f"{number:05}.parquet"
        pq.write_table(table.slice(number * rows, rows), path)
        at = START // 1000 + number
        os.utime(path, (at, at))  # Spark takes the oldest first


def events(total: int, rng: np.random.Generator) -> pa.Table:
    """So many events in the order of their arrival: of 50, one is a person, three are auctions, and 46 are bids."""
    people, auctions = max(total // 50, 1), max(3 * total // 50, 1)
    bids = total - people - auctions
    span = 10 * MUCH_LATER
    table = pa.concat_tables(
        [_people(people, span, rng), *_auctions_and_bids(auctions, bids, people, span, rng)]
    )
    at = table["at"].to_numpy()
    later = rng.integers(0, DISORDER, total)
    much = (rng.random(total) < 0.01) & (table["price"].is_valid().to_numpy())
    later[much] = rng.integers(0, MUCH_LATER, int(much.sum()))
    arrived = table.take(np.argsort(at + later, kind="stable"))
    return arrived.set_column(0, SCHEMA.field("seq"), pa.array(np.arange(total)))


def _people(n: int, span: int, rng: np.random.Generator) -> pa.Table:
    at = START + rng.integers(0, span, n)
    states = pa.array(STATES).take(rng.integers(0, len(STATES), n))
    names = [f"person {number}" for number in range(n)]
    return _table("person", at, person=np.arange(n), name=names, state=states)


def _auctions_and_bids(
    auctions: int, bids: int, people: int, span: int, rng: np.random.Generator
) -> tuple[pa.Table, pa.Table]:
    at = START + rng.integers(0, span, auctions)
    takes = rng.integers(LONGEST // 6, LONGEST, auctions)
    on = rng.integers(0, auctions, bids)
    # Some bids come to an auction that is over.
    bid_at = at[on] + (rng.random(bids) * 1.1 * takes[on]).astype(np.int64)
    price = (100 * np.exp(6 * rng.random(bids))).astype(np.int64)
    opened = _table(
        "auction",
        at,
        auction=np.arange(auctions),
        person=rng.integers(0, people, auctions),
        category=rng.integers(0, CATEGORIES, auctions),
        expires=at + takes,
    )
    return opened, _table("bid", bid_at, auction=on, person=rng.integers(0, people, bids), price=price)


def _table(kind: str, at: Any, **columns: Any) -> pa.Table:
    n = len(at)
    there = {"kind": pa.array([kind]).take(np.zeros(n, np.int64)), "at": at, **columns}
    return pa.Table.from_arrays(
        [
            pa.array(there[field.name], field.type) if field.name in there else pa.nulls(n, field.type)
            for field in SCHEMA
        ],
        schema=SCHEMA,
    )
