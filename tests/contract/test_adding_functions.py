"""`add_many` with a user's function goes ways of its own, and is what `add` row by row is."""

from __future__ import annotations

import gc
import random
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import statebackend as sb
from statebackend.backends.heap import state_handles as on_heap
from statebackend.backends.rocksdb import single_state as on_rocksdb
from statebackend.testing import ManualClock

pytestmark = pytest.mark.checked

Function = Callable[[Any, Any, Any], None]
KEYS = 12
Ways = Callable[[], Iterator[None]]


@pytest.fixture
def ways(backend: sb.StateBackend, monkeypatch: pytest.MonkeyPatch) -> Ways:
    """Goes the backend's own way, and then that of the interface, which calls `add` row by row."""
    if backend.name == "reference":
        pytest.skip("the backend has no way of its own")

    def both() -> Iterator[None]:
        monkeypatch.setattr(on_rocksdb, "FEWEST_IN_ORDER", 0)
        yield
        monkeypatch.setattr(on_rocksdb, "FEWEST_IN_ORDER", 10**9)
        monkeypatch.setattr(on_heap.HeapAddingColumns, "_add_each", sb.ReducingState._add_each)
        yield

    return both


class Collecting(sb.AggregateFunction):
    """Accumulates what was added in one list, which it changes in place and keeps."""

    def __init__(self, then: Callable[[], None]) -> None:
        self.then = then
        self.kept: list[Any] = []

    def create_accumulator(self) -> list[Any]:
        return []

    def add(self, value: Any, accumulator: list[Any]) -> list[Any]:
        accumulator.append(value)
        for each in self.kept[-3:]:
            each.append("stray")
        self.kept.append(accumulator)
        self.then()
        return list(accumulator)

    def get_result(self, accumulator: list[Any]) -> Any:
        return repr(accumulator)

    def merge(self, a: list[Any], b: list[Any]) -> list[Any]:
        return a + b


class Run:
    """A backend on which the same is done; what the function has seen."""

    def __init__(
        self, backend: sb.StateBackend, kind: str, does: Function, ttl: dict[str, Any] | None = None
    ) -> None:
        self.seen: list[Any] = []
        self.clock = ManualClock(0)
        self.keyed: Any = backend.create_keyed_backend(int, clock=self.clock)
        self.does, self.rows, self.turn = does, 0, random.Random(7)

        def then() -> None:
            self.rows += 1
            self.does(self, self.keyed, self.state)

        def reduce(a: int, b: int) -> int:
            self.seen.append((self.keyed.current_key, self.keyed.current_namespace, a, b))
            then()
            return a * 3 + b & 0xFFFF_FFFF

        def fold(a: str, b: int) -> str:
            self.seen.append((self.keyed.current_key, a, b))
            then()
            return f"{a[-40:]}/{b}"

        descriptor: Any = {
            "reducing": lambda: sb.ReducingStateDescriptor("s", reduce, int),
            "folding": lambda: sb.FoldingStateDescriptor("s", "", fold, str),
            "aggregating": lambda: sb.AggregatingStateDescriptor(
                "s", Collecting(then), sb.types.LONG, sb.types.PICKLE
            ),
        }[kind]()
        if ttl is not None:
            descriptor = descriptor.enable_time_to_live(sb.StateTtlConfig(**ttl))
        self.state: Any = self.keyed.get_state(descriptor)

    def held(self) -> Any:
        found = []
        for key in range(KEYS):
            self.keyed.set_current_key(key)
            for namespace in (sb.VOID, "w"):
                self.keyed.set_current_namespace(namespace)
                found.append(self.state.get())
        return found

    def close(self) -> None:
        self.keyed.close()


def nothing(run: Run, keyed: Any, state: Any) -> None:
    """Only compute."""


def call(run: Run, keyed: Any, state: Any) -> None:
    """Try what a call would refuse."""
    for each in (state.get, state.clear, lambda: keyed.set_current_key(1), keyed.mark):
        with pytest.raises(sb.UsageError, match="inside this backend"):
            each()


def let_time_pass(run: Run, keyed: Any, state: Any) -> None:
    run.clock.set(run.clock.now() + 5)


DOES = [nothing, call, let_time_pass]
IN_EVENT_TIME = {"ttl_time_characteristic": sb.StateTtlConfig.TtlTimeCharacteristic.EventTime}


