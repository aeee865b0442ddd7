"""Registers the library's data source with a session."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def register(spark: SparkSession) -> None:
    """Let a session read state: ``spark.read.format("statebackend").load("state of the query")``.

    With Spark 4.2, ``spark.readStream`` streams the change feed: pass ``readChangeFeed``.

    The options have the names of Spark's own source of state: ``batchId`` (default: the newest), ``stateVarName`` (may
    be left out if there is one state), ``readRegisteredTimers``, ``flattenCollectionTypes``, ``readChangeFeed``,
    ``changeStartBatchId`` and ``changeEndBatchId``. ``keys`` is a JSON list of keys to read. Executors need the
    library.

    If ``spark.sql.python.filterPushdown.enabled`` (Spark 4.1) is true when it is registered, filters on the key's field
    read only these keys.
    """
    from statebackend.spark.state_source import FilteringDataSource, StateDataSource

    pushes = spark.conf.get("spark.sql.python.filterPushdown.enabled", "false") == "true"
    spark.dataSource.register(FilteringDataSource if pushes else StateDataSource)
