"""State made of a table is what writing its rows one by one would have made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from all_backends import BACKENDS

import statebackend as sb
from statebackend.errors import SerializationError, UsageError
from statebackend.testing import ManualClock
from statebackend.tools import build


def restored(backend: str, key_type: Any, path: Path, **options: Any) -> Any:
    return sb.create_backend(backend).create_keyed_backend(key_type, restore=path, **options)


@pytest.mark.parametrize("piece", [2, 1 << 20])
@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_are_in_order(tmp_path: Path, backend: str, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_PIECE_ROWS", piece)
    table = pa.table(
        {
            "user": ["ann", "bob", "ann", "ann", "cleo"],
            "last": [1, 2, None, 4, None],
            "spent": [1.5, None, 2.0, 4.0, None],
            "n": [1, 1, 1, 1, 1],
            "tag": ["x", "y", "z", None, None],
            "tags": [["a", "b"], [], None, ["c"], None],
            "limits": pa.array(
                [[("p", 1), ("q", None)], [], [("p", 3)], None, None], pa.map_(pa.string(), pa.int64())
            ),
            "which": ["k", None, "l", "k", None],
            "what": [1, 2, None, 4, 5],
        }
    )
    descriptors = [
        sb.ValueStateDescriptor("last", int),
        sb.ReducingStateDescriptor("spent", "max", float),
        sb.AggregatingStateDescriptor("n", "count", int),
        (sb.ListStateDescriptor("one by one", str), "tag"),
        sb.ListStateDescriptor("tags", str),
        (sb.ListStateDescriptor("lists", list[str]), "tags"),
        sb.MapStateDescriptor("limits", str, int),
        (sb.MapStateDescriptor("pairs", str, int), ("which", "what")),
    ]
    sb.tools.bootstrap(tmp_path, table, key="user", descriptors=descriptors, backend=backend)
    for other in BACKENDS:
        with restored(other, str, tmp_path, max_parallelism=16) as keyed:
            states = [keyed.get_state(each[0] if isinstance(each, tuple) else each) for each in descriptors]
            last, spent, n, one_by_one, tags, lists, limits, pairs = states
            users = ["ann", "bob", "cleo"]
            assert last.get_many(users).to_pylist() == [4, 2, None]
            assert spent.get_many(users).to_pylist() == [4.0, None, None]
            assert n.get_many(users).to_pylist() == [3, 1, 1]
            assert one_by_one.get_many(users).to_pylist() == [["x", "z"], ["y"], []]
            assert tags.get_many(users).to_pylist() == [["a", "b", "c"], [], []]
            assert lists.get_many(users).to_pylist() == [[["a", "b"], ["c"]], [[]], []]
            keyed.set_current_key("ann")
            assert list(limits.items()) == [("p", 3), ("q", None)]
            assert list(pairs.items()) == [("k", 4), ("l", None)]
            keyed.set_current_key("bob")
            assert limits.is_empty()


@pytest.mark.parametrize("backend", BACKENDS)
def test_composite_keys_and_times(tmp_path: Path, backend: str) -> None:
    table = pa.table({"a": [1, 1, None], "b": ["x", "y", "x"], "n": [1, 2, 3]})
    descriptor = sb.ValueStateDescriptor("n", int).enable_time_to_live(sb.StateTtlConfig(100))
    clock = ManualClock(1000)
    savepoint = sb.tools.bootstrap(
        tmp_path, table, key=["a", "b"], descriptors=[descriptor], backend=backend, clock=clock
    )
    assert savepoint.now is None  # of no batch, whatever stamps the values
    clock.set(1099)
    with restored(backend, "struct<a:bigint,b:string>", tmp_path, clock=clock) as keyed:
        state = keyed.get_state(descriptor)
        keys = [(1, "x"), (1, "y"), (None, "x")]
        assert state.get_many(keys).to_pylist() == [1, 2, 3]
        clock.set(1100)
        assert state.get_many(keys).to_pylist() == [None] * 3


def test_record_batches_and_slices_of_tables(tmp_path: Path) -> None:
    batch = pa.record_batch({"k": range(100), "v": [[n] * (n % 3) for n in range(100)]}).slice(40, 20)
    for number, table in enumerate((batch, pa.Table.from_batches([batch, batch.slice(5)]))):
        path = tmp_path / str(number)
        sb.tools.bootstrap(path, table, key="k", descriptors=[sb.ListStateDescriptor("v", int)])
        with restored("reference", int, path) as keyed:
            state = keyed.get_state(sb.ListStateDescriptor("v", int))
            found = state.get_many(range(38, 62)).to_pylist()
            copies = [0, 0, *([1] * 5), *([1 + number] * 15), 0, 0]
            assert found == [[n] * (n % 3) * times for n, times in zip(range(38, 62), copies, strict=True)]


@pytest.mark.parametrize(
    ("key", "descriptor", "message"),
    [
        ("nothing", sb.ValueStateDescriptor("n", int), "no column 'nothing'"),
        ("k", sb.ValueStateDescriptor("m", int), "no column 'm'"),
        ("k", (sb.MapStateDescriptor("m", str, int), "n"), "takes a column of maps"),
        ("k", (sb.MapStateDescriptor("m", str, int), ("n", "n", "n")), "takes a column of maps"),
        ("k", (sb.ValueStateDescriptor("m", int), ("n", "n")), "takes a column of maps"),
        ("k", sb.FoldingStateDescriptor("n", 0, lambda a, b: a, int), "folding"),
        ("k", "n", "not a descriptor"),
    ],
)
def test_columns_that_do_not_fit_are_refused(tmp_path: Path, key: str, descriptor: Any, message: str) -> None:
    table = pa.table({"k": [1], "n": [2]})
    with pytest.raises(UsageError, match=message):
        sb.tools.bootstrap(tmp_path, table, key=key, descriptors=[descriptor])
    assert list(tmp_path.iterdir()) == []


def test_a_row_that_is_refused_leaves_nothing(tmp_path: Path) -> None:
    for table in (pa.table({"k": [1, None], "n": [2, 2]}), pa.table({"k": [1, 2], "n": ["2", "x"]})):
        with pytest.raises(SerializationError):
            sb.tools.bootstrap(tmp_path, table, key="k", descriptors=[sb.ValueStateDescriptor("n", int)])
    assert list(tmp_path.iterdir()) == []
