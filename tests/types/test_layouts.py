"""Every row of the table of layouts is known wherever types are told apart.

`tests/contract/test_type_matrix.py` takes each of them through every kind of state, backend, batch and savepoint.
"""

from __future__ import annotations

import re

import pytest
from house_tools import ROOT, reads_sources
from type_samples import LEAVES, NESTED, OBJECTS, stored_and_read, texts

from statebackend import types as t
from statebackend.columns.codec_factory import type_codec
from statebackend.keys import key_encoder
from statebackend.runtime.arrow_rows import OutputSchema, rows_of
from statebackend.spark.sink_delivery import spark_schema
from statebackend.state.aggregates import ordering
from statebackend.types.layout import LAYOUTS, decimal_layout
from statebackend.types.serializers import serializer_for

every_leaf = pytest.mark.parametrize("leaf", LEAVES)


@reads_sources
def test_codes_equal_the_compiled_codes() -> None:
    text = (ROOT / "statebackend/_core/tables/values.pxd").read_text(encoding="utf-8")
    compiled = {name: int(code) for name, code in re.findall(r"^    TYPE_(\w+) = (\d+)", text, re.M)}
    own = {name: row.code for name, row in LAYOUTS.items() if row.code != compiled["OTHER"]}
    own["DECIMAL"], own["LONG_DECIMAL"] = decimal_layout(18, 2).code, decimal_layout(19, 2).code
    own["RECORD"], own["OTHER"] = own.pop("ROW"), compiled["OTHER"]
    assert own.pop("TUPLE") == own["RECORD"]
    assert own == compiled


def test_every_type_has_samples_that_the_type_matrix_uses() -> None:
    sampled = {t.of(leaf).name for leaf in LEAVES} | {declared.name for declared, _ in OBJECTS.values()}
    assert sampled | {name.upper() for name in NESTED} >= {*LAYOUTS, "DECIMAL"}


@every_leaf
def test_names_lead_to_the_type(leaf: str) -> None:
    declared = t.of(leaf)
    assert {t.of(name) for name in declared.layout.ddl} == {declared}
    assert t.of(declared.arrow) == declared
    assert t.from_config(declared.config()) == declared


@every_leaf
def test_packed_values_are_stored_as_the_layout_says(leaf: str) -> None:
    declared = t.of(leaf)
    layout, serializer, codec = declared.layout, serializer_for(declared), type_codec(declared)
    assert codec.kind == layout.code
    for value in LEAVES[leaf]:
        stored = serializer.serialize(value)
        assert layout.width in (None, len(stored))
        assert type(serializer.deserialize(stored)) is layout.python
        assert key_encoder(declared).decode(key_encoder(declared).encode(value)) is not None


def test_only_types_without_parts_and_records_have_an_order() -> None:
    for leaf in LEAVES:
        assert ordering(t.of(leaf)) is not None
        assert ordering(t.TUPLE(leaf, t.ROW(a=leaf))) is not None
        assert ordering(t.LIST(leaf)) is ordering(t.MAP(leaf, leaf)) is None
    assert [ordering(declared) for declared, _ in OBJECTS.values()] == [None] * len(OBJECTS)


@every_leaf
def test_rows_of_functions_hold_values(leaf: str) -> None:
    declared = t.of(leaf)
    values = [None, *(stored_and_read(declared, value) for value in LEAVES[leaf])]
    table = OutputSchema(t.ROW(x=declared)).table_of_rows([(value,) for value in values])
    assert table.schema.field("x").type == declared.arrow
    assert texts(row[0] for row in rows_of(table)) == texts(values)


@pytest.mark.spark
@every_leaf
def test_spark_has_the_type(leaf: str) -> None:
    (field,) = spark_schema(t.ROW(x=leaf))
    assert t.of(field.dataType) == t.of(leaf)
