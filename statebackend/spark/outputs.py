"""The way of a committed output to the sink: Spark reads its files, or this process reads them for Spark.

Spark cannot read the files of an encrypted store, nor those at an address for which it has no connector. This process
can. Which way outputs go is found out when a query starts.

>>> Outputs("the store is encrypted")
<outputs through the driver: the store is encrypted>
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pyarrow as pa

from statebackend.checkpoint import CheckpointReader
from statebackend.checkpoint.files import scheme_of
from statebackend.runtime import Committed
from statebackend.spark.session import output_frame, reading_error, settings
from statebackend.types import DecimalType, ListType, MapType, RowType, TupleType, Type

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import DataType, StructType

__all__ = ["Outputs"]

#: The classes of pyspark for types without parts. PICKLE and the types of users' serializers are bytes.
_CLASSES = {
    "LONG": "LongType",
    "INT": "IntegerType",
    "SHORT": "ShortType",
    "BYTE": "ByteType",
    "DOUBLE": "DoubleType",
    "FLOAT": "FloatType",
    "BOOL": "BooleanType",
    "STRING": "StringType",
    "BYTES": "BinaryType",
    "DATE": "DateType",
    "TIMESTAMP": "TimestampType",
    "TIMESTAMP_NTZ": "TimestampNTZType",
    "PICKLE": "BinaryType",
    "CUSTOM": "BinaryType",
}


def spark_schema(row_type: RowType) -> StructType:
    """The ``StructType`` of rows of this type; every field may be null."""
    return _struct(row_type.names, row_type.types)


def _struct(names: tuple[str, ...], kinds: tuple[Type, ...]) -> StructType:
    from pyspark.sql import types

    fields = zip(names, kinds, strict=True)
    return types.StructType([types.StructField(name, _spark_type(kind)) for name, kind in fields])


def _spark_type(kind: Type) -> DataType:
    from pyspark.sql import types

    if isinstance(kind, RowType):
        return _struct(kind.names, kind.types)
    if isinstance(kind, TupleType):
        return _struct(tuple(field.name for field in kind.arrow), kind.types)
    if isinstance(kind, ListType):
        return types.ArrayType(_spark_type(kind.element))
    if isinstance(kind, MapType):
        return types.MapType(_spark_type(kind.key), _spark_type(kind.value))
    if isinstance(kind, DecimalType):
        return types.DecimalType(kind.precision, kind.scale)
    made: DataType = getattr(types, _CLASSES[kind.name])()
    return made


_log = logging.getLogger("statebackend.spark")

#: Rows in a partition of a frame. The session may say "no limit", which PySpark does not take here.
_SETTINGS = {"spark.sql.execution.arrow.maxRecordsPerBatch": "10000"}


class Outputs:
    """Makes the frames for a sink. ``why_not_spark`` is the reason why Spark does not read the files; None: it does.

    >>> Outputs(None)
    <outputs as files that Spark reads>
    """

    def __init__(self, why_not_spark: str | None) -> None:
        self._why_not_spark = why_not_spark

    def __repr__(self) -> str:
        reason = self._why_not_spark
        way = "as files that Spark reads" if reason is None else f"through the driver: {reason}"
        return f"<outputs {way}>"

    @classmethod
    def of(cls, store: CheckpointReader, frame: DataFrame) -> Outputs:
        """Find out if Spark can read the store, and say so in the log. At other addresses than paths, runs a small job.

        That executors can read a path is checked elsewhere.
        """
        why_not_spark = None
        if store.encryption is not None:
            why_not_spark = "the store is encrypted"
        elif scheme_of(store.address) not in (None, "file"):
            error = reading_error(frame, store.address_of_metadata())
            if error is not None:
                _log.debug("Spark cannot read %s", store.address, exc_info=error)
                why_not_spark = f"Spark cannot read {scheme_of(store.address)}:// ({type(error).__name__})"
        made = cls(why_not_spark)
        _log.info("%s: %r", store.address, made)
        return made

    def frame(self, frame: DataFrame, row_type: RowType, committed: Committed, name: str) -> DataFrame:
        """A frame over the committed output of this name, in the session of another frame.

        Rows and order are the same either way. Memory, through the driver: the output, in this process and in Spark's
        driver.
        """
        files, schema = committed.outputs.get(name, ()), spark_schema(row_type)
        if self._why_not_spark is None:
            return output_frame(frame, schema, [committed.checkpoint.address(file) for file in files])
        tables = [committed.read_output(file) for file in files]
        session = frame.sparkSession
        with settings(session, _SETTINGS):
            return session.createDataFrame(pa.concat_tables(tables) if tables else [], schema)
