"""Vectorised calls with a column of times do what a loop does that sets each row's time, on every backend."""

from __future__ import annotations

import datetime
import random
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from contract.conftest import MakeKeyed
from contract.samples import Longest, dump, last_of

import statebackend as sb
from statebackend import types as t
from statebackend.state import KeyedStateBackend, StateDescriptor, StateTtlConfig
from statebackend.state.value_columns import to_arrow

pytestmark = pytest.mark.checked

TTL = 100
Update = StateTtlConfig.UpdateType
Visibility = StateTtlConfig.StateVisibility
EVENT_TIME = StateTtlConfig.TtlTimeCharacteristic.EventTime
UTC = datetime.timezone.utc

#: For each kind a state, the columns beside the keys that writes and reads take, and what makes their results.
STATES: dict[str, Any] = {
    "value": lambda: sb.ValueStateDescriptor("s", int, default=5),
    "text": lambda: sb.ValueStateDescriptor("s", str),
    "wide": lambda: sb.ValueStateDescriptor("s", "struct<a:bigint,b:bigint>"),
    "object": lambda: sb.ValueStateDescriptor("s", t.PICKLE),
    "list": lambda: sb.ListStateDescriptor("s", int),
    "texts": lambda: sb.ListStateDescriptor("s", str),
    "map": lambda: sb.MapStateDescriptor("s", int, int),
    "text map": lambda: sb.MapStateDescriptor("s", str, str),
    "sum": lambda: sb.ReducingStateDescriptor("s", "sum", int),
    "float max": lambda: sb.ReducingStateDescriptor("s", "max", "float"),
    "first": lambda: sb.ReducingStateDescriptor("s", "first", str),
    "own reducing": lambda: sb.ReducingStateDescriptor("s", lambda a, b: a - b, int),
    "average": lambda: sb.AggregatingStateDescriptor("s", "avg", int),
    "own aggregate": lambda: sb.AggregatingStateDescriptor("s", Longest(), str, str),
    "folding": lambda: sb.FoldingStateDescriptor("s", "", last_of, str),
}


def with_ttl(descriptor: StateDescriptor, **options: Any) -> Any:
    config = StateTtlConfig(TTL, ttl_time_characteristic=EVENT_TIME, **options)
    return descriptor.enable_time_to_live(config)


def sample(kind: str, rng: random.Random) -> Any:
    if kind == "wide":
        return (rng.randrange(9), rng.choice([None, 3]))
    if kind == "object":
        return {"n": rng.randrange(9)}
    if kind in ("text", "texts", "text map", "first", "own aggregate", "folding"):
        return rng.choice(["", "a", "b" * 50])
    return float(rng.randrange(9)) if kind == "float max" else rng.randrange(9)


