"""Sinks that know which batches they have, so that each batch is there once."""

from statebackend.spark.sinks.delta_table import delta
from statebackend.spark.sinks.parquet_sink import parquet

__all__ = ["delta", "parquet"]
