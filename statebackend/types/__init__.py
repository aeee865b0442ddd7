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
from statebackend.types import convert as convert
from statebackend.types import layout as layout
from statebackend.types.convert import is_not_a_time as is_not_a_time
from statebackend.types.model import ACC as ACC
from statebackend.types.model import (
    BOOL,
    BYTE,
    BYTES,
    DATE,
    DOUBLE,
    FLOAT,
    INT,
    LONG,
    PICKLE,
    SHORT,
    STRING,
    TIMESTAMP,
    TIMESTAMP_NTZ,
    CustomType,
    DecimalType,
    ListType,
    MapType,
    PrimitiveType,
    RowType,
    TupleType,
    Type,
)
from statebackend.types.model import IN as IN
from statebackend.types.model import OUT as OUT
from statebackend.types.model import SCALARS as SCALARS
from statebackend.types.model import A as A
from statebackend.types.model import K as K
from statebackend.types.model import Notation as Notation
from statebackend.types.model import Subscriptable as Subscriptable
from statebackend.types.model import T as T
from statebackend.types.model import V as V
from statebackend.types.normalise import DECIMAL, LIST, MAP, ROW, TUPLE, from_config, of, parse_ddl
from statebackend.types.row_classes import record_builder as record_builder
from statebackend.types.row_classes import record_reader as record_reader
from statebackend.types.row_classes import row_class
from statebackend.types.serializer_interface import Compatibility as Compatibility
from statebackend.types.serializer_interface import Serializer as Serializer

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
