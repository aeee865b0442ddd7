"""Rules of vectorised calls with a column of namespaces; `test_vectorised_sequences` compares them with loops."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from contract.conftest import Keyed
from contract.samples import join
from contract.test_vectorised_sequences import WINDOWS, window_column

import statebackend as sb

pytestmark = pytest.mark.checked


def test_nulls_are_void(keyed: Keyed) -> None:
    total = keyed.get_reducing_state(sb.ReducingStateDescriptor("r", "sum", int))
    total.add_many([1, 1, 1], [1, 2, 4], namespaces=pa.array([5, None, 5]))
    keyed.set_current_namespace(5)
    assert total.get() == 5
    keyed.set_current_namespace(sb.VOID)
    assert total.get() == 2
    assert total.get_many([1, 1, 1], namespaces=[None, 5, sb.VOID]).to_pylist() == [2, 5, 2]


def test_changed_namespaces_have_the_type_of_the_column(keyed: Keyed) -> None:
    total = keyed.get_reducing_state(sb.ReducingStateDescriptor("r", "sum", int))
    windows = window_column([WINDOWS[0]])
    for column, sort in (
        (windows, windows.type),
        (pa.array(["a"]), pa.string()),
        (pa.array([1]), pa.int64()),
    ):
        for rows in (0, 1):
            changed = total.add_many([1] * rows, [1] * rows, return_changed=True, namespaces=column[:rows])
            namespaces = changed.namespaces
            assert (namespaces.type, len(namespaces)) == (sort, rows)
        changed = total.add_many([1], [1], return_changed=True, namespaces=pa.nulls(1, sort))
        assert changed.namespaces.type == sort


ONE = sb.TimeWindow(0, 1)
NO_END = pa.array([{"start": 0, "end": None}] * 2, window_column([ONE]).type)


@pytest.mark.parametrize(
    ("spaces", "error"),
    [
        ([ONE], sb.UsageError),
        ([ONE] * 3, sb.UsageError),
        ([ONE, 1.5], sb.SerializationTypeError),
        (pa.array([1.5, 2]), sb.SerializationTypeError),
        (np.array([True, False]), sb.SerializationError),
        ("ab", sb.SerializationTypeError),
        (NO_END, sb.SerializationError),
        ([ONE, 2**63], OverflowError),
    ],
)
def test_wrong_namespaces_change_nothing(keyed: Keyed, spaces: Any, error: type[Exception]) -> None:
    value = keyed.get_value_state(sb.ValueStateDescriptor("v", str))
    entries = keyed.get_map_state(sb.MapStateDescriptor("m", str, str))
    words = keyed.get_list_state(sb.ListStateDescriptor("l", str))
    folded = keyed.get_folding_state(sb.FoldingStateDescriptor("f", "", join, str))
    for call in (
        lambda **spaces: value.update_many([1, 2], ["a", "b"], **spaces),
        lambda **spaces: value.get_many([1, 2], **spaces),
        lambda **spaces: value.exists_many([1, 2], **spaces),
        lambda **spaces: value.clear_many([1, 2], **spaces),
        lambda **spaces: entries.put_many([1, 2], ["a", "b"], ["x", "y"], **spaces),
        lambda **spaces: entries.get_many([1, 2], ["a", "b"], **spaces),
        lambda **spaces: entries.remove_many([1, 2], ["a", "b"], **spaces),
        lambda **spaces: words.add_many([1, 2], ["a", "b"], **spaces),
        lambda **spaces: folded.add_many([1, 2], ["a", "b"], **spaces),
    ):
        with pytest.raises(error):
            call(namespaces=spaces)
    assert keyed.num_entries() == 0
    assert (keyed.current_key, keyed.current_namespace) == (1, sb.VOID)


def test_errors_name_the_row_of_the_call(keyed: Keyed) -> None:
    total = keyed.get_reducing_state(sb.ReducingStateDescriptor("sum", "sum", "tinyint"))
    for spaces in (
        [ONE] * 4,
        [sb.VOID, ONE, sb.VOID, ONE],
        [ONE, sb.VOID, ONE, sb.VOID],
        [sb.VOID, sb.VOID, sb.VOID, 7],
    ):
        with pytest.raises(OverflowError) as raised:
            total.add_many([2, 1, 2, 3], [100, 1, 100, 1], namespaces=spaces)
        if "position" in str(raised.value):
            assert "position 2" in str(raised.value)
        assert keyed.num_entries() == 0
