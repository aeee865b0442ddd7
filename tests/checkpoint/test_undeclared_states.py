"""States that were restored and that nobody has asked for: named, kept, and written again."""

from __future__ import annotations

from pathlib import Path

import pytest
from all_backends import BACKENDS

import statebackend as sb
from statebackend.backends.reference import ReferenceKeyedBackend
from statebackend.checkpoint import Checkpoint
from statebackend.errors import ClosedError, StateMigrationError

each_backend = pytest.mark.parametrize("backend", BACKENDS)

NAMES = ["count", "seen", "tags"]


def descriptor(name: str) -> sb.ValueStateDescriptor:
    return sb.ValueStateDescriptor(name, int)


def stored(folder: Path) -> Checkpoint:
    store = sb.CheckpointStore(folder).open_for_writing(key_type=int, max_parallelism=128)
    reference = sb.create_backend("reference")
    with store, reference.create_keyed_backend(int) as keyed:
        keyed.set_current_key(1)
        for name in reversed(NAMES):
            keyed.get_value_state(descriptor(name)).update(1)
        keyed.timers.register(5)
        operator = reference.create_operator_backend()
        operator.get_list_state(sb.ListStateDescriptor("offsets", int)).add(1)
        operator.get_union_list_state(sb.ListStateDescriptor("every", int)).add(1)
        operator.get_broadcast_state(sb.MapStateDescriptor("rules", str, int)).put("a", 1)
        return store.commit(0, [each.snapshot(0, store).result() for each in (keyed, operator)])


@each_backend
def test_the_list_of_a_keyed_backend_shrinks_as_states_are_asked_for(tmp_path: Path, backend: str) -> None:
    factory = sb.create_backend(backend)
    assert factory.create_keyed_backend(int).undeclared_states() == []
    with factory.create_keyed_backend(int, restore=stored(tmp_path / "store")) as keyed:
        keyed.savepoint(tmp_path / "savepoint")
        for left in (NAMES, NAMES[1:], NAMES[2:], []):
            assert keyed.undeclared_states() == left
            keyed.get_state(descriptor("not in the checkpoint"))
            assert keyed.undeclared_states() == left
            if left:
                with pytest.raises(StateMigrationError):
                    keyed.get_state(sb.ListStateDescriptor(left[0], int))
                assert keyed.undeclared_states() == left
                keyed.get_state(descriptor(left[0]))
    with pytest.raises(ClosedError):
        keyed.undeclared_states()
    with factory.create_keyed_backend(int, restore=tmp_path / "savepoint") as keyed:
        assert keyed.undeclared_states() == NAMES


@each_backend
def test_the_list_of_an_operator_shrinks_as_states_are_asked_for(tmp_path: Path, backend: str) -> None:
    factory = sb.create_backend(backend)
    assert factory.create_operator_backend().undeclared_states() == []
    with factory.create_operator_backend(restore=stored(tmp_path)) as operator:
        assert operator.undeclared_states() == ["every", "offsets", "rules"]
        operator.get_broadcast_state(sb.MapStateDescriptor("rules", str, int))
        operator.get_list_state(sb.ListStateDescriptor("not in the checkpoint", int))
        assert operator.undeclared_states() == ["every", "offsets"]
        with pytest.raises(StateMigrationError):
            operator.get_list_state(sb.ListStateDescriptor("every", int))
        assert operator.undeclared_states() == ["every", "offsets"]
        operator.get_union_list_state(sb.ListStateDescriptor("every", int))
        operator.get_list_state(sb.ListStateDescriptor("offsets", int))
        assert operator.undeclared_states() == []
    with pytest.raises(ClosedError):
        operator.undeclared_states()


def test_a_backend_without_timers_keeps_them_and_does_not_list_them(tmp_path: Path) -> None:
    class WithoutTimers(ReferenceKeyedBackend):
        has_timers = False

    with WithoutTimers(int, restore=stored(tmp_path)) as keyed:
        assert "statebackend.timers.event" in keyed._restored.names
        assert keyed.undeclared_states() == NAMES