class Drive:
    """Random calls on two backends: one is called row by row, the other with whole columns."""

    def __init__(self, make_keyed: MakeKeyed, kind: str, rng: random.Random, **options: Any) -> None:
        self.kind, self.rng = kind, rng
        self.descriptor = with_ttl(STATES[kind](), **options)
        self.one, self.many = make_keyed(str), make_keyed(str)
        for keyed in (self.one, self.many):
            keyed.begin_event_time(None, None)
        self.one_state = self.one.get_state(self.descriptor)
        self.many_state: Any = self.many.get_state(self.descriptor)
        self.before: int | None = None
        self.after: int | None = None
        self.goes_back = False

    def batch(self) -> None:
        """The next batch begins."""
        self.before, self.after = self.after, (self.after or 1000) + self.rng.choice([0, 5, 40, 300])
        for keyed in (self.one, self.many):
            keyed.begin_event_time(self.before, self.after)

    def time(self) -> int | None:
        assert self.after is not None
        if self.rng.random() < 0.1:
            return None
        low = 0 if self.goes_back or self.before is None else self.before
        return self.rng.randint(max(low, self.after - 400), self.after + 50)

    def rows(self, *, writes: bool) -> tuple[list[Any], list[Any], list[tuple[Any, ...]]]:
        count = self.rng.choice([0, 1, 4, 30])
        spaces = self.rng.choices([sb.VOID, 7, "n"], k=count)
        if self.rng.random() < 0.3:
            spaces = [sb.VOID] * count
        same = self.time() if self.rng.random() < 0.2 else -1
        times = [self.time() if same == -1 else same for _ in range(count)]
        rows = []
        for _ in range(count):
            row: list[Any] = [self.rng.choice(["a", "b", "c", "d"])]
            if "map" in self.kind:
                row.append(self.rng.randrange(3) if self.kind == "map" else self.rng.choice(["", "k"]))
            if writes:
                is_null = self.descriptor.kind != "list" and self.rng.random() < 0.15
                row.append(None if is_null else sample(self.kind, self.rng))
            rows.append(tuple(row))
        return spaces, times, rows

    def loop(
        self, method: str, spaces: list[Any], times: list[Any], rows: list[tuple[Any, ...]]
    ) -> list[Any]:
        results = []
        for space, time, (key, *arguments) in zip(spaces, times, rows, strict=True):
            self.one.set_event_time(self.after if time is None else time)
            self.one.set_current_namespace(space)
            self.one.set_current_key(key)
            results.append(getattr(self.one_state, method)(*arguments))
        self.one.set_current_namespace(sb.VOID)
        self.one.set_event_time(self.after)
        return results

    def columns(self, spaces: list[Any], times: list[Any]) -> dict[str, Any]:
        column: Any = times
        if self.rng.random() < 0.5:
            column = pa.array(times, pa.int64())
            if self.rng.random() < 0.5:
                column = column.cast(pa.timestamp("ms")).cast(pa.timestamp("us", "UTC"))
        elif times and None not in times:
            column = np.array(times)
        if all(each is sb.VOID for each in spaces):
            return {"times": column}
        return {"times": column, "namespaces": spaces}

    def compare(self, many: str, one: str, *, writes: bool, keys_only: bool = False) -> None:
        spaces, times, rows = self.rows(writes=writes)
        if keys_only:
            rows = [row[:1] for row in rows]
        given = [list(column) for column in zip(*rows, strict=True)]
        if not rows:
            given = [[] for _ in range(1 if keys_only else 1 + ("map" in self.kind) + writes)]
        expected = self.loop(one, spaces, times, rows)
        got = getattr(self.many_state, many)(*given, **self.columns(spaces, times))
        if got is not None:
            assert repr(got.to_pylist()) == repr(to_arrow(expected, self.result_type(many)).to_pylist())
        self.check()

    def result_type(self, many: str) -> Any:
        if many == "exists_many":
            return t.BOOL
        descriptor: Any = self.descriptor
        if descriptor.kind == "list":
            return t.LIST(descriptor.element_type)
        if descriptor.kind == "map":
            return descriptor.value_type
        return descriptor.result_type if descriptor.kind == "aggregating" else descriptor.type

    def changed(self) -> None:
        spaces, times, rows = self.rows(writes=True)
        given = [list(column) for column in zip(*rows, strict=True)] or [[], []]
        self.loop("add", spaces, times, rows)
        columns = {"namespaces": spaces, **self.columns(spaces, times)}
        keys, _, results = self.many_state.add_many(*given, return_changed=True, **columns)
        last = {(row[0], spaces[at]): times[at] for at, row in enumerate(rows)}
        touched = list(dict.fromkeys((row[0], spaces[at]) for at, row in enumerate(rows)))
        assert keys.to_pylist() == [key for key, _ in touched]
        expected = self.loop(
            "get", [at for _, at in touched], [last[each] for each in touched], [(key,) for key, _ in touched]
        )
        assert repr(results.to_pylist()) == repr(to_arrow(expected, self.result_type("add")).to_pylist())
        self.check()

    def check(self) -> None:
        """What the states hold by the watermark, seen without a change."""
        seen = []
        for keyed in (self.one, self.many):
            keyed.set_event_time(self.after)
            mark = keyed.mark()
            seen.append(dump(keyed, self.descriptor))
            keyed.rollback(mark)
            keyed.release(mark)
        assert seen[0] == seen[1]

    def step(self) -> None:
        kind = self.descriptor.kind
        write = {"value": "update", "map": "put"}.get(kind, "add")
        read = {"value": "value"}.get(kind, "get")
        choice = self.rng.randrange(7)
        if choice == 0:
            self.compare("exists_many", "exists", writes=False, keys_only=True)
        elif choice == 1:
            self.compare("clear_many", "clear", writes=False, keys_only=True)
        elif choice in (2, 3):
            self.compare("get_many", read, writes=False)
        elif choice == 4 and kind == "map":
            self.compare("remove_many", "remove", writes=False)
        elif choice == 4 and kind in ("reducing", "aggregating", "folding"):
            self.changed()
        else:
            self.compare(f"{write}_many", write, writes=True)

    def run(self, steps: int) -> None:
        both = (self.one, self.many)
        for _ in range(steps):
            self.batch()
            marks = [keyed.mark() for keyed in both]
            for _ in range(self.rng.randrange(6)):
                self.step()
            back = self.rng.random() < 0.2
            for keyed, mark in zip(both, marks, strict=True):
                if back:
                    keyed.rollback(mark)
                keyed.release(mark)
                keyed.begin_event_time(self.after, self.after)
                keyed.advance()
            self.check()
            if self.descriptor.ttl_config.cleanup_idle:
                assert self.one.num_entries("s") == self.many.num_entries("s")


