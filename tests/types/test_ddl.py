"""Spark DDL strings are read as Spark reads them."""

from __future__ import annotations

import pytest

from statebackend import types as t
from statebackend.errors import UsageError

GOOD = {
    "bigint": t.LONG,
    " LONG ": t.LONG,
    "Int": t.INT,
    "integer": t.INT,
    "smallint": t.SHORT,
    "tinyint": t.BYTE,
    "byte": t.BYTE,
    "double": t.DOUBLE,
    "float": t.FLOAT,
    "real": t.FLOAT,
    "boolean": t.BOOL,
    "string": t.STRING,
    "string collate UTF8_BINARY": t.STRING,
    "char(3)": t.STRING,
    "varchar(10)": t.STRING,
    "binary": t.BYTES,
    "date": t.DATE,
    "timestamp": t.TIMESTAMP,
    "timestamp_ltz": t.TIMESTAMP,
    "timestamp_ntz": t.TIMESTAMP_NTZ,
    "decimal": t.DECIMAL(10, 0),
    "dec(5)": t.DECIMAL(5, 0),
    "numeric( 20 , 3 )": t.DECIMAL(20, 3),
    "array<array<int>>": t.LIST(t.LIST(t.INT)),
    "map<string,struct<a:int>>": t.MAP(t.STRING, t.ROW(a=t.INT)),
    "struct<sum:bigint,n:bigint>": t.ROW(sum=t.LONG, n=t.LONG),
    "STRUCT<a: BIGINT NOT NULL COMMENT 'it''s', b STRING>": t.ROW(a=t.LONG, b=t.STRING),
    "struct<`a b`:int,`c``d`:int>": t.ROW(**{"a b": t.INT, "c`d": t.INT}),
    "struct<Name:string,2nd:int,größe:int>": t.ROW(**{"Name": t.STRING, "2nd": t.INT, "größe": t.INT}),
    "user bigint, item string": t.ROW(user=t.LONG, item=t.STRING),
    "date bigint": t.ROW(date=t.LONG),
    "date date not null, timestamp timestamp": t.ROW(date=t.DATE, timestamp=t.TIMESTAMP),
    "map map<int,int>": t.ROW(map=t.MAP(t.INT, t.INT)),
    "a: int": t.ROW(a=t.INT),
}

BAD = {
    "": "it is empty",
    "  ": "it is empty",
    "novelty": "unknown type name",
    "struct<a:novelty>": "unknown type name 'novelty'",
    "array<int": "expected '>' at the end",
    "array<int>>": "unexpected '>' after the type",
    "array": "expected '<' at the end",
    "map<int>": "expected ','",
    "struct<a>": "unknown type name",
    "struct<a:int,>": "expected a field name",
    "decimal(a)": "expected a number",
    "decimal(40)": "precision or scale",
    "interval day": "cannot be stored",
    "variant": "cannot be stored",
    "struct<v:variant>": "cannot be stored",
    "string collate UTF8_LCASE": "collation UTF8_LCASE is not supported",
    "int; drop table": "unexpected character",
    "struct<a:int comment 3>": "a comment is a quoted string",
    "struct<a:int,a:int>": "two fields of the same name",
    "array<" * 100 + "int" + ">" * 100: "nested too deeply",
}


@pytest.mark.parametrize("text", GOOD)
def test_ddl_is_read(text: str) -> None:
    assert t.of(text) == GOOD[text]


@pytest.mark.parametrize("text", BAD)
def test_bad_ddl_is_refused_with_the_reason(text: str) -> None:
    with pytest.raises(UsageError, match=BAD[text]):
        t.of(text)


def test_odd_names_are_quoted() -> None:
    assert t.ROW(**{"a b": int, "c`d": int, "e": int}).ddl() == "struct<`a b`:bigint,`c``d`:bigint,e:bigint>"
