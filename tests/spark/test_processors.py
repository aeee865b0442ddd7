"""Processors of `transformWithState` give the same through Spark's operator and through ours, batch by batch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from processor_pairs import Pair, Query, table


def totals() -> Any:
    from pyspark.sql import Row
    from pyspark.sql.streaming import StatefulProcessor

    class Totals(StatefulProcessor):
        def init(self, handle: Any) -> None:
            self.state = handle.getValueState("state", "total bigint, n bigint")

        def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
            total, n = self.state.get() if self.state.exists() else (0, 0)
            for row in rows:
                total, n = total + row.n, n + 1
            self.state.update((total, n))
            yield Row(k=key[0], text=repr((total, n)))

    return Totals()


def test_totals_are_those_of_sparks_operator(spark: Any, tmp_path: Path) -> None:
    query = Query(spark, tmp_path)
    keys = ("a", "b", None)
    for batch in range(3):
        query.add(table([{"k": keys[n % 3], "n": n} for n in range(batch, 7)]))
    given = query.compare(Pair(totals()))
    assert [sum(rows.values()) for rows in given.values()] == [3, 3, 3]
    query.add(table([{"k": "a", "n": 100}]))
    query.compare(Pair(totals()))  # a restart, with the state that was left
