"""Spark's own type objects are understood, and read DDL as we do."""

from __future__ import annotations

from typing import Any

import pytest

from statebackend import types as t
from statebackend.errors import UsageError


@pytest.fixture
def spark_types() -> Any:
    """Here and not at the top: a run without Spark has to read this file, too."""
    from pyspark.sql import types

    return types


@pytest.mark.spark
def test_spark_type_objects(spark_types: Any) -> None:
    s = spark_types
    simple = {
        s.LongType: t.LONG,
        s.IntegerType: t.INT,
        s.ShortType: t.SHORT,
        s.ByteType: t.BYTE,
        s.DoubleType: t.DOUBLE,
        s.FloatType: t.FLOAT,
        s.BooleanType: t.BOOL,
        s.StringType: t.STRING,
        s.BinaryType: t.BYTES,
        s.DateType: t.DATE,
        s.TimestampType: t.TIMESTAMP,
        s.TimestampNTZType: t.TIMESTAMP_NTZ,
        s.DecimalType: t.DECIMAL(10, 0),
    }
    for cls, wanted in simple.items():
        assert t.of(cls) == wanted
        assert t.of(cls()) == wanted
    assert t.of(s.DecimalType(20, 3)) == t.DECIMAL(20, 3)
    assert t.of(s.VarcharType(3)) == t.STRING
    struct = (
        s.StructType().add("a", s.ArrayType(s.LongType())).add("b", s.MapType(s.StringType(), s.DateType()))
    )
    assert t.of(struct) == t.ROW(a=t.LIST(t.LONG), b=t.MAP(t.STRING, t.DATE))


@pytest.mark.spark
@pytest.mark.parametrize("name", ["NullType", "VariantType", "DayTimeIntervalType", "CalendarIntervalType"])
def test_spark_types_without_stored_form_are_refused(name: str, spark_types: Any) -> None:
    with pytest.raises(UsageError, match=f"Spark type {name}"):
        t.of(getattr(spark_types, name)())


@pytest.mark.spark
def test_a_collated_string_is_refused(spark_types: Any) -> None:
    with pytest.raises(UsageError, match="collation UTF8_LCASE is not supported"):
        t.of(spark_types.StringType("UTF8_LCASE"))


@pytest.mark.spark
def test_spark_reads_ddl_as_we_do(spark: Any, spark_types: Any) -> None:
    texts = [
        "struct<sum:bigint,n:bigint>",
        "STRUCT<a: BIGINT NOT NULL COMMENT 'it''s', b STRING>",
        "struct<`a b`:int,`c``d`:int>",
        "array<map<string,decimal(20,3)>>",
        "user bigint, item string",
        "date bigint",
        "date date not null, timestamp timestamp",
        "map map<int,int>",
        "a: int",
        "dec(5)",
        "timestamp_ltz",
        "2nd int",
    ]
    for text in texts:
        parsed = spark_types._parse_datatype_string(text)
        assert t.of(parsed) == t.of(text), text
        assert t.of(spark_types._parse_datatype_string(t.of(text).ddl())) == t.of(text), text
