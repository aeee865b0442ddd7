"""`each` makes the keys of an iterable or an array current in turn, as a loop with `set_current_key` does."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from contract.conftest import MakeKeyed

import statebackend as sb

NUMBERS = [7, -1, 7, 2**40, 0, *range(100, 130)]


@pytest.mark.parametrize(
    "given",
    [
        list,
        tuple,
        iter,
        dict.fromkeys,
        np.array,
        pa.array,
        lambda keys: pa.chunked_array([keys[:3], keys[3:]]),
    ],
    ids=["list", "tuple", "iterator", "dict", "numpy", "arrow", "chunks"],
)
def test_each_key_is_current_in_its_turn(make_keyed: MakeKeyed, given: Callable[[Any], Any]) -> None:
    keyed = make_keyed("bigint")
    count = keyed.get_state(sb.ReducingStateDescriptor("count", "sum", int))
    expected = list(made) if isinstance(made := given(NUMBERS), dict) else NUMBERS
    seen = []
    for key in keyed.each(made):
        assert type(key) is int
        assert keyed.current_key == key
        count.add(1)
        seen.append(key)
    assert seen == expected
    assert keyed.current_key == expected[-1]
    assert count.get_many(expected).to_pylist() == [expected.count(key) for key in expected]


def test_no_key_leaves_the_current_one(make_keyed: MakeKeyed) -> None:
    keyed = make_keyed("bigint")
    keyed.set_current_key(5)
    assert list(keyed.each([])) == list(keyed.each(iter(()))) == []
    assert keyed.current_key == 5
    keyed.each([1, 2])
    assert keyed.current_key == 5, "nothing is set before the first step"


@pytest.mark.parametrize("wrong", ["x", None, 1.5, 2**70])
def test_wrong_key_is_refused_in_its_turn(make_keyed: MakeKeyed, wrong: Any) -> None:
    keyed = make_keyed("bigint")
    with pytest.raises((sb.SerializationError, OverflowError)) as alone:
        keyed.set_current_key(wrong)
    seen: list[Any] = []
    with pytest.raises(type(alone.value)) as caught:
        seen.extend(keyed.each([*range(20), wrong, 99]))
    assert str(caught.value) == str(alone.value)
    assert seen == list(range(20))
    assert keyed.current_key == 19


def test_key_of_another_range_is_refused_in_its_turn(make_keyed: MakeKeyed) -> None:
    keyed = make_keyed("bigint", key_group_range=sb.KeyGroupRange(0, 63))
    run, mine, refused = keyed.each(range(300)), 0, 0
    while True:
        try:
            mine += next(run) is not None
        except sb.KeyGroupError:
            refused += 1
        except StopIteration:
            break
    assert mine + refused == 300 if not hasattr(run, "gi_frame") else refused == 1


def test_error_of_the_keys_is_raised_when_it_is_its_turn(make_keyed: MakeKeyed) -> None:
    def keys() -> Iterator[int]:
        yield from range(30)
        raise LookupError("no more")

    keyed, seen = make_keyed("bigint"), list[int]()
    with pytest.raises(LookupError, match="no more"):
        seen.extend(keyed.each(keys()))
    assert seen == list(range(30))


def test_backend_that_is_closed_ends_the_run(make_keyed: MakeKeyed) -> None:
    keyed = make_keyed("bigint")
    run = keyed.each(range(100))
    while next(run) < 50:
        pass
    keyed.close()
    with pytest.raises(sb.ClosedError):
        next(run)


@pytest.mark.parametrize(
    ("declared", "make"),
    [
        ("bigint", lambda number: number << 20),
        ("string", lambda number: f"user-{number}" * (number % 9)),
        ("binary", lambda number: b"%d" % number),
        ("struct<a:bigint,b:string>", lambda number: (number, f"n{number}")),
        ("double", float),
    ],
)
def test_states_equal_a_plain_loop(
    make_keyed: MakeKeyed, declared: str, make: Callable[[int], Any], rng: random.Random
) -> None:
    """Keys of a run, others in between, namespaces that change, and lists that change while they are gone over."""
    keyed, model = make_keyed(declared), {}
    count = keyed.get_state(sb.ValueStateDescriptor("count", int))
    seen = keyed.get_state(sb.MapStateDescriptor("seen", int, int))
    for _ in range(4):
        keys = [make(rng.randrange(200)) for _ in range(400)]
        for step, key in enumerate(keyed.each(keys)):
            if rng.random() < 0.05:
                keyed.set_current_namespace(rng.choice([sb.VOID, 1, 2]))
            if rng.random() < 0.05:
                key = rng.choice(keys)
                keyed.set_current_key(key)
            if step == 350:
                del keys[380:]
            model.setdefault((key, keyed.current_namespace), []).append(step)
            count.update((count.value() or 0) + 1)
            seen.put(step % 5, step)
    for (key, space), steps in model.items():
        keyed.set_current_key(key)
        keyed.set_current_namespace(space)
        assert count.value() == len(steps)
        assert dict(seen.items()) == {step % 5: step for step in steps}
