"""Operator state: lists and broadcast maps, marks, contents, restore, and redistribution as Flink does it."""

from __future__ import annotations

import copy
import random
import tracemalloc
from collections.abc import Iterator
from typing import Any

import pytest
from contract.conftest import backend_params

import statebackend as sb
from statebackend.functions import FunctionInitializationContext
from statebackend.operator_state import redistribute
from statebackend.state import BackendMark

pytestmark = pytest.mark.checked


@pytest.fixture(params=backend_params()[:1])
def backend(request: pytest.FixtureRequest) -> sb.StateBackend:
    """The first one: `test_flink_programs` has operator state on each, and those of this package share its code."""
    return sb.create_backend(request.param)


@pytest.fixture
def operator(backend: sb.StateBackend) -> Iterator[sb.OperatorStateBackend]:
    with backend.create_operator_backend() as made:
        yield made


def numbers(name: str = "s") -> sb.ListStateDescriptor:
    return sb.ListStateDescriptor(name, int)


def rules(name: str = "r") -> sb.MapStateDescriptor:
    return sb.MapStateDescriptor(name, str, int)


@pytest.mark.parametrize("mode", ["split", "union"])
def test_lists(operator: sb.OperatorStateBackend, mode: str) -> None:
    getter = operator.get_list_state if mode == "split" else operator.get_union_list_state
    state = getter(numbers())
    assert isinstance(state, sb.ListState)
    assert state.mode == mode
    assert state.get() == list(state) == []
    assert not state.exists()
    state.add(1)
    state.add_all(range(2, 4))
    state.add_all([])
    assert state.get() == list(state) == [1, 2, 3]
    for method, argument in (
        ("add", None),
        ("add_all", None),
        ("update", None),
        ("add_all", [4, None]),
        ("update", [4, None]),
        ("add", "text"),
        ("add_all", "text"),
    ):
        with pytest.raises(sb.SerializationTypeError):
            getattr(state, method)(argument)
    assert state.get() == [1, 2, 3]
    state.update([9])
    assert state.get() == [9]
    state.update([])
    assert not state.exists()
    assert getter(numbers()) is state


def test_returned_value_is_a_copy(operator: sb.OperatorStateBackend) -> None:
    state = operator.get_list_state(sb.ListStateDescriptor("s", list[int]))
    given = [1]
    state.add(given)
    given.append(2)
    state.get()[0].append(3)
    state.get().append([4])
    assert state.get() == [[1]]


def test_broadcast(operator: sb.OperatorStateBackend) -> None:
    state = operator.get_broadcast_state(rules())
    view = state.read_only()
    assert state.is_empty()
    state.put("b", 1)
    state.put_all({"a": None, "b": 2})
    for side in (state, view):
        assert list(side.items()) == [("b", 2), ("a", None)]
        assert list(side.keys()) == list(side) == ["b", "a"]
        assert list(side.values()) == [2, None]
        assert side.contains("a")
        assert "x" not in side
        assert side.get("a", 7) is None
        assert side.get("x", 7) == 7
        assert side["b"] == 2
        assert not side.is_empty()
        with pytest.raises(KeyError):
            side["x"]
    state.remove("a")
    state.remove("a")
    del state["b"]
    with pytest.raises(KeyError):
        del state["b"]
    assert view.is_empty()
    state["z"] = 1
    state.clear()
    assert state.is_empty()
    for call in (
        lambda: state.put(None, 1),
        lambda: state.put_all(None),
        lambda: state.put_all({"a": 1, "b": "x"}),
        lambda: state.put_all({"a": 1, None: 2}),
    ):
        with pytest.raises(sb.SerializationTypeError):
            call()
    assert state.is_empty()


def test_the_read_only_side_cannot_write(operator: sb.OperatorStateBackend) -> None:
    view = operator.get_broadcast_state(rules()).read_only()
    assert type(view) is sb.ReadOnlyBroadcastState
    for name in ("put", "put_all", "remove", "clear", "__setitem__", "__delitem__"):
        assert not hasattr(view, name)


def test_changes_while_iterating(operator: sb.OperatorStateBackend) -> None:
    words = operator.get_list_state(numbers())
    state = operator.get_broadcast_state(rules())
    for begin, change in (
        (words.__iter__, lambda: words.add(3)),
        (words.__iter__, lambda: words.clear()),
        (state.items, lambda: state.put("c", 3)),
        (state.keys, lambda: state.remove("c")),
        (state.values, lambda: state.clear()),
    ):
        words.update([1, 2])
        state.put_all({"a": 1, "b": 2})
        steps = begin()
        next(steps)
        change()
        with pytest.raises(RuntimeError):
            next(steps)


