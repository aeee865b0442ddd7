"""A call of every public method: of states of all kinds, of the keyed backend, of its timers, of the factory.

Each leaves its world as it was, so that it can be repeated: what removes puts back first, what adds removes in the
end. A method may have several calls: "spaced add_many" is one of `add_many` with a column of namespaces, "timed
add_many" one with a column of times, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
from cliffs.worlds import COLD, DESCRIPTORS, HOT, World

import statebackend as sb
from statebackend.state import KeyedListState, KeyedStateBackend, StateBackend
from statebackend.state.timers import Timers

Call = Callable[[World, int], Any]

INTERFACES: dict[str, type] = {
    "value": sb.ValueState,
    "list": KeyedListState,
    "map": sb.MapState,
    "reducing": sb.ReducingState,
    "aggregating": sb.AggregatingState,
    "folding": sb.FoldingState,
    "backend": KeyedStateBackend,
    "timers": Timers,
    "factory": StateBackend,
}

#: Special methods that users write as syntax.
_SYNTAX = ("__iter__", "__getitem__", "__setitem__", "__delitem__", "__contains__", "__len__")


def public(interface: type) -> list[str]:
    return [name for name in dir(interface) if not name.startswith("_") or name in _SYNTAX]


def at(key: int, call: Callable[[World, Any, int], Any]) -> Call:
    def row(world: World, number: int) -> None:
        world.keyed.set_current_key(key)
        call(world, world.state, number)

    return row


def many(call: Callable[[Any, Any, Any, Any], Any]) -> Call:
    return lambda world, number: call(world.state, *world.columns)


def through(iterable: Any) -> None:
    for _ in iterable:
        pass


def spaces(world: World) -> Any:
    rows = np.arange(world.rows) % 3
    return pa.array(rows, mask=rows == 0)


def spaced(method: str, taken: slice) -> Call:
    """A call with a column of namespaces beside some of the columns; what is beside VOID goes again."""

    def call(world: World, number: int) -> None:
        column = spaces(world)
        getattr(world.state, method)(*world.columns[taken], namespaces=column)
        world.state.clear_many(world.columns[0][: world.rows // 2], namespaces=np.ones(world.rows // 2, int))
        world.state.clear_many(world.columns[0][: world.rows // 2], namespaces=np.full(world.rows // 2, 2))

    return call


def timed(method: str, taken: slice) -> Call:
    """The same of a state in event time, each row at its own time."""

    def call(world: World, number: int) -> None:
        state = world.in_event_time
        keys = world.columns[0]
        getattr(state, method)(
            *world.columns[taken], namespaces=spaces(world), times=number + np.arange(world.rows)
        )
        if number % 16 == 15:
            state.clear_many(keys, namespaces=spaces(world))

    return call


def _clear_many(world: World, number: int) -> None:
    world.state.clear_many(np.full(world.rows, COLD))
    world.keyed.set_current_key(COLD)
    world.write(world.state, 0)


def _add_many_and_clear(world: World, number: int) -> None:
    keys, _, values = world.columns
    world.state.add_many(keys, values)
    if number % 16 == 15:
        world.state.clear_many(keys[:64])


_KEYED: dict[str, Call] = {
    "clear": at(COLD, lambda world, state, number: (world.write(state, 0), state.clear())),
    "exists": at(HOT, lambda world, state, number: state.exists()),
    "clear_many": _clear_many,
    "exists_many": many(lambda state, keys, map_keys, values: state.exists_many(keys)),
    "descriptor": at(HOT, lambda world, state, number: state.descriptor),
    "backend": at(HOT, lambda world, state, number: state.backend),
}

_ADDING: dict[str, Call] = {
    **_KEYED,
    "get": at(HOT, lambda world, state, number: state.get()),
    "add": at(HOT, lambda world, state, number: state.add(world.value)),
    "get_many": many(lambda state, keys, map_keys, values: state.get_many(keys)),
    "add_many": many(lambda state, keys, map_keys, values: state.add_many(keys, values, return_changed=True)),
    "spaced get_many": spaced("get_many", slice(0, 1)),
    "spaced add_many": spaced("add_many", slice(0, 3, 2)),
    "timed add_many": timed("add_many", slice(0, 3, 2)),
}


def _put_and(remove: Callable[[Any, int], Any]) -> Call:
    def call(world: World, state: Any, number: int) -> None:
        state.put(500 + number % 8, world.value)
        remove(state, 500 + number % 8)

    return at(HOT, call)


def keyed(call: Callable[[Any, World, int], Any]) -> Call:
    return lambda world, number: call(world.keyed, world, number)


def _count_changes(keyed: Any, world: World, number: int) -> None:
    """Of a batch that is rolled back."""
    mark = keyed.mark()
    world.fill([COLD])
    keyed.count_changes(mark)
    keyed.rollback(mark)
    keyed.release(mark)


def _merge_namespaces(keyed: Any, world: World, number: int) -> None:
    keyed.set_current_key(COLD)
    for kind in ("reducing", "list"):
        for namespace in ("a", "b"):
            keyed.set_current_namespace(namespace)
            world.write(world.states[kind], 0)
        keyed.merge_namespaces(world.states[kind].descriptor, "c", ["a", "b"])
        keyed.set_current_namespace("c")
        world.states[kind].clear()
    keyed.set_current_namespace(sb.VOID)


def _snapshot(keyed: Any, world: World, number: int) -> None:
    store = world.opened_store()
    world.fill([COLD])
    pending = keyed.snapshot(number + 1, store)
    store.commit(number + 1, [pending.result()], now=world.clock.now())


def _get_state(kind: str) -> Call:
    return keyed(lambda k, w, n: getattr(k, f"get_{kind}_state")(w.states[kind].descriptor))


def timers(call: Callable[[Any, World, int], Any]) -> Call:
    def row(world: World, number: int) -> None:
        world.keyed.set_current_key(COLD)
        call(world.keyed.timers, world, number)

    return row


def _of_domain(domain: str) -> dict[str, Call]:
    def on(verb: str, timers: Any, *arguments: Any) -> None:
        getattr(timers, f"{verb}_{domain}_time_{'timers' if len(arguments) != 1 else 'timer'}")(*arguments)

    def register(t: Any, w: World, n: int) -> None:
        on("register", t, 2_000_000 + n % 16)

    def register_many(t: Any, w: World, n: int) -> None:
        on("register", t, [COLD], [2_000_000 + n % 16])

    calls = {
        f"register_{domain}_time_timer": register,
        f"delete_{domain}_time_timer": lambda t, w, n: (
            register(t, w, n),
            on("delete", t, 2_000_000 + n % 16),
        ),
        f"pending_{domain}_time_timers": lambda t, w, n: on("pending", t),
        f"register_{domain}_time_timers": register_many,
        f"delete_{domain}_time_timers": lambda t, w, n: (
            register_many(t, w, n),
            on("delete", t, [COLD], [2_000_000 + n % 16]),
        ),
    }
    return {name: timers(call) for name, call in calls.items()}


def _load(timers: Any, world: World, number: int) -> None:
    if not hasattr(world, "timer_rows"):
        timers.register_event_time_timer(3_000_000)
        world.timer_rows = [row for row in timers.rows() if row.timestamp == 3_000_000]
    timers.load(world.timer_rows)


def _restore(world: World, number: int) -> None:
    options = {"max_parallelism": 16, "clock": world.clock}
    sb.create_backend("heap", threads=1).create_keyed_backend(
        int, restore=world.checkpoint(), **options
    ).close()


#: A call for each public method. `test_grid` says if one is missing.
OPERATIONS: dict[str, dict[str, Call]] = {
    "value": {
        **_KEYED,
        "value": at(HOT, lambda world, state, number: state.value()),
        "update": at(HOT, lambda world, state, number: state.update(world.value)),
        "get_many": many(lambda state, keys, map_keys, values: state.get_many(keys)),
        "update_many": many(lambda state, keys, map_keys, values: state.update_many(keys, values)),
        "spaced get_many": spaced("get_many", slice(0, 1)),
        "spaced update_many": spaced("update_many", slice(0, 3, 2)),
        "timed update_many": timed("update_many", slice(0, 3, 2)),
    },
    "list": {
        **_KEYED,
        "get": at(HOT, lambda world, state, number: state.get()),
        "__iter__": at(HOT, lambda world, state, number: through(state)),
        "add": at(COLD, lambda world, state, n: (state.add(world.value), n % 16 == 15 and state.clear())),
        "add_all": at(COLD, lambda world, state, number: (state.add_all([world.value] * 3), state.clear())),
        "update": at(COLD, lambda world, state, number: state.update([world.value] * 3)),
        "get_many": many(lambda state, keys, map_keys, values: state.get_many(keys)),
        "add_many": _add_many_and_clear,
        "timed add_many": timed("add_many", slice(0, 3, 2)),
    },
    "map": {
        **_KEYED,
        "get": at(HOT, lambda world, state, number: state.get(number % 4)),
        "put": at(HOT, lambda world, state, number: state.put(number % 4, world.value)),
        "put_all": at(HOT, lambda world, state, number: state.put_all({0: world.value, 1: world.value})),
        "remove": _put_and(lambda state, key: state.remove(key)),
        "contains": at(HOT, lambda world, state, number: state.contains(number % 8)),
        "keys": at(HOT, lambda world, state, number: through(state.keys())),
        "values": at(HOT, lambda world, state, number: through(state.values())),
        "items": at(HOT, lambda world, state, number: through(state.items())),
        "is_empty": at(HOT, lambda world, state, number: state.is_empty()),
        "__getitem__": at(HOT, lambda world, state, number: state[number % 4]),
        "__setitem__": at(HOT, lambda world, state, number: state.__setitem__(number % 4, world.value)),
        "__delitem__": _put_and(lambda state, key: state.__delitem__(key)),
        "__contains__": at(HOT, lambda world, state, number: number % 8 in state),
        "__iter__": at(HOT, lambda world, state, number: through(state)),
        "get_many": many(lambda state, keys, map_keys, values: state.get_many(keys, map_keys)),
        "put_many": many(lambda state, keys, map_keys, values: state.put_many(keys, map_keys, values)),
        "remove_many": many(
            lambda state, keys, map_keys, values: (
                state.put_many(keys, map_keys + 500, values),
                state.remove_many(keys, map_keys + 500),
            )
        ),
        "spaced get_many": spaced("get_many", slice(0, 2)),
        "spaced put_many": spaced("put_many", slice(0, 3)),
        "timed put_many": timed("put_many", slice(0, 3)),
    },
    "reducing": _ADDING,
    "aggregating": _ADDING,
    "folding": _ADDING,
    "backend": {
        "set_current_key": keyed(lambda k, w, n: k.set_current_key(n % 64)),
        "each": keyed(lambda k, w, n: next(k.each([n % 64]))),
        "clear_current_key": keyed(lambda k, w, n: (k.clear_current_key(), k.set_current_key(HOT))),
        "current_key": keyed(lambda k, w, n: k.current_key),
        "set_current_namespace": keyed(
            lambda k, w, n: [k.set_current_namespace(each) for each in (n % 3, sb.VOID)]
        ),
        "current_namespace": keyed(lambda k, w, n: k.current_namespace),
        "key_type": keyed(lambda k, w, n: k.key_type),
        "max_parallelism": keyed(lambda k, w, n: k.max_parallelism),
        "key_group_range": keyed(lambda k, w, n: k.key_group_range),
        "get_state": keyed(lambda k, w, n: k.get_state(w.state.descriptor)),
        **{f"get_{kind}_state": _get_state(kind) for kind in DESCRIPTORS},
        "keys": keyed(lambda k, w, n: through(k.keys("value"))),
        "keys_of": keyed(lambda k, w, n: through(k.keys_of(["value", "map"]))),
        "keys_and_namespaces": keyed(lambda k, w, n: through(k.keys_and_namespaces("value"))),
        "apply_to_all_keys": keyed(lambda k, w, n: k.apply_to_all_keys(w.state.descriptor, lambda *_: None)),
        "num_entries": keyed(lambda k, w, n: k.num_entries()),
        "clear_key": keyed(lambda k, w, n: (w.fill([COLD], 4), k.clear_key())),
        "merge_namespaces": keyed(_merge_namespaces),
        "begin": keyed(lambda k, w, n: (k.begin(w.clock.now()), k.begin(None))),
        "set_event_time": keyed(lambda k, w, n: (k.begin(watermarks=(n, n + 1)), k.set_event_time(n))),
        "has_timers": keyed(lambda k, w, n: k.has_timers),
        "timers": keyed(lambda k, w, n: k.timers),
        "advance": keyed(lambda k, w, n: k.advance()),
        "mark": keyed(lambda k, w, n: k.release(k.mark())),
        "release": keyed(lambda k, w, n: k.release(k.mark())),
        "rollback": keyed(_count_changes),
        "count_changes": keyed(_count_changes),
        "snapshot": keyed(_snapshot),
        "savepoint": keyed(lambda k, w, n: k.savepoint(str(w.folder(n)))),
        "notify_checkpoint_complete": keyed(lambda k, w, n: k.notify_checkpoint_complete(10**9 + n)),
        "notify_checkpoint_aborted": keyed(lambda k, w, n: k.notify_checkpoint_aborted(10**9 + n)),
        "undeclared_states": keyed(lambda k, w, n: k.undeclared_states()),
        "metrics": keyed(lambda k, w, n: k.metrics()),
        "counts": keyed(lambda k, w, n: k.counts()),
    },
    "timers": {
        **_of_domain("event"),
        **_of_domain("processing"),
        "current_watermark": timers(lambda t, w, n: t.current_watermark()),
        "current_processing_time": timers(lambda t, w, n: t.current_processing_time()),
        "due": timers(lambda t, w, n: (t.register_event_time_timer(5), through(t.due(10)))),
        "take_due": timers(lambda t, w, n: (t.register_event_time_timer(5), t.take_due(10))),
        "next_due": timers(lambda t, w, n: t.next_due()),
        "count": timers(lambda t, w, n: t.count()),
        "fired": timers(lambda t, w, n: t.fired),
        "rows": timers(lambda t, w, n: t.rows()),
        "load": timers(_load),
    },
    "factory": {
        "create_keyed_backend": _restore,
        "create_operator_backend": lambda world, number: (
            sb.create_backend("heap").create_operator_backend().close()
        ),
        "unavailable_reason": lambda world, number: sb.create_backend("heap").unavailable_reason(),
        "native_library": lambda world, number: sb.create_backend("heap").native_library(),
        "keeps_insertion_order": lambda world, number: sb.create_backend("heap").keeps_insertion_order,
        "cleans_up_incrementally": lambda world, number: sb.create_backend("heap").cleans_up_incrementally,
        "cleans_up_in_compactions": lambda world, number: sb.create_backend("heap").cleans_up_in_compactions,
    },
}

#: Measured by a test of its own: a backend closes once.
ELSEWHERE = {"backend": {"close"}}

#: Writing and reading files takes milliseconds: one call makes a sample.
SLOW = {("backend", "snapshot"), ("backend", "savepoint"), ("factory", "create_keyed_backend")}
