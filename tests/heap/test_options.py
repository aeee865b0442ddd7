"""The options of the heap backend: a limit of memory, and the search for objects changed in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from type_samples import Backwards

import statebackend as sb
from statebackend.state import KeyedStateBackend

pytestmark = pytest.mark.checked

PICKLE = sb.types.PICKLE


def strict() -> KeyedStateBackend:
    keyed = sb.create_backend("heap", check_mutations=True).create_keyed_backend(str)
    keyed.set_current_key("ann")
    return keyed


def of_value(keyed: KeyedStateBackend) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    state = keyed.get_value_state(sb.ValueStateDescriptor("things", PICKLE))
    state.update(["a"])
    return state.value, state.update


def of_map(keyed: KeyedStateBackend) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    state = keyed.get_map_state(sb.MapStateDescriptor("things", str, PICKLE))
    state["x"] = ["a"]
    return lambda: state["x"], lambda value: state.put("x", value)


def of_reduced(keyed: KeyedStateBackend) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    state = keyed.get_reducing_state(sb.ReducingStateDescriptor("things", lambda old, new: new, PICKLE))
    state.add(["a"])
    return state.get, state.add


KINDS = [of_value, of_map, of_reduced]


@pytest.mark.parametrize("kind", KINDS)
def test_a_change_in_place_is_found_at_the_next_mark(kind: Any) -> None:
    with strict() as keyed:
        read, _ = kind(keyed)
        read().append("b")
        with pytest.raises(sb.MutationError, match="type list was changed in place") as caught:
            keyed.mark()
        assert str(caught.value.detail).startswith("state 'things', key group ")
        assert "'b'" not in str(caught.value)


@pytest.mark.parametrize("kind", KINDS)
def test_reading_again_does_not_make_a_change_in_place_good_but_storing_does(kind: Any) -> None:
    with strict() as keyed:
        read, store = kind(keyed)
        things = read()
        things.append("b")
        assert read() == ["a", "b"]
        store(things)
        keyed.release(keyed.mark())
        for _ in range(2):
            assert read() == ["a", "b"]
            keyed.release(keyed.mark())
        if kind is not of_reduced:  # whose function gets the objects themselves
            store([*read(), "c"])
            keyed.release(keyed.mark())
            store(["a", "b"])
        read().append("c")
        assert read() == ["a", "b", "c"]
        with pytest.raises(sb.MutationError, match="type list was changed in place"):
            keyed.mark()


@pytest.mark.parametrize("kind", KINDS)
def test_an_object_of_an_earlier_batch_is_not_changed_and_stored(kind: Any) -> None:
    with strict() as keyed:
        read, store = kind(keyed)
        things = read()
        keyed.release(keyed.mark())
        things.append("b")
        store(things)
        with pytest.raises(sb.MutationError, match="type list was changed in place"):
            keyed.mark()


class Calling:
    """An object whose pickling calls a backend."""

    call: Any = None

    def __reduce__(self) -> Any:
        if Calling.call is not None:
            Calling.call()
        return Calling, ()


@pytest.mark.parametrize("kind", KINDS)
def test_a_call_by_the_pickling_of_a_noted_object_is_refused(kind: Any) -> None:
    refused = []

    def call() -> None:
        with pytest.raises(sb.UsageError) as caught:
            keyed.set_current_key("bob")
        refused.append(caught.value.code)

    with strict() as keyed:
        _, store = kind(keyed)
        store(Calling())
        Calling.call = call
        try:
            store(Calling())
            keyed.mark()
        finally:
            Calling.call = None
        assert len(refused) >= 2
        assert set(refused) == {"USAGE.OVERLAPPING_CALL"}
        assert keyed.current_key == "ann"


def test_changed_element_of_a_list_is_found() -> None:
    with strict() as keyed:
        state = keyed.get_list_state(sb.ListStateDescriptor("things", PICKLE))
        given = ["a"]
        state.add(given)
        state.get()[0].append("b")  # lists give copies
        keyed.release(keyed.mark())
        given.append("c")
        with pytest.raises(sb.MutationError, match="type list was changed in place"):
            keyed.mark()


def test_declared_types_are_not_watched() -> None:
    with strict() as keyed:
        tags = keyed.get_value_state(sb.ValueStateDescriptor("tags", list[str]))
        tags.update(["a"])
        tags.value().append("b")
        keyed.mark()
        assert tags.value() == ["a"]


def test_without_the_option_nothing_is_searched() -> None:
    with sb.create_backend("heap").create_keyed_backend(str) as keyed:
        keyed.set_current_key("ann")
        read, _ = of_value(keyed)
        read().append("b")
        keyed.mark()


def test_a_call_beyond_the_limit_changes_nothing() -> None:
    with sb.create_backend("heap", max_bytes=4_000_000).create_keyed_backend(int) as keyed:
        sums = keyed.get_reducing_state(sb.ReducingStateDescriptor("sums", "sum", int))

        def fill() -> None:
            for key in range(1_000_000):
                keyed.set_current_key(key)
                sums.add(key)

        with pytest.raises(sb.MemoryLimitError, match="state 'sums', max_bytes=4000000"):
            fill()
        assert keyed.current_key == keyed.num_entries() > 10_000
        assert not sums.exists()
        assert sorted(keyed.keys("sums")) == list(range(keyed.current_key))
        for each in range(0, keyed.current_key, 2):
            keyed.set_current_key(each)
            assert sums.get() == each
            sums.clear()


def test_none_among_objects_of_a_users_serializer_is_not_watched() -> None:
    state = strict().get_map_state(sb.MapStateDescriptor("names", int, Backwards()))
    state.put_all({1: None, 2: "ab"})
    state.backend.mark()
    assert dict(state.items()) == {1: None, 2: "ab"}
    state.put(2, None)
    state.backend.mark()
    assert list(state.values()) == [None, None]


@pytest.mark.parametrize(
    "options",
    [{"max_bytes": -1}, {"max_bytes": 1.5}, {"threads": 0}, {"threads": "2"}, {"check_mutations": 1}],
)
def test_an_option_that_makes_no_sense_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(sb.UsageError, match=next(iter(options))):
        sb.create_backend("heap", **options)


def test_a_mark_that_is_ended_twice_within_a_call_ends_no_other() -> None:
    """The second end waits for the first one, which closes the mark."""
    keyed: Any = sb.create_backend("heap").create_keyed_backend(int)
    state = keyed.get_state(sb.ValueStateDescriptor("s", int))
    keyed.set_current_key(1)
    state.update(0)
    older = keyed.core.mark()
    state.update(1)
    newer = keyed.core.mark()
    state.update(2)
    keyed._run(lambda: [keyed.core.release_soon(newer) for _ in range(2)])
    keyed._settle()
    assert keyed.core.metrics()["marks"] == 1
    keyed.core.rollback(older)
    assert state.value() == 0
    keyed.close()
