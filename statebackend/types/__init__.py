"""Types of keys, values and fields: constants, constructors, and `of`, which accepts every other notation.

>>> from statebackend import types
>>> types.of(int) is types.LONG
True
>>> types.of("struct<sum:bigint,n:bigint>")
ROW(sum=LONG, n=LONG)
>>> types.LIST(types.STRING).ddl()
'array<string>'
"""

# For the rest of the package.
from statebackend.types import convert as convert, layout as layout
from statebackend.types.convert import is_not_a_time as is_not_a_time
from statebackend.types.model import (
    ACC as ACC,
    BOOL,
    BYTE,
    BYTES,
    DATE,
    DOUBLE,
    FLOAT,
    IN as IN,
    INT,
    LONG,
    OUT as OUT,
    PICKLE,
    SCALARS as SCALARS,
    SHORT,
    STRING,
    TIMESTAMP,
    TIMESTAMP_NTZ,
    A as A,
    CustomType,
    DecimalType,
    K as K,
    ListType,
    MapType,
    Notation as Notation,
    PrimitiveType,
    RowType,
    Subscriptable as Subscriptable,
    T as T,
    TupleType,
    Type,
    V as V,
)
from statebackend.types.normalise import DECIMAL, LIST, MAP, ROW, TUPLE, from_config, of, parse_ddl
from statebackend.types.row_classes import (
    record_form as record_form,
    record_reader as record_reader,
    row_class,
)
from statebackend.types.serializer_interface import Compatibility as Compatibility, Serializer as Serializer

__all__ = [
    "BOOL",
    "BYTE",
    "BYTES",
    "DATE",
    "DECIMAL",
    "DOUBLE",
    "FLOAT",
    "INT",
    "LIST",
    "LONG",
    "MAP",
    "PICKLE",
    "ROW",
    "SHORT",
    "STRING",
    "TIMESTAMP",
    "TIMESTAMP_NTZ",
    "TUPLE",
    "CustomType",
    "DecimalType",
    "ListType",
    "MapType",
    "PrimitiveType",
    "RowType",
    "TupleType",
    "Type",
    "from_config",
    "of",
    "parse_ddl",
    "row_class",
]
