"""Processors for tests. Each is a generator function over the rows of a key, and one over its timers if it has any.

A generator gives values of any kind, whose text is the output. One class brings them to Spark's rows, another one to
data frames. `Several` runs many processors in one query: the key names the processor.
"""

from __future__ import annotations

import datetime
import decimal
import json
import random
import sys
from collections import namedtuple
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from pyspark.cloudpickle import register_pickle_by_value
from pyspark.sql import Row
from pyspark.sql.streaming import StatefulProcessor

register_pickle_by_value(sys.modules[__name__])

UTC = datetime.timezone.utc
#: By time mode and name: the variables, the function for rows, and the one for timers.
CASES: dict[str, dict[str, tuple[dict[str, tuple[Any, ...]], Any, Any]]] = {
    "None": {},
    "ProcessingTime": {},
    "EventTime": {},
}


def case(mode: str = "None", on_timer: Any = None, **variables: tuple[Any, ...]) -> Callable[[Any], Any]:
    """Add a processor with these variables: a kind, the schemas, and perhaps a time to live."""

    def added(on_rows: Any) -> Any:
        CASES[mode][on_rows.__name__] = (variables, on_rows, on_timer)
        return on_rows

    return added


class Written(StatefulProcessor):
    """A processor of rows."""

    def __init__(self, variables: dict[str, tuple[Any, ...]], on_rows: Any, on_timer: Any) -> None:
        self.variables, self.on_rows, self.on_timer = variables, on_rows, on_timer

    def init(self, handle: Any) -> None:
        self.h = handle
        for name, (kind, *schema) in self.variables.items():
            setattr(self, name, getattr(handle, f"get{kind}State")(name, *schema))

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
        for given in self.on_rows(self, key, rows, timerValues):
            yield Row(k=str(key[0]), text=repr(given))

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Any]:
        for given in self.on_timer(self, key, timerValues, expiredTimerInfo.getExpiryTimeInMs()):
            yield Row(k=str(key[0]), text=repr(given))


class WrittenInPandas(Written):
    """The same over data frames."""

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
        each = (row for frame in rows for row in frame.itertuples(index=False))
        yield from self._frames(key, self.on_rows(self, key, each, timerValues))

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Any]:
        at = expiredTimerInfo.getExpiryTimeInMs()
        yield from self._frames(key, self.on_timer(self, key, timerValues, at))

    @staticmethod
    def _frames(key: Any, given: Any) -> Iterator[Any]:
        import pandas as pd

        for each in given:
            yield pd.DataFrame({"text": [repr(each)], "k": [str(key[0])]})


class Named:
    """A handle whose variables have a prefix."""

    def __init__(self, handle: Any, prefix: str) -> None:
        self.handle, self.prefix = handle, prefix

    def __getattr__(self, call: str) -> Any:
        method = getattr(self.__dict__["handle"], call)
        if "Timer" in call:
            return method
        return lambda name, *schema: method(f"{self.prefix}.{name}", *schema)


class Several(StatefulProcessor):
    """Many processors: a key is the name of one, a colon and the rest."""

    def __init__(self, processors: dict[str, Any]) -> None:
        self.processors = processors

    def init(self, handle: Any) -> None:
        for name, each in self.processors.items():
            each.init(Named(handle, name))

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
        return self.processors[key[0].partition(":")[0]].handleInputRows(key, rows, timerValues)

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Any]:
        one = self.processors[key[0].partition(":")[0]]
        return one.handleExpiredTimer(key, timerValues, expiredTimerInfo)


def several(mode: str, in_pandas: bool = False, names: Any = None) -> Several:
    """The processors of a time mode, or those of these names."""
    made = WrittenInPandas if in_pandas else Written
    return Several({name: made(*CASES[mode][name]) for name in names or CASES[mode]})


# ------------------------------------------------------------------------------------------------- values

TOTAL = {"v": ("Value", "total bigint, n bigint")}


@case(**TOTAL)
def running_total(p, key, rows, tv):
    total, n = p.v.get() if p.v.exists() else (0, 0)
    for row in rows:
        total, n = total + row.n, n + 1
    p.v.update((total, n))
    yield total, n


