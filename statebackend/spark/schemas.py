"""The types of an output as Spark's own objects. DDL text would mean whatever the settings of the session say.

``spark.sql.timestampType`` decides what "timestamp" is in a text, and ``spark.sql.ansi.enforceReservedKeywords`` which
names it may have.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from statebackend.types import DecimalType, ListType, MapType, RowType, TupleType, Type

if TYPE_CHECKING:
    from pyspark.sql.types import DataType, StructType

__all__ = ["spark_schema"]

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