def test_names(operator: sb.OperatorStateBackend) -> None:
    assert operator.registered_state_names() == []
    operator.get_union_list_state(numbers("u"))
    operator.get_list_state(numbers("s"))
    operator.get_broadcast_state(rules("b"))
    assert operator.registered_state_names() == ["b", "s", "u"]
    for wrong, first, second in (
        (lambda: operator.get_list_state(numbers("u")), "union", "split"),
        (lambda: operator.get_union_list_state(numbers("s")), "split", "union"),
        (lambda: operator.get_broadcast_state(rules("s")), "split", "broadcast"),
        (lambda: operator.get_list_state(sb.ListStateDescriptor("s", str)), "LONG", "STRING"),
    ):
        with pytest.raises(sb.StateMigrationError, match=f"{first}.*{second}"):
            wrong()
    for wrong in (
        lambda: operator.get_list_state(rules("x")),
        lambda: operator.get_broadcast_state(numbers("x")),
        lambda: operator.get_list_state(sb.ValueStateDescriptor("x", int)),
        lambda: operator.get_list_state(numbers("x").enable_time_to_live(sb.StateTtlConfig(1))),
    ):
        with pytest.raises(sb.UsageError):
            wrong()
    assert operator.registered_state_names() == ["b", "s", "u"]


def everything(operator: sb.OperatorStateBackend) -> Any:
    return (
        operator.get_list_state(numbers("s")).get(),
        operator.get_union_list_state(numbers("u")).get(),
        list(operator.get_broadcast_state(rules("b")).items()),
    )


def change(operator: sb.OperatorStateBackend, number: int) -> None:
    operator.get_list_state(numbers("s")).add(number)
    operator.get_union_list_state(numbers("u")).update([number])
    state = operator.get_broadcast_state(rules("b"))
    state.put_all({f"k{number}": number, "k": number})
    state.remove(f"k{number - 1}")


def test_marks(operator: sb.OperatorStateBackend) -> None:
    change(operator, 1)
    first, before_first = operator.mark(), everything(operator)
    change(operator, 2)
    second, before_second = operator.mark(), everything(operator)
    change(operator, 3)
    operator.get_list_state(numbers("s")).clear()
    steps = iter(operator.get_union_list_state(numbers("u")))
    operator.rollback(second)
    assert everything(operator) == before_second
    with pytest.raises(RuntimeError):
        next(steps)
    change(operator, 4)
    operator.rollback(second)
    assert everything(operator) == before_second
    third = operator.mark()
    change(operator, 5)
    operator.rollback(first)
    assert everything(operator) == before_first
    for stale in (second, third):
        with pytest.raises(sb.UsageError):
            operator.rollback(stale)
    operator.release(first)
    operator.release(first)
    with pytest.raises(sb.UsageError):
        operator.rollback(first)
    change(operator, 6)
    assert everything(operator)[1] == [6]


def test_a_state_asked_for_since_is_new(backend: sb.StateBackend, operator: sb.OperatorStateBackend) -> None:
    mark = operator.mark()
    change(operator, 1)
    operator.rollback(mark)
    assert everything(operator) == ([], [], [])
    change(operator, 1)
    again = backend.create_operator_backend(restore=[operator.contents()])
    mark = again.mark()
    change(again, 2)
    assert everything(again) != everything(operator)
    again.rollback(mark)
    assert everything(again) == everything(operator)


def test_lists_return_to_a_mark_after_any_use(operator: sb.OperatorStateBackend, rng: random.Random) -> None:
    state = operator.get_list_state(numbers())
    expected: list[int] = []
    marks: list[tuple[BackendMark, list[int]]] = []
    views: list[tuple[Any, list[int]]] = []
    for step in range(1500):
        often = ["add", "add_all", "mark", "back", "view"]
        action = rng.choice([*often * 3, "update", "clear", "release"])
        if action == "add":
            state.add(step)
            expected.append(step)
        elif action == "add_all":
            state.add_all([step, step])
            expected += [step, step]
        elif action == "update":
            state.update([step])
            expected = [step]
        elif action == "clear":
            state.clear()
            expected = []
        elif action == "mark":
            marks.append((operator.mark(), list(expected)))
        elif action == "back" and marks:
            place = rng.randrange(len(marks))
            del marks[place + 1 :]
            operator.rollback(marks[place][0])
            expected = list(marks[place][1])
        elif action == "release" and marks:
            operator.release(marks.pop(rng.randrange(len(marks)))[0])
        elif action == "view":
            views.append((state.view(), list(expected)))
        assert state.get() == expected, action
    for view, then in views:
        assert list(map(state._bytes.value, view.rows())) == then, "a view no longer changes"


