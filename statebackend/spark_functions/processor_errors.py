"""Errors of processors: the class and the text that Spark has, and a code of the library."""

from __future__ import annotations

from pyspark.errors import PySparkRuntimeError

from statebackend.errors import UsageError


class ProcessorError(UsageError, PySparkRuntimeError):
    """A call of a state variable, a timer or a handle that Spark refuses too; also a ``PySparkRuntimeError``.

    >>> print(invalid_time_mode("registerTimer", "None"))
    Error register timer: ...
    """


_DOING = {
    "registerTimer": "Error register timer",
    "deleteTimer": "Error deleting timer",
    "listTimers": "Error listing timers",
    "deleteIfExists": "Error deleting state",
    "getValueState": "Error initializing value state",
    "getListState": "Error initializing list state",
    "getMapState": "Error initializing map state",
}


def refused(doing: str, spark_class: str | None, text: str, hint: str | None = None) -> ProcessorError:
    """The error of a call, with the class that Spark gives it."""
    named = "" if spark_class is None else f"[{spark_class}] "
    return ProcessorError(f"{_DOING.get(doing, doing)}: {named}{text}", code="USAGE.PROCESSOR", hint=hint)


def invalid_handle_state(call: str, state: str) -> ProcessorError:
    """The error of a call at the wrong time."""
    hint = "get variables in init, and use variables and timers in the other methods"
    return refused(
        call,
        "STATEFUL_PROCESSOR_CANNOT_PERFORM_OPERATION_WITH_INVALID_HANDLE_STATE",
        f"Failed to perform stateful processor operation={call} with invalid handle state={state}.",
        hint,
    )


def invalid_time_mode(call: str, mode: str) -> ProcessorError:
    """The error of a timer in a job without one of the two times."""
    return refused(
        call,
        "STATEFUL_PROCESSOR_CANNOT_PERFORM_OPERATION_WITH_INVALID_TIME_MODE",
        f"Failed to perform stateful processor operation={call} with invalid timeMode={mode}",
        "pass time_mode='ProcessingTime' or 'EventTime'",
    )


def illegal_value(kind: str, name: str) -> ProcessorError:
    """The error of a value that no state holds."""
    what = "empty list" if kind == "EMPTY_LIST_VALUE" else "null"
    return refused(
        "Error updating value state",
        f"ILLEGAL_STATE_STORE_VALUE.{kind}",
        f"Cannot write {what} values to State Store for StateName {name}.",
        "call clear() to remove the list" if kind == "EMPTY_LIST_VALUE" else None,
    )
