"""The causes that docs/errors.md gives for a code have this code, on every backend."""

from __future__ import annotations

import datetime
import decimal
from collections.abc import Callable
from typing import Any

import pytest
from contract.conftest import MakeKeyed

import statebackend as sb

UTC = datetime.timezone.utc


class Handles:
    """States of all kinds under names that say what they hold, made when first asked for."""

    def __init__(self, make_keyed: MakeKeyed) -> None:
        self.make_keyed = make_keyed
        self.keyed = make_keyed()
        self.keyed.set_current_key(1)

    def value(self, declared: Any) -> Any:
        return self.keyed.get_value_state(sb.ValueStateDescriptor(f"value {declared!r}", declared))

    @property
    def list(self) -> Any:
        return self.keyed.get_list_state(sb.ListStateDescriptor("list", str))

    @property
    def map(self) -> Any:
        return self.keyed.get_map_state(sb.MapStateDescriptor("map", str, int))

    @property
    def total(self) -> Any:
        return self.keyed.get_reducing_state(sb.ReducingStateDescriptor("total", "sum", int))


class Short(sb.serializers.Serializer):
    fixed_width = 8

    def serialize(self, value: Any) -> bytes:
        return b"x"

    def deserialize(self, data: bytes) -> Any:
        return data


class Broken:
    def __reduce__(self) -> Any:
        raise TypeError("not today")


def stale_mark(on: Handles, method: str) -> None:
    mark = on.keyed.mark()
    on.keyed.release(mark)
    getattr(on.keyed, method)(mark)


def closed(on: Handles) -> None:
    state = on.total
    on.keyed.close()
    state.get()


def incompatible(on: Handles) -> None:
    old = sb.OperatorStateBackend()
    old.get_list_state(sb.ListStateDescriptor("s", str)).add("a")
    sb.OperatorStateBackend(restore=[old.contents()]).get_list_state(sb.ListStateDescriptor("s", int))


def other_broadcast_key(on: Handles) -> None:
    old = sb.OperatorStateBackend()
    old.get_broadcast_state(sb.MapStateDescriptor("s", "int", int)).put(1, 1)
    sb.OperatorStateBackend(restore=[old.contents()]).get_broadcast_state(
        sb.MapStateDescriptor("s", int, int)
    )


def instances_disagree(on: Handles) -> None:
    split, union = sb.OperatorStateBackend(), sb.OperatorStateBackend()
    split.get_list_state(sb.ListStateDescriptor("s", int))
    union.get_union_list_state(sb.ListStateDescriptor("s", int))
    sb.OperatorStateBackend(restore=[split.contents(), union.contents()])


CAUSES: list[tuple[str, Callable[[Handles], object]]] = [
    ("USAGE.NO_KEY", lambda on: on.make_keyed().get_value_state(sb.ValueStateDescriptor("x", int)).value()),
    ("USAGE.NO_STATE", lambda on: on.keyed.keys("no such state")),
    ("USAGE.COLUMN", lambda on: on.total.add_many([1, 2], [1])),
    ("USAGE.AGGREGATE", lambda on: sb.AggregatingStateDescriptor("x", "avg", str)),
    ("USAGE.REDUCTION", lambda on: sb.ReducingStateDescriptor("x", "median", int)),
    ("USAGE.TYPE", lambda on: sb.types.of(list)),
    ("USAGE.DDL", lambda on: sb.types.of("map<string>")),
    ("USAGE.KEY_TYPE", lambda on: on.make_keyed(list[int])),
    ("USAGE.KEY_TYPE", lambda on: sb.MapStateDescriptor("x", sb.types.PICKLE, int)),
    ("USAGE.STALE_MARK", lambda on: stale_mark(on, "rollback")),
    ("USAGE.STALE_MARK", lambda on: stale_mark(on, "count_changes")),
    ("USAGE.FOREIGN_MARK", lambda on: on.keyed.rollback(on.make_keyed().mark())),
    ("USAGE.FOREIGN_MARK", lambda on: on.keyed.rollback("mark")),
    ("USAGE.FOREIGN_MARK", lambda on: on.keyed.count_changes("mark")),
    ("SERIALIZATION", lambda on: on.value(float).update(2**53 + 1)),
    ("SERIALIZATION.TYPE", lambda on: on.value(int).update(True)),
    ("SERIALIZATION.TYPE", lambda on: on.total.add_many([1], [1.5])),
    ("SERIALIZATION.NULL", lambda on: on.list.add(None)),
    ("SERIALIZATION.NULL", lambda on: on.list.add_all(None)),
    ("SERIALIZATION.NULL", lambda on: on.list.add_many([1], [None])),
    ("SERIALIZATION.NULL", lambda on: on.map.put_all(None)),
    ("SERIALIZATION.NULL_KEY", lambda on: on.keyed.set_current_key(None)),
    ("SERIALIZATION.NULL_KEY", lambda on: on.map.put(None, 1)),
    ("SERIALIZATION.NULL_KEY", lambda on: on.map.put_many([1], [None], [1])),
    ("SERIALIZATION.NULL_KEY", lambda on: on.total.add_many([None], [1])),
    ("SERIALIZATION.NAIVE_DATETIME", lambda on: on.value("timestamp").update(datetime.datetime(2024, 1, 1))),
    (
        "SERIALIZATION.AWARE_DATETIME",
        lambda on: on.value("timestamp_ntz").update(datetime.datetime(2024, 1, 1, tzinfo=UTC)),
    ),
    ("SERIALIZATION.DECIMAL", lambda on: on.value("decimal(4,2)").update(decimal.Decimal("1.005"))),
    ("SERIALIZATION.SURROGATE", lambda on: on.value(str).update("\ud800")),
    ("SERIALIZATION.NAMESPACE", lambda on: on.keyed.set_current_namespace(1.5)),
    ("SERIALIZATION.PICKLE", lambda on: on.value(sb.types.LIST(sb.types.PICKLE)).update([Broken()])),
    ("SERIALIZATION.LENGTH", lambda on: on.value(sb.types.LIST(Short())).update(["x"])),
    ("SERIALIZATION.CONFIG", lambda on: sb.types.from_config({"type": "long long"})),
    ("SERIALIZATION.CUSTOM_CONFIG", lambda on: sb.types.from_config({"type": "custom"})),
    (
        "STATE_MIGRATION.REDECLARED",
        lambda on: on.total.backend.get_state(sb.ListStateDescriptor("total", int)),
    ),
    ("STATE_MIGRATION.INCOMPATIBLE", incompatible),
    ("STATE_MIGRATION.SERIALIZER", lambda on: Short().migration({"other": 1})),
    ("STATE_MIGRATION.KEY_TYPE", other_broadcast_key),
    ("STATE_MIGRATION.OPERATOR_STATE", instances_disagree),
    ("CLOSED", closed),
    ("KEY_GROUP", lambda on: on.make_keyed(key_group_range=sb.KeyGroupRange(0, 0)).set_current_key(-1)),
    ("BACKEND_UNAVAILABLE.UNKNOWN", lambda on: sb.create_backend("no such backend")),
]


@pytest.mark.parametrize(("code", "cause"), CAUSES)
def test_a_cause_has_its_code(make_keyed: MakeKeyed, code: str, cause: Callable[[Handles], object]) -> None:
    with pytest.raises(sb.StateBackendError) as caught:
        cause(Handles(make_keyed))
    assert caught.value.code == code
