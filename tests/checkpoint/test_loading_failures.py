"""Restored states that cannot be loaded, or that nobody has asked for: they stay in the checkpoint, whole."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
from all_backends import BACKENDS

import statebackend as sb
from statebackend.backends.reference import ReferenceKeyedBackend
from statebackend.checkpoint import Checkpoint
from statebackend.errors import ClosedError, StateMigrationError

pytestmark = pytest.mark.checked

ROWS = 80_000


SMALL = sb.ValueStateDescriptor("small", int)


LARGE: dict[str, Any] = {
    "inline": sb.ValueStateDescriptor("inline", "struct<a:bigint,b:bigint>"),
    "arena": sb.ValueStateDescriptor("arena", str),
    "object": sb.ValueStateDescriptor("object", sb.types.PICKLE),
    "list": sb.ListStateDescriptor("list", str),
    "map": sb.MapStateDescriptor("map", int, str).enable_time_to_live(sb.StateTtlConfig(10**12)),
}


class Fragile:
    """Comes back from a checkpoint only so often."""

    left = 0

    def __reduce__(self) -> Any:
        return remade, ()


def remade() -> Fragile:
    Fragile.left -= 1
    if Fragile.left < 0:
        raise RuntimeError("no more of these")
    return Fragile()


def create(backend: str, **options: Any) -> Any:
    created = sb.create_backend(
        backend, **{name: options.pop(name) for name in ["max_bytes"] if name in options}
    )
    return created.create_keyed_backend(int, max_parallelism=32, **options)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with a checkpoint of all these states, in two namespaces each."""
    path = tmp_path_factory.mktemp("store")
    store = sb.CheckpointStore(path).open_for_writing(key_type=int, max_parallelism=32)
    with store, create("heap") as keyed:
        keyed.get_state(SMALL).update_many(range(10), range(10))
        keys, texts = list(range(ROWS // 2)), [f"a text of some length {n}" for n in range(ROWS // 2)]
        for namespace in (sb.VOID, "other"):
            keyed.set_current_namespace(namespace)
            keyed.get_state(LARGE["inline"]).update_many(keys, [(n, n) for n in keys])
            keyed.get_state(LARGE["arena"]).update_many(keys, texts)
            keyed.get_state(LARGE["object"]).update_many(keys, [(n,) for n in keys])
            keyed.get_state(LARGE["list"]).add_many(keys, texts)
            keyed.get_state(LARGE["map"]).put_many(keys, keys, texts)
        store.commit(0, [keyed.snapshot(0, store).result()])
    return path


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("name", "marked"), [(name, name in ("arena", "map")) for name in LARGE])
def test_a_state_that_passes_the_memory_limit(root: Path, tmp_path: Path, name: str, marked: bool) -> None:
    checkpoint = sb.CheckpointStore(root).open(0)
    with create("heap", max_bytes=3_000_000, restore=checkpoint) as keyed:
        small = keyed.get_state(SMALL)
        mark = keyed.mark() if marked else None
        before = keyed.metrics()
        for _ in range(2):
            with pytest.raises(sb.MemoryLimitError, match=f"state '{name}' cannot be restored") as caught:
                keyed.get_state(LARGE[name])
            assert "max_bytes=3000000" in str(caught.value)
            after = keyed.metrics()
            assert list(after["states"]) == ["small"]
            assert (after["run_bytes"], after["blob_bytes"]) == (before["run_bytes"], before["blob_bytes"])
            assert name in keyed.undeclared_states()
        # What is left is of use: other state may take the memory.
        small.update_many(range(8_000), range(8_000))
        with pytest.raises(sb.MemoryLimitError, match="would pass its memory limit"):
            small.update_many(range(10**6), range(10**6))
        if mark is not None:
            keyed.rollback(mark)
        kept = [(each, n) for each, n in enumerate(small.get_many(range(8_000)).to_pylist()) if n is not None]
        assert len(kept) == (10 if marked else 8_000)
        keyed.core._check()
        # The state is still in the next checkpoint.
        store = sb.CheckpointStore(tmp_path).open_for_writing(key_type=int, max_parallelism=32)
        with store:
            committed = store.commit(1, [keyed.snapshot(1, store).result()])
    table = sb.tools.state(tmp_path, name).to_table()
    assert table.num_rows == ROWS
    with create("heap", restore=committed) as again:
        state = again.get_state(LARGE[name])
        assert again.num_entries(name) == ROWS
        again.set_current_key(77)
        again.set_current_namespace("other")
        found = {"list": lambda: state.get()[0], "map": lambda: state.get(77)}.get(
            name, lambda: state.value()
        )()
        assert (found[0] if name in ("inline", "object") else found[-2:]) in (77, "77")


@pytest.mark.parametrize("kind", ["value", "list", "map"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_an_object_that_does_not_come_back(tmp_path: Path, backend: str, kind: str) -> None:
    descriptor = {
        "value": sb.ValueStateDescriptor("things", sb.types.PICKLE),
        "list": sb.ListStateDescriptor("things", sb.types.PICKLE),
        "map": sb.MapStateDescriptor("things", int, sb.types.PICKLE),
    }[kind]
    Fragile.left = 10**6
    store = sb.CheckpointStore(tmp_path).open_for_writing(key_type=int, max_parallelism=32)
    with store, create(backend) as keyed:
        state = keyed.get_state(descriptor)
        keyed.get_state(SMALL).update_many(range(10), range(10))
        put = {"value": "update", "list": "add", "map": "put"}[kind]
        arguments = (1, Fragile()) if kind == "map" else (Fragile(),)
        for key in range(20):
            keyed.set_current_key(key)
            keyed.set_current_namespace(key % 2)
            getattr(state, put)(*arguments)
        store.commit(0, [keyed.snapshot(0, store).result()])
        # A second file, so that something has been loaded before it fails.
        keyed.set_current_key(100)
        getattr(state, put)(*arguments)
        checkpoint = store.commit(1, [keyed.snapshot(1, store).result()])
    assert [file.kind for file in checkpoint.files.values()] == ["base", "delta"]
    with create(backend, restore=checkpoint) as keyed:
        for left in (0, 7, 20):
            Fragile.left = left
            with pytest.raises(sb.SerializationError, match="a pickled value cannot be read"):
                keyed.get_state(descriptor)
            assert keyed.undeclared_states() == ["small", "things"]
            assert keyed.num_entries() == 0
        Fragile.left = 21
        keyed.get_state(descriptor)
        assert keyed.num_entries("things") == len(list(keyed.keys_and_namespaces("things"))) == 21
        keyed.get_state(SMALL)
        assert keyed.undeclared_states() == []


def test_nothing_is_kept_of_a_state_that_was_to_be_cleaned_up_for_every_record(tmp_path: Path) -> None:
    cleanup = sb.StateTtlConfig.new_builder(10**12).cleanup_incrementally(5, True).build()
    descriptor = sb.ValueStateDescriptor("things", sb.types.PICKLE).enable_time_to_live(cleanup)
    Fragile.left = 10**6
    store = sb.CheckpointStore(tmp_path).open_for_writing(key_type=int, max_parallelism=32)
    with store, create("heap") as keyed:
        keyed.set_current_key(1)
        keyed.get_state(descriptor).update(Fragile())
        handle = type(keyed.get_state(descriptor))
        checkpoint = store.commit(0, [keyed.snapshot(0, store).result()])
    del keyed
    with create("heap", restore=checkpoint) as keyed:
        Fragile.left = 0
        with pytest.raises(sb.SerializationError, match="a pickled value cannot be read"):
            keyed.get_state(descriptor)
        gc.collect()
        assert not [each for each in gc.get_objects() if type(each) is handle and each.backend is keyed]
        Fragile.left = 1
        assert isinstance(keyed.get_state(descriptor), handle)


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
        keyed.timers.register_event_time_timer(5)
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
        assert "statebackend.timers.event" in keyed._restored
        assert keyed.undeclared_states() == NAMES
