"""`TwsTester`: Spark's tester of processors, on a backend of the library."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from pyspark.errors import PySparkAssertionError, PySparkValueError
from pyspark.errors.exceptions.base import IllegalArgumentException
from pyspark.sql.streaming.stateful_processor import ExpiredTimerInfo, StatefulProcessor, TimerValues

from statebackend.backends import create_backend
from statebackend.functions import FunctionContext, Metrics
from statebackend.operator_state import OperatorStateBackend
from statebackend.spark_functions.batch_clock import NO_TIME
from statebackend.spark_functions.processor_calls import time_mode_of
from statebackend.spark_functions.processor_handle import ProcessorHandle, Step
from statebackend.spark_functions.state_variables import ListVariable, MapVariable, ValueVariable
from statebackend.types import LONG, ROW


class TwsTester:
    """Tests a Spark ``StatefulProcessor`` without Spark, with the methods of ``pyspark.sql.streaming.TwsTester``.

    State is on a backend of the library, so values must fit the declared types. All other rules are as in Spark's
    tester: a key is given bare and passed as ``(key,)``, timers fire by key and then by time, times begin at 0, timers
    at or below the watermark are refused, and state does not expire. With ``strict=True``, timers and time to live
    follow the engine: timers fire by time, a timer that is due fires at the end of a call, and state expires.

    >>> from pyspark.sql import Row
    >>> from pyspark.sql.streaming import StatefulProcessor
    >>> class Count(StatefulProcessor):
    ...     def init(self, handle):
    ...         self.count = handle.getValueState("count", "n bigint")
    ...     def handleInputRows(self, key, rows, timerValues):
    ...         n = sum(1 for row in rows) + (self.count.get() or (0,))[0]
    ...         self.count.update((n,))
    ...         yield Row(user=key[0], n=n)
    >>> tester = TwsTester(Count())
    >>> tester.test("ann", [Row(page="/"), Row(page="/cart")])
    [Row(user='ann', n=2)]
    >>> tester.peekValueState("count", "ann")
    (2,)
    """

    def __init__(
        self,
        processor: StatefulProcessor,
        initialStateRow: Sequence[tuple[Any, Any]] | None = None,
        initialStatePandas: Sequence[tuple[Any, Any]] | None = None,
        timeMode: str = "None",
        outputMode: str = "Append",
        eventTimeExtractor: Callable[[Any], int] | None = None,
        *,
        strict: bool = False,
    ) -> None:
        self.processor = processor
        self._mode = time_mode_of(timeMode)
        if self._mode == "EventTime" and eventTimeExtractor is None:
            raise PySparkValueError(
                errorClass="ARGUMENT_REQUIRED",
                messageParameters={"arg_name": "eventTimeExtractor", "condition": "timeMode is EventTime"},
            )
        self._time_of = eventTimeExtractor
        self._is_strict = strict
        self._in_pandas = initialStatePandas is not None
        self._now = self._watermark = 0
        self.handle = TesterHandle(self._mode, strict)
        self.processor.init(self.handle)
        self.handle.step = Step.INITIALIZED
        assert initialStateRow is None or initialStatePandas is None, (
            "Cannot specify both Row and Pandas initial states."
        )
        for key, state in initialStateRow or initialStatePandas or ():
            self.handle.setGroupingKey(key)
            self.processor.handleInitialState((key,), state, self._timer_values())

    # --- rows ---

    def test(self, key: Any, input: list[Any]) -> list[Any]:
        """Give rows of a key to the processor, without those that are late; return the rows that it gives."""
        self._in_pandas = False
        rows = input
        if self._mode == "EventTime" and self._time_of is not None:
            rows = [row for row in input if self._time_of(row) > self._watermark]
        result: list[Any] = self._called(key, iter(rows))
        return result

    def testInPandas(self, key: Any, input: Any) -> Any:
        """The same with a data frame, for a processor that takes and gives data frames."""
        self._in_pandas = True
        frame, time_of = input, self._time_of
        if self._mode == "EventTime" and time_of is not None:
            kept = frame.apply(lambda row: time_of(row) > self._watermark, axis=1)
            frame = frame[kept].reset_index(drop=True)
        return self._called(key, iter([frame]))

    def _called(self, key: Any, rows: Iterator[Any]) -> Any:
        self.handle.setGroupingKey(key)
        given = list(self.processor.handleInputRows((key,), rows, self._timer_values()))
        if self._is_strict:
            given += self._fired()
        return self._result(given)

    def _result(self, given: list[Any]) -> Any:
        if not self._in_pandas:
            return given
        import pandas as pd

        return pd.concat(given, ignore_index=True) if given else pd.DataFrame()

    # --- state ---

    def updateValueState(self, stateName: str, key: Any, value: tuple[Any, ...]) -> None:
        """Set a value of a key."""
        self._variable(stateName, key, ValueVariable).update(value)

    def peekValueState(self, stateName: str, key: Any) -> tuple[Any, ...] | None:
        """The value of a key; None if there is none."""
        value: tuple[Any, ...] | None = self._variable(stateName, key, ValueVariable).get()
        return value

    def updateListState(self, stateName: str, key: Any, value: list[tuple[Any, ...]]) -> None:
        """Set the list of a key."""
        self._variable(stateName, key, ListVariable).put(value)

    def peekListState(self, stateName: str, key: Any) -> list[tuple[Any, ...]]:
        """The list of a key."""
        return list(self._variable(stateName, key, ListVariable).get())

    def updateMapState(self, stateName: str, key: Any, value: dict[Any, Any]) -> None:
        """Set the map of a key."""
        entries = self._variable(stateName, key, MapVariable)
        entries.clear()
        for map_key, each in value.items():
            entries.updateValue(map_key, each)

    def peekMapState(self, stateName: str, key: Any) -> dict[Any, Any]:
        """The map of a key."""
        return dict(self._variable(stateName, key, MapVariable).iterator())

    def deleteState(self, stateName: str, key: Any) -> None:
        """Remove a variable of a key."""
        if stateName not in self.handle._variables:
            raise PySparkAssertionError(errorClass="STATE_NOT_EXISTS", messageParameters={})
        self.handle.setGroupingKey(key)
        self.handle._variables[stateName].clear()

    def _variable(self, name: str, key: Any, kind: type) -> Any:
        variable = self.handle._variables.get(name)
        assert isinstance(variable, kind), f"State {name} has not been initialized."
        self.handle.setGroupingKey(key)
        return variable

    # --- time ---

    def setProcessingTime(self, currentTimeMs: int) -> Any:
        """Move processing time on; return what the timers give that are due."""
        self._check_mode("ProcessingTime", "setProcessingTime")
        self._check_forward("Processing time", self._now, currentTimeMs)
        self._now = currentTimeMs
        return self._passed()

    def setWatermark(self, currentWatermarkMs: int) -> Any:
        """Move the watermark on; return what the timers give that are due."""
        self._check_mode("EventTime", "setWatermark")
        self._check_forward("Watermark", self._watermark, currentWatermarkMs)
        self._watermark = currentWatermarkMs
        return self._passed()

    def _check_mode(self, mode: str, call: str) -> None:
        if self._mode != mode:
            raise _unsupported(f"{call} with TimeMode other than {mode}")

    @staticmethod
    def _check_forward(what: str, before: int, after: int) -> None:
        if after <= before:
            raise IllegalArgumentException(
                message=f"{what} must move forward. Current: {before} ms, provided: {after} ms."
            )

    def _passed(self) -> Any:
        self.handle.set_times(self._now, self._watermark)
        return self._result(list(self._fired()))

    def _timer_values(self) -> TimerValues:
        if self._mode == "None":
            return TimerValues(NO_TIME, NO_TIME)
        return TimerValues(self._now, self._watermark if self._mode == "EventTime" else NO_TIME)

    def _fired(self) -> Iterator[Any]:
        until = self._watermark if self._mode == "EventTime" else self._now
        due: Iterable[tuple[Any, int]] = self.handle.fired(until)
        for key, time in due:
            yield from self.processor.handleExpiredTimer((key,), self._timer_values(), ExpiredTimerInfo(time))


class TesterHandle(ProcessorHandle):
    """The handle of a tester. Keys may be of any type that can be hashed."""

    def __init__(self, time_mode: str, strict: bool) -> None:
        self._is_strict = strict
        self._keyed = create_backend("heap").create_keyed_backend(ROW(key=LONG))
        #: The keys by their numbers, which are the keys of the backend.
        self._numbers: dict[Any, int] = {}
        self._key: Any = None
        #: The keys with timers, in the order in which they fire in Spark's tester.
        self._with_timers: dict[Any, None] = {}
        super().__init__(FunctionContext(self._keyed, OperatorStateBackend(), Metrics()), time_mode)
        self._watermark = 0
        self.set_times(0, 0)

    def set_times(self, now: int, watermark: int) -> None:
        """Let time pass."""
        self._watermark = watermark
        self._keyed.begin(now, (watermark, watermark))

    def setGroupingKey(self, key: Any) -> None:
        """Make a key current."""
        self._key = key
        self._keyed.set_current_key((self._numbers.setdefault(key, len(self._numbers)),))

    def fired(self, until: int) -> Iterator[tuple[Any, int]]:
        """Key and time of each timer that is due, with its key current; by key, and of a key by time, unless strict."""
        if self._timers is None:
            return
        if self._is_strict:
            keys = list(self._numbers)
            for (number,), time in self._timers.due(until):
                yield keys[number], time
            return
        for key in list(self._with_timers):
            self.setGroupingKey(key)
            for time in [each for each in self._timers.listed() if each <= until]:
                self.setGroupingKey(key)
                yield key, time
                self.setGroupingKey(key)
                self._deleted(time)

    def registerTimer(self, expiryTimestampMs: int) -> None:
        self._check_timers()
        is_late = self._time_mode == "EventTime" and expiryTimestampMs <= self._watermark
        if is_late and not self._is_strict:
            raise IllegalArgumentException(
                message=f"Cannot register timer with expiry {expiryTimestampMs} ms which is not later than the "
                f"current watermark {self._watermark} ms."
            )
        super().registerTimer(expiryTimestampMs)
        self._with_timers.setdefault(self._key)

    def deleteTimer(self, expiryTimestampMs: int) -> None:
        self._check_timers()
        self._deleted(expiryTimestampMs)

    def _deleted(self, time: int) -> None:
        super().deleteTimer(time)
        if not list(super().listTimers()):
            self._with_timers.pop(self._key, None)

    def listTimers(self) -> Iterator[int]:
        self._check_timers()
        return super().listTimers()

    def _check_timers(self) -> None:
        if self._timers is None and not self._is_strict:
            raise _unsupported("Timers with TimeMode.None")

    def _check_new(self, call: str, kind: str, name: Any, ttl: int | None) -> None:
        if self._is_strict:
            super()._check_new(call, kind, name, ttl)

    def _state(self, describe: Any, ttl: int | None) -> Any:
        return super()._state(describe, ttl if self._is_strict else None)

    def _kept(self, name: str, variable: Any) -> Any:
        if isinstance(variable, ListVariable):
            variable.accepts_empty = not self._is_strict
        return super()._kept(name, variable)


def _unsupported(operation: str) -> PySparkValueError:
    return PySparkValueError(errorClass="UNSUPPORTED_OPERATION", messageParameters={"operation": operation})
