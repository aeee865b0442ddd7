"""A real local Spark session for tests; one for the whole run, as Spark itself has it."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

needs_java = pytest.mark.skipif(shutil.which("java") is None, reason="needs Java 17 or newer")


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A session on two threads; skipped without Java. Spark stops it when the process ends."""
    from pyspark.sql import SparkSession  # takes a while

    if shutil.which("java") is None:
        pytest.skip("needs Java 17 or newer")
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # else Spark takes the first python3 of the path
    return (
        SparkSession.builder.master("local[2]")
        .appName("statebackend tests")
        .config("spark.ui.enabled", "false")
        .config("spark.sql.shuffle.partitions", "2")  # of few rows; Spark makes 200
        .config("spark.sql.warehouse.dir", str(tmp_path_factory.mktemp("warehouse")))
        .getOrCreate()
    )


@contextmanager
def settings(spark: Any, given: dict[str, str]) -> Iterator[None]:
    """Give the session settings; it has its own again after the block."""
    before = {name: spark.conf.get(name, None) for name in given}
    for name, value in given.items():
        spark.conf.set(name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            spark.conf.unset(name) if value is None else spark.conf.set(name, value)
