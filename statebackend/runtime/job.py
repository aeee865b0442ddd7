"""A job: a function, and how rows reach it. It is configuration only, checked when it is made."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from statebackend.backends import create_backend
from statebackend.checkpoint.store.manifest import MAIN_OUTPUT
from statebackend.errors import UsageError, usage
from statebackend.functions import (
    BatchProcessFunction,
    EngineFrame,
    KeyedProcessFunction,
    KeyRowsFunction,
    ProcessFunction,
    WholeKeysFunction,
)
from statebackend.functions.row_options import EventTime, Rule, checked_rule, output_of
from statebackend.runtime.arrow_rows import OutputSchema
from statebackend.state import StateBackend, checked_range
from statebackend.types import ROW, Type, of

#: Levels to go into an object.
_MOST = 8


def culprit(value: object, copied: Callable[[Any], object]) -> str | None:
    """The path to the innermost part of an object that ``copied`` raises for, and its class; None if no part does."""
    path, seen = "", {id(value)}
    for _ in range(_MOST):
        parts = [step for step in _parts(value) if id(step[1]) not in seen]
        step = next((step for step in parts if not _succeeds(copied, step[1])), None)
        if step is None:
            break
        path, value = path + step[0], step[1]
        seen.add(id(value))
    return f"{path.removeprefix('.')}, a {type(value).__qualname__}" if path else None


def _succeeds(copied: Callable[[Any], object], value: object) -> bool:
    try:
        copied(value)
    except Exception:  # noqa: BLE001 - any that the class of an attribute raises
        return False
    return True


def _parts(value: object) -> Iterator[tuple[str, object]]:
    """The parts of an object, each with its step of the path. Keys of dicts may be data, and are not shown."""
    if inspect.ismodule(value):
        return
    if isinstance(value, Mapping):
        for each in value.values():
            yield "[...]", each
    elif isinstance(value, (list, tuple)):
        for at, each in enumerate(value):
            yield f"[{at}]", each
    elif inspect.isfunction(value):
        names = inspect.getclosurevars(value)
        for name, each in {**names.nonlocals, **names.globals}.items():
            yield f" (variable {name})", each
        for parameter in inspect.signature(value).parameters.values():
            yield f" (parameter {parameter.name})", parameter.default
    elif inspect.ismethod(value):
        yield ".__self__", value.__self__
    else:
        for name, each in getattr(value, "__dict__", {}).items():
            yield f".{name}", each


_FUNCTIONS = (KeyedProcessFunction, KeyRowsFunction, BatchProcessFunction)
_METHODS = (
    "open",
    "close",
    "process_element",
    "process_rows",
    "process_batch",
    "process_broadcast",
    "on_timer",
    "on_timers",
)
#: The columns of the output of rows whose call has failed, next to the columns of the rows.
ERROR_COLUMNS = ("error_class", "error_code")


class Job:
    """A function with its key, schema, backend and the columns that steer it. Picklable if the function is."""

    def __init__(
        self,
        function: object,
        *,
        key: str | Sequence[str],
        schema: object = None,
        backend: str | StateBackend = "heap",
        max_parallelism: int = 128,
        event_time: str | EventTime | None = None,
        order_by: str | Sequence[str] | None = None,
        broadcast_when: str | None = None,
        null_keys: Rule = "fail",
        errors: Rule = "fail",
    ) -> None:
        if isinstance(function, type) or not isinstance(function, _FUNCTIONS):
            what = f"an object of {type(function).__name__}"
            hint = "give an object of a KeyedProcessFunction, KeyRowsFunction or BatchProcessFunction, or "
            hint += "map_with_state(...)"
            if isinstance(function, type):
                what, hint = "the class itself", f"make an object of it: {function.__name__}()"
            raise usage.function(f"{what} is not a function with state", hint=hint)
        _check_methods(function)
        #: The object that was given. It never runs: see `fresh_function`.
        self.function: ProcessFunction = function
        self.fresh_function()  # that it cannot be copied is said here, not by the first batch
        names = _names(key, "key")
        #: The column of the key, or the columns of a composite one.
        self.key: str | tuple[str, ...] = key if isinstance(key, str) else names
        #: The outputs by name, with its schema; None: rows of any kind, as they are. The first is the main one.
        self.outputs: dict[str, OutputSchema | None] = _outputs(
            getattr(function, "output_schema", None) if schema is None else schema
        )
        self.backend = create_backend(backend) if isinstance(backend, str) else backend
        if not isinstance(self.backend, StateBackend):
            raise usage.option("backend is the name of one, or a StateBackend")
        checked_range(max_parallelism, None)
        self.max_parallelism = max_parallelism
        #: All about the time of rows; None if time is the clock's alone.
        self.event_time = EventTime(event_time) if isinstance(event_time, str) else event_time
        if self.event_time is not None and not isinstance(self.event_time, EventTime):
            raise usage.option("event_time is the name of a column, or an EventTime of one")
        takes_rows = isinstance(function, KeyedProcessFunction)
        timers = None if self.event_time is None else self.event_time.timers
        if timers == "between_rows" and not takes_rows:
            raise usage.function(
                "event_time= with timers='between_rows' is for a KeyedProcessFunction",
                hint="other functions get several rows at once",
            )
        names = () if order_by is None else _names(order_by, "order_by")
        self.order_by: tuple[str, ...] = names
        #: True if rows and timers come in the order of their times.
        self.is_in_order = self.event_time is not None and takes_rows and timers != "after_batch"
        self.sorted_by = (self.event_time.column, *names) if self.event_time and self.is_in_order else names
        #: The column that says which rows are broadcast; None: no row is.
        self.broadcast = _column(broadcast_when, "broadcast_when")
        self.null_keys = checked_rule("null_keys", null_keys, "fail", "drop")
        if self.null_keys != "fail" and not isinstance(self.key, str):
            raise usage.function(
                "null_keys= needs a key of one column",
                detail=f"key columns {', '.join(self.key)}",
                hint="leave null_keys= out: the columns of a composite key may be null",
            )
        self.errors = checked_rule("errors", errors, "fail", "drop")
        if self.survives_errors and not takes_rows:
            raise usage.function(
                f"errors={errors!r} is for a KeyedProcessFunction",
                hint="other functions get several rows at once",
            )
        #: The outputs of rows with a null key, of rows whose call has failed, and of late rows; None: no output.
        self.null_key_output = self._output_of("null_keys", self.null_keys)
        self.error_output = self._output_of("errors", self.errors)
        late = "keep" if self.event_time is None else self.event_time.late
        self.late_output = self._output_of("late", late)

    @property
    def survives_errors(self) -> bool:
        """True if a row whose call fails is undone alone, instead of failing the batch."""
        return self.errors != "fail"

    def _output_of(self, option: str, rule: Rule) -> str | None:
        name = output_of(rule)
        if name is not None and name not in self.outputs:
            raise UsageError(
                f"{option}={rule!r} needs an output of that name",
                code="USAGE.NO_OUTPUT",
                detail=f"output {name!r}; there are {', '.join(self.outputs)}",
                hint="name it in schema=, with the columns of the rows that it is to have",
            )
        return name

    @property
    def is_batch(self) -> bool:
        """True if the function takes whole batches."""
        return isinstance(self.function, BatchProcessFunction)

    @property
    def takes_whole_keys(self) -> bool:
        """True if the function takes all rows of a key at once."""
        return isinstance(self.function, (KeyRowsFunction, WholeKeysFunction))

    @property
    def is_planned(self) -> bool:
        """True if the function uses the times that the engine has planned."""
        return isinstance(self.function, WholeKeysFunction)

    @property
    def settings(self) -> tuple[str, ...]:
        """The settings of the engine's session that the function depends on."""
        return getattr(self.function, "settings", ())

    @property
    def fixed(self) -> dict[str, str]:
        """The settings of the function that a restart must not change."""
        return dict(getattr(self.function, "fixed", {}))

    def on_frame(self, frame: EngineFrame) -> Job:
        """The job for batches of such frames; itself, unless the function depends on them."""
        if not isinstance(self.function, WholeKeysFunction):
            return self
        bound, function = copy.copy(self), copy.copy(self.function)
        bound.function, bound.event_time = function, function.on_frame(frame)
        return bound

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.key,) if isinstance(self.key, str) else self.key

    def fresh_function(self) -> ProcessFunction:
        """A copy of the function as it was given."""
        try:
            made: Any = copy.deepcopy(self.function)
        except Exception as error:
            raise self._not_made("copied", copy.deepcopy) from error
        return made  # type: ignore[no-any-return]

    def check_broadcast(self) -> None:
        """Raise if broadcast rows are to come to a function that lacks a method for them."""
        method: Any = self.function.process_broadcast  # type: ignore[attr-defined]
        own = getattr(method, "__func__", method)
        if self.broadcast is not None and own in (each.process_broadcast for each in _FUNCTIONS):
            raise usage.function(
                "broadcast_when= needs a function with a method process_broadcast",
                detail=f"class {type(self.function).__qualname__}",
                hint="write the method, which gets the broadcast rows, or leave broadcast_when= out",
            )

    def check_pickled(self, dumps: Callable[[Any], object]) -> None:
        """Raise unless ``dumps`` can pickle the function, which is to run in another process."""
        try:
            dumps(self.function)
        except Exception as error:
            raise self._not_made("pickled", dumps) from error

    def _not_made(self, what: str, made: Callable[[Any], object]) -> UsageError:
        part = culprit(self.function, made)
        return UsageError(
            f"the function cannot be {what}",
            code="USAGE.NOT_COPIED",
            detail=f"class {type(self.function).__qualname__}"
            + ("" if part is None else f", attribute {part}"),
            hint="make connections, locks and the like in open(), not in __init__",
        )

    def key_type(self, columns: Mapping[str, object]) -> Type:
        """The type of the key, given the types of all columns in any notation; for a composite key, a ROW."""
        self.check_columns(list(columns))
        types = {name: of(columns[name]) for name in self.columns}
        return types[self.key] if isinstance(self.key, str) else ROW(**types)

    def check_columns(self, names: Sequence[str]) -> None:
        """Raise unless a batch with these columns has each column that the job names exactly once."""
        wanted = [*self.columns, *self.order_by]
        wanted += [] if self.event_time is None else [self.event_time.column]
        wanted += [] if self.broadcast is None else [self.broadcast]
        for output in (self.late_output, self.null_key_output):
            wanted += [] if output is None else self._names(output)
        if self.error_output is not None:
            taken = [name for name in ERROR_COLUMNS if name in names]
            if taken:
                raise usage.column(
                    "the batch has a column that the output of errors adds",
                    detail=f"columns {', '.join(taken)}",
                    hint="rename it in the frame, before foreachBatch",
                )
            wanted += [name for name in self._names(self.error_output) if name not in ERROR_COLUMNS]
        for name in wanted:
            self.check_column(name, names)
        twice = sorted({name for name in names if list(names).count(name) > 1})
        if twice:
            raise usage.column(
                "two columns of the batch have the same name",
                detail=f"columns {', '.join(twice)}",
                hint="rename one before foreachBatch",
            )

    def _names(self, output: str) -> list[str]:
        schema = self.outputs[output]
        return [] if schema is None else list(schema.arrow.names)

    @staticmethod
    def check_column(name: str, names: Sequence[str]) -> None:
        """Raise unless ``names`` contains the name."""
        if name not in names:
            raise UsageError(
                f"the batch lacks the column {name!r}",
                code="USAGE.NO_COLUMN",
                detail=f"columns {', '.join(names)}",
            )


