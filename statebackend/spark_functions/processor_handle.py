"""The handle that a processor's ``init`` gets: it provides variables, timers and the deletion of variables."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from enum import IntEnum
from functools import partial
from typing import Any, NoReturn

from pyspark.sql.streaming.stateful_processor import StatefulProcessorHandle

from statebackend.errors import usage
from statebackend.functions import FunctionContext, Metrics
from statebackend.spark_functions.processor_errors import (
    invalid_handle_state,
    invalid_time_mode,
    refused,
)
from statebackend.spark_functions.state_variables import ListVariable, MapVariable, NoState, ValueVariable
from statebackend.state import (
    ListStateDescriptor,
    MapStateDescriptor,
    StateDescriptor,
    StateTtlConfig,
    ValueStateDescriptor,
)
from statebackend.types import RowType, of


class Step(IntEnum):
    """The steps of a processor's life, with Spark's names."""

    PRE_INIT = 0
    CREATED = 1
    INITIALIZED = 2
    DATA_PROCESSED = 3
    TIMER_PROCESSED = 4
    CLOSED = 5


def row_type(schema: Any) -> RowType:
    """The type of the rows of a schema: a ``StructType``, or DDL with names."""
    kind = of(schema)
    if not isinstance(kind, RowType):
        raise usage.schema(
            f"the schema of a state variable is {kind.name}; expected a row",
            hint='name its fields, for example "total bigint, n bigint"',
        )
    return kind


class ProcessorTimers:
    """The timers of a processor, with Spark's rules.

    Timers that fire in a round are those that were due when it began. One that is registered meanwhile waits for the
    next batch, one that is deleted meanwhile still fires.
    """

    def __init__(self, ctx: FunctionContext, domain: str) -> None:
        self._timers: Any = ctx.keyed_backend.timers
        self._backend = ctx.keyed_backend
        self._domain = domain
        self._register = getattr(self._timers, f"register_{domain}_time_timer")
        self._delete = getattr(self._timers, f"delete_{domain}_time_timer")
        self._pending = getattr(self._timers, f"pending_{domain}_time_timers")
        #: Of the round that fires: the times that the timers of each key are still registered for.
        self._firing: defaultdict[Any, set[int]] = defaultdict(set)

    def register(self, time: int) -> None:
        times = self._firing.get(self._backend.current_key) if self._firing else None
        if times is None or time not in times:
            self._register(time)

    def delete(self, time: int) -> None:
        if self._firing:
            self._firing[self._backend.current_key].discard(time)
        self._delete(time)

    def listed(self) -> Iterator[int]:
        times = set(self._pending())
        if self._firing:
            times |= self._firing.get(self._backend.current_key, set())
        yield from sorted(times)

    def due(self, until: int) -> Iterator[tuple[Any, int]]:
        """Key and time of each timer that is due now, with its key current; it is deleted after its turn."""
        taken = self._timers.take_due(until, self._domain)
        keys, times = taken.keys, taken.timestamps.to_pylist()
        if not times:
            return
        set_key = self._backend.set_current_key
        columns = [column.to_pylist() for column in keys.flatten()]
        rows = list(zip(*columns, strict=True))
        of_key: list[Any] = []
        for row, time in zip(rows, times, strict=True):
            set_key(row)
            key = self._backend.current_key
            of_key.append(key)
            self._firing[key].add(time)
        for key, time in zip(of_key, times, strict=True):
            set_key(key)
            yield key, time
            set_key(key)
            self._firing[key].discard(time)
            self._delete(time)
        self._firing.clear()


class ProcessorHandle(StatefulProcessorHandle):
    """The handle of one batch, or of the opening of the function (`Step.PRE_INIT`)."""

    def __init__(self, ctx: FunctionContext, time_mode: str, step: Step = Step.CREATED) -> None:
        self.step = step
        self._ctx = ctx
        self._time_mode = time_mode
        self._variables: dict[str, Any] = {}
        self._timers = None if time_mode == "None" else ProcessorTimers(ctx, DOMAINS[time_mode])
        #: True once the initial state has been given.
        self.has_initial_state = False
        #: The states of the function and their number, for its metrics.
        self.counts: defaultdict[str, int] = defaultdict(int)

    # --- variables ---

    def getValueState(self, stateName: str, schema: Any, ttlDurationMs: int | None = None) -> Any:
        kind = row_type(schema)
        self._check_new("getValueState", "Value", stateName, ttlDurationMs)
        state = self._state(partial(ValueStateDescriptor, stateName, kind), ttlDurationMs)
        return self._kept(stateName, ValueVariable(state, kind))

    def getListState(self, stateName: str, schema: Any, ttlDurationMs: int | None = None) -> Any:
        kind = row_type(schema)
        self._check_new("getListState", "List", stateName, ttlDurationMs)
        state = self._state(partial(ListStateDescriptor, stateName, kind), ttlDurationMs)
        return self._kept(stateName, ListVariable(state, kind, stateName))

    def getMapState(
        self,
        stateName: str,
        userKeySchema: Any,
        valueSchema: Any,
        ttlDurationMs: int | None = None,
    ) -> Any:
        key, value = row_type(userKeySchema), row_type(valueSchema)
        self._check_new("getMapState", "Map", stateName, ttlDurationMs)
        state = self._state(partial(MapStateDescriptor, stateName, key, value), ttlDurationMs)
        return self._kept(stateName, MapVariable(state, key, value))

    def _check_new(self, call: str, kind: str, name: Any, ttl: int | None) -> None:
        if self.step > Step.CREATED:
            raise invalid_handle_state(call, self.step.name)
        if not isinstance(name, str) or not name.strip() or name != name.strip() or name == "default":
            raise refused(
                call,
                "STATE_STORE_CANNOT_USE_COLUMN_FAMILY_WITH_INVALID_NAME",
                f"Failed to perform column family operation=CREATE_COL_FAMILY with invalid name={name}. Column "
                "family name cannot be empty or include leading/trailing spaces or use the reserved keyword=default",
            )
        if name[0] == "$":
            raise refused(
                call,
                "STATE_STORE_CANNOT_CREATE_COLUMN_FAMILY_WITH_RESERVED_CHARS",
                f"Failed to create column family with unsupported starting character and name={name}.",
            )
        if name in self._variables:
            raise refused(call, None, f"{kind} state {name} already exists")
        if ttl is not None:
            self._check_ttl(call, name, ttl)
        self.counts[f"num{kind}StateVars" if not ttl else f"num{kind}StateWithTTLVars"] += 1

    def _check_ttl(self, call: str, name: str, ttl: int) -> None:
        if ttl < 0:
            raise refused(
                call,
                "STATEFUL_PROCESSOR_TTL_DURATION_MUST_BE_POSITIVE",
                f"TTL duration must be greater than zero for State store operation={call} on state={name}.",
            )
        if ttl and self._time_mode != "ProcessingTime":
            raise refused(
                call,
                "STATEFUL_PROCESSOR_INCORRECT_TIME_MODE_TO_ASSIGN_TTL",
                f"Cannot use TTL for state={name} in timeMode={self._time_mode}, use TimeMode.ProcessingTime() "
                "instead.",
                "pass time_mode='ProcessingTime'",
            )

    def _state(self, describe: Callable[[], StateDescriptor], ttl: int | None) -> Any:
        descriptor = describe()
        if ttl:
            descriptor.enable_time_to_live(StateTtlConfig(ttl, cleanup_idle=True))
        return self._ctx.get_state(descriptor)

    def _kept(self, name: str, variable: Any) -> Any:
        if self.step is Step.PRE_INIT:
            variable._state = NoState(self._not_yet)
        self._variables[name] = variable
        return variable

    @staticmethod
    def _not_yet(call: str) -> NoReturn:
        raise invalid_handle_state(call, Step.PRE_INIT.name)

    def deleteIfExists(self, stateName: str) -> None:
        if self.step > Step.CREATED:
            raise invalid_handle_state("deleteIfExists", self.step.name)
        if stateName not in self._ctx._descriptors:
            restored = self._ctx.keyed_backend._restored_descriptor(stateName)
            if restored is not None:
                self._ctx.get_state(restored)
        if self.step is Step.CREATED and stateName in self._ctx._descriptors:
            self.counts["numDeletedStateVars"] += 1
            self._ctx.delete_state(stateName)
        variable = self._variables.pop(stateName, None)
        if variable is not None:
            variable._state = NoState(partial(_refuse_deleted, f"{variable.kind} state {stateName}"))

    def tell(self, metrics: Metrics) -> None:
        """Tell the metrics what the batch has counted: sums of calls and times, and the number of variables."""
        for name, count in self.counts.items():
            counter = metrics.counter(name)
            counter.inc(count - counter.get_count() if name.endswith("Vars") else count)
        if any(name.endswith("WithTTLVars") for name in self.counts):
            states = self._ctx.keyed_backend.metrics()["states"].values()
            removed = sum(each.get(of, 0) for each in states for of in _REMOVALS)
            counter = metrics.counter("numValuesRemovedDueToTTLExpiry")
            counter.inc(removed - counter.get_count())

    # --- timers ---

    def registerTimer(self, expiryTimestampMs: int) -> None:
        self._usable("registerTimer").register(expiryTimestampMs)
        self.counts["numRegisteredTimers"] += 1

    def deleteTimer(self, expiryTimestampMs: int) -> None:
        self._usable("deleteTimer").delete(expiryTimestampMs)
        self.counts["numDeletedTimers"] += 1

    def listTimers(self) -> Iterator[int]:
        return self._usable("listTimers").listed()

    def due(self, until: int) -> Iterator[tuple[Any, int]]:
        """Key and time of each timer of a round, with its key current."""
        return iter(()) if self._timers is None else self._timers.due(until)

    def _usable(self, call: str) -> ProcessorTimers:
        if self._timers is None:
            raise invalid_time_mode(call, self._time_mode)
        if not Step.INITIALIZED <= self.step < Step.TIMER_PROCESSED:
            raise invalid_handle_state(call, self.step.name)
        return self._timers


#: The counts of a state that expired.
_REMOVALS = ("expired_on_read", "expired_by_cleanup")
#: The domain of the timers of each time mode.
DOMAINS = {"ProcessingTime": "processing", "EventTime": "event"}


def _refuse_deleted(what: str, call: str) -> NoReturn:
    raise refused(f"Error calling {call}", None, f"{what} is not initialized.")