@case(**TOTAL)
def total_for_each_row(p, key, rows, tv):
    for row in rows:
        total, n = p.v.get() or (0, 0)
        p.v.update((total + row.n, n + 1))
        yield p.v.get(), type(p.v.get()).__name__, p.v.exists()


@case(a=("Value", "n bigint"), b=("Value", "s string"), c=("Value", "x double, ok boolean"))
def three_values(p, key, rows, tv):
    for row in rows:
        yield p.a.get(), p.b.get(), p.c.get()
        p.a.update((row.n,))
        if row.s is not None:
            p.b.update((row.s,))
        p.c.update((float(row.n), row.n > 3))


@case(v=("Value", "a bigint, b string, c double, d boolean"))
def null_fields(p, key, rows, tv):
    for row in rows:
        yield p.v.get()
        p.v.update((None, None, None, None) if row.n % 2 else (row.n, "x", None, True))


@case(v=("Value", "at timestamp, local timestamp_ntz, day date"))
def times(p, key, rows, tv):
    for row in rows:
        yield p.v.get()
        at = datetime.datetime(2024, 1, 1 + row.n % 20, 12, 30, 1, 250_000)
        p.v.update((at.replace(tzinfo=UTC) if row.n % 2 else at, at, at.date()))


@case(v=("Value", "d decimal(10,2), big decimal(30,10), raw binary, f float, s smallint"))
def other_scalars(p, key, rows, tv):
    for row in rows:
        yield p.v.get()
        n = decimal.Decimal(row.n)
        p.v.update((n / 4, n * 10**15, str(row.n).encode(), row.n / 2, row.n))


@case(v=("Value", "inner struct<x:int,y:string>, at struct<z:timestamp>"))
def nested_rows(p, key, rows, tv):
    for row in rows:
        got = p.v.get()
        yield got, None if got is None else (type(got[0]).__name__, got[0].x, got[0]["y"])
        inner = [(row.n, "a"), Row(x=row.n, y="b"), {"y": "c", "x": row.n}, {"y": "d"}][row.n % 4]
        p.v.update((inner, (datetime.datetime(2024, 5, 5, tzinfo=UTC),)))


@case(v=("Value", "tags array<string>, ns array<struct<a:int>>, m map<string,int>"))
def collections_in_values(p, key, rows, tv):
    for row in rows:
        yield p.v.get()
        p.v.update(([row.s, "t"], [(row.n,), (None,)], {"n": row.n, "none": None}))


@case(v=("Value", "tags array<bigint>"))
def changed_copies(p, key, rows, tv):
    for row in rows:
        got = p.v.get() or ([],)
        got[0].append(row.n)
        yield got, p.v.get()
        if row.n % 2:
            p.v.update(got)


@case(v=("Value", "a bigint, b double, c boolean, d array<int>"))
def numpy_values(p, key, rows, tv):
    for row in rows:
        yield p.v.get()
        p.v.update((np.int64(row.n), np.float64(0.5), np.bool_(True), [np.int32(row.n)]))


Pair = namedtuple("Pair", ["a", "b"])


@case(v=("Value", "a bigint, b string"))
def named_tuples(p, key, rows, tv):
    for row in rows:
        yield p.v.get()
        p.v.update([Pair(row.n, "pair"), Row(a=row.n, b="row"), [row.n, "list"]][row.n % 3])


@case(v=("Value", "n bigint"))
def refused_none(p, key, rows, tv):
    try:
        p.v.update(None)
    except TypeError:
        yield "refused", p.v.get()
    p.v.update((1,))


@case(v=("Value", "s string"))
def texts(p, key, rows, tv):
    for row in rows:
        yield p.v.get()
        p.v.update((["", "é€😀", "a\x00b", " x "][row.n % 4],))


@case(v=("Value", "step string, since bigint"))
def state_machine(p, key, rows, tv):
    step, since = p.v.get() or ("idle", 0)
    for row in rows:
        after = {"idle": "busy", "busy": "done", "done": "idle"}[step] if row.n % 3 else step
        if after != step:
            yield step, after, since
            step, since = after, since + 1
    p.v.update((step, since))