@pytest.mark.parametrize("kind", ["reducing", "folding", "aggregating"])
@pytest.mark.parametrize("does", DOES, ids=lambda each: each.__name__)
@pytest.mark.parametrize(
    "ttl", [None, {"ttl": 20}, {"ttl": 30, **IN_EVENT_TIME}], ids=["", "expiring", "in event time"]
)
def test_a_call_is_what_its_rows_are_one_by_one(
    backend: sb.StateBackend, ways: Ways, rng: random.Random, kind: str, does: Function, ttl: Any
) -> None:
    calls = []
    for _ in range(4):
        n = rng.randrange(1, 150)
        keys = [rng.randrange(KEYS) for _ in range(n)]
        values = [rng.choice([None, *range(8)]) for _ in range(n)]
        spaces = [rng.choice([sb.VOID, "w"]) for _ in range(n)] if rng.random() < 0.5 else None
        is_timed = bool(ttl) and ttl["ttl"] == 30 and rng.random() < 0.7
        times = [rng.randrange(100) for _ in range(n)] if is_timed else None
        calls.append((keys, values, spaces, times, rng.random() < 0.5, rng.random() < 0.5))
    found = []
    for _way in ways():
        run = Run(backend, kind, does, ttl)
        if ttl and ttl["ttl"] == 30:
            run.keyed.begin(watermarks=(0, 50))
        for keys, values, spaces, times, returns, is_marked in calls:
            mark = run.keyed.mark() if is_marked else None
            given = run.state.add_many(keys, values, return_changed=returns, namespaces=spaces, times=times)
            run.seen.append(
                None
                if given is None
                else [each.to_pylist() if hasattr(each, "to_pylist") else each for each in given]
            )
            if mark is not None:
                run.keyed.release(mark)
            run.clock.set(run.clock.now() + 6)
        does_then, run.does = run.does, nothing
        assert does_then is does
        found.append((run.seen, run.held(), run.keyed.metrics()["states"]["s"].get("expired_on_read")))
        run.close()
    assert found[0] == found[1]


def test_an_error_undoes_the_call_and_names_what_a_row_names(backend: sb.StateBackend, ways: Ways) -> None:
    class Refused(Exception):
        pass

    def refuse(run: Run, keyed: Any, state: Any) -> None:
        if run.rows == 30:
            raise Refused(str(keyed.current_key))

    messages = []
    for _way in ways():
        run = Run(backend, "reducing", nothing)
        run.state.add_many(range(KEYS), range(KEYS))
        before = run.held()
        run.does, run.rows = refuse, 0
        with pytest.raises(Refused, match=r"^5$"):
            run.state.add_many([key % KEYS for key in range(100)], range(100))
        run.does = nothing
        assert run.held() == before
        for values, keys in (([1] * 50 + ["x"], range(51)), ([1] * 50 + [2**70], range(51)), ([1, 2], [1])):
            with pytest.raises((sb.SerializationError, sb.UsageError, OverflowError)) as caught:
                run.state.add_many(keys, values)
            messages.append((type(caught.value), str(caught.value)))
        wrong = run.keyed.get_state(sb.ReducingStateDescriptor("wrong", lambda a, b: "no number", int))
        with pytest.raises(sb.SerializationTypeError) as caught_at:
            wrong.add_many([1] * 50, [1] * 50)
        messages.append((type(caught_at.value), str(caught_at.value)))
        assert not wrong.exists_many([1]).to_pylist()[0]
        run.close()
    assert messages[:4] == messages[4:]


def test_function_may_change_its_values(backend: sb.StateBackend, ways: Ways) -> None:
    """Values come decoded from the columns: the same list in two rows is two lists, and the caller's is a third one."""

    def reduce(a: list[int], b: list[int]) -> list[int]:
        b.append(7)
        return a + b

    for _way in ways():
        with backend.create_keyed_backend(int) as keyed:
            state = keyed.get_state(sb.ReducingStateDescriptor("s", reduce, sb.types.LIST(sb.types.LONG)))
            given = [1]
            state.add_many([1, 1, 2, 2], [given] * 4)
            assert given == [1]
            assert state.get_many([1, 2]).to_pylist() == [[1, 1, 7]] * 2


def test_a_signal_is_handled_while_a_function_that_is_not_pythons_runs(backend: sb.StateBackend) -> None:
    """No bytecode runs between two rows then; an interrupt would have to wait for the last one."""

    class Interrupted(Exception):
        pass

    def interrupt(*_: Any) -> None:
        raise Interrupted

    rows = 50_000 if backend.name == "reference" else 400_000
    taken: dict[int, int] = {}  # by the values that were there: one more for each row
    with backend.create_keyed_backend(int) as keyed:
        state = keyed.get_state(sb.ReducingStateDescriptor("s", taken.setdefault, int))
        keys, values = np.ones(rows, np.int64), np.arange(rows)
        began = time.monotonic()
        state.add_many(keys, values)
        took = time.monotonic() - began
        assert len(taken) == rows - 1
        taken.clear()
        state.clear_many([1])
        before = signal.signal(signal.SIGALRM, interrupt)
        gc.disable()  # Python ignores an error of a callback of a collection, and hypothesis has callbacks
        try:
            signal.setitimer(signal.ITIMER_REAL, took / 5)
            with pytest.raises(Interrupted):
                state.add_many(keys, values)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
            gc.enable()
        assert len(taken) < rows - 1
        assert state.get_many([1]).to_pylist() == [None]
