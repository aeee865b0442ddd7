"""What is reported before a restart is what the restart does."""

from __future__ import annotations

from pathlib import Path

import pytest

import statebackend as sb

OLD = [
    sb.ValueStateDescriptor("same", int),
    sb.ValueStateDescriptor("wider", "int"),
    sb.ValueStateDescriptor("row", "struct<a:int,b:string>"),
    sb.ListStateDescriptor("kind", int),
    sb.MapStateDescriptor("keys", "int", int),
    sb.MapStateDescriptor("values", int, "float"),
    sb.ValueStateDescriptor("aging", int),
    sb.ValueStateDescriptor("forgotten", int),
]
NEW = {
    "same": (sb.ValueStateDescriptor("same", int), "kept"),
    "wider": (sb.ValueStateDescriptor("wider", int), "migrated"),
    "row": (sb.ValueStateDescriptor("row", "struct<c:bigint,a:bigint>"), "migrated"),
    "kind": (sb.ValueStateDescriptor("kind", int), "refused"),
    "keys": (sb.MapStateDescriptor("keys", int, int), "refused"),
    "values": (sb.MapStateDescriptor("values", int, float), "migrated"),
    "aging": (
        sb.ValueStateDescriptor("aging", int).enable_time_to_live(sb.StateTtlConfig(1)),
        "migrated",
    ),
    "fresh": (sb.ValueStateDescriptor("fresh", int), "begun empty"),
}


@pytest.mark.parametrize("backend", ["heap", "reference", "rocksdb"])
def test_a_report_says_what_a_restart_does(tmp_path: Path, backend: str) -> None:
    store = sb.CheckpointStore(tmp_path).open_for_writing(key_type=int, max_parallelism=128)
    with sb.create_backend(backend).create_keyed_backend(int) as keyed, store:
        for descriptor in OLD:
            keyed.get_state(descriptor)
        checkpoint = store.commit(0, [keyed.snapshot(0, store).result()])
        for where in (store, tmp_path, str(tmp_path), checkpoint):
            planned = sb.tools.plan(where, [descriptor for descriptor, _ in NEW.values()])
            outcomes = {each.name: each.action for each in planned.states}
            assert outcomes == {
                **{name: outcome for name, (_, outcome) in NEW.items()},
                "forgotten": "stored, not declared",
            }
            assert not planned.is_safe
        with sb.create_backend(backend).create_keyed_backend(int, restore=checkpoint) as again:
            for descriptor, outcome in NEW.values():
                if outcome == "refused":
                    with pytest.raises(sb.StateMigrationError, match=descriptor.name):
                        again.get_state(descriptor)
                else:
                    again.get_state(descriptor)
            assert again.undeclared_states() == ["forgotten", "keys", "kind"]
        fitting = [descriptor for descriptor, outcome in NEW.values() if outcome != "refused"]
        refused = sb.ValueStateDescriptor("forgotten", str)
        for others, actions in (
            ([], {"stored, not declared"}),
            ([refused], {"stored, not declared", "refused"}),
        ):
            planned = sb.tools.plan(store, fitting + others)
            assert {each.action for each in planned.states} >= actions
            assert not planned.is_safe
