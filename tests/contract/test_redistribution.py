"""Redistribution of operator state: Flink's own results, and what follows from the rules."""

from __future__ import annotations

import copy
from typing import Any

import pytest

import statebackend as sb
from statebackend.operator_state import redistribute

#: Elements of three instances, as 100 * instance + position; sizes 4, 3, 2.
OLD = [[0, 1, 2, 3], [100, 101, 102], [200, 201]]


def state(mode: str, elements: list[Any]) -> dict[str, Any]:
    key = "entries" if mode == "broadcast" else "elements"
    return {"mode": mode, "config": {"types": {}}, key: elements}


def contents(mode: str, old: list[list[Any]] = OLD, name: str = "s") -> list[dict[str, Any]]:
    return [{name: state(mode, elements)} for elements in old]


def dealt(new: list[dict[str, Any]], name: str = "s") -> list[Any]:
    return [each[name].get("elements", each[name].get("entries")) for each in new]


@pytest.mark.parametrize(
    ("parallelism", "expected"),
    [
        (1, [[0, 1, 2, 3, 100, 101, 102, 200, 201]]),
        (2, [[0, 1, 2, 3, 100], [101, 102, 200, 201]]),
        (3, OLD),
        (4, [[0, 1, 2], [3, 100], [101, 102], [200, 201]]),
        (5, [[0, 1], [2, 3], [100, 101], [102, 200], [201]]),
    ],
)
def test_split_as_flink_does(parallelism: int, expected: list[list[int]]) -> None:
    assert dealt(redistribute(contents("split"), parallelism)) == expected


def test_broadcast_as_flink_does() -> None:
    old = contents("broadcast", [[("k", 0)], [("k", 1)], [("k", 2)]])
    assert dealt(redistribute(old, 5)) == [[("k", i)] for i in (0, 1, 2, 0, 1)]
    assert dealt(redistribute(old, 2)) == [[("k", 0)], [("k", 1)]]
    assert dealt(redistribute(old, 3)) == [[("k", 0)], [("k", 1)], [("k", 2)]]


def test_a_broadcast_state_that_only_some_reported() -> None:
    old = contents("broadcast", [[("k", 0)], [("k", 1)], [("k", 2)]])
    del old[1]["s"]
    assert dealt(redistribute(old, 3)) == [[("k", 0)], [("k", 2)], [("k", 0)]]


@pytest.mark.parametrize("parallelism", [1, 2, 3, 5])
def test_union_gives_all_to_everyone(parallelism: int) -> None:
    everything = [element for elements in OLD for element in elements]
    assert dealt(redistribute(contents("union"), parallelism)) == [everything] * parallelism


def test_the_longer_runs_go_round_over_the_names() -> None:
    """Three elements over two instances, for three names: the extra one goes to 0, then 1, then 0."""
    old = [{name: state("split", [f"{name}{i}" for i in range(3)]) for name in "cab"}]
    new = redistribute(old, 2)
    assert dealt(new, "a") == [["a0", "a1"], ["a2"]]
    assert dealt(new, "b") == [["b2"], ["b0", "b1"]]
    assert dealt(new, "c") == [["c0", "c1"], ["c2"]]


def test_even_splits_do_not_move_the_start() -> None:
    old = [{"a": state("split", [1, 2]), "b": state("split", [1]), "c": state("split", [1, 2])}]
    new = redistribute(old, 2)
    assert dealt(new, "a") == [[1], [2]]
    assert dealt(new, "b") == [[1], []]
    assert dealt(new, "c") == [[2], [1]]


def test_names_in_any_order_give_the_same() -> None:
    names = ["x", "m", "a"]
    old = [{n: state("split", [f"{n}{i}{j}" for j in range(2)]) for n in names} for i in range(3)]
    turned = [dict(reversed(each.items())) for each in old]
    assert redistribute(old, 4) == redistribute(turned, 4)


@pytest.mark.parametrize("parallelism", range(1, 9))
def test_nothing_is_lost_and_loads_are_even(parallelism: int) -> None:
    old = [
        {
            name: state("split", [(name, i, j) for j in range((i * 3 + len(name)) % 5)])
            for name in ("a", "bb", "c")
        }
        for i in range(4)
    ]
    new = redistribute(old, parallelism)
    for name in ("a", "bb", "c"):
        before = sorted(element for each in old for element in each[name]["elements"])
        after = [each[name]["elements"] for each in new]
        assert sorted(element for elements in after for element in elements) == before
        sizes = [len(elements) for elements in after]
        assert parallelism == 4 or max(sizes) - min(sizes) <= 1
    if parallelism != 4:
        totals = [sum(len(each[name]["elements"]) for name in each) for each in new]
        assert max(totals) - min(totals) <= 1


def test_what_an_instance_did_not_report() -> None:
    old = contents("split")
    del old[1]["s"]
    assert dealt(redistribute(old, 2)) == [[0, 1, 2], [3, 200, 201]]
    assert "s" not in redistribute(old, 3)[1]
    assert redistribute([], 2) == [{}, {}]


def test_old_contents_are_not_changed() -> None:
    old = contents("union")
    before = copy.deepcopy(old)
    for each in redistribute(old, 2):
        each["s"]["elements"].append(7)
    assert old == before


def test_instances_that_disagree_are_refused() -> None:
    with pytest.raises(sb.StateMigrationError, match=r"'s'.*split, union"):
        redistribute([*contents("split"), *contents("union")], 2)
    other = contents("split")
    other[0]["s"]["config"] = {"types": {"element": {"type": "long"}}}
    with pytest.raises(sb.StateMigrationError, match="'s'"):
        redistribute(other, 2)


@pytest.mark.parametrize("parallelism", [0, -1, 1.0, None])
def test_a_bad_parallelism_is_refused(parallelism: Any) -> None:
    with pytest.raises(sb.UsageError):
        redistribute([], parallelism)
