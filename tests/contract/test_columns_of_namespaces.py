"""Rules of vectorised calls with a column of namespaces; `test_vectorised_sequences` compares them with loops."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from contract.conftest import MakeKeyed
from contract.samples import dump, join
from contract.test_vectorised_sequences import WINDOWS, window_column

from statebackend import types as t
from statebackend.errors import (
    KeyGroupError,
    SerializationError,
    SerializationTypeError,
    UsageError,
)
from statebackend.keys import VOID, KeyGroupRange, TimeWindow, key_encoder
from statebackend.state import (
    FoldingStateDescriptor,
    KeyedStateBackend,
    ListStateDescriptor,
    MapStateDescriptor,
    ReducingStateDescriptor,
    StateDescriptor,
    ValueStateDescriptor,
)

pytestmark = pytest.mark.checked


def test_reading_where_nothing_was_written_leaves_nothing(keyed: KeyedStateBackend) -> None:
    states: list[Any] = [
        keyed.get_state(ValueStateDescriptor("v", str, default="d")),
        keyed.get_state(ListStateDescriptor("l", int)),
        keyed.get_state(ReducingStateDescriptor("r", "sum", int)),
    ]
    maps = keyed.get_map_state(MapStateDescriptor("m", int, int))
    for spaces in (WINDOWS, [VOID, *WINDOWS[:2]], ["x", "y", "x"]):
        for state, nothing in zip(states, ("d", [], None), strict=True):
            assert state.get_many([1, 2, 1], namespaces=spaces).to_pylist() == [nothing] * 3
            assert state.exists_many([1, 2, 1], namespaces=spaces).to_pylist() == [False] * 3
            state.clear_many([1, 2, 1], namespaces=spaces)
        assert maps.get_many([1, 2, 1], [1, 1, 1], namespaces=spaces).to_pylist() == [None] * 3
        maps.remove_many([1, 2, 1], [1, 1, 1], namespaces=spaces)
    assert keyed.num_entries() == 0


def test_nulls_are_void(keyed: KeyedStateBackend) -> None:
    total = keyed.get_reducing_state(ReducingStateDescriptor("r", "sum", int))
    total.add_many([1, 1, 1], [1, 2, 4], namespaces=pa.array([5, None, 5]))
    keyed.set_current_namespace(5)
    assert total.get() == 5
    keyed.set_current_namespace(VOID)
    assert total.get() == 2
    assert total.get_many([1, 1, 1], namespaces=[None, 5, VOID]).to_pylist() == [2, 5, 2]


def test_what_changed_has_the_type_of_the_column(keyed: KeyedStateBackend) -> None:
    total = keyed.get_reducing_state(ReducingStateDescriptor("r", "sum", int))
    windows = window_column([WINDOWS[0]])
    for column, sort in (
        (windows, windows.type),
        (pa.array(["a"]), pa.string()),
        (pa.array([1]), pa.int64()),
    ):
        for rows in (0, 1):
            _, namespaces, _ = total.add_many(
                [1] * rows, [1] * rows, return_changed=True, namespaces=column[:rows]
            )
            assert (namespaces.type, len(namespaces)) == (sort, rows)
        _, namespaces, _ = total.add_many([1], [1], return_changed=True, namespaces=pa.nulls(1, sort))
        assert namespaces.type == sort


STATES: dict[str, StateDescriptor] = {
    "value": ValueStateDescriptor("value", str),
    "list": ListStateDescriptor("list", str),
    "map": MapStateDescriptor("map", str, str),
    "sum": ReducingStateDescriptor("sum", "sum", "tinyint"),
    "fold": FoldingStateDescriptor("fold", "", join, str),
}
ONE = TimeWindow(0, 1)
NO_END = pa.array([{"start": 0, "end": None}] * 2, window_column([ONE]).type)
FAILING = [
    ("value", lambda s: s.update_many([1, 2], ["a", "b"], namespaces=[ONE]), UsageError),
    ("value", lambda s: s.update_many([1], ["a"], namespaces=[ONE, ONE]), UsageError),
    ("value", lambda s: s.update_many([1, 2], ["a", "b"], namespaces=[ONE, 1.5]), SerializationTypeError),
    (
        "value",
        lambda s: s.update_many([1, 2], ["a", "b"], namespaces=pa.array([1.5, 2])),
        SerializationTypeError,
    ),
    (
        "value",
        lambda s: s.update_many([1, 2], ["a", "b"], namespaces=np.array([True, False])),
        SerializationError,
    ),
    ("value", lambda s: s.update_many([1, 2], ["a", "b"], namespaces="ab"), SerializationTypeError),
    ("value", lambda s: s.update_many([1, 2], ["a", "b"], namespaces=NO_END), SerializationError),
    ("value", lambda s: s.update_many([1, 2], ["a", "b"], namespaces=[ONE, 2**63]), OverflowError),
    ("value", lambda s: s.update_many([1, 2], ["a", 3], namespaces=[ONE, VOID]), SerializationTypeError),
    ("value", lambda s: s.get_many([1, 2], namespaces=[ONE]), UsageError),
    ("value", lambda s: s.exists_many([1, 2], namespaces=[ONE]), UsageError),
    ("value", lambda s: s.clear_many([1, 2], namespaces=[ONE]), UsageError),
    ("list", lambda s: s.add_many([1, 2], ["a", None], namespaces=[ONE, VOID]), SerializationTypeError),
    (
        "map",
        lambda s: s.put_many([1, 2], ["a", None], ["x", "y"], namespaces=[ONE] * 2),
        SerializationTypeError,
    ),
    ("map", lambda s: s.put_many([1, 2], ["a", "b"], ["x", "y"], namespaces=[ONE]), UsageError),
    ("map", lambda s: s.remove_many([1, 2], ["a", "b"], namespaces=[ONE]), UsageError),
    ("map", lambda s: s.get_many([1, 2], ["a", "b"], namespaces=[ONE]), UsageError),
    ("sum", lambda s: s.add_many([1, 2, 1], [1, 1, 127], namespaces=[ONE] * 3), OverflowError),
    ("sum", lambda s: s.add_many([2, 1, 1], [1, 1, 127], namespaces=[VOID, ONE, ONE]), OverflowError),
    ("sum", lambda s: s.add_many([1, 2, 1], [1, 1, 127], namespaces=[ONE, ONE, VOID]), OverflowError),
    ("fold", lambda s: s.add_many([1, 2], ["a", "b"], namespaces=[ONE]), UsageError),
]


@pytest.mark.parametrize(("name", "call", "error"), FAILING)
def test_a_failed_call_changes_nothing(
    keyed: KeyedStateBackend, name: str, call: Any, error: type[Exception]
) -> None:
    state = keyed.get_state(STATES[name])
    filled: dict[str, Any] = {"map": lambda: state.put("k", "v"), "value": lambda: state.update("v")}
    for namespace in (ONE, VOID):
        keyed.set_current_namespace(namespace)
        (filled.get(name) or (lambda: state.add(1 if name == "sum" else "v")))()
    before = dump(keyed, STATES[name])
    with pytest.raises(error):
        call(state)
    assert dump(keyed, STATES[name]) == before
    assert (keyed.current_key, keyed.current_namespace) == (1, VOID)


def test_errors_name_the_row_of_the_call(keyed: KeyedStateBackend) -> None:
    total = keyed.get_state(STATES["sum"])
    for spaces in ([ONE] * 4, [VOID, ONE, VOID, ONE], [ONE, VOID, ONE, VOID], [VOID, VOID, VOID, 7]):
        with pytest.raises(OverflowError) as raised:
            total.add_many([2, 1, 2, 3], [100, 1, 100, 1], namespaces=spaces)
        if "position" in str(raised.value):
            assert "position 2" in str(raised.value)
        assert keyed.num_entries() == 0


def test_key_groups_are_checked_before_anything_changes(make_keyed: MakeKeyed) -> None:
    groups = {key: key_encoder(int).key_group(key, 8) for key in range(50)}
    own = next(key for key, group in groups.items() if group <= 3)
    foreign = next(key for key, group in groups.items() if group > 3)
    keyed = make_keyed(int, max_parallelism=8, key_group_range=KeyGroupRange(0, 3))
    total = keyed.get_reducing_state(ReducingStateDescriptor("s", "sum", int))
    for spaces in ([ONE, ONE], [ONE, VOID], [VOID, ONE]):
        with pytest.raises(KeyGroupError):
            total.add_many([own, foreign], [1, 2], namespaces=spaces)
        with pytest.raises(KeyGroupError):
            total.get_many([own, foreign], namespaces=spaces)
    assert keyed.num_entries() == 0


def test_a_function_of_the_user_has_the_key_and_namespace_of_its_row(make_keyed: MakeKeyed) -> None:
    keyed = make_keyed()
    seen: list[Any] = []
    weights = {(1, "a"): 10, (2, "b"): 100}

    def weighted(total: int, value: int) -> int:
        seen.append((keyed.current_key, keyed.current_namespace))
        return total + value * weights[seen[-1]]

    totals = keyed.get_state(ReducingStateDescriptor("total", weighted, t.LONG))
    totals.add_many([1, 1, 2, 2], [1, 1, 1, 1], namespaces=["a", "a", "b", "b"])
    assert seen == [(1, "a"), (2, "b")]
    assert totals.get_many([1, 2], namespaces=["a", "b"]).to_pylist() == [11, 101]