@case(v=("Value", "last timestamp"))
def gaps(p, key, rows, tv):
    for row in rows:
        before = p.v.get()
        p.v.update((row.at,))
        yield before, p.v.get()


# -------------------------------------------------------------------------------------------------- lists

LIST = {"ls": ("List", "n bigint, s string")}


@case(**LIST)
def appended(p, key, rows, tv):
    for row in rows:
        p.ls.appendValue((row.n, row.s))
    yield list(p.ls.get()), p.ls.exists()


@case(**LIST)
def last_three(p, key, rows, tv):
    kept = [*p.ls.get(), *((row.n, row.s) for row in rows)][-3:]
    p.ls.put(kept)
    yield kept, list(p.ls.get())


@case(**LIST)
def interleaved_iterators(p, key, rows, tv):
    p.ls.appendList([(row.n, row.s) for row in rows])
    one, two = p.ls.get(), p.ls.get()
    yield next(one, None), next(two, None), next(one, None), list(two), list(one)


@case(**LIST)
def iterator_over_what_was_there(p, key, rows, tv):
    p.ls.put([(row.n, "a") for row in rows])
    early = p.ls.get()
    first = next(early)
    p.ls.appendValue((99, "later"))
    unread = p.ls.get()
    p.ls.appendValue((100, "latest"))
    yield first, list(early), list(unread)


@case(ls=("List", "at timestamp, inner struct<x:int>"))
def lists_of_rows(p, key, rows, tv):
    yield list(p.ls.get())
    for row in rows:
        p.ls.appendValue((row.at, {"x": row.n}))


# --------------------------------------------------------------------------------------------------- maps

MAP = {"m": ("Map", "s string", "n bigint")}


@case(**MAP)
def counted_texts(p, key, rows, tv):
    for row in rows:
        before = p.m.getValue((row.s or "none",))
        p.m.updateValue((row.s or "none",), ((before[0] if before else 0) + 1,))
        yield before, type(before).__name__
    yield sorted(p.m.iterator())


@case(**MAP)
def removed_entries(p, key, rows, tv):
    for row in rows:
        name = (row.s or "none",)
        if p.m.containsKey(name):
            p.m.removeKey(name)
        else:
            p.m.updateValue(name, (row.n,))
        yield p.m.exists(), sorted(p.m.keys()), sorted(p.m.values())
    p.m.removeKey(("not there",))


@case(m=("Map", "a string, b int", "v struct<x:int>, at timestamp"))
def composite_map_keys(p, key, rows, tv):
    for row in rows:
        name = (row.s, row.n % 2 or None)
        got = p.m.getValue(name)
        yield got, None if got is None else (got.v, got.at)
        p.m.updateValue(name, ((row.n,), datetime.datetime(2024, 1, 1, tzinfo=UTC)))
    yield sorted(map(repr, p.m.iterator()))


@case(m=("Map", "at timestamp", "d decimal(5,1)"))
def maps_by_time(p, key, rows, tv):
    for row in rows:
        at = datetime.datetime(2024, 1, 1 + row.n % 3)
        p.m.updateValue((at,), (decimal.Decimal(row.n),))
        yield p.m.containsKey((at,)), sorted(p.m.iterator())


@case(v=("Value", "n bigint"), ls=("List", "n bigint"), m=("Map", "n bigint", "m bigint"))
def all_kinds(p, key, rows, tv):
    for row in rows:
        p.v.update(((p.v.get() or (0,))[0] + row.n,))
        p.ls.appendValue((row.n,))
        p.m.updateValue((row.n % 3,), (row.n,))
    yield p.v.get(), list(p.ls.get()), sorted(p.m.iterator())


# ------------------------------------------------------------------------------------------- rows and life


@case()
def all_columns(p, key, rows, tv):
    for row in rows:
        yield key, row.k, row.n, row.s, None if row.x != row.x else row.x, row.at


@case()
def first_row_only(p, key, rows, tv):
    yield next(iter(rows)).n


@case()
def no_row_read(p, key, rows, tv):
    yield key


@case()
def nothing_given(p, key, rows, tv):
    yield from ()