def _outputs(schema: object) -> dict[str, OutputSchema | None]:
    by_name = schema if isinstance(schema, Mapping) else {MAIN_OUTPUT: schema}
    if not by_name or not all(isinstance(name, str) and name for name in by_name):
        raise usage.schema(
            "schema is the schema of emitted rows, or a dict of output to schema",
            hint='write for example {"totals": "user string, total bigint", "late": "user string"}',
        )
    return {name: None if each is None else OutputSchema(each) for name, each in by_name.items()}


def _names(given: object, what: str) -> tuple[str, ...]:
    """The names of columns: one, or several, each once."""
    names: tuple[object, ...] = ()
    if isinstance(given, str):
        names = (given,)
    elif isinstance(given, Iterable):
        names = tuple(given)
    texts = tuple(each for each in names if isinstance(each, str) and each)
    if not texts or len(texts) < len(names):
        raise usage.option(f"unknown {what}={given!r}; expected the name of a column, or a list of names")
    if len(set(texts)) < len(texts):
        raise usage.option(f"{what} names a column twice", detail=f"columns {', '.join(texts)}")
    return texts


def _column(name: object, what: str) -> str | None:
    if name is not None and not (isinstance(name, str) and name):
        raise usage.option(f"{what} is the name of a column")
    return name


def _check_methods(function: object) -> None:
    """Raise if a method of the function would do nothing when it is called: it returns an awaitable that is never
    awaited."""
    for name in _METHODS:
        if inspect.iscoroutinefunction(method := getattr(function, name, None)) or inspect.isasyncgenfunction(
            method
        ):
            raise usage.function(
                f"the method {name} of the function is async, and nothing waits for it",
                detail=f"class {type(function).__qualname__}",
                hint="write it with def; run coroutines in it with asyncio.run",
            )