@pytest.fixture(params=STATES)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("visibility", Visibility, ids=lambda each: each.name)
@pytest.mark.parametrize(
    "update", [Update.OnCreateAndWrite, Update.OnReadAndWrite], ids=lambda each: each.name
)
def test_calls_do_what_a_loop_does(
    make_keyed: MakeKeyed, kind: str, update: Update, visibility: Visibility, rng: random.Random
) -> None:
    # What is shown until it is cleaned up must not depend on when that is.
    shows = visibility is Visibility.ReturnExpiredIfNotCleanedUp
    options = {"update_type": update, "state_visibility": visibility}
    Drive(make_keyed, kind, rng, cleanup_in_background=not shows, **options).run(12)


def test_late_rows_and_idle_cleanup(make_keyed: MakeKeyed, kind: str, rng: random.Random) -> None:
    """Nothing cleans up but reads and `advance`, so that late rows see the same; none is forgotten."""
    drive = Drive(make_keyed, kind, rng, cleanup_in_background=False, cleanup_idle=True)
    drive.goes_back = True
    drive.run(15)


def test_late_rows_are_cleaned_up_too(make_keyed: MakeKeyed, kind: str, backend: sb.StateBackend) -> None:
    """What is known of the oldest timestamps must not hide one that a late row of a column has written."""
    idle = {"cleanup_idle": True, "cleanup_in_background": False}
    for options in (idle, {}) if backend.cleans_up_incrementally else (idle,):
        keyed = make_keyed(str)
        keyed.begin_event_time(None, None)
        state: Any = keyed.get_state(with_ttl(STATES[kind](), **options))
        write = {"value": "update_many", "map": "put_many"}.get(state.descriptor.kind, "add_many")
        watermark = 10_000
        for number in range(60):
            keyed.begin_event_time(watermark, watermark)
            keys = [f"{number}", f"{number} late", f"{number} too"]
            values = [sample(kind, random.Random(number))] * 3
            columns = [keys, values]
            if "map" in kind:
                columns.insert(1, [1, 2, 3] if kind == "map" else ["a", "b", "c"])
            getattr(state, write)(*columns, times=[watermark, watermark - 10 * TTL, watermark - TTL // 2])
            keyed.advance()
            watermark += 7
        keyed.begin_event_time(watermark + TTL, watermark + TTL)
        keyed.advance()
        keyed.set_current_key("x")
        for _ in range(100):
            state.clear()
        assert keyed.num_entries("s") == 0


@pytest.mark.parametrize("key_type", [int, str])
def test_large_batches(make_keyed: MakeKeyed, key_type: type, rng: random.Random) -> None:
    """So many rows that a backend may sort them, and divide them among threads."""
    one, many = make_keyed(key_type), make_keyed(key_type)
    descriptors = [
        with_ttl(sb.ReducingStateDescriptor("sum", "sum", int), update_type=Update.OnReadAndWrite),
        with_ttl(sb.ValueStateDescriptor("text", str), update_type=Update.OnReadAndWrite),
    ]
    n, states = 9_000, []
    for keyed in (one, many):
        keyed.begin_event_time(None, 5000)
        states.append([keyed.get_state(each) for each in descriptors])
    for _ in range(2):
        keys = [key_type(rng.randrange(700)) for _ in range(n)]
        numbers = [rng.randrange(100) for _ in range(n)]
        times = [rng.randrange(4000, 5200) for _ in range(n)]
        spaces = rng.choices([0, 1], k=n)
        seen = []
        for key, number, time, space in zip(keys, numbers, times, spaces, strict=True):
            one.set_event_time(time)
            one.set_current_namespace(space)
            one.set_current_key(key)
            states[0][0].add(number)
            states[0][1].update(f"{number}")
        for key, time, space in zip(keys, times[::-1], spaces, strict=True):
            one.set_event_time(time)
            one.set_current_namespace(space)
            one.set_current_key(key)
            seen.append((states[0][0].get(), states[0][1].value()))
        columns = {"times": np.array(times), "namespaces": np.array(spaces)}
        states[1][0].add_many(keys, pa.array(numbers), **columns)
        states[1][1].update_many(keys, pa.array(map(str, numbers)), **columns)
        columns["times"] = np.array(times[::-1])
        got = [state.get_many(keys, **columns).to_pylist() for state in states[1]]
        assert list(zip(*got, strict=True)) == seen
        for keyed in (one, many):
            keyed.set_event_time(5000)
        for descriptor in descriptors:
            assert dump(one, descriptor) == dump(many, descriptor)


def test_without_a_column_calls_go_by_the_watermark_after_the_batch(make_keyed: MakeKeyed) -> None:
    keyed = make_keyed()
    state = keyed.get_state(with_ttl(sb.ValueStateDescriptor("s", int)))
    keyed.begin_event_time(1000, 1050)
    state.update_many([1, 2, 3], [1, 2, 3], times=[1000, None, 1100])
    for at, left in ((1099, [1, 2, 3]), (1100, [None, 2, 3]), (1150, [None, None, 3]), (1200, [None] * 3)):
        mark = keyed.mark()
        keyed.begin_event_time(1000, at)
        assert state.get_many([1, 2, 3]).to_pylist() == left
        assert state.get_many([1, 2, 3], times=[at] * 3).to_pylist() == left
        keyed.rollback(mark)
        keyed.release(mark)


def test_a_call_leaves_the_time_of_the_row(make_keyed: MakeKeyed) -> None:
    keyed = make_keyed()
    for kind in ("value", "object", "list", "map"):
        state = keyed.get_state(with_ttl(STATES[kind](), cleanup_in_background=False))
        keyed.begin_event_time(None, 5000)
        keyed.set_event_time(1000)
        keyed.set_current_key(1)
        if kind == "map":
            state.put(1, 1)
        else:
            (state.add if kind == "list" else state.update)(1)
        state.exists_many([1, 2], times=[3000, 4000])
        assert state.exists(), kind
        state.clear()
        keyed.close()
        keyed = make_keyed()


def test_parts_of_a_millisecond_are_cut_off(make_keyed: MakeKeyed) -> None:
    """As the time of a row is, wherever it is asked for."""
    keyed = make_keyed()
    state = keyed.get_state(with_ttl(sb.ValueStateDescriptor("s", int)))
    keyed.begin_event_time(None, 0)
    for column, written in (
        (pa.array([1_000_999, -1], pa.timestamp("us")), [1000, -1]),
        (pa.array([1_000_999_999, -1], pa.timestamp("ns")), [1000, -1]),
        (pa.array([1, -1], pa.timestamp("s", "Europe/Berlin")), [1000, -1000]),
        (np.array([1_000_999, -1], dtype="datetime64[us]"), [1000, -1]),
        (
            [datetime.datetime(1970, 1, 1, 0, 0, 1, 999, UTC), datetime.datetime(1970, 1, 1, tzinfo=UTC)],
            [1000, 0],
        ),
    ):
        state.update_many([1, 2], [1, 2], times=column)
        ends = np.array(written) + TTL
        assert state.exists_many([1, 2], times=ends - 1).to_pylist() == [True, True]
        assert state.exists_many([1, 2], times=ends).to_pylist() == [False, False]


def call_all(state: Any, **columns: Any) -> list[Any]:
    """Each vectorised method of a state, with columns of two rows."""
    kind = state.descriptor.kind
    calls = [lambda: state.clear_many([1, 2], **columns), lambda: state.exists_many([1, 2], **columns)]
    if kind == "map":
        calls.append(lambda: state.get_many([1, 2], [1, 1], **columns))
        calls.append(lambda: state.put_many([1, 2], [1, 1], [1, 1], **columns))
        calls.append(lambda: state.remove_many([1, 2], [1, 1], **columns))
        return calls
    write = state.update_many if kind == "value" else state.add_many
    values = ["a", "b"] if kind == "folding" else [1, 2]
    return [*calls, lambda: state.get_many([1, 2], **columns), lambda: write([1, 2], values, **columns)]


PLAIN = ["value", "object", "list", "map", "sum", "own reducing", "average", "folding"]


@pytest.mark.parametrize("kind", PLAIN)
def test_a_time_to_live_in_processing_time_refuses(make_keyed: MakeKeyed, kind: str) -> None:
    keyed = make_keyed()
    keyed.begin_event_time(None, 5000)
    state = keyed.get_state(STATES[kind]().enable_time_to_live(StateTtlConfig(TTL)))
    for call in call_all(state, times=[1, 2]):
        with pytest.raises(sb.UsageError, match="processing time goes by the clock"):
            call()
    assert keyed.num_entries() == 0


@pytest.mark.parametrize("kind", PLAIN)
def test_a_backend_without_the_time_of_rows_refuses(make_keyed: MakeKeyed, kind: str) -> None:
    keyed = make_keyed()
    state = keyed.get_state(with_ttl(STATES[kind]()))
    for call in call_all(state, times=[1, 2]):
        with pytest.raises(sb.UsageError, match="no time of rows"):
            call()
    assert keyed.num_entries() == 0


@pytest.mark.parametrize("kind", PLAIN)
@pytest.mark.parametrize("has_ttl", [True, False], ids=["ttl", "no ttl"])
def test_wrong_columns_are_refused(make_keyed: MakeKeyed, kind: str, has_ttl: bool) -> None:
    keyed = make_keyed()
    keyed.begin_event_time(None, 5000)
    state = keyed.get_state(with_ttl(STATES[kind]()) if has_ttl else STATES[kind]())
    wrong: list[Any] = [
        [1],
        [1, 2, 3],
        [1, 1.5],
        ["now", "then"],
        [True, False],
        [1, 2**63],
        pa.array([1.0, 2.0]),
        pa.array([2**63, 1], pa.uint64()),
        pa.array([2**60, 1], pa.timestamp("s")),
        pa.array([datetime.date(2024, 1, 1)] * 2),
    ]
    for column in wrong:
        for call in call_all(state, times=column):
            with pytest.raises(sb.UsageError):
                call()
    assert keyed.num_entries() == 0


@pytest.mark.parametrize("kind", PLAIN)
def test_states_without_a_time_to_live_take_times_and_do_nothing_with_them(
    keyed: KeyedStateBackend, kind: str
) -> None:
    state = keyed.get_state(STATES[kind]())
    for call in call_all(state, times=[5, None]):
        call()


def test_a_clock_that_was_given_is_read_once_a_call(make_keyed: MakeKeyed) -> None:
    """Though the call goes by the times of its rows: checkpoints have what the clock said last."""

    class Counting:
        reads = 0

        def now(self) -> int:
            self.reads += 1
            return 1000

    clock = Counting()
    keyed = make_keyed(clock=clock)
    values = keyed.get_state(with_ttl(sb.ValueStateDescriptor("v", int)))
    keyed.begin_event_time(None, 5000)
    for times in ([4900, 5000], None):
        clock.reads = 0
        values.update_many([1, 2], [1, 2], times=times)
        assert clock.reads == 1, times