def test_changes_that_are_taken_back_leave_the_view(
    operator: sb.OperatorStateBackend,
) -> None:
    state = operator.get_list_state(numbers())
    state.add(1)
    before = state.view().kept
    mark = operator.mark()
    state.add(2)
    operator.rollback(mark)
    assert state.view().kept is before, "so that it is not written again"


@pytest.mark.parametrize("is_viewed", [False, True])
def test_a_mark_for_each_row_copies_no_list(operator: sb.OperatorStateBackend, is_viewed: bool) -> None:
    state = operator.get_list_state(numbers())
    state.update(range(100_000))
    if is_viewed:
        state.view()
    outer = operator.mark()
    state.add(0)  # copies once, because the view must not see it
    operator.rollback(outer)
    tracemalloc.start()
    try:
        for number in range(100):
            mark = operator.mark()
            state.add(number)
            if number % 2:
                operator.rollback(mark)
            operator.release(mark)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(state.get()) == 100_050
    assert peak < 400_000, "a copy takes eight bytes an element"


def test_everything_raises_after_close(backend: sb.StateBackend) -> None:
    operator = backend.create_operator_backend()
    words, state = operator.get_list_state(numbers()), operator.get_broadcast_state(rules())
    words.add(1)
    steps = iter(words)
    mark = operator.mark()
    operator.close()
    operator.close()
    for call in (
        lambda: operator.get_list_state(numbers()),
        operator.registered_state_names,
        operator.contents,
        operator.mark,
        lambda: operator.rollback(mark),
        words.get,
        words.exists,
        words.clear,
        lambda: words.add(1),
        lambda: words.update([1]),
        lambda: iter(words),
        lambda: next(steps),
        lambda: state.get("a"),
        lambda: state.put("a", 1),
        lambda: state.put_all({}),
        state.clear,
        state.keys,
        state.is_empty,
        lambda: state.read_only().get("a"),
    ):
        with pytest.raises(sb.ClosedError):
            call()


@pytest.mark.parametrize(
    "options",
    [
        {"parallelism": 0},
        {"subtask_index": 1},
        {"subtask_index": -1, "parallelism": 2},
        {"restore": {"s": {}}},
    ],
    ids=repr,
)
def test_bad_options_are_refused(backend: sb.StateBackend, options: dict[str, Any]) -> None:
    with pytest.raises(sb.UsageError):
        backend.create_operator_backend(**options)


def test_contexts(operator: sb.OperatorStateBackend) -> None:
    ctx = FunctionInitializationContext(operator)
    assert ctx.operator_state_store is operator
    assert (ctx.is_restored, ctx.restored_checkpoint_id) == (False, None)
    with pytest.raises(sb.UsageError, match="lacks keys"):
        _ = ctx.keyed_state_store
    assert FunctionInitializationContext(operator, restored_checkpoint_id=3).is_restored


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
    ("mode", "expected"),
    [
        ("split", [[0, 1, 2, 3, 100, 101, 102, 200, 201]]),
        ("split", [[0, 1, 2, 3, 100], [101, 102, 200, 201]]),
        ("split", OLD),
        ("split", [[0, 1, 2], [3, 100], [101, 102], [200, 201]]),
        ("split", [[0, 1], [2, 3], [100, 101], [102, 200], [201]]),
        *(("union", [[*OLD[0], *OLD[1], *OLD[2]]] * parallelism) for parallelism in (1, 2, 3, 5)),
        *(("broadcast", [OLD[i % 3] for i in range(parallelism)]) for parallelism in (2, 3, 5)),
    ],
)
def test_elements_are_dealt_as_flink_does(mode: str, expected: list[list[int]]) -> None:
    assert dealt(redistribute(contents(mode), len(expected))) == expected


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


def test_state_that_an_instance_did_not_report() -> None:
    old = contents("split")
    del old[1]["s"]
    assert dealt(redistribute(old, 2)) == [[0, 1, 2], [3, 200, 201]]
    assert "s" not in redistribute(old, 3)[1]
    assert redistribute([], 2) == [{}, {}]
    old = contents("broadcast")
    del old[1]["s"]
    assert dealt(redistribute(old, 3)) == [OLD[0], OLD[2], OLD[0]]


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
