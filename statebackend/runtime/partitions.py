"""Rows in partitions: one for each of the values of some columns, named as the folders of a partitioned table are.

Spark, Hive, Arrow and DuckDB take the columns from the names of the folders, so the files do not have them.

>>> table = pa.table({"day": ["mon", None, "mon"], "n": [1, 2, 3]})
>>> [(name, rows.to_pydict()) for name, rows in partitioned(table, ["day"])]
[('day=__HIVE_DEFAULT_PARTITION__', {'n': [2]}), ('day=mon', {'n': [1, 3]})]
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

#: Where the schema of a file says which partition it is.
_MEMBER = b"statebackend.partition"
#: And which types the columns have that name it, which readers guess.
_TYPES = b"statebackend.partition_types"
#: What Hive calls null; and the empty text, which a folder cannot be named after.
_NULL = "__HIVE_DEFAULT_PARTITION__"
#: What the name of a folder cannot have as it is, for Spark.
_ESCAPED = {chr(code) for code in range(0x20)} | set("\"#%'*/:=?\\\x7f{[]^")


def names_partitions(kind: pa.DataType) -> bool:
    """Return True if the values of a type have one name each, which readers take for the same value.

    >>> names_partitions(pa.date32()), names_partitions(pa.float64())
    (True, False)
    """
    checks = (pa.types.is_integer, pa.types.is_string, pa.types.is_boolean, pa.types.is_date32)
    return any(check(kind) for check in checks)


def partitioned(table: pa.Table, columns: Sequence[str]) -> list[tuple[str, pa.Table]]:
    """The partitions of a table, each with its rows in their order, without the columns. O(bytes), and a sort.

    The schema of each says which partition it is, see `partition_in`. A column is joined into one array, so a table of
    more than one row has to be smaller than 2 GiB.
    """
    numbers = np.zeros(table.num_rows, np.int64)
    for name in columns:
        encoded = pc.dictionary_encode(pa.concat_arrays(table[name].chunks), null_encoding="encode")
        # Both are less than the number of rows, so the products fit.
        joined = numbers * len(encoded.dictionary) + encoded.indices.to_numpy(zero_copy_only=False)
        numbers = np.unique(joined, return_inverse=True)[1]
    order = np.argsort(numbers, kind="stable")
    starts = np.flatnonzero(np.diff(numbers[order], prepend=-1))
    ends = [*starts[1:].tolist(), table.num_rows]
    rows = table.drop_columns(list(columns)).take(order)
    heads = [table[name].take(order[starts]).to_pylist() for name in columns]
    types = json.dumps({name: str(table.schema.field(name).type) for name in columns}).encode()
    made: dict[str, list[pa.Table]] = {}
    for at, (start, end) in enumerate(zip(starts.tolist(), ends, strict=True)):
        folders = (_named(name, head[at]) for name, head in zip(columns, heads, strict=True))
        # An empty text and null are one folder.
        made.setdefault("/".join(folders), []).append(rows.slice(start, end - start))
    return [
        (name, pa.concat_tables(parts).replace_schema_metadata({_MEMBER: name.encode(), _TYPES: types}))
        for name, parts in sorted(made.items())
    ]


def partition_in(schema: pa.Schema) -> str:
    """The partition that the schema of a file names: folders with slashes; empty if there is none."""
    return str((schema.metadata or {}).get(_MEMBER, b""), "utf-8")


def columns_in(schema: pa.Schema) -> dict[str, pa.DataType]:
    """The types of the columns of a file by their names, with those that name its partition.

    >>> [(_, rows)] = partitioned(pa.table({"day": ["mon"], "n": [1]}), ["day"])
    >>> columns_in(rows.schema)
    {'n': DataType(int64), 'day': DataType(string)}
    """
    types = json.loads((schema.metadata or {}).get(_TYPES, b"{}"))
    named = {name: pa.type_for_alias(kind) for name, kind in types.items()}
    return {**{field.name: field.type for field in schema}, **named}


def _named(name: str, value: object) -> str:
    """
    >>> _named("a b", "x/y"), _named("ok", True), _named("day", None)
    ('a b=x%2Fy', 'ok=true', 'day=__HIVE_DEFAULT_PARTITION__')
    """
    if value is None or value == "":
        text = _NULL
    else:
        text = folder_of(str(value).lower() if isinstance(value, bool) else str(value))
    return f"{folder_of(name)}={text}"


def folder_of(text: str) -> str:
    """A text as the name of a folder has it.

    >>> folder_of("50%")
    '50%25'
    """
    return "".join(f"%{ord(each):02X}" if each in _ESCAPED else each for each in text)
