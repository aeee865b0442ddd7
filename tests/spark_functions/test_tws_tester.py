"""`TwsTester` gives what Spark's tester gives, and with ``strict=True`` what the engine gives."""

from __future__ import annotations

import datetime
import random
from collections.abc import Callable
from typing import Any

import pytest
from processors import CASES, TOTAL, Written, WrittenInPandas
from pyspark.errors import PySparkAssertionError, PySparkException, PySparkValueError
from pyspark.errors.exceptions.base import IllegalArgumentException
from pyspark.sql import Row
from pyspark.sql.streaming import TwsTester as SparksTester

from statebackend.testing import TwsTester

#: Spark's tester keeps the objects that it is given, reads iterators and empties maps in another way, lets no state
#: expire, and has other rules for timers that are due.
_KEPT = """
    times other_scalars nested_rows changed_copies numpy_values named_tuples refused_none lists_of_rows
    composite_map_keys maps_by_time gaps collections_in_values interleaved_iterators
    iterator_over_what_was_there removed_entries counted_texts totals_until_a_timer deleted_timers
    timers_that_register_due_ones timers_that_delete_due_ones timers_below_the_watermark values_with_ttl
    lists_with_ttl maps_with_ttl
"""
KEPT_BY_SPARK = set(_KEPT.split())


def time_of(row: Any) -> int:
    return round(row["at"].timestamp() * 1000)


def rows_of(rng: random.Random) -> list[Any]:
    zone = datetime.timezone.utc
    return [
        Row(
            k="a",
            n=rng.randrange(1, 7),
            x=rng.choice([None, 0.5]),
            s=rng.choice(["a", "b", None]),
            at=datetime.datetime.fromtimestamp(rng.randrange(50), zone),
        )
        for _ in range(rng.randrange(1, 4))
    ]


CALLS = [(mode, name) for mode, cases in CASES.items() for name in cases if name not in KEPT_BY_SPARK]


@pytest.mark.parametrize("made", [Written, WrittenInPandas])
@pytest.mark.parametrize(("mode", "name"), CALLS, ids=lambda each: each)
def test_both_testers_give_the_same(rng: random.Random, mode: str, name: str, made: Any) -> None:
    testers = [
        tester(made(*CASES[mode][name]), timeMode=mode, eventTimeExtractor=time_of)
        for tester in (SparksTester, TwsTester)
    ]
    for step in range(6):
        key, rows = rng.choice("ab"), rows_of(rng)
        told = []
        for tester in testers:
            if made is Written:
                told.append([tester.test(key, rows)])
            else:
                import pandas as pd

                frame = pd.DataFrame([row.asDict() for row in rows])
                told.append([tester.testInPandas(key, frame).to_dict("records")])
            if mode != "None" and step % 2:
                moved = getattr(tester, "setProcessingTime" if mode == "ProcessingTime" else "setWatermark")
                fired = moved(10_000 * (step + 1))
                told[-1].append(fired if made is Written else fired.to_dict("records"))
        assert told[0] == told[1]


def test_state_is_set_and_peeked_at_by_name() -> None:
    for tester in (SparksTester, TwsTester):
        made = tester(Written(*CASES["None"]["all_kinds"]))
        made.updateValueState("v", "ann", (5,))
        made.updateListState("ls", "ann", [(1,), (2,)])
        made.updateMapState("m", "ann", {(1,): (2,)})
        assert made.peekValueState("v", "ann") == (5,)
        assert made.peekListState("ls", "ann") == [(1,), (2,)]
        assert made.peekMapState("m", "ann") == {(1,): (2,)}
        assert made.peekValueState("v", "bob") is None
        assert (made.peekListState("ls", "bob"), made.peekMapState("m", "bob")) == ([], {})
        made.deleteState("v", "ann")
        assert made.peekValueState("v", "ann") is None
        made.handle.setGroupingKey("ann")
        assert made.processor.ls.exists()


REFUSED: dict[str, tuple[type[BaseException], Callable[[Any], Any]]] = {
    "state": (AssertionError, lambda made: made(Written(TOTAL, None, None)).peekListState("v", "a")),
    "deleted": (PySparkAssertionError, lambda made: made(Written(TOTAL, None, None)).deleteState("x", "a")),
    "extractor": (PySparkValueError, lambda made: made(Written({}, None, None), timeMode="EventTime")),
    "timer": (PySparkValueError, lambda made: made(Written({}, None, None)).handle.registerTimer(1)),
    "setter": (PySparkValueError, lambda made: made(Written({}, None, None)).setWatermark(1)),
    "initial": (AssertionError, lambda made: made(Written({}, None, None), [], [])),
    "backwards": (
        IllegalArgumentException,
        lambda made: made(Written({}, None, None), timeMode="ProcessingTime").setProcessingTime(0),
    ),
    "late timer": (
        IllegalArgumentException,
        lambda made: made(
            Written({}, None, None), timeMode="EventTime", eventTimeExtractor=time_of
        ).handle.registerTimer(0),
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_both_testers_refuse_the_same(what: str) -> None:
    kind, call = REFUSED[what]
    told = []
    for tester in (SparksTester, TwsTester):
        with pytest.raises(kind) as caught:
            call(tester)
        error = caught.value
        told.append(error.getCondition() if isinstance(error, PySparkException) else type(error))
    assert told[0] == told[1]


def test_strict_tester_fires_due_timers_in_the_same_call() -> None:
    tester = TwsTester(
        Written(*CASES["ProcessingTime"]["timers_that_register_due_ones"]),
        timeMode="ProcessingTime",
        strict=True,
    )
    tester.setProcessingTime(1_000)
    given = [eval(row.text) for row in tester.test("a", [Row(n=1)])]
    assert given == [[1], (1, [1]), [1, 2]]
    assert [eval(row.text) for row in tester.setProcessingTime(1_001)] == [(2, [2]), [2, 3]]


def test_strict_tester_lets_state_expire() -> None:
    tester = TwsTester(
        Written(*CASES["ProcessingTime"]["values_with_ttl"]), timeMode="ProcessingTime", strict=True
    )
    tester.test("a", [Row(n=4)])
    tester.setProcessingTime(10)
    assert tester.peekValueState("v", "a") is None
    assert tester.peekValueState("w", "a") == (4,)
