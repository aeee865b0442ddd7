"""Namespaces: separate states of one key, and merging them."""

from __future__ import annotations

from typing import Any

import pytest
from contract.conftest import MakeKeyed
from contract.samples import KINDS, Kind, Longest, dump, join

import statebackend as sb
from statebackend import types as t

pytestmark = pytest.mark.checked

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
def test_every_namespace_has_its_own(keyed: sb.KeyedStateBackend, kind: Kind) -> None:
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
def test_a_refused_namespace_changes_nothing(keyed: sb.KeyedStateBackend, wrong: Any) -> None:
    keyed.set_current_namespace("n")
    with pytest.raises(sb.SerializationTypeError):
        keyed.set_current_namespace(wrong)
    with pytest.raises(sb.SerializationError):
        keyed.set_current_namespace("\ud800")
    with pytest.raises(OverflowError):
        keyed.set_current_namespace(2**63)
    assert keyed.current_namespace == "n"


def fill(keyed: sb.KeyedStateBackend, state: Any, by_namespace: dict[Any, Any]) -> None:
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
def test_merging_in_order(
    keyed: sb.KeyedStateBackend, descriptor: Any, target: Any, sources: list[Any], letters: str
) -> None:
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
def test_merging_nothing(keyed: sb.KeyedStateBackend, descriptor: Any, sources: Any) -> None:
    state = keyed.get_state(descriptor)
    fill(keyed, state, {"t": "t", sb.VOID: "v"})
    before = dump(keyed, descriptor)
    keyed.merge_namespaces(descriptor, "t", sources)
    assert dump(keyed, descriptor) == before


def test_merging_that_fails_changes_nothing(keyed: sb.KeyedStateBackend) -> None:
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
def test_other_kinds_cannot_be_merged(keyed: sb.KeyedStateBackend, descriptor: Any) -> None:
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