@case()
def rows_twice(p, key, rows, tv):
    yield [row.n for row in rows], [row.n for row in rows]


@case()
def many_rows_out(p, key, rows, tv):
    for row in rows:
        for n in range(row.n):
            yield row.n, n


@case(v=("Value", "n bigint"))
def attributes_of_a_batch(p, key, rows, tv):
    """Attributes last for a batch; variables for ever."""
    seen = p.__dict__.setdefault("seen", {})
    seen[key] = seen.get(key, 0) + sum(1 for _ in rows)
    p.v.update(((p.v.get() or (0,))[0] + 1,))
    yield seen[key], p.v.get()


@case()
def no_times(p, key, rows, tv):
    yield tv.getCurrentProcessingTimeInMs(), tv.getCurrentWatermarkInMs()


@case(v=("Value", "n bigint"))
def closed_generators(p, key, rows, tv):
    try:
        yield next(rows).n
    finally:
        p.v.update((1,))
    yield p.v.get()


@case(**TOTAL)
def keyed_totals(p, key, rows, tv):
    n = sum(row.n for row in rows)
    total, calls = p.v.get() or (0, 0)
    p.v.update((total + n, calls + 1))
    yield repr(key), total + n, calls + 1


class FrameSizes(StatefulProcessor):
    """Gives the size, the names and the types of each frame."""

    def init(self, handle: Any) -> None:
        pass

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
        import pandas as pd

        for frame in rows:
            texts = [
                f"{len(frame)} {list(frame.columns)} {[str(each) for each in frame.dtypes]} {list(frame.index)}"
            ]
            yield pd.DataFrame({"k": [key[0]], "text": texts})


class Initial(StatefulProcessor):
    """Begins with an initial state, and has a timer for each key of it."""

    def init(self, handle: Any) -> None:
        self.h, self.v = handle, handle.getValueState("v", "n bigint")

    def handleInitialState(self, key: Any, initialState: Any, timerValues: Any) -> None:
        self._add(self._starts(initialState))
        self.h.registerTimer(timerValues.getCurrentProcessingTimeInMs() - 1)

    @staticmethod
    def _starts(given: Any) -> int:
        return given.start

    def _add(self, n: int) -> int:
        total = (self.v.get() or (0,))[0] + n
        self.v.update((total,))
        return total

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
        yield Row(k=key[0], text=str(self._add(sum(row.n for row in rows))))

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Any]:
        yield Row(k=key[0], text=f"timer {self.v.get()}")


class InitialInPandas(Initial):
    @staticmethod
    def _starts(given: Any) -> int:
        return int(given["start"].sum())

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
        import pandas as pd

        total = self._add(sum(int(frame["n"].sum()) for frame in rows))
        yield pd.DataFrame({"k": [key[0]], "text": [str(total)]})

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Any]:
        import pandas as pd

        yield pd.DataFrame({"k": [key[0]], "text": [f"timer {self.v.get()}"]})


def golden_rows(p, key, rows, tv):
    p.h.registerTimer(tv.getCurrentWatermarkInMs())
    for row in rows:
        yield row.n


def golden_timer(p, key, tv, at):
    yield at


# -------------------------------------------------------------------------------------------------- timers


def told(p, key, tv, at):
    yield "fired", at - tv.getCurrentProcessingTimeInMs() <= 0


def now(tv):
    return tv.getCurrentProcessingTimeInMs()


@case("ProcessingTime", told)
def timer_that_is_due(p, key, rows, tv):
    p.h.registerTimer(now(tv))
    p.h.registerTimer(now(tv) - 5)
    p.h.registerTimer(now(tv) - 5)
    yield [at - now(tv) for at in sorted(p.h.listTimers())]


@case("ProcessingTime", told)
def timer_of_the_next_batch(p, key, rows, tv):
    if not list(p.h.listTimers()):
        p.h.registerTimer(now(tv) + 1)
    yield len(list(p.h.listTimers()))


@case("ProcessingTime", told)
def deleted_timers(p, key, rows, tv):
    for row in rows:
        p.h.registerTimer(row.n)
    p.h.deleteTimer(2)
    p.h.deleteTimer(99_999)
    yield sorted(p.h.listTimers())


