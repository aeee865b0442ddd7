"""Objects that are nested more deeply than Python's stack allows: an error that names the state, and no crash."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import statebackend as sb
from statebackend.errors import SerializationError
from statebackend.types import PICKLE

KEYS = [1]


def nested(depth: int, made: Callable[[Any], Any]) -> Any:
    value: Any = made(0)
    for _ in range(depth):
        value = made(value)
    return value


def parts(value: Any) -> Any:
    return value.pop() if isinstance(value, list) else value.popitem()[1]


class Nest(sb.AggregateFunction[Any, Any, Any]):
    def create_accumulator(self) -> Any:
        return []

    def add(self, value: Any, accumulator: Any) -> Any:
        return [value, accumulator]

    def get_result(self, accumulator: Any) -> Any:
        return 1

    def merge(self, a: Any, b: Any) -> Any:
        return a


NAME = "deep one"
CALLS: dict[str, Callable[[Any, Any], object]] = {
    "value": lambda keyed, value: keyed.get_state(sb.ValueStateDescriptor(NAME, PICKLE)).update(value),
    "value_many": lambda keyed, value: keyed.get_state(sb.ValueStateDescriptor(NAME, PICKLE)).update_many(
        KEYS, [value]
    ),
    "list": lambda keyed, value: keyed.get_state(sb.ListStateDescriptor(NAME, PICKLE)).add(value),
    "list_all": lambda keyed, value: keyed.get_state(sb.ListStateDescriptor(NAME, PICKLE)).add_all(
        [1, value]
    ),
    "list_many": lambda keyed, value: keyed.get_state(sb.ListStateDescriptor(NAME, PICKLE)).add_many(
        KEYS, [value]
    ),
    "map": lambda keyed, value: keyed.get_state(sb.MapStateDescriptor(NAME, int, PICKLE)).put(1, value),
    "map_all": lambda keyed, value: keyed.get_state(sb.MapStateDescriptor(NAME, int, PICKLE)).put_all(
        {1: value}
    ),
    "reducing": lambda keyed, value: keyed.get_state(
        sb.ReducingStateDescriptor(NAME, lambda a, b: b, PICKLE)
    ).add(value),
    "aggregating": lambda keyed, value: keyed.get_state(
        sb.AggregatingStateDescriptor(NAME, Nest(), accumulator_type=PICKLE)
    ).add(value),
    "in a list": lambda keyed, value: keyed.get_state(
        sb.ValueStateDescriptor(NAME, sb.types.LIST(PICKLE))
    ).update([value]),
    "in a struct": lambda keyed, value: keyed.get_state(
        sb.ValueStateDescriptor(NAME, sb.types.ROW(a=PICKLE))
    ).update((value,)),
    "of another type": lambda keyed, value: keyed.get_state(
        sb.ValueStateDescriptor(NAME, "array<array<map<string,bigint>>>")
    ).update(value),
}
READS: dict[str, Callable[[Any], object]] = {
    "value": lambda keyed: keyed.get_state(sb.ValueStateDescriptor(NAME, PICKLE)).value(),
    "list": lambda keyed: keyed.get_state(sb.ListStateDescriptor(NAME, PICKLE)).get(),
    "map": lambda keyed: list(keyed.get_state(sb.MapStateDescriptor(NAME, int, PICKLE)).items()),
    "reducing": lambda keyed: keyed.get_state(
        sb.ReducingStateDescriptor(NAME, lambda a, b: b, PICKLE)
    ).get_many(KEYS),
}


def attempt(call: Callable[[], object]) -> None:
    """The call does its work, or raises the error for deep values, in one line and with the state's name."""
    try:
        call()
    except SerializationError as error:
        assert NAME in str(error)  # noqa: PT017
        assert len(str(error)) < 400  # noqa: PT017


@pytest.mark.parametrize("depth", [2_000, 100_000])
@pytest.mark.parametrize("made", [lambda value: [value], lambda value: {"a": value}], ids=["list", "dict"])
@pytest.mark.parametrize("how", CALLS)
@pytest.mark.parametrize("backend", ["heap", "rocksdb", "reference"])
def test_a_deep_value_is_named(
    tmp_path: Path, backend: str, how: str, made: Callable[[Any], Any], depth: int
) -> None:
    """`heap` keeps objects as they are: it raises where it copies or pickles them."""
    value = nested(depth, made)
    store = sb.CheckpointStore(tmp_path).open_for_writing(key_type=int, max_parallelism=128)
    with store, sb.create_backend(backend).create_keyed_backend(int) as keyed:
        keyed.set_current_key(1)
        attempt(lambda: CALLS[how](keyed, value))
        if how in READS:
            attempt(lambda: READS[how](keyed))
            mark = keyed.mark()
            attempt(lambda: READS[how](keyed))
            keyed.rollback(mark)
        attempt(lambda: keyed.snapshot(0, store).result())
        if backend == "heap" and how in ("value", "list", "map", "aggregating"):
            with pytest.raises(SerializationError, match="nested too deeply to be pickled") as caught:
                keyed.snapshot(1, store).result()
            assert f"state {NAME!r}" in str(caught.value)
    while value:  # without recursion
        value = parts(value)


@pytest.mark.parametrize("how", ["value", "list", "map_all", "reducing"])
@pytest.mark.parametrize("backend", ["rocksdb", "reference"])
def test_a_deep_value_is_refused_where_it_is_stored_as_bytes(backend: str, how: str) -> None:
    with sb.create_backend(backend).create_keyed_backend(int) as keyed:
        keyed.set_current_key(1)
        with pytest.raises(SerializationError, match="nested too deeply to be pickled") as caught:
            CALLS[how](keyed, nested(2_000, lambda value: [value]))
        assert f"state {NAME!r}" in str(caught.value)


def test_a_deep_object_is_not_copied_by_heap() -> None:
    with sb.create_backend("heap").create_keyed_backend(int) as keyed:
        keyed.set_current_key(1)
        CALLS["list"](keyed, nested(2_000, lambda value: [value]))
        with pytest.raises(SerializationError, match=f"nested too deeply to be copied .state '{NAME}'"):
            READS["list"](keyed)
