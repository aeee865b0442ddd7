"""A live view shows the state of one moment, from any thread, whatever is written later."""

from __future__ import annotations

import random
import threading
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from contract.conftest import MakeKeyed

import statebackend as sb
from statebackend.runtime.live_view import StateView
from statebackend.testing import ManualClock

WINDOW = sb.TimeWindow(0, 10)
STATES = {
    "count": sb.ValueStateDescriptor("count", "bigint"),
    "name": sb.ValueStateDescriptor("name", str),
    "tags": sb.ListStateDescriptor("tags", str),
    "total": sb.ReducingStateDescriptor("total", "sum", int),
    "thing": sb.ValueStateDescriptor("thing", sb.types.PICKLE),
    "seen": sb.MapStateDescriptor("seen", str, int),
}


def view_of(keyed: Any, now: int = 1_000) -> StateView:
    checkpoint: Any = SimpleNamespace(id=7, now=now, watermark=None)
    return StateView(keyed, checkpoint)


def fill(keyed: Any, keys: list[Any], offset: int) -> None:
    """Give some keys values; every fifth key has none."""
    chosen = [key for at, key in enumerate(keys) if at % 5]
    numbers = [offset + at for at in range(len(chosen))]
    states = {name: keyed.get_state(each) for name, each in STATES.items()}
    states["count"].update_many(chosen, numbers)
    states["name"].update_many(chosen, [f"n{number}" for number in numbers])
    states["tags"].add_many(chosen, [f"t{number}" for number in numbers])
    states["total"].add_many(chosen, numbers)
    states["thing"].update_many(chosen, [{"n": number} for number in numbers])
    states["seen"].put_many(chosen, ["a"] * len(chosen), numbers)
    keyed.set_current_key(keys[1])
    keyed.set_current_namespace(WINDOW)
    states["count"].update(-offset)
    keyed.set_current_namespace(sb.VOID)


def shown(view: StateView) -> dict[str, list[Any]]:
    """All that a view has, by state, in an order of its own."""
    found = {name: sb.tools.state(view, name).to_table().to_pylist() for name in STATES}
    return {name: sorted(map(repr, rows)) for name, rows in found.items()}


@pytest.mark.parametrize("key_type", ["bigint", "string", "struct<a:int,b:string>"])
def test_view_keeps_its_moment(make_keyed: MakeKeyed, key_type: str, rng: random.Random) -> None:
    keyed = make_keyed(key_type, max_parallelism=16)
    keys: list[Any] = rng.sample(range(-500, 500), 300)
    if key_type != "bigint":
        keys = [f"k{key}" if key_type == "string" else {"a": key, "b": f"b{key % 7}"} for key in keys]
    column = pa.array(keys, sb.types.of(key_type).arrow)
    fill(keyed, keys, 10)
    asked = column.take(pa.array([*range(300), 3, 3]))
    simple = [name for name in STATES if name not in ("seen", "thing")]
    expected = {name: keyed.get_state(STATES[name]).get_many(asked).to_pylist() for name in simple}
    with view_of(keyed) as view, view_of(keyed) as other:
        assert sorted(view.states()) == sorted(STATES)
        before = shown(view)
        fill(keyed, keys, 1_000)
        for state in STATES.values():
            keyed.get_state(state).clear_many(column.slice(0, 100))
        keyed.get_state(STATES["count"]).update_many(
            [*range(9_000, 12_000)] if key_type == "bigint" else keys,
            [0] * (3_000 if key_type == "bigint" else 300),
        )
        assert shown(view) == before == shown(other)
        for name in simple:
            found = view.get_many(name, asked).to_pylist()
            assert [each or None for each in found] == [each or None for each in expected[name]], name
        assert view.get_many("count", asked.slice(1, 2), namespace=WINDOW).to_pylist() == [-10, None]
        assert view.get_many("count", asked.slice(1, 1), namespace="unknown").to_pylist() == [None]
        assert view.get_many("count", asked.slice(0, 0)).to_pylist() == []
        assert isinstance(view.get_many("thing", asked.slice(1, 1)).to_pylist()[0], bytes)
        (row,) = sb.tools.state(view, "total", keys=asked.slice(1, 1)).to_table()["value"].to_pylist()
        assert row == expected["total"][1]
        with pytest.raises(sb.UsageError, match=r"one value for a key of the map state") as caught:
            view.get_many("seen", asked)
        assert caught.value.code == "USAGE.STATE_KIND"
        with pytest.raises(sb.UsageError, match="state 'other' not found"):
            view.get_many("other", asked)
    with pytest.raises(sb.ClosedError):
        view.get_many("count", asked)
    with pytest.raises(sb.ClosedError):
        shown(other)


def test_view_leaves_out_what_had_expired(make_keyed: MakeKeyed, clock: ManualClock) -> None:
    keyed = make_keyed("bigint")
    config = sb.StateTtlConfig(100)
    value = keyed.get_state(sb.ValueStateDescriptor("value", int).enable_time_to_live(config))
    tags = keyed.get_state(sb.ListStateDescriptor("tags", str).enable_time_to_live(config))
    value.update_many([1], [10])
    tags.add_many([1], ["old"])
    clock.advance(80)
    value.update_many([2], [20])
    tags.add_many([1], ["new"])
    with view_of(keyed, clock.now() + 50) as view:
        assert view.get_many("value", [1, 2, 3]).to_pylist() == [None, 20, None]
        assert view.get_many("tags", [1, 2]).to_pylist() == [["new"], None]
        assert sb.tools.state(view, "value").to_table()["key"].to_pylist() == [2]
        assert len(sb.tools.state(view, "value", expired=True)) == 2


def test_views_are_read_while_batches_write(make_keyed: MakeKeyed) -> None:
    keyed = make_keyed("bigint", max_parallelism=8)
    count = keyed.get_state(STATES["count"])
    keys = list(range(2_000))
    errors: list[BaseException] = []

    def read(view: StateView, expected: int) -> None:
        try:
            with view:
                for _ in range(3):
                    assert set(view.get_many("count", keys).to_pylist()) == {expected}
                    assert set(sb.tools.state(view, "count").to_table()["value"].to_pylist()) == {expected}
        except BaseException as error:  # noqa: BLE001 - reported by the test
            errors.append(error)

    readers = []
    for batch in range(12):
        count.update_many(keys, [batch] * len(keys))
        readers.append(threading.Thread(target=read, args=(view_of(keyed), batch)))
        readers[-1].start()
        count.clear_many(keys[: batch * 100])
    for each in readers:
        each.join()
    assert errors == []
