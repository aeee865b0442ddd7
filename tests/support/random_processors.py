"""Processors that a seed makes: their variables, the steps for each row, and the steps for each timer."""

from __future__ import annotations

import datetime
import decimal
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

from processors import Several, Written, WrittenInPandas
from pyspark.cloudpickle import register_pickle_by_value
from pyspark.sql import Row

register_pickle_by_value(sys.modules[__name__])

EPOCH = datetime.datetime(2024, 3, 1, tzinfo=datetime.timezone.utc)
#: By type: a value of a number and a text.
VALUES: dict[str, Callable[[int, Any], Any]] = {
    "bigint": lambda n, s: n * 3,
    "int": lambda n, s: n,
    "string": lambda n, s: s,
    "double": lambda n, s: n / 4,
    "boolean": lambda n, s: n % 2 == 0,
    "timestamp": lambda n, s: EPOCH + datetime.timedelta(hours=n, microseconds=n),
    "date": lambda n, s: EPOCH.date() + datetime.timedelta(days=n),
    "decimal(12,3)": lambda n, s: decimal.Decimal(n) / 8,
    "binary": lambda n, s: None if s is None else s.encode(),
    "struct<a:int,b:string>": lambda n, s: Row(a=n, b=s) if n % 2 else {"b": s, "a": n},
    "array<bigint>": lambda n, s: [n, None][: n % 3],
    "map<string,int>": lambda n, s: {"n": n, "none": None},
}
#: Types that keys of maps have: each value equals itself when it is read again.
MAP_KEYS = ("bigint", "string", "timestamp", "date", "decimal(12,3)")
#: By kind of variable and call: what gives the call's text; ``k`` makes a map's key of a number, ``v`` a value.
CALLS: dict[str, dict[str, Callable[[Any, Any, Any, int], Any]]] = {
    "Value": {
        "get": lambda each, k, v, n: each.get(),
        "exists": lambda each, k, v, n: each.exists(),
        "update": lambda each, k, v, n: each.update(v(n)),
        "update if absent": lambda each, k, v, n: each.exists() or each.update(v(n)),
        "clear": lambda each, k, v, n: each.clear(),
    },
    "List": {
        "get": lambda each, k, v, n: list(each.get()),
        "exists": lambda each, k, v, n: each.exists(),
        "put": lambda each, k, v, n: each.put([v(at) for at in range(n % 3 + 1)]),
        "append": lambda each, k, v, n: each.appendValue(v(n)),
        "append two": lambda each, k, v, n: each.appendList([v(n), v(n + 1)]),
        "keep the last": lambda each, k, v, n: each.put([*each.get(), v(n)][-2:]),
        "clear": lambda each, k, v, n: each.clear(),
    },
    "Map": {
        "get": lambda each, k, v, n: each.getValue(k(n)),
        "contains": lambda each, k, v, n: each.containsKey(k(n)),
        "update": lambda each, k, v, n: each.updateValue(k(n), v(n)),
        "remove": lambda each, k, v, n: each.removeKey(k(n)),
        "entries": lambda each, k, v, n: sorted(map(repr, each.iterator())),
        "keys": lambda each, k, v, n: sorted(map(repr, each.keys())),
        "values": lambda each, k, v, n: sorted(map(repr, each.values())),
        "exists": lambda each, k, v, n: each.exists(),
        "clear": lambda each, k, v, n: each.clear(),
    },
}
TIMERS: dict[str, Callable[[Any, int], Any]] = {
    "registerTimer": lambda handle, at: handle.registerTimer(at),
    "deleteTimer": lambda handle, at: handle.deleteTimer(at),
    "listTimers": lambda handle, at: sorted(handle.listTimers()),
}


def _schema(rng: random.Random, types: Any) -> tuple[str, ...]:
    return tuple(rng.choice(list(types)) for _ in range(rng.randrange(1, 4)))


def _ddl(types: Any) -> str:
    return ", ".join(f"f{at} {kind}" for at, kind in enumerate(types))


def _steps(rng: random.Random, kinds: dict[str, str], mode: str, count: int) -> list[tuple[Any, ...]]:
    """Calls, each with the variable, what is added to the number of the row, and the rows that it is made for."""
    steps = []
    for _ in range(count):
        if mode != "None" and rng.random() < 0.25:
            step = ("", rng.choice(list(TIMERS)), rng.randrange(-4, 3))
        else:
            name = rng.choice(list(kinds))
            step = (name, rng.choice(list(CALLS[kinds[name]])), rng.randrange(4))
        divisor = rng.choice([1, 1, 2, 3])
        steps.append((*step, divisor, rng.randrange(divisor)))
    return steps


def random_processor(seed: int, mode: str, in_pandas: bool) -> Written:
    """The processor of a seed."""
    rng = random.Random(f"{seed} {mode}")
    variables: dict[str, tuple[Any, ...]] = {}
    types: dict[str, tuple[Any, Any]] = {}
    for at in range(rng.randrange(1, 4)):
        kind, keys, values = rng.choice(list(CALLS)), _schema(rng, MAP_KEYS), _schema(rng, VALUES)
        ttl = rng.choice([[], [0], [1], [3_600_000]]) if mode == "ProcessingTime" else []
        schemas = [_ddl(keys), _ddl(values)] if kind == "Map" else [_ddl(values)]
        variables[f"v{at}"] = (kind, *schemas, *ttl)
        types[f"v{at}"] = (keys, values)
    kinds = {name: each[0] for name, each in variables.items()}
    on_row, on_timer = (_steps(rng, kinds, mode, rng.randrange(least, 9)) for least in (3, 1))

    def run(p: Any, steps: Any, n: int, s: Any, now: int) -> Iterator[Any]:
        for name, call, more, divisor, rest in steps:
            if n % divisor != rest:
                continue
            if not name:
                given = TIMERS[call](p.h, now + more)
            else:

                def k(n: int, kinds: Any = types[name][0]) -> tuple[Any, ...]:
                    return tuple(VALUES[kind](n % 4, "ab"[n % 2]) for kind in kinds)

                def v(n: int, kinds: Any = types[name][1]) -> tuple[Any, ...]:
                    return tuple(
                        None if (n + at) % 5 == 0 else VALUES[kind](n, s) for at, kind in enumerate(kinds)
                    )

                given = CALLS[kinds[name]][call](getattr(p, name), k, v, n + more)
            yield name, call, given

    def now_of(tv: Any) -> int:
        return tv.getCurrentProcessingTimeInMs() if mode == "ProcessingTime" else tv.getCurrentWatermarkInMs()

    def rows_handled(p: Any, key: Any, rows: Any, tv: Any) -> Iterator[Any]:
        for n, s in sorted(((row.n, row.s) for row in rows), key=repr):  # they come in no certain order
            yield n, list(run(p, on_row, n, s, now_of(tv)))

    def timer_handled(p: Any, key: Any, tv: Any, at: int) -> Iterator[Any]:
        yield at, list(run(p, on_timer, at % 7, "timer", now_of(tv)))

    return (WrittenInPandas if in_pandas else Written)(variables, rows_handled, timer_handled)


def random_processors(seeds: range, mode: str, in_pandas: bool) -> Several:
    """The processors of these seeds as one; the text of a key names its seed."""
    return Several({str(seed): random_processor(seed, mode, in_pandas) for seed in seeds})
