"""Keys and entries of all namespaces: enumerated, counted, merged, removed."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from contract.conftest import Keyed, MakeKeyed
from contract.samples import KINDS, Kind, Longest, dump, join

import statebackend as sb
from statebackend import types as t
from statebackend.testing import ManualClock

pytestmark = pytest.mark.checked


@pytest.fixture
def filled(keyed: Keyed) -> Keyed:
    """``a`` has keys 1, 2, 3 without a namespace and 3, 4 in "n"; ``b`` has 3, 5. Current are 9 and "n"."""
    a = keyed.get_value_state(sb.ValueStateDescriptor("a", int))
    b = keyed.get_list_state(sb.ListStateDescriptor("b", int))
    for key in (1, 2, 3):
        keyed.set_current_key(key)
        a.update(key)
    for key in (3, 5):
        keyed.set_current_key(key)
        b.add(key)
    keyed.set_current_namespace("n")
    for key in (3, 4):
        keyed.set_current_key(key)
        a.update(key * 10)
    keyed.set_current_key(9)
    return keyed


def test_keys(filled: Keyed) -> None:
    assert sorted(filled.keys("a")) == [1, 2, 3]
    assert sorted(filled.keys("a", "n")) == [3, 4]
    assert sorted(filled.keys("a", sb.ALL_NAMESPACES)) == [1, 2, 3, 4]
    assert list(filled.keys("a", "other")) == []
    assert sorted(filled.keys_of(["a", "b"])) == [1, 2, 3, 5]
    assert sorted(filled.keys_of(["b", "a"], sb.ALL_NAMESPACES)) == [1, 2, 3, 4, 5]
    assert list(filled.keys_of([])) == []
    pairs = sorted(filled.keys_and_namespaces("a"), key=str)
    assert pairs == [(1, sb.VOID), (2, sb.VOID), (3, "n"), (3, sb.VOID), (4, "n")]
    assert filled.current_key == 9
    assert filled.current_namespace == "n"


def test_counts(filled: Keyed) -> None:
    assert filled.num_entries("a") == 5
    assert filled.num_entries("b") == 2
    assert filled.num_entries() == 7
    counts = filled.get_map_state(sb.MapStateDescriptor("m", str, int))
    counts.put_all({"x": 1, "y": 2})
    assert filled.num_entries("m") == 1
    metrics = filled.metrics()
    assert metrics["entries"] == 8
    assert metrics["states"]["a"]["entries"] == 5
    assert metrics["states"]["b"]["kind"] == "list"


def test_enumeration_needs_no_current_key(make_keyed: MakeKeyed) -> None:
    keyed = make_keyed()
    keyed.get_value_state(sb.ValueStateDescriptor("a", int))
    assert list(keyed.keys("a")) == list(keyed.keys_and_namespaces("a")) == []
    assert keyed.num_entries() == keyed.num_entries("a") == 0
    with pytest.raises(sb.UsageError):
        _ = keyed.current_key


@pytest.mark.parametrize(
    "call",
    [
        lambda k: k.keys("c"),
        lambda k: k.keys_of(["a", "c"]),
        lambda k: k.keys_and_namespaces("c"),
        lambda k: k.num_entries("c"),
    ],
)
def test_an_unknown_name_raises(filled: Keyed, call: Any) -> None:
    with pytest.raises(sb.UsageError, match="'c'.*'a', 'b'"):
        call(filled)
    with pytest.raises(sb.UsageError, match="several"):
        filled.keys_of("ab")


def test_state_may_be_changed_while_enumerating(filled: Keyed) -> None:
    a = filled.get_value_state(sb.ValueStateDescriptor("a", int))
    filled.set_current_namespace(sb.VOID)
    seen = []
    for key in filled.keys("a"):
        seen.append(key)
        filled.set_current_key(key)
        a.clear()
        filled.set_current_key(key + 100)
        a.update(0)
    assert sorted(seen) == [1, 2, 3]
    assert sorted(filled.keys("a")) == [101, 102, 103]


def test_apply_to_all_keys(filled: Keyed) -> None:
    descriptor = sb.ValueStateDescriptor("a", int)
    state = filled.get_value_state(descriptor)
    seen = []

    def double(key: Any, given: Any) -> None:
        assert given is state
        assert filled.current_key == key
        seen.append((key, filled.current_namespace))
        given.update(given.value() * 2)

    filled.apply_to_all_keys(descriptor, double)
    assert sorted(seen) == [(1, sb.VOID), (2, sb.VOID), (3, sb.VOID)]
    filled.apply_to_all_keys(descriptor, double, "n")
    assert sorted(seen[3:]) == [(3, "n"), (4, "n")]
    del seen[:]
    filled.apply_to_all_keys(descriptor, double, sb.ALL_NAMESPACES)
    assert len(seen) == 5
    assert filled.current_key == 9
    assert filled.current_namespace == "n"
    filled.set_current_key(4)
    assert state.value() == 160
    filled.set_current_namespace(sb.VOID)
    filled.set_current_key(3)
    assert state.value() == 12


def test_apply_goes_over_the_keys_at_the_call(filled: Keyed) -> None:
    seen = []

    def move(key: Any, state: Any) -> None:
        seen.append((key, state.value()))
        filled.clear_key()
        for other in (1, 2, 3):
            filled.set_current_key(other)
            state.clear()
        filled.set_current_key(key + 100)
        state.update(key)

    filled.apply_to_all_keys(sb.ValueStateDescriptor("a", int), move)
    assert sorted(key for key, _ in seen) == [1, 2, 3]
    assert sorted(str(value) for _, value in seen)[1:] == ["None", "None"]


def test_apply_restores_key_and_namespace_after_an_error(filled: Keyed) -> None:
    def fail(key: Any, state: Any) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        filled.apply_to_all_keys(sb.ValueStateDescriptor("a", int), fail)
    assert filled.current_key == 9
    assert filled.current_namespace == "n"


def test_apply_without_a_current_key_leaves_none(make_keyed: MakeKeyed) -> None:
    keyed = make_keyed()
    descriptor = sb.ValueStateDescriptor("a", int)
    keyed.get_value_state(descriptor).update_many([1, 2], [1, 2])
    keyed.apply_to_all_keys(descriptor, lambda key, state: state.clear())
    assert keyed.num_entries() == 0
    with pytest.raises(sb.UsageError):
        _ = keyed.current_key


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_clear_key_removes_all_states_in_all_namespaces(keyed: Keyed, kind: Kind) -> None:
    states = [keyed.get_state(kind.descriptor(name, t.LONG)) for name in ("a", "b")]
    for key in (1, 2):
        keyed.set_current_key(key)
        for namespace in (sb.VOID, "n", sb.TimeWindow(0, 1)):
            keyed.set_current_namespace(namespace)
            for state in states:
                kind.write(state, key)
    keyed.clear_key()
    assert keyed.num_entries() == 6
    assert set(keyed.keys_of(["a", "b"], sb.ALL_NAMESPACES)) == {1}
    assert not states[0].exists()
    keyed.clear_key()
    kind.write(states[0], 5)
    assert kind.read(states[0]) == 5


NAMESPACES = [
    sb.VOID,
    0,
    -1,
    2**63 - 1,
    "",
    "a",
    b"",
    b"a",
    (),
    (0,),
    ("a", b"a", (1,)),
    sb.TimeWindow(0, 1),
    (0, 1),
]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_every_namespace_has_its_own(keyed: Keyed, kind: Kind) -> None:
    state = keyed.get_state(kind.descriptor("s", t.LONG))
    for number, namespace in enumerate(NAMESPACES):
        keyed.set_current_namespace(namespace)
        assert keyed.current_namespace == namespace
        assert not state.exists()
        kind.write(state, number)
    for number, namespace in enumerate(NAMESPACES):
        keyed.set_current_namespace(namespace)
        assert kind.read(state) == number
    found = list(keyed.keys_and_namespaces("s"))
    assert len(found) == keyed.num_entries("s") == len(NAMESPACES)
    assert {repr(namespace) for _, namespace in found} == set(map(repr, NAMESPACES))
    keyed.set_current_namespace("a")
    state.clear()
    keyed.set_current_namespace(b"a")
    assert state.exists()
    assert keyed.num_entries("s") == len(NAMESPACES) - 1


@pytest.mark.parametrize("wrong", [None, 1.0, True, [1], sb.ALL_NAMESPACES, (1, None)])
def test_a_refused_namespace_changes_nothing(keyed: Keyed, wrong: Any) -> None:
    keyed.set_current_namespace("n")
    with pytest.raises(sb.SerializationTypeError):
        keyed.set_current_namespace(wrong)
    with pytest.raises(sb.SerializationError):
        keyed.set_current_namespace("\ud800")
    with pytest.raises(OverflowError):
        keyed.set_current_namespace(2**63)
    assert keyed.current_namespace == "n"


def fill(keyed: Keyed, state: Any, by_namespace: dict[Any, Any]) -> None:
    for namespace, values in by_namespace.items():
        keyed.set_current_namespace(namespace)
        for value in values:
            state.add(value)
    keyed.set_current_namespace(sb.VOID)


MERGING = [
    sb.ListStateDescriptor("s", str),
    sb.ReducingStateDescriptor("s", join, str),
    sb.AggregatingStateDescriptor("s", Longest(), str, str),
]


merging = pytest.mark.parametrize("descriptor", MERGING, ids=lambda d: d.kind)


def merged_result(descriptor: Any, letters: str) -> Any:
    if descriptor.kind == "list":
        return list(letters)
    if descriptor.kind == "reducing":
        return letters
    return (1, letters[0])  # the first of the longest


@merging
@pytest.mark.parametrize(
    ("target", "sources", "letters"),
    [
        ("t", ["a", "b"], "tab"),
        ("t", ["b", "a"], "tba"),
        ("new", ["a", "b"], "ab"),
        ("new", ["b", "missing", "a"], "ba"),
        ("t", ["a", "t", "b"], "atb"),
        ("a", ["a"], "a"),
        ("t", ["a", "a"], "ta"),
        (sb.VOID, ["t", "a"], "vta"),
    ],
)
def test_merge_in_order(keyed: Keyed, descriptor: Any, target: Any, sources: list[Any], letters: str) -> None:
    state = keyed.get_state(descriptor)
    fill(keyed, state, {"t": "t", "a": "a", "b": "b", sb.VOID: "v"})
    keyed.set_current_key(2)
    fill(keyed, state, {"t": "x", "a": "y"})
    others = {at: value for at, value in dump(keyed, descriptor).items() if at[0] == "2"}
    keyed.set_current_key(1)
    keyed.merge_namespaces(descriptor, target, iter(sources))
    assert keyed.current_namespace is sb.VOID
    keyed.set_current_namespace(target)
    assert state.get() == merged_result(descriptor, letters)
    for source in set(sources) - {target}:
        keyed.set_current_namespace(source)
        assert not state.exists()
    left = {at: value for at, value in dump(keyed, descriptor).items() if at[0] == "2"}
    assert left == others


@merging
@pytest.mark.parametrize("sources", [None, [], ["missing"], ["missing", "t"]])
def test_merging_nothing(keyed: Keyed, descriptor: Any, sources: Any) -> None:
    state = keyed.get_state(descriptor)
    fill(keyed, state, {"t": "t", sb.VOID: "v"})
    before = dump(keyed, descriptor)
    keyed.merge_namespaces(descriptor, "t", sources)
    assert dump(keyed, descriptor) == before


def test_merging_that_fails_changes_nothing(keyed: Keyed) -> None:
    def failing(old: str, new: str) -> str:
        if new == "b":
            raise ZeroDivisionError
        return old + new

    for descriptor, error in (
        (sb.ReducingStateDescriptor("f", failing, str), ZeroDivisionError),
        (sb.ReducingStateDescriptor("o", "sum", "tinyint"), OverflowError),
    ):
        state = keyed.get_state(descriptor)
        fill(keyed, state, {n: [n] if error is ZeroDivisionError else [60] for n in ("t", "a", "b")})
        before = dump(keyed, descriptor)
        with pytest.raises(error):
            keyed.merge_namespaces(descriptor, "t", ["a", "b"])
        assert dump(keyed, descriptor) == before


@pytest.mark.parametrize(
    "descriptor",
    [
        sb.ValueStateDescriptor("s", str),
        sb.MapStateDescriptor("s", str, str),
        sb.FoldingStateDescriptor("s", "", join, str),
    ],
    ids=lambda d: d.kind,
)
def test_other_kinds_cannot_be_merged(keyed: Keyed, descriptor: Any) -> None:
    with pytest.raises(sb.UsageError, match=r"cannot be merged.*'s'"):
        keyed.merge_namespaces(descriptor, "t", ["a"])


def test_merging_checks_namespaces_and_key_first(make_keyed: MakeKeyed) -> None:
    keyed = make_keyed(str)
    descriptor = sb.ListStateDescriptor("s", str)
    with pytest.raises(sb.UsageError, match="current key"):
        keyed.merge_namespaces(descriptor, "t", ["a"])
    keyed.set_current_key("k")
    fill(keyed, keyed.get_state(descriptor), {"t": "t", "a": "a"})
    before = dump(keyed, descriptor)
    for target, sources in ((None, ["a"]), ("t", ["a", None]), ("t", "a"), (sb.ALL_NAMESPACES, ["a"])):
        with pytest.raises((sb.SerializationTypeError, sb.UsageError)):
            keyed.merge_namespaces(descriptor, target, sources)
    assert dump(keyed, descriptor) == before


def states(keyed: Keyed) -> dict[str, Any]:
    return {
        "value": keyed.get_value_state(sb.ValueStateDescriptor("value", int)),
        "list": keyed.get_list_state(sb.ListStateDescriptor("list", str)),
        "map": keyed.get_map_state(sb.MapStateDescriptor("map", str, int)),
        "sum": keyed.get_reducing_state(sb.ReducingStateDescriptor("sum", "sum", int)),
        "object": keyed.get_value_state(sb.ValueStateDescriptor("object", sb.types.PICKLE)),
    }


def test_reading_is_a_change_only_as_use(make_keyed: Callable[..., Keyed], clock: ManualClock) -> None:
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


def test_expired_entries_are_removed(make_keyed: Callable[..., Keyed], clock: ManualClock) -> None:
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


def test_counts_equal_a_model_after_random_calls(keyed: Keyed, rng: random.Random) -> None:
    state = states(keyed)
    model: dict[Any, Any] = {}
    outer: list[tuple[Any, dict[Any, Any]]] = []
    for number in range(40):
        if number % 5 == 0:  # marks within marks, released in any order
            outer.append((keyed.mark(), dict(model)))
        elif number % 8 == 0:
            keyed.release(outer.pop(rng.randrange(len(outer)))[0])
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
        for each, then in outer:
            assert keyed.count_changes(each)[1] == len(then.keys() - model.keys())
