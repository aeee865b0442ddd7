"""Named aggregates and reductions give what Spark's own aggregates give, to the last bit."""

from __future__ import annotations

import decimal
import functools
import math
from typing import Any

import pytest
from local_spark import spark
from type_samples import same

import statebackend as sb

__all__ = ["spark"]
pytestmark = pytest.mark.spark

NAN, INF = float("nan"), float("inf")

#: By Spark type: groups of values, each aggregated in its order.
GROUPS: dict[str, list[list[Any]]] = {
    "bigint": [[3, -7, 11, 2**40], [5], [1, 2], [2**62, -(2**62), 17], [-1, -1, -1]],
    "int": [[3, -7, 11], [2**31 - 1, -(2**31)]],
    "smallint": [[1, 2, 4], [-(2**15)]],
    "tinyint": [[100, 20, -5], [-128]],
    "double": [
        [0.1, 0.2, 0.3, 1e9],
        [1.0, NAN, INF],
        [INF, -INF],
        [-0.0, 0.0],
        [0.0, -0.0],
        [5.0],
        [1e9 + 4, 1e9 + 7, 1e9 + 13, 1e9 + 16],
        [NAN],
        [1e308, 1e308],
    ],
    "float": [[0.5, 0.25, 3.0], [NAN, 1.0], [1.5]],
    "decimal(10,2)": [[decimal.Decimal("1.50"), decimal.Decimal("-2.25"), decimal.Decimal("7.00")]],
    "string": [["b", "é", "z", "Z"], ["", "a"]],
    "binary": [[b"\xff", b"\x01", b""]],
    "boolean": [[False, True], [True]],
    "struct<a:double,b:string>": [[(1.0, "b"), (1.0, None), (NAN, "a"), (None, "z")]],
}
NUMBERS = ("bigint", "int", "smallint", "tinyint", "double", "float")
CASES = [
    *((name, spark_type) for name in ("avg", "variance", "stddev", "sum") for spark_type in NUMBERS),
    *((name, spark_type) for name in ("count", "min", "max") for spark_type in GROUPS),
    ("sum", "decimal(10,2)"),
    ("variance", "decimal(10,2)"),
]
IN_SPARK = {"variance": "var_samp", "stddev": "stddev_samp"}


@functools.cache
def spark_results(spark: Any, spark_type: str) -> list[Any]:
    """A row for each group, with all aggregates. One partition, so that Spark adds in order and never merges."""
    from pyspark.sql.functions import expr

    rows = [(group, value) for group, values in enumerate(GROUPS[spark_type]) for value in values]
    frame = spark.createDataFrame(rows, f"g int, v {spark_type}").coalesce(1)
    asked = [expr(f"{IN_SPARK.get(name, name)}(v) AS {name}") for name, each in CASES if each == spark_type]
    return sorted(frame.groupBy("g").agg(*asked).collect(), key=lambda row: row.g)


def plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(plain, value))
    return bytes(value) if isinstance(value, bytearray) else value


@pytest.mark.parametrize(("name", "spark_type"), CASES)
def test_results_are_sparks(keyed: sb.KeyedStateBackend, spark: Any, name: str, spark_type: str) -> None:
    aggregating = keyed.get_aggregating_state(sb.AggregatingStateDescriptor("a", name, spark_type))
    reducing = None
    if name in ("sum", "min", "max"):
        reducing = keyed.get_reducing_state(sb.ReducingStateDescriptor("r", name, spark_type))
    wanted = [plain(row[name]) for row in spark_results(spark, spark_type)]
    for group, (values, expected) in enumerate(zip(GROUPS[spark_type], wanted, strict=True)):
        keyed.set_current_key(group)
        for value in values:
            aggregating.add(value)
            if reducing is not None:
                reducing.add(value)
        assert as_spark(aggregating.get(), expected), group
        assert reducing is None or as_spark(reducing.get(), expected), group


def as_spark(ours: Any, sparks: Any) -> bool:
    """The same to the last bit; but Spark's group-by may give either zero."""
    if isinstance(ours, float) and ours == 0.0 and isinstance(sparks, float):
        return sparks == 0.0
    if isinstance(ours, decimal.Decimal):
        return bool(ours == sparks)
    if isinstance(ours, float) and math.isnan(ours):
        return isinstance(sparks, float) and math.isnan(sparks)
    return same(ours, sparks)