def again(p, key, tv, at):
    yield at, sorted(p.h.listTimers())
    p.h.registerTimer(at)
    p.h.registerTimer(at + 1)
    yield sorted(p.h.listTimers())


@case("ProcessingTime", again)
def timers_that_register_due_ones(p, key, rows, tv):
    if not list(p.h.listTimers()):
        p.h.registerTimer(1)
    yield sorted(p.h.listTimers())


def deletes_others(p, key, tv, at):
    yield at, sorted(p.h.listTimers())
    p.h.deleteTimer(at + 1)
    if at % 2:
        p.h.registerTimer(at + 1)
    yield sorted(p.h.listTimers())


@case("ProcessingTime", deletes_others)
def timers_that_delete_due_ones(p, key, rows, tv):
    for at in range(10, 15):
        p.h.registerTimer(at)
    yield sorted(p.h.listTimers())


def closes(p, key, tv, at):
    yield key.k, key[0], type(key).__name__, p.v.get()
    p.v.clear()


@case("ProcessingTime", closes, **TOTAL)
def totals_until_a_timer(p, key, rows, tv):
    total, n = p.v.get() or (0, 0)
    for row in rows:
        total, n = total + row.n, n + 1
    p.v.update((total, n))
    if total > 10:
        p.h.registerTimer(now(tv))
    yield total, n


@case(
    "ProcessingTime",
    v=("Value", "n bigint", 1),
    w=("Value", "n bigint", 3_600_000),
    z=("Value", "n bigint", 0),
)
def values_with_ttl(p, key, rows, tv):
    yield p.v.get(), p.v.exists(), p.w.get(), p.z.get()
    for row in rows:
        for each in (p.v, p.w, p.z):
            each.update((row.n,))
    yield p.v.get(), p.v.exists()


@case("ProcessingTime", ls=("List", "n bigint", 1), long=("List", "n bigint", 3_600_000))
def lists_with_ttl(p, key, rows, tv):
    yield list(p.ls.get()), p.ls.exists(), list(p.long.get())
    for row in rows:
        p.ls.appendValue((row.n,))
        p.long.appendValue((row.n,))
    yield list(p.ls.get())


@case("ProcessingTime", m=("Map", "n bigint", "m bigint", 1), long=("Map", "n bigint", "m bigint", 3_600_000))
def maps_with_ttl(p, key, rows, tv):
    yield sorted(p.m.iterator()), p.m.exists(), p.m.containsKey((1,)), sorted(p.long.keys())
    for row in rows:
        p.m.updateValue((row.n,), (row.n,))
        p.long.updateValue((row.n,), (row.n,))
    yield sorted(p.m.keys()), p.m.getValue((1,))


@case("ProcessingTime", lambda p, key, tv, at: iter([tv.getCurrentWatermarkInMs()]))
def times_of_a_batch(p, key, rows, tv):
    p.h.registerTimer(now(tv))
    yield now(tv), tv.getCurrentWatermarkInMs()


# ----------------------------------------------------------------------------------------------- event time


def watermarked(p, key, tv, at):
    yield "fired", at, tv.getCurrentWatermarkInMs()


def milliseconds(row: Any) -> int:
    at = row.at if row.at.tzinfo is not None else row.at.tz_localize("UTC")
    return round(at.timestamp() * 1000)


@case("EventTime", watermarked)
def timers_at_event_time(p, key, rows, tv):
    for row in rows:
        p.h.registerTimer(milliseconds(row))
        yield row.n, milliseconds(row), tv.getCurrentWatermarkInMs()


@case("EventTime", watermarked)
def timers_below_the_watermark(p, key, rows, tv):
    p.h.registerTimer(tv.getCurrentWatermarkInMs())
    p.h.registerTimer(tv.getCurrentWatermarkInMs() + 1)
    yield sorted(p.h.listTimers())


def session_ends(p, key, tv, at):
    start, end, n = p.v.get()
    if at >= end + 5_000:
        yield start, end, n
        p.v.clear()


