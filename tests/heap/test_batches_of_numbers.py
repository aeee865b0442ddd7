"""Batches over numbers, with nulls, under marks and snapshots, expiring or not, against a dict."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import statebackend as sb
from statebackend.state.ttl import StateTtlConfig
from statebackend.testing import ManualClock

pytestmark = pytest.mark.checked

TTL = 100
ARROW = {"bigint": pa.int64(), "int": pa.int32(), "double": pa.float64(), "float": pa.float32()}
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
    "update": lambda old, new: new,
    "sum": lambda old, new: old + new,
    "min": smaller,
    "max": larger,
    "first": lambda old, new: old,
    "last": lambda old, new: new,
}


class Model:
    """Value and stamp of each key, by the rules of time to live; without one nothing has a stamp."""

    def __init__(self, name: str, kind: str, config: StateTtlConfig | None) -> None:
        self.step, self.kind, self.config = STEPS[name], kind, config
        self.held: dict[Any, tuple[Any, int]] = {}

    def is_gone(self, key: Any, now: int) -> bool:
        return self.config is not None and self.held[key][1] + TTL <= now

    def write(self, key: Any, value: Any, now: int) -> None:
        if value is None:
            self.held.pop(key, None)
            return
        if key in self.held and not self.is_gone(key, now):
            value = self.step(self.held[key][0], value)
        self.held[key] = float(np.float32(value)) if self.kind == "float" else value, now

    def read(self, key: Any, now: int) -> Any:
        if key not in self.held:
            return None
        value = self.held[key][0]
        if self.is_gone(key, now):
            del self.held[key]
            return value if self.config is not None and self.config.shows_expired else None
        if self.config is not None and self.config.renews_on_read:
            self.held[key] = value, now
        return value

    def rows(self) -> dict[Any, str]:
        """What a snapshot holds, by key."""
        return {key: repr((value, at if self.config else 0)) for key, (value, at) in self.held.items()}


def config_of(rng: random.Random) -> StateTtlConfig:
    return StateTtlConfig(
        TTL,
        update_type=rng.choice(list(StateTtlConfig.UpdateType)[1:]),
        state_visibility=rng.choice(list(StateTtlConfig.StateVisibility)),
        cleanup_in_background=False,
    )


def rows_of(view: Any, keyed: Any, table: Any, expires: bool) -> dict[Any, str]:
    rows = {}
    for group in range(keyed.max_parallelism):
        columns = view.rows(table, group, group).columns()
        if len(columns["value"]):
            keys, values = columns["key"].tolist(), columns["value"].tolist()
            stamps = columns["timestamp"].tolist() if expires else [0] * len(keys)
            rows.update({key: repr((value, at)) for key, value, at in zip(keys, values, stamps, strict=True)})
    return rows


def values_of(rng: random.Random, kind: str, n: int) -> pa.Array:
    share = rng.choice((0, 0, 0.01, 0.3, 1))
    some = (0.0, -0.0, 1.5, -2.25, math.nan, math.inf)
    values = [
        None
        if rng.random() < share
        else rng.randint(-1000, 1000)
        if kind in LIMITS
        else rng.choice((*some, rng.random()))
        for _ in range(n)
    ]
    return pa.array(values, ARROW[kind])


def state_of(keyed: Any, name: str, kind: str, config: StateTtlConfig | None) -> Any:
    descriptor: Any = (
        sb.ValueStateDescriptor("v", kind)
        if name == "update"
        else sb.ReducingStateDescriptor("v", name, kind)
    )
    return keyed.get_state(descriptor if config is None else descriptor.enable_time_to_live(config))


@pytest.mark.parametrize("kind", ARROW)
@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("keys_are", ["numbers", "texts"])
@pytest.mark.parametrize("expires", [True, False], ids=["ttl", "no ttl"])
@pytest.mark.parametrize("threads", [1, 2])
def test_batches_give_what_a_dict_gives(
    rng: random.Random, kind: str, name: str, keys_are: str, expires: bool, threads: int
) -> None:
    texts, config = keys_are == "texts", config_of(rng) if expires else None
    clock = ManualClock(1_000)
    keyed = sb.create_backend("heap", threads=threads).create_keyed_backend(
        str if texts else int, max_parallelism=rng.choice((4, 128)), clock=clock
    )
    state = state_of(keyed, name, kind, config)
    write = state.update_many if name == "update" else state.add_many
    model = Model(name, kind, config)
    marks: list[tuple[Any, dict[Any, Any]]] = []
    views: list[tuple[Any, dict[Any, str]]] = []

    def check(keys: list[Any]) -> None:
        expected = [model.read(key, clock.now()) for key in keys]
        assert repr(state.get_many(keys).to_pylist()) == repr(expected)

    for _ in range(45):
        action = rng.random()
        if action < 0.12:
            marks.append((keyed.mark(), dict(model.held)))
        elif action < 0.24 and marks:
            mark, before = marks.pop()
            if rng.random() < 0.6:
                keyed.rollback(mark)
                model.held = before
            keyed.release(mark)
        elif action < 0.32:
            views.append((keyed.core.snapshot(), model.rows()))
        elif action < 0.4 and views:
            view, rows = views.pop(rng.randrange(len(views)))
            assert texts or rows_of(view, keyed, state.plain, expires) == rows
            view.release()
        else:
            clock.set(max(1, clock.now() + rng.choice((-150, -30, 0, 0, 20, 60, 120))))
            n = rng.choice((1, 40, 4_500, 4_500))
            numbers = rng.choices(range(rng.choice((3, 300, 9_000))), k=n)
            keys = [f"k{number}" for number in numbers] if texts else numbers
            if rng.random() < 0.4:
                check(keys)
            else:
                values = values_of(rng, kind, n)
                write(keys, values.to_numpy() if values.null_count == 0 else values)
                for key, value in zip(keys, values.to_pylist(), strict=True):
                    model.write(key, value, clock.now())
        assert len(state.plain) == len(model.held)
        keyed.core._check()
    check(list(model.held))
    for view, _ in views:
        view.release()
    keyed.close()
