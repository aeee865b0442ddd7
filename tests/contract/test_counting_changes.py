"""How many rows of state were written and removed since a mark, and how many there are: values, lists, map entries."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

import statebackend as sb
from statebackend.testing import ManualClock

pytestmark = pytest.mark.checked


def states(keyed: sb.KeyedStateBackend) -> dict[str, Any]:
    return {
        "value": keyed.get_value_state(sb.ValueStateDescriptor("value", int)),
        "list": keyed.get_list_state(sb.ListStateDescriptor("list", str)),
        "map": keyed.get_map_state(sb.MapStateDescriptor("map", str, int)),
        "sum": keyed.get_reducing_state(sb.ReducingStateDescriptor("sum", "sum", int)),
        "object": keyed.get_value_state(sb.ValueStateDescriptor("object", sb.types.PICKLE)),
    }


def test_reading_is_no_change_unless_it_counts_as_use(
    make_keyed: Callable[..., sb.KeyedStateBackend], clock: ManualClock
) -> None:
    keyed = make_keyed()
    on_read = sb.StateTtlConfig(100, update_type=sb.StateTtlConfig.UpdateType.OnReadAndWrite)
    used = keyed.get_state(sb.ValueStateDescriptor("used", int).enable_time_to_live(on_read))
    plain = keyed.get_state(
        sb.ValueStateDescriptor("plain", sb.types.PICKLE).enable_time_to_live(sb.StateTtlConfig(100))
    )
    entries = keyed.get_state(sb.MapStateDescriptor("entries", str, int).enable_time_to_live(on_read))
    keyed.set_current_key(1)
    used.update(1)
    plain.update([1])
    entries.put_all({"a": 1, "b": 2})
    mark = keyed.mark()
    assert (used.value(), entries.get("a")) == (1, 1)
    assert keyed.count_changes(mark) == (0, 0)  # no stamp is another one
    clock.advance(50)
    keyed.set_current_key(1)
    assert plain.value() == [1]
    assert keyed.count_changes(mark) == (0, 0)
    assert (used.value(), entries.get("a")) == (1, 1)
    assert keyed.count_changes(mark) == (2, 0)


def test_what_expires_is_removed(make_keyed: Callable[..., sb.KeyedStateBackend], clock: ManualClock) -> None:
    keyed = make_keyed()
    idle = sb.StateTtlConfig(100, cleanup_idle=True)
    state = keyed.get_state(sb.MapStateDescriptor("seen", str, int).enable_time_to_live(idle))
    for key in range(20):
        keyed.set_current_key(key)
        state.put_all({"a": 1, "b": 2})
    clock.advance(60)
    keyed.set_current_key(0)
    state.put("a", 2)
    mark = keyed.mark()
    clock.advance(60)
    keyed.advance(1_000)
    assert keyed.count_changes(mark) == (0, 39)
    assert keyed.metrics()["rows"] == 1


def test_only_an_open_mark_of_its_own_counts(keyed: sb.KeyedStateBackend) -> None:
    mark = keyed.mark()
    keyed.release(mark)
    with pytest.raises(sb.UsageError, match="no longer valid"):
        keyed.count_changes(mark)
    with pytest.raises(sb.UsageError, match="not a mark of this backend"):
        keyed.count_changes(object())


def test_counts_are_those_of_a_model_whatever_is_done(
    keyed: sb.KeyedStateBackend, rng: random.Random
) -> None:
    """Over namespaces, failed calls that are undone, and rollbacks."""
    state = states(keyed)
    model: dict[Any, Any] = {}
    for _ in range(40):
        mark, before, written = keyed.mark(), dict(model), {}
        for _ in range(rng.randrange(60)):
            key, space = rng.randrange(8), rng.choice([sb.VOID, "x"])
            keyed.set_current_key(key)
            keyed.set_current_namespace(space)
            action = rng.randrange(9)
            name = rng.choice(["value", "object", "sum", "list"])
            if action < 3:
                value = rng.randrange(9)
                if name in ("value", "object"):
                    state[name].update(value)
                else:
                    state[name].add(str(value) if name == "list" else value)
                written[name, key, space] = model[name, key, space] = True
            elif action < 5:
                inner = rng.choice("abc")
                state["map"].put(inner, 1)
                written["map", key, space, inner] = model["map", key, space, inner] = True
            elif action == 5:
                inner = rng.choice("abc")
                state["map"].remove(inner)
                model.pop(("map", key, space, inner), None)
            elif action == 6:
                state["map"].clear()
                for inner in "abc":
                    model.pop(("map", key, space, inner), None)
            elif action == 7:
                state[name].clear()
                model.pop((name, key, space), None)
            else:
                with pytest.raises((sb.SerializationError, TypeError)):
                    state["value"].update_many([1, 2, 3], [1, 2, "no number"])
        gone = len(before.keys() - model.keys())
        assert keyed.count_changes(mark) == (len(written.keys() & model.keys()), gone)
        assert keyed.metrics()["rows"] == len(model)
        if rng.random() < 0.3:
            keyed.rollback(mark)
            assert keyed.count_changes(mark) == (0, 0)
            model = before
        keyed.release(mark)