@case("EventTime", session_ends, v=("Value", "start bigint, last bigint, n bigint"))
def sessions(p, key, rows, tv):
    for row in rows:
        at = milliseconds(row)
        start, end, n = p.v.get() or (at, at, 0)
        p.v.update((min(start, at), max(end, at), n + 1))
        p.h.registerTimer(max(end, at) + 5_000)
    yield len(list(p.h.listTimers()))


def hourly(p, key, tv, at):
    yield at, sorted(p.m.iterator())
    p.m.removeKey((at,))


@case("EventTime", hourly, m=("Map", "last bigint", "n bigint"))
def windows(p, key, rows, tv):
    for row in rows:
        end = milliseconds(row) // 10_000 * 10_000 + 10_000
        p.m.updateValue((end,), ((p.m.getValue((end,)) or (0,))[0] + 1,))
        p.h.registerTimer(end)
    yield len(list(p.m.keys()))


# ----------------------------------------------------------------------------------------------- programmes

#: The variables of programmes, with and without a time to live.
VARIABLES = {"v": ("Value", "n bigint"), "ls": ("List", "n bigint"), "m": ("Map", "k bigint", "n bigint")}
EXPIRING = {f"{name}{ttl}": (*each, ttl) for name, each in VARIABLES.items() for ttl in (1, 3_600_000)}

STEPS: dict[str, Callable[[Any, int], Any]] = {
    "v.get": lambda v, n: v.get(),
    "v.exists": lambda v, n: v.exists(),
    "v.update": lambda v, n: v.update((n,)),
    "v.clear": lambda v, n: v.clear(),
    "ls.get": lambda ls, n: list(ls.get()),
    "ls.exists": lambda ls, n: ls.exists(),
    "ls.put": lambda ls, n: ls.put([(each,) for each in range(n + 1)]),
    "ls.appendValue": lambda ls, n: ls.appendValue((n,)),
    "ls.appendList": lambda ls, n: ls.appendList([(n,), (None,)]),
    "ls.clear": lambda ls, n: ls.clear(),
    "m.getValue": lambda m, n: m.getValue((n,)),
    "m.containsKey": lambda m, n: m.containsKey((n,)),
    "m.updateValue": lambda m, n: m.updateValue((n,), (n * n,)),
    "m.removeKey": lambda m, n: m.removeKey((n,)),
    "m.iterator": lambda m, n: sorted(m.iterator()),
    "m.keys": lambda m, n: sorted(m.keys()),
    "m.values": lambda m, n: sorted(m.values()),
    "m.exists": lambda m, n: m.exists(),
    "m.clear": lambda m, n: m.clear(),
}


def programme(rng: Any, mode: str, length: int = 8) -> str:
    """A random sequence of calls, as a text."""
    calls = []
    for _ in range(length):
        if mode != "None" and rng.random() < 0.3:
            calls.append([rng.choice(["registerTimer", "deleteTimer", "listTimers"]), "", rng.randrange(6)])
            continue
        step = rng.choice(list(STEPS))
        ttl = rng.choice(["", "1", "3600000"]) if mode == "ProcessingTime" else ""
        calls.append([step, step.partition(".")[0] + ttl, rng.randrange(4)])
    return json.dumps(calls)


def run_programme(p, text, base):
    """Make the calls of a programme; timers are at ``base`` and after."""
    for call, variable, n in json.loads(text):
        if call == "listTimers":
            given = sorted(at - base for at in p.h.listTimers())
        elif call.endswith("Timer"):
            given = getattr(p.h, call)(base + n)
        else:
            given = STEPS[call](getattr(p, variable), n)
        yield call, variable, n, given


def programme_of_rows(p, key, rows, tv):
    for row in rows:
        yield list(run_programme(p, row.s, 1_000))


def programme_of_timer(p, key, tv, at):
    calls = programme(random.Random(f"{at} of {key[0]}"), p.mode, length=4)
    yield at, list(run_programme(p, calls, 1_000))


def programmed(mode: str) -> Written:
    """The processor that runs the programmes in its rows."""
    variables = {**VARIABLES, **EXPIRING} if mode == "ProcessingTime" else VARIABLES
    made = Written(variables, programme_of_rows, programme_of_timer)
    made.mode = mode
    return made
