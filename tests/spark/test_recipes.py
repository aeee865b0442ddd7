"""The page of recipes: its queries run as they stand there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from house_tools import ROOT, module
from spark_streams import Collecting, Fails, Stream, Total, numbers

import statebackend as sb

pytestmark = pytest.mark.spark


def blocks(folder: Path) -> list[str]:
    """The code of the page that needs Spark, and the class before it, with paths below the folder."""
    pages = module(ROOT / "tests" / "house" / "test_docs.py", "pages")
    page = (ROOT / "docs/build/recipes.md").read_text(encoding="utf-8")
    for name in ("app/", "backups/"):
        page = page.replace(f'"{name}', f'"{folder}/{name}')
    return [each.code for each in pages.python_blocks(page) if not each.is_session and each.note != "not run"]


def write(folder: Path, number: int, rows: dict[str, list[Any]]) -> None:
    folder.mkdir(exist_ok=True)
    pq.write_table(pa.table(rows), folder / f"{number}.parquet")


def test_the_join_and_a_savepoint_while_it_runs(spark: Any, tmp_path: Path) -> None:
    join, query, _, savepoint = blocks(tmp_path)
    write(tmp_path / "orders", 0, {"customer": [1, 2], "order": [7, 9], "amount": [30, 5]})
    write(tmp_path / "customers", 0, {"id": [1], "name": ["ann"]})
    columns = {
        "orders": "customer bigint, order bigint, amount bigint",
        "customers": "id bigint, name string",
    }
    names: dict[str, Any] = {
        name: spark.readStream.schema(ddl).parquet(str(tmp_path / name)) for name, ddl in columns.items()
    }
    exec(compile(join, "recipes", "exec"), names)
    exec(compile(query, "recipes", "exec"), names)
    try:
        names["query"].processAllAvailable()
        write(tmp_path / "customers", 1, {"id": [2], "name": ["bob"]})
        write(tmp_path / "orders", 1, {"customer": [1, 3], "order": [8, 6], "amount": [12, 1]})
        names["query"].processAllAvailable()
        exec(compile(savepoint, "recipes", "exec"), names)
    finally:
        names["query"].stop()
        names["batches"].close()
    rows = sorted(tuple(row) for row in spark.read.parquet(str(tmp_path / "app/joined")).collect())
    assert rows == [("ann", 7, 30), ("ann", 8, 12), ("bob", 9, 5)]
    kept = sb.tools.state(tmp_path / "backups/2024-03-01", "waiting").to_table().to_pylist()
    assert [(row["key"], row["value"]) for row in kept] == [(3, [{"order": 6, "amount": 1}])]


def test_two_functions_over_one_stream(stream: Stream) -> None:
    sinks = {"totals": Collecting(), "alerts": Collecting(Fails(1))}
    stream.add(numbers(("a", 1)))
    stream.add(numbers(("a", 2)))

    def run() -> Any:
        names: dict[str, Any] = {
            name: stream.batches(Total(), sink, state=stream.folder / name) for name, sink in sinks.items()
        }
        exec(compile(blocks(stream.folder)[2], "recipes", "exec"), names)
        try:
            stream.start(names["both_functions"]).awaitTermination()
        finally:
            names["totals"].close()
            names["alerts"].close()

    with pytest.raises(Exception, match="Outage"):
        run()
    run()
    first, second = (0, [("a", 1)]), (1, [("a", 3)])
    assert sinks["totals"].calls == [first, second, second]
    assert sinks["alerts"].calls == [first, second, second]
