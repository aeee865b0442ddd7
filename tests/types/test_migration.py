"""What can be read as what, and that converted values are the old ones."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from statebackend import types as t
from statebackend.errors import StateMigrationError
from statebackend.types import Compatibility, Serializer
from statebackend.types.serializers import arrow_migration, serializer_for

AS_IS, AFTER, NEVER = Compatibility.AS_IS, Compatibility.AFTER_MIGRATION, Compatibility.INCOMPATIBLE

CASES = [
    ("int", "int", AS_IS),
    ("tinyint", "smallint", AFTER),
    ("tinyint", "bigint", AFTER),
    ("int", "bigint", AFTER),
    ("bigint", "int", NEVER),
    ("float", "double", AFTER),
    ("double", "float", NEVER),
    ("int", "double", NEVER),
    ("int", "string", NEVER),
    ("string", "binary", NEVER),
    ("timestamp", "timestamp_ntz", NEVER),
    ("date", "timestamp", NEVER),
    ("decimal(10,2)", "decimal(12,2)", AFTER),
    ("decimal(10,2)", "decimal(30,2)", AFTER),
    ("decimal(10,2)", "decimal(12,3)", NEVER),
    ("decimal(12,2)", "decimal(10,2)", NEVER),
    ("array<int>", "array<bigint>", AFTER),
    ("array<int>", "array<string>", NEVER),
    ("int", "array<int>", NEVER),
    ("map<int,int>", "map<int,bigint>", AFTER),
    ("map<int,int>", "map<bigint,int>", NEVER),
    (tuple[int, str], tuple[int, str], AS_IS),
    (t.TUPLE(t.INT, str), tuple[int, str], AFTER),
    (tuple[int, str], tuple[int, str, int], NEVER),
    (tuple[int, str], "struct<_1:bigint,_2:string>", NEVER),
    ("struct<a:int,b:string>", "struct<a:int,b:string>", AS_IS),
    ("struct<a:int,b:string>", "struct<b:string,a:int>", AFTER),
    ("struct<a:int,b:string>", "struct<a:int>", AFTER),
    ("struct<a:int,b:string>", "struct<a:int,b:string,c:date>", AFTER),
    ("struct<a:int,b:string>", "struct<c:date,b:string,a:bigint>", AFTER),
    ("struct<a:int,b:string>", "struct<a:string,b:string>", NEVER),
    ("struct<a:int>", "struct<b:int>", NEVER),
    ("struct<a:struct<b:int,c:int>>", "struct<a:struct<c:bigint>>", AFTER),
    (t.PICKLE, t.PICKLE, AS_IS),
    (t.PICKLE, "binary", NEVER),
    ("bigint", t.PICKLE, NEVER),
    (t.ROW(a=t.PICKLE), t.ROW(a=t.BYTES), NEVER),
]


@pytest.mark.parametrize(("old", "new", "wanted"), CASES, ids=str)
def test_compatibility(old: Any, new: Any, wanted: Compatibility) -> None:
    old_type, reader = t.of(old), serializer_for(new)
    assert reader.compatibility(old_type.config()) is wanted
    if wanted is NEVER:
        with pytest.raises(StateMigrationError, match="stored values cannot be read as"):
            reader.migration(old_type.config())


class Text(Serializer):
    def serialize(self, value: str) -> bytes:
        return value.encode()

    def deserialize(self, data: bytes) -> str:
        return data.decode()


class Other(Text):
    pass


@pytest.mark.parametrize("wrap", [t.of, t.LIST, lambda s: t.ROW(a=s, n=int), lambda s: t.MAP(int, t.LIST(s))])
def test_a_serializer_of_the_users_reads_what_it_wrote_wherever_it_is(wrap: Any) -> None:
    stored = wrap(Text()).config()
    assert serializer_for(wrap(Text())).compatibility(stored) is AS_IS
    for other in (wrap(Other()), wrap(t.STRING), t.BYTES):
        assert serializer_for(other).compatibility(stored) is NEVER
    assert serializer_for(wrap(Text())).compatibility(wrap(t.STRING).config()) is NEVER


#: Old and new type, old values, and what they become: themselves, if nothing else is said.
VALUES: list[tuple[Any, ...]] = [
    ("tinyint", "bigint", [-128, 127]),
    ("float", "double", [0.10000000149011612, float("inf")]),
    ("decimal(10,2)", "decimal(30,2)", [Decimal("12.34"), Decimal("-0.01")]),
    ("array<int>", "array<bigint>", [[1, None, 3], []]),
    ("map<string,int>", "map<string,bigint>", [{"b": 1, "a": None}, {}]),
    (t.TUPLE(t.INT, str), tuple[int, str], [(1, "a"), (None, None)]),
    (
        "struct<a:int,b:string>",
        "struct<c:date,b:string,a:bigint>",
        [(1, "x"), (None, "y")],
        [(None, "x", 1), (None, "y", None)],
    ),
    ("struct<a:int,b:string>", "struct<b:string>", [(1, "x")], [("x",)]),
    (
        "struct<k:string,a:array<struct<b:int,c:int>>>",
        "struct<a:array<struct<c:bigint,d:string>>,k:string>",
        [("x", [(1, 2), None, (None, 3)]), ("y", None)],
        [([(2, None), None, (3, None)], "x"), (None, "y")],
    ),
]


@pytest.mark.parametrize("case", VALUES, ids=lambda case: f"{case[0]} to {case[1]}")
def test_old_bytes_and_columns_become_new_ones(case: tuple[Any, ...]) -> None:
    old, new, values = case[:3]
    expected = case[-1]
    writer, reader = serializer_for(old), serializer_for(new)
    migrate = reader.migration(writer.config())
    assert [reader.deserialize(migrate(writer.serialize(value))) for value in values] == expected
    old_type, new_type = t.of(old), t.of(new)
    for cut in (0, 1):
        column = pa.array([None, *map(_plain(old_type), values), None], old_type.arrow).slice(cut)
        migrated = arrow_migration(old_type, new_type)(column)
        assert migrated.type == new_type.arrow
        migrated.validate(full=True)
        wanted = pa.array([None, *map(_plain(new_type), expected), None][cut:], new_type.arrow)
        assert migrated.to_pylist() == wanted.to_pylist()


def _plain(declared: t.Type) -> Any:
    """From the library's values to what pyarrow takes."""

    def convert(value: Any) -> Any:
        if value is None:
            return None
        if isinstance(declared, (t.RowType, t.TupleType)):
            names = [field.name for field in declared.arrow]
            return {
                name: _plain(part)(item)
                for name, part, item in zip(names, declared.types, value, strict=True)
            }
        if isinstance(declared, t.ListType):
            return list(map(_plain(declared.element), value))
        if isinstance(declared, t.MapType):
            return list(value.items())
        return value

    return convert
