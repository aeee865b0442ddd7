"""`read_state` of savepoints: the same rows as of a checkpoint of the same moment."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from all_backends import BACKENDS
from keyed_story import DESCRIPTORS, Story

import statebackend as sb
from statebackend.checkpoint.store.savepoint_folder import Savepoint

pytestmark = pytest.mark.usefixtures("no_fsync")

TIMED = sb.ListStateDescriptor("timed", str).enable_time_to_live(sb.StateTtlConfig(10**12))


def rows(table: pa.Table) -> list[Any]:
    return sorted(table.to_pylist(), key=repr)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_rows_are_those_of_a_checkpoint(tmp_path: Path, backend: str, rng: random.Random) -> None:
    store = sb.CheckpointStore(tmp_path / "store").open_for_writing(key_type=int, max_parallelism=32)
    ranges = [sb.key_groups.range_for(32, 3, index) for index in range(3)]
    made = sb.create_backend(backend)
    instances = [made.create_keyed_backend(int, max_parallelism=32, key_group_range=own) for own in ranges]
    operators = [made.create_operator_backend(subtask_index=index, parallelism=2) for index in range(2)]
    with store:
        for number, keyed in enumerate(instances):
            story = Story(keyed, rng, int, keys=120)
            story.keys = [key for key in story.keys if keyed._encoder.key_group(key, 32) in ranges[number]]
            story.change(1500)
            keyed.set_current_namespace(sb.VOID)
            keyed.get_state(TIMED).add_many(story.keys[:5], ["x"] * 5)
            if number:
                keyed.get_state(sb.ValueStateDescriptor("here and there", "date"))
            keyed.savepoint(tmp_path / "savepoint")
        for number, operator in enumerate(operators):
            operator.get_list_state(sb.ListStateDescriptor("n", "int")).add_all(range(3 * number))
            operator.get_broadcast_state(sb.MapStateDescriptor("b", str, float)).put("x", 0.5)
            operator.savepoint(tmp_path / "savepoint")
        taken = [each.snapshot(0, store) for each in (*instances, *operators)]
        store.commit(0, [each.result() for each in taken])
    for name in [*DESCRIPTORS, "timed", "here and there", "n", "b", "statebackend.timers.event"]:
        expected = sb.tools.read_state(tmp_path / "store", name)
        for savepoint in (tmp_path / "savepoint", Savepoint(tmp_path / "savepoint")):
            found = sb.tools.read_state(savepoint, name)
            assert sorted(found.schema.names) == sorted(expected.schema.names)
            assert rows(found) == rows(expected)
            assert {each.name: each.type for each in found.schema} == {
                each.name: each.type for each in expected.schema
            }
    assert sb.tools.read_state(tmp_path / "savepoint", "count")["namespace"].null_count > 0
    with pytest.raises(sb.UsageError, match="there is no state 'nobody'") as caught:
        sb.tools.read_state(tmp_path / "savepoint", "nobody")
    assert "'count'" in str(caught.value)


def test_a_savepoint_within_a_store_is_read_and_the_store_is_preferred(tmp_path: Path) -> None:
    count = sb.ValueStateDescriptor("count", int)
    store = sb.CheckpointStore(tmp_path).open_for_writing(key_type=int, max_parallelism=128)
    with store, sb.create_backend("heap").create_keyed_backend(int) as keyed:
        keyed.get_state(count).update_many([1], [10])
        store.commit(4, [keyed.snapshot(4, store).result()])
        keyed.get_state(count).update_many([1], [11])
        savepoint = keyed.savepoint(store)
    assert sb.tools.read_state(tmp_path, "count")["value"].to_pylist() == [10]
    assert sb.tools.read_state(savepoint, "count")["value"].to_pylist() == [11]
    assert sb.tools.read_state(tmp_path / "savepoints" / "4", "count")["value"].to_pylist() == [11]
    with pytest.raises(sb.UsageError, match="there is no checkpoint"):
        sb.tools.read_state(tmp_path / "savepoints", "count")
    with pytest.raises(sb.UsageError, match="a savepoint has no ids"):
        sb.tools.read_state(savepoint, "count", 4)


def test_one_name_for_two_states_and_parts_that_are_missing(tmp_path: Path) -> None:
    made = sb.create_backend("reference")
    for index in range(2):
        own = sb.key_groups.range_for(128, 2, index)
        with made.create_keyed_backend(int, key_group_range=own) as keyed:
            keyed.get_state(sb.ValueStateDescriptor("n", int))
            keyed.savepoint(tmp_path)
    operator = made.create_operator_backend()
    operator.get_list_state(sb.ListStateDescriptor("n", int)).add(1)
    operator.savepoint(tmp_path)
    with pytest.raises(sb.UsageError, match="both a keyed state and an operator state are called 'n'"):
        sb.tools.read_state(tmp_path, "n")
    (tmp_path / "_savepoint" / "operator-0-of-1.json").unlink()
    assert sb.tools.read_state(tmp_path, "n").schema.names == ["key", "value"]
    (tmp_path / "_savepoint" / "keyed-0-63.json").unlink()
    with pytest.raises(sb.CorruptCheckpointError, match="every key group once"):
        sb.tools.read_state(tmp_path, "n")


def test_damage_is_found(tmp_path: Path) -> None:
    with sb.create_backend("heap").create_keyed_backend(int) as keyed:
        keyed.get_state(sb.ValueStateDescriptor("n", int)).update_many(range(10), range(10))
        keyed.savepoint(tmp_path)
    (path,) = (tmp_path / "keyed" / "n").iterdir()
    content = path.read_bytes()
    for at in range(0, len(content), 7):
        path.write_bytes(content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :])
        with pytest.raises(sb.CorruptCheckpointError, match=path.name):
            sb.tools.read_state(tmp_path, "n")
