"""Payments by card, checked against rules that change while the query runs: broadcast rows and a map state.

    python examples/spark/card_fraud.py

Rules come in the same stream as payments, marked by a boolean column, and take effect with their batch: the largest
payment, and in how many countries a card may be used, which becomes fewer in the middle of the stream. What each card
has spent in each country is a map state; the rules are broadcast state. The alerts of all batches are compared with
those of a loop over the whole input.
"""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import statebackend as sb

COLUMNS = pa.schema(
    [
        ("card", pa.string()),
        ("cents", pa.int64()),
        ("country", pa.string()),
        ("is_rule", pa.bool_()),
        ("rule", pa.string()),
        ("value", pa.int64()),
    ]
)
COUNTRIES = ["DE", "FR", "IT", "PL", "ES"]
Alert = tuple[str, str, int]


class Fraud(sb.KeyedProcessFunction):
    """Gives out an alert for each payment that breaks a rule."""

    def open(self, ctx: sb.FunctionContext) -> None:
        self.spent = ctx.get_map_state(sb.MapStateDescriptor("spent", str, int))
        self.rules = ctx.operator_backend.get_broadcast_state(sb.MapStateDescriptor("rules", str, int))

    def process_broadcast(self, row: Any, ctx: sb.FunctionContext) -> None:
        self.rules.put(row.rule, row.value)

    def process_element(self, row: Any, ctx: sb.FunctionContext) -> Iterator[Alert]:
        if row.cents > self.rules["largest payment"]:
            yield row.card, "largest payment", row.cents
        is_new = row.country not in self.spent
        self.spent[row.country] = self.spent.get(row.country, 0) + row.cents
        if is_new:
            countries = sum(1 for _ in self.spent)
            if countries > self.rules["countries"]:
                yield row.card, "countries", countries


def generate(folder: Path, batches: int, payments: int, cards: int) -> None:
    rng = np.random.default_rng(11)
    rules = {0: {"largest payment": 90_000, "countries": 3}, batches // 2: {"countries": 2}}
    (folder / "in").mkdir(parents=True)
    for batch in range(batches):
        rows: list[dict[str, Any]] = [
            {"card": f"c{card}", "cents": int(cents), "country": COUNTRIES[where], "is_rule": False}
            for card, cents, where in zip(
                rng.integers(0, cards, payments).tolist(),
                rng.integers(100, 91_000, payments).tolist(),
                np.minimum(rng.poisson(0.3, payments), len(COUNTRIES) - 1).tolist(),
                strict=True,
            )
        ]
        rows += [{"is_rule": True, "rule": rule, "value": n} for rule, n in rules.get(batch, {}).items()]
        path = folder / "in" / f"{batch:05}.parquet"
        pq.write_table(pa.Table.from_pylist(rows, COLUMNS), path)
        os.utime(path, (1_700_000_000 + batch, 1_700_000_000 + batch))  # Spark takes the oldest first


def expected(folder: Path) -> list[Alert]:
    """The alerts of a plain loop, batch by batch with the rules of the batch first."""
    alerts: list[Alert] = []
    rules: dict[str, int] = {}
    seen: dict[str, set[str]] = {}
    for path in sorted((folder / "in").iterdir()):
        rows = pq.read_table(path).to_pylist()
        rules.update({row["rule"]: row["value"] for row in rows if row["is_rule"]})
        for row in rows:
            if row["is_rule"]:
                continue
            card, cents = row["card"], row["cents"]
            if cents > rules["largest payment"]:
                alerts.append((card, "largest payment", cents))
            known = len(seen.setdefault(card, set()))
            seen[card].add(row["country"])
            if len(seen[card]) > max(known, rules["countries"]):
                alerts.append((card, "countries", len(seen[card])))
    return alerts


def run(spark: Any, folder: Path) -> list[Alert]:
    """Run the query over the input that is there; its alerts in order."""
    alerts: list[Alert] = []

    def sink(frame: Any, batch_id: int) -> None:
        new = [tuple(row) for row in frame.collect()]
        alerts.extend(new)
        by_rule = Counter(rule for _, rule, _ in new)
        told = ", ".join(f"{by_rule[rule]:,} for {rule}" for rule in ("largest payment", "countries"))
        print(f"batch {batch_id}: {len(new):,} alerts, {told}", flush=True)

    batches = sb.spark.stateful(
        Fraud(),
        key="card",
        schema="card string, rule string, value bigint",
        state=folder / "state",
        broadcast_when="is_rule",
        sink=sink,
    )
    schema = spark.read.parquet(str(folder / "in")).schema
    query = (
        spark.readStream.schema(schema)
        .option("maxFilesPerTrigger", 1)
        .parquet(str(folder / "in"))
        .writeStream.foreachBatch(batches)
        .option("checkpointLocation", str(folder / "stream"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    batches.close()
    return alerts


def main() -> None:
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
    spark = builder.config("spark.ui.showConsoleProgress", "false").getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    sizes = {"batches": 10, "payments": 20_000, "cards": 5_000}
    print("{batches} batches of {payments:,} payments with {cards:,} cards\n".format(**sizes))
    with tempfile.TemporaryDirectory(prefix="statebackend-fraud-") as name:
        folder = Path(name)
        generate(folder, **sizes)
        alerts = run(spark, folder)
        right = alerts == expected(folder)
    spark.stop()
    print(f"\n{len(alerts):,} alerts; the same as those of a loop over the whole input: {right}")
    if not right:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
