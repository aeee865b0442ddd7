"""Batches over numbers that expire, with nulls: marks, snapshots and clocks that go back, against a dict."""

from __future__ import annotations

import random
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
UPDATES = [StateTtlConfig.UpdateType.OnCreateAndWrite, StateTtlConfig.UpdateType.OnReadAndWrite]
STEPS = {"update": lambda old, new: new, "sum": lambda old, new: old + new, "min": min, "max": max}


class Model:
    """Value and stamp of each key, by the rules of time to live; without one nothing has a stamp."""

    def __init__(self, name: str, config: StateTtlConfig | None) -> None:
        self.step, self.config = STEPS[name], config
        self.held: dict[Any, tuple[Any, int]] = {}

    def is_gone(self, key: Any, now: int) -> bool:
        return self.config is not None and self.held[key][1] + TTL <= now

    def write(self, key: Any, value: Any, now: int) -> None:
        if value is None:
            self.held.pop(key, None)
        elif key not in self.held or self.is_gone(key, now):
            self.held[key] = value, now
        else:
            self.held[key] = self.step(self.held[key][0], value), now

    def read(self, key: Any, now: int) -> Any:
        if key not in self.held:
            return None
        value = self.held[key][0]
        if self.is_gone(key, now):
            del self.held[key]
            shows = StateTtlConfig.StateVisibility.ReturnExpiredIfNotCleanedUp
            return value if self.config.state_visibility is shows else None
        if self.config is not None and self.config.update_type is StateTtlConfig.UpdateType.OnReadAndWrite:
            self.held[key] = value, now
        return value


def config_of(rng: random.Random) -> StateTtlConfig:
    return StateTtlConfig(
        TTL,
        update_type=rng.choice(UPDATES),
        state_visibility=rng.choice(list(StateTtlConfig.StateVisibility)),
        cleanup_in_background=False,
    )


def rows_of(view: Any, keyed: Any, table: Any, expires: bool) -> dict[Any, tuple[Any, int]]:
    """What a snapshot holds, by key."""
    rows = {}
    for group in range(keyed.max_parallelism):
        columns = view.read_group(table, group)
        if len(columns["value"]):
            keys, values = columns["key"].tolist(), columns["value"].tolist()
            stamps = columns["timestamp"].tolist() if expires else [0] * len(keys)
            rows.update({key: (value, at) for key, value, at in zip(keys, values, stamps, strict=True)})
    return rows


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
    descriptor: Any
    if name == "update":
        descriptor = sb.ValueStateDescriptor("v", kind)
    else:
        descriptor = sb.ReducingStateDescriptor("v", name, kind)
    if config is not None:
        descriptor.enable_time_to_live(config)
    state: Any = (keyed.get_value_state if name == "update" else keyed.get_reducing_state)(descriptor)
    write = state.update_many if name == "update" else state.add_many
    model = Model(name, config)
    marks: list[tuple[Any, dict[Any, Any]]] = []
    views: list[tuple[Any, dict[Any, Any]]] = []

    for _ in range(30):
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
            views.append((keyed.core.snapshot(), dict(model.held)))
        elif action < 0.4 and views:
            view, before = views.pop(rng.randrange(len(views)))
            if not texts:
                assert rows_of(view, keyed, state.plain, expires) == (
                    before if expires else {key: (value, 0) for key, (value, _) in before.items()}
                )
            view.release()
        else:
            clock.set(max(1, clock.now() + rng.choice((-150, -30, 0, 0, 20, 60, 120))))
            n = rng.choice((1, 40, 4_500, 4_500))
            numbers = rng.choices(range(rng.choice((3, 300, 9_000))), k=n)
            keys = [f"k{number}" for number in numbers] if texts else numbers
            if rng.random() < 0.4:
                expected = [model.read(key, clock.now()) for key in keys]
                assert state.get_many(keys).to_pylist() == expected
            else:
                share = rng.choice((0, 0.01, 0.3, 1))
                values = [None if rng.random() < share else rng.randrange(-99, 99) for _ in range(n)]
                write(keys, pa.array(values, ARROW[kind]))
                for key, value in zip(keys, values, strict=True):
                    model.write(key, value, clock.now())
        assert len(state.plain) == len(model.held)
        keyed.core._check()
    keys = list(model.held)
    assert state.get_many(keys).to_pylist() == [model.read(key, clock.now()) for key in keys]
    for view, _ in views:
        view.release()
    keyed.close()


@pytest.mark.parametrize("kind", ["bigint", "int"])
def test_a_sum_that_overflows_brings_back_what_nulls_have_removed(kind: str) -> None:
    clock = ManualClock(1_000)
    keyed = sb.create_backend("heap", threads=1).create_keyed_backend(int, clock=clock)
    descriptor = sb.ReducingStateDescriptor("v", "sum", kind)
    descriptor.enable_time_to_live(StateTtlConfig(TTL))
    state = keyed.get_reducing_state(descriptor)
    keys = np.arange(5_000)
    state.add_many(keys, pa.array([1] * 5_000, ARROW[kind]))
    values: list[int | None] = [None if row % 10 == 0 else 7 for row in range(5_000)]
    values[4_321] = 2 ** (63 if kind == "bigint" else 31) - 1
    clock.set(1_050)
    with pytest.raises(OverflowError):
        state.add_many(keys, pa.array(values, ARROW[kind]))
    assert state.get_many(keys).to_pylist() == [1] * 5_000
    clock.set(1_100)
    assert state.get_many(keys).null_count == 5_000
    assert len(state.plain) == 0
    keyed.close()
