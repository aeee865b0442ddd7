"""Two backends driven together by random calls: every answer, error and content must be the same.

The first is the reference, the other each backend that can be used here; without one, a second reference,
which at least tries the machine itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hypothesis
import pytest
from contract.conftest import backend_params
from contract.samples import Longest, contents, join
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)
from type_samples import fingerprint

import statebackend as sb
from statebackend import types as t
from statebackend.testing import ManualClock

pytestmark = pytest.mark.checked

OTHERS = [name for name in backend_params() if name != "reference"] or ["reference"]

SMALL = st.integers(-3, 3)
NUMBERS = SMALL | st.sampled_from([100, -100, 2**63 - 1, -(2**63)])
TEXTS = st.sampled_from(["", "a", "bb", "é", "x" * 40])
FLOATS = st.sampled_from([0.0, -0.0, 1.5, float("nan"), float("inf")])

KEY_TYPES: dict[t.Type, st.SearchStrategy[Any]] = {
    t.LONG: st.integers(-4, 4),
    t.STRING: TEXTS,
    t.DOUBLE: FLOATS,
    t.TUPLE(t.LONG, t.STRING): st.tuples(st.none() | SMALL, st.none() | TEXTS),
}
NAMESPACES = st.sampled_from([sb.VOID, 0, "n", sb.TimeWindow(0, 10), (1, "a")])

TTL = 100


def expiring(descriptor: Any, **options: Any) -> Any:
    return descriptor.enable_time_to_live(sb.StateTtlConfig(TTL, **options))


ON_READ = {"update_type": sb.StateTtlConfig.UpdateType.OnReadAndWrite}
#: Cleaned up when it is read, and otherwise not: what is left is the same at any time, whatever it is.
QUIET = {"cleanup_in_background": False}
#: Shows what has not been cleaned up yet: so it must not depend on the order in which others are.
SHOW = {**QUIET, "state_visibility": sb.StateTtlConfig.StateVisibility.ReturnExpiredIfNotCleanedUp}
IDLE = {**QUIET, "cleanup_idle": True}
OFTEN = {"cleanup_incrementally": (2, True)}

#: By name: the descriptor and the values that its state takes.
VALUES: dict[str, tuple[Any, st.SearchStrategy[Any]]] = {
    "value-long": (sb.ValueStateDescriptor("value-long", int), NUMBERS),
    "value-text": (sb.ValueStateDescriptor("value-text", str, default="none"), TEXTS),
    "value-row": (
        sb.ValueStateDescriptor("value-row", "struct<a:bigint,b:string>"),
        st.tuples(NUMBERS, TEXTS),
    ),
    "value-object": (sb.ValueStateDescriptor("value-object", t.PICKLE), st.lists(SMALL, max_size=2)),
    "ttl-value": (expiring(sb.ValueStateDescriptor("ttl-value", int), **IDLE), NUMBERS),
    "ttl-text": (
        expiring(sb.ValueStateDescriptor("ttl-text", str, default="none"), **ON_READ, **SHOW),
        TEXTS,
    ),
    "ttl-object": (
        expiring(sb.ValueStateDescriptor("ttl-object", t.PICKLE), **ON_READ, **OFTEN),
        st.lists(SMALL, max_size=2),
    ),
}
LISTS: dict[str, tuple[Any, st.SearchStrategy[Any]]] = {
    "list-long": (sb.ListStateDescriptor("list-long", int), NUMBERS),
    "list-text": (sb.ListStateDescriptor("list-text", str), TEXTS),
    "list-list": (sb.ListStateDescriptor("list-list", list[int]), st.lists(st.none() | SMALL, max_size=3)),
    "list-object": (sb.ListStateDescriptor("list-object", t.PICKLE), st.lists(SMALL, max_size=2)),
    "ttl-list": (expiring(sb.ListStateDescriptor("ttl-list", str), **IDLE), TEXTS),
    "ttl-list-read": (expiring(sb.ListStateDescriptor("ttl-list-read", int), **ON_READ), NUMBERS),
    "ttl-list-show": (expiring(sb.ListStateDescriptor("ttl-list-show", str), **ON_READ, **SHOW), TEXTS),
}
MAPS: dict[str, tuple[Any, st.SearchStrategy[Any], st.SearchStrategy[Any]]] = {
    "map-text-long": (sb.MapStateDescriptor("map-text-long", str, int), TEXTS, NUMBERS),
    "map-long-text": (sb.MapStateDescriptor("map-long-text", int, str), SMALL, TEXTS),
    "map-double-list": (
        sb.MapStateDescriptor("map-double-list", float, list[str]),
        FLOATS,
        st.lists(TEXTS, max_size=2),
    ),
    "map-text-object": (
        sb.MapStateDescriptor("map-text-object", str, t.PICKLE),
        TEXTS,
        st.lists(SMALL, max_size=2),
    ),
    "ttl-map": (expiring(sb.MapStateDescriptor("ttl-map", str, int), **IDLE), TEXTS, NUMBERS),
    "ttl-map-read": (
        expiring(sb.MapStateDescriptor("ttl-map-read", int, str), **ON_READ, **OFTEN),
        SMALL,
        TEXTS,
    ),
    "ttl-map-show": (expiring(sb.MapStateDescriptor("ttl-map-show", str, str), **SHOW), TEXTS, TEXTS),
}
ADDING: dict[str, tuple[Any, st.SearchStrategy[Any]]] = {
    "sum": (sb.ReducingStateDescriptor("sum", "sum", "tinyint"), st.integers(-100, 100)),
    "max": (sb.ReducingStateDescriptor("max", "max", float), FLOATS),
    "min": (sb.ReducingStateDescriptor("min", "min", str), TEXTS),
    "first": (sb.ReducingStateDescriptor("first", "first", str), TEXTS),
    "last": (sb.ReducingStateDescriptor("last", "last", int), NUMBERS),
    "join": (sb.ReducingStateDescriptor("join", join, str), TEXTS),
    "count": (sb.AggregatingStateDescriptor("count", "count", str), TEXTS),
    "total": (sb.AggregatingStateDescriptor("total", "sum", int), NUMBERS),
    "avg": (sb.AggregatingStateDescriptor("avg", "avg", int), NUMBERS),
    "stddev": (sb.AggregatingStateDescriptor("stddev", "stddev", float), FLOATS),
    "longest": (sb.AggregatingStateDescriptor("longest", Longest(), str, str), TEXTS),
    "fold": (sb.FoldingStateDescriptor("fold", [], lambda old, new: [*old, len(old)], list[int]), TEXTS),
    "ttl-sum": (
        expiring(sb.ReducingStateDescriptor("ttl-sum", "sum", "tinyint"), **ON_READ),
        st.integers(-100, 100),
    ),
    "ttl-join": (expiring(sb.ReducingStateDescriptor("ttl-join", join, str), **SHOW), TEXTS),
    "ttl-avg": (expiring(sb.AggregatingStateDescriptor("ttl-avg", "avg", int), **IDLE), NUMBERS),
}
STATES: dict[str, Any] = {
    name: entry[0] for table in (VALUES, LISTS, MAPS, ADDING) for name, entry in table.items()
}
#: States of which each backend may have cleaned up another part: their answers are the same, not what they hold.
CLEANED = {n for n, d in STATES.items() if d.ttl_config is not None and d.ttl_config.incremental_cleanup}
#: A value that is merged with an expired one is stamped anew, one that is alone is not.
MERGING = [
    n
    for n, d in STATES.items()
    if d.kind == "list" or (d.kind in ("reducing", "aggregating") and n not in CLEANED)
]
DOMAINS = st.sampled_from(["event", "processing"])
TIMES = st.integers(-2, 12) | st.sampled_from([2**63 - 1, -(2**63)])


def _timers(keyed: Any, verb: str, domain: str) -> Callable[[int], None]:
    method: Callable[[int], None] = getattr(keyed.timers, f"{verb}_{domain}_time_timer")
    return method


def outcome(call: Callable[[], Any]) -> tuple[str, Any]:
    """What a call gives, or the class of what it raises, in a form that compares."""
    try:
        result = call()
    except (sb.StateBackendError, OverflowError, KeyError, RuntimeError) as error:
        return "raised", type(error)
    if hasattr(result, "to_pylist"):
        return "gave", (str(result.type), fingerprint(result.to_pylist()))
    return "gave", fingerprint(result)


def either(table: dict[str, Any], *columns: int) -> st.SearchStrategy[Any]:
    """The name of a state, and values for it from these columns of the table."""
    return st.sampled_from(sorted(table)).flatmap(
        lambda name: st.tuples(st.just(name), *(table[name][column] for column in columns))
    )


def batches(table: dict[str, Any], *columns: int) -> st.SearchStrategy[Any]:
    """The name of a state, and rows of values for it, of which some are None."""

    def rows(name: str) -> st.SearchStrategy[Any]:
        each = [table[name][column] for column in columns]
        each[-1] = st.none() | each[-1]
        return st.tuples(st.just(name), st.lists(st.tuples(*each), max_size=6))

    return st.sampled_from(sorted(table)).flatmap(rows)


class TwoBackends(RuleBasedStateMachine):
    """Every rule does the same to both and compares."""

    other_name = "reference"
    marks = Bundle("marks")

    def __init__(self) -> None:
        super().__init__()
        self.both: list[Any] = []
        self.open_marks: list[Any] = []
        self.has_gone_back = False

    @initialize(data=st.data(), key_type=st.sampled_from(list(KEY_TYPES)))
    def begin(self, data: st.DataObject, key_type: t.Type) -> None:
        self.keys = KEY_TYPES[key_type]
        self.clock = ManualClock()
        self.other = sb.create_backend(self.other_name)
        self.both = [
            each.create_keyed_backend(key_type, max_parallelism=8, clock=self.clock)
            for each in (sb.create_backend("reference"), self.other)
        ]
        self.set_key(data)

    def teardown(self) -> None:
        for keyed in self.both:
            keyed.close()
        self.both = []

    def same(self, use: Callable[[Any], Any]) -> None:
        first, second = (outcome(lambda keyed=keyed: use(keyed)) for keyed in self.both)
        assert first == second

    def on(self, name: str, use: Callable[[Any], Any]) -> None:
        if self.has_gone_back and name in CLEANED:
            return  # what one has cleaned up may be alive again in the other
        self.same(lambda keyed: self.ordered(name, use(keyed.get_state(STATES[name]))))

    def ordered(self, name: str, found: Any) -> Any:
        is_map = name in MAPS and isinstance(found, list)
        return sorted(found, key=repr) if is_map and not self.other.keeps_insertion_order else found

    # --- keys and namespaces ---

    @rule(data=st.data())
    def set_key(self, data: st.DataObject) -> None:
        key = data.draw(self.keys)
        self.same(lambda keyed: keyed.set_current_key(key))
        self.same(lambda keyed: keyed.current_key)

    @rule(data=st.data(), step=st.sampled_from([1, TTL // 3, TTL // 2, TTL]))
    def let_time_pass(self, data: st.DataObject, step: int) -> None:
        self.clock.advance(step)
        self.set_key(data)

    @rule(
        data=st.data(),
        step=st.sampled_from([1, TTL // 2, 2 * TTL]),
        really=st.sampled_from([False, False, True]),
    )
    def set_the_clock_back(self, data: st.DataObject, step: int, really: bool) -> None:
        if really:
            self.has_gone_back = True
            self.clock.set(max(0, self.clock.now() - step))
        self.set_key(data)

    @rule(budget=st.sampled_from([1, 3, 1000, 1000]))
    def advance(self, budget: int) -> None:
        if budget == 1000:
            self.same(lambda keyed: keyed.advance())
            return
        for keyed in self.both:  # which of them first is not told
            assert keyed.advance(budget) <= budget
        self.same(lambda keyed: keyed.advance())

    @rule(name=st.sampled_from(sorted(CLEANED)))
    def clean_up(self, name: str) -> None:
        if self.has_gone_back or not self.other.cleans_up_incrementally:
            return
        for _ in range(200):
            self.on(name, contents)
        self.same(lambda keyed: keyed.num_entries(name))
        self.same(
            lambda keyed: sum(1 for _ in keyed.keys(name, sb.ALL_NAMESPACES)) <= keyed.num_entries(name)
        )

    # --- timers ---

    @rule(times=st.lists(TIMES, max_size=4), domain=DOMAINS)
    def register_timers(self, times: list[int], domain: str) -> None:
        for time in times:
            self.same(lambda keyed, time=time: _timers(keyed, "register", domain)(time))
        self.same(lambda keyed: getattr(keyed.timers, f"pending_{domain}_time_timers")())

    @rule(time=TIMES, domain=DOMAINS)
    def delete_timer(self, time: int, domain: str) -> None:
        self.same(lambda keyed: _timers(keyed, "delete", domain)(time))
        self.same(lambda keyed: getattr(keyed.timers, f"pending_{domain}_time_timers")())

    @rule(
        now=st.integers(-3, 14),
        domain=DOMAINS,
        meanwhile=st.lists(st.tuples(st.booleans(), TIMES), max_size=4),
    )
    def fire_timers(self, now: int, domain: str, meanwhile: list[tuple[bool, int]]) -> None:
        def use(keyed: Any) -> Any:
            seen = []
            for time in keyed.timers.due(now, domain):
                seen.append((time, fingerprint(keyed.current_key, True), repr(keyed.current_namespace)))
                if len(seen) <= len(meanwhile):
                    registers, other = meanwhile[len(seen) - 1]
                    _timers(keyed, "register" if registers else "delete", domain)(other)
            return seen

        self.same(use)
        self.same(lambda keyed: repr(keyed.current_namespace))

    @rule(namespace=NAMESPACES)
    def set_namespace(self, namespace: Any) -> None:
        self.same(lambda keyed: keyed.set_current_namespace(namespace))

    @rule()
    def clear_key(self) -> None:
        self.same(lambda keyed: keyed.clear_key())

    @rule(
        data=st.data(), name=st.sampled_from(MERGING), namespaces=st.lists(NAMESPACES, min_size=1, max_size=4)
    )
    def merge(self, data: st.DataObject, name: str, namespaces: list[Any]) -> None:
        into, *sources = namespaces
        for namespace in namespaces:
            value = data.draw(st.none() | {**LISTS, **ADDING}[name][1])
            self.same(lambda keyed, namespace=namespace: keyed.set_current_namespace(namespace))
            self.on(name, lambda state, value=value: state.add(value))
        self.same(lambda keyed: keyed.merge_namespaces(STATES[name], into, sources))
        self.same(lambda keyed: keyed.set_current_namespace(into))
        self.on(name, lambda state: state.get())

    @rule(name=st.sampled_from(sorted(STATES)))
    def clear(self, name: str) -> None:
        self.on(name, lambda state: state.clear())
        self.on(name, lambda state: state.exists())

    # --- one by one ---

    @rule(given=either(VALUES, 1), none=st.booleans())
    def update_value(self, given: Any, none: bool) -> None:
        name, value = given
        self.on(name, lambda state: state.update(None if none else value))
        self.on(name, lambda state: state.value())

    @rule(given=either(LISTS, 1))
    def add_element(self, given: Any) -> None:
        name, value = given
        self.on(name, lambda state: state.add(value))
        self.on(name, lambda state: state.get())

    @rule(given=batches(LISTS, 1), replace=st.booleans())
    def add_elements(self, given: Any, replace: bool) -> None:
        name, rows = given
        values = [value for (value,) in rows]
        self.on(name, lambda state: (state.update if replace else state.add_all)(values))
        self.on(name, list)

    @rule(given=either(MAPS, 1, 2), none=st.booleans())
    def put(self, given: Any, none: bool) -> None:
        name, key, value = given
        self.on(name, lambda state: state.put(key, None if none else value))
        self.on(name, lambda state: state[key])

    @rule(given=batches(MAPS, 1, 2))
    def put_all(self, given: Any) -> None:
        name, rows = given
        self.on(name, lambda state: state.put_all(dict(rows)))
        self.on(name, lambda state: list(state.items()))

    @rule(given=either(MAPS, 1), strict=st.booleans())
    def remove(self, given: Any, strict: bool) -> None:
        name, key = given
        self.on(name, lambda state: state.contains(key))
        self.on(name, lambda state: state.__delitem__(key) if strict else state.remove(key))
        self.on(name, lambda state: list(state))

    @rule(given=either(MAPS, 1), steps=st.integers(0, 3))
    def change_while_iterating(self, given: Any, steps: int) -> None:
        name, key = given

        def walk(state: Any) -> Any:
            seen = []
            for number, entry in enumerate(state.items()):
                seen.append(entry)
                if number == steps:
                    state.remove(key)
            return seen

        self.on(name, walk)

    @rule(given=either(ADDING, 1), none=st.sampled_from([False, False, False, True]))
    def add(self, given: Any, none: bool) -> None:
        name, value = given
        self.on(name, lambda state: state.add(None if none else value))
        self.on(name, lambda state: state.get())

    # --- vectorised ---

    @rule(data=st.data(), given=batches(VALUES, 1))
    def update_many(self, data: st.DataObject, given: Any) -> None:
        name, rows = given
        keys = [data.draw(self.keys) for _ in rows]
        self.on(name, lambda state: state.update_many(keys, [value for (value,) in rows]))
        self.on(name, lambda state: state.get_many(keys))

    @rule(data=st.data(), given=batches(LISTS, 1), nulls=st.booleans())
    def add_elements_many(self, data: st.DataObject, given: Any, nulls: bool) -> None:
        name, rows = given
        rows = [row for row in rows if nulls or row[0] is not None]
        keys = [data.draw(self.keys) for _ in rows]
        self.on(name, lambda state: state.add_many(keys, [value for (value,) in rows]))
        self.on(name, lambda state: state.get_many(keys))

    @rule(data=st.data(), given=batches(MAPS, 1, 2), then_remove=st.integers(0, 3))
    def put_many(self, data: st.DataObject, given: Any, then_remove: int) -> None:
        name, rows = given
        keys = [data.draw(self.keys) for _ in rows]
        map_keys = [row[0] for row in rows]
        self.on(name, lambda state: state.put_many(keys, map_keys, [row[1] for row in rows]))
        self.on(name, lambda state: state.remove_many(keys[:then_remove], map_keys[:then_remove]))
        self.on(name, lambda state: state.get_many(keys, map_keys))

    @rule(data=st.data(), given=batches(ADDING, 1), changed=st.booleans())
    def add_many(self, data: st.DataObject, given: Any, changed: bool) -> None:
        name, rows = given
        keys = [data.draw(self.keys) for _ in rows]

        def call(state: Any) -> Any:
            found = state.add_many(keys, [value for (value,) in rows], return_changed=changed)
            return None if found is None else tuple((str(c.type), c.to_pylist()) for c in found[:2])

        self.on(name, call)
        self.on(name, lambda state: state.get_many(keys))

    @rule(data=st.data(), name=st.sampled_from(sorted(STATES)), count=st.integers(0, 4))
    def clear_many(self, data: st.DataObject, name: str, count: int) -> None:
        keys = [data.draw(self.keys) for _ in range(count)]
        self.on(name, lambda state: state.exists_many(keys))
        self.on(name, lambda state: state.clear_many(keys))

    # --- marks ---

    @rule(target=marks)
    def mark(self) -> Any:
        found = [keyed.mark() for keyed in self.both]
        self.open_marks.append(found)
        return found

    @rule(mark=marks)
    def rollback(self, mark: Any) -> None:
        first, second = (
            outcome(lambda k=k, m=m: k.rollback(m)) for k, m in zip(self.both, mark, strict=True)
        )
        assert first == second or mark not in self.open_marks
        if mark in self.open_marks:
            assert first == ("gave", fingerprint(None))
            del self.open_marks[self.open_marks.index(mark) + 1 :]

    @rule(mark=consumes(marks))
    def release(self, mark: Any) -> None:
        if mark in self.open_marks:
            self.open_marks.remove(mark)
        for keyed, each in zip(self.both, mark, strict=True):
            keyed.release(each)

    # --- what must hold ---

    @invariant()
    def enumeration_is_the_same(self) -> None:
        if self.both:
            self.same(
                lambda keyed: {
                    name: state["entries"]
                    for name, state in keyed.metrics()["states"].items()
                    if name not in CLEANED
                }
            )
            self.same(lambda keyed: keyed.current_key)

    @invariant()
    def timers_are_the_same(self) -> None:
        if self.both:
            self.same(lambda keyed: list(map(tuple, keyed.timers.rows())))
            self.same(lambda keyed: [keyed.timers.next_due(each) for each in ("event", "processing")])
            self.same(lambda keyed: keyed.metrics()["timers"])
            for handle in getattr(self.both[1].timers, "_handles", dict)().values():
                handle._check()

    @rule(name=st.sampled_from(sorted(STATES)), namespace=NAMESPACES | st.just(sb.ALL_NAMESPACES))
    def contents_are_the_same(self, name: str, namespace: Any) -> None:
        def dump(keyed: Any) -> Any:
            found: list[Any] = []
            keyed.apply_to_all_keys(
                STATES[name],
                lambda key, state: found.append(
                    (
                        fingerprint(key, True),
                        repr(keyed.current_namespace),
                        fingerprint(self.ordered(name, contents(state))),
                    )
                ),
                namespace,
            )
            return sorted(map(repr, found))

        if self.has_gone_back and name in CLEANED:
            return
        self.same(dump)
        if name not in CLEANED:
            self.same(lambda keyed: keyed.num_entries(name))
        self.same(lambda keyed: sorted(repr(fingerprint(k, True)) for k in keyed.keys(name, namespace)))


@pytest.mark.parametrize("other", OTHERS)
def test_backends_agree(other: Any, is_stress: bool) -> None:
    machine = type(f"Reference_and_{other}", (TwoBackends,), {"other_name": other})
    examples = 15 if other == "rocksdb" else 40  # opening a database takes long
    size = (
        {"stateful_step_count": 200} if is_stress else {"stateful_step_count": 60, "max_examples": examples}
    )
    run_state_machine_as_test(machine, settings=hypothesis.settings(**size))
