"""Batches over numbers of four and eight bytes: every operation, under marks and snapshots, against a dict."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import statebackend as sb

pytestmark = pytest.mark.checked

DTYPES = {"bigint": np.int64, "int": np.int32, "double": np.float64, "float": np.float32}
LIMITS = {"bigint": 2**63 - 1, "int": 2**31 - 1}


def smaller(old: Any, new: Any) -> Any:
    if isinstance(old, float) and math.isnan(old):
        return new
    return new if new < old else old


def larger(old: Any, new: Any) -> Any:
    """NaN is greater than every number."""
    if isinstance(old, float) and (math.isnan(old) or math.isnan(new)):
        return old if math.isnan(old) else new
    return new if new > old else old


STEPS: dict[str, Callable[[Any, Any], Any]] = {
    "sum": lambda old, new: old + new,
    "min": smaller,
    "max": larger,
    "first": lambda old, new: old,
    "last": lambda old, new: new,
}


def values_of(rng: random.Random, kind: str, n: int) -> np.ndarray[Any, Any]:
    if kind in LIMITS:
        return np.array([rng.randint(-1000, 1000) for _ in range(n)], DTYPES[kind])
    some = [rng.choice((0.0, -0.0, 1.5, -2.25, math.nan, math.inf, rng.random())) for _ in range(n)]
    return np.array(some, DTYPES[kind])


def rounded(kind: str, value: Any) -> Any:
    return float(np.float32(value)) if kind == "float" else value


@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize("name", [*STEPS, "update"])
@pytest.mark.parametrize("keys_are", ["numbers", "texts"])
@pytest.mark.parametrize("threads", [1, 2])
def test_batches_give_what_a_dict_gives(
    rng: random.Random, kind: str, name: str, keys_are: str, threads: int
) -> None:
    texts = keys_are == "texts"
    keyed = sb.create_backend("heap", threads=threads).create_keyed_backend(str if texts else int)
    state: Any
    if name == "update":
        state = keyed.get_value_state(sb.ValueStateDescriptor("v", kind))
    else:
        state = keyed.get_reducing_state(sb.ReducingStateDescriptor("v", name, kind))
    write = state.update_many if name == "update" else state.add_many
    step = STEPS["last"] if name == "update" else STEPS[name]
    model: dict[Any, Any] = {}
    saved: list[tuple[Any, dict[Any, Any]]] = []
    views: list[Any] = []

    def check() -> None:
        found = state.get_many(list(model)).to_pylist()
        assert list(map(repr, found)) == list(map(repr, model.values()))
        keyed.core._check()

    for _ in range(25):
        action = rng.random()
        if action < 0.15:
            saved.append((keyed.mark(), dict(model)))
        elif action < 0.3 and saved:
            mark, before = saved.pop()
            if rng.random() < 0.5:
                keyed.rollback(mark)
                model = before
            keyed.release(mark)
        elif action < 0.4:
            views.append(keyed.core.snapshot())
        elif action < 0.5 and views:
            views.pop(rng.randrange(len(views))).release()
        else:
            n = rng.choice((1, 40, 5_000))
            numbers = [rng.randrange(rng.choice((3, 300, 9_000))) for _ in range(n)]
            keys = [f"k{number}" for number in numbers] if texts else numbers
            values = values_of(rng, kind, n)
            write(keys, values)
            for key, value in zip(keys, values.tolist(), strict=True):
                model[key] = rounded(kind, step(model[key], value) if key in model else value)
        check()
    for view in views:
        view.release()
    keyed.close()


@pytest.mark.parametrize("kind", LIMITS)
def test_a_sum_that_overflows_changes_nothing(kind: str) -> None:
    keyed = sb.create_backend("heap", threads=1).create_keyed_backend(int)
    state = keyed.get_reducing_state(sb.ReducingStateDescriptor("v", "sum", kind))
    keys = np.arange(5_000)
    state.add_many(keys, np.ones(5_000, DTYPES[kind]))
    view = keyed.core.snapshot()
    values = np.full(5_000, 7, DTYPES[kind])
    values[4_321] = LIMITS[kind]
    with pytest.raises(OverflowError):
        state.add_many(keys, values)
    view.release()
    assert state.get_many(keys).to_pylist() == [1] * 5_000
    state.add_many([1], [LIMITS[kind] - 1])
    assert state.get_many([1]).to_pylist() == [LIMITS[kind]]
    keyed.close()


def test_one_call_agrees_with_many(np_rng: np.random.Generator) -> None:
    """Sums of doubles depend on their order: a batch adds in the order of its rows."""
    keyed = sb.create_backend("heap", threads=2).create_keyed_backend(int)
    keys, values = np_rng.integers(0, 50, 4_000), np_rng.random(4_000) * 10.0 ** np_rng.integers(-9, 9, 4_000)
    state = keyed.get_reducing_state(sb.ReducingStateDescriptor("v", "sum", "double"))
    state.add_many(keys, values)
    for key in range(50):
        mine = values[keys == key].tolist()
        assert state.get_many([key]).to_pylist() == [functools.reduce(lambda a, b: a + b, mine)]
    keyed.close()
