"""The six kinds of state descriptors.

>>> ValueStateDescriptor("last", "bigint", default=0).default_copy()
0
>>> from statebackend.state.ttl import StateTtlConfig
>>> MapStateDescriptor("seen", str, int).enable_time_to_live(StateTtlConfig(1000)).ttl_config.ttl
1000
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Generic, Literal, TypeVar, overload

from statebackend.errors import SerializationError, StateMigrationError, UsageError, usage
from statebackend.state.aggregates import (
    AggregateFunction,
    NamedAggregate,
    Reduction,
    named_aggregate,
    named_reduction,
)
from statebackend.state.ttl import StateTtlConfig
from statebackend.types import ACC, IN, OUT, A, K, Notation, Subscriptable, T, Type, V, of
from statebackend.types.serializers import serializer_for

D = TypeVar("D", bound="StateDescriptor")


class StateDescriptor(Subscriptable):
    """The name and the stored types of a state; the base of the six kinds.

    Two descriptors are equal if kind, name, types, time to live and combining function are.

    Each kind takes three more options for a restore, which are ignored otherwise. ``renamed_from`` is the name that the
    state had in the checkpoint. ``migrate`` is a function from an old value to a new one, for values of another type or
    of a renamed state; those of a list are its elements, those of a map its values. ``new_fields`` has a value for each
    field of a ROW that stored rows lack; other new fields are null.

    >>> ListStateDescriptor("tags", str) == ListStateDescriptor("tags", "string")
    True
    """

    #: "value", "list", "map", "reducing", "aggregating" or "folding".
    kind: ClassVar[str]

    def __init__(
        self,
        name: str,
        *,
        renamed_from: str | None = None,
        migrate: Callable[[Any], Any] | None = None,
        new_fields: Mapping[str, Any] | None = None,
    ) -> None:
        given: Any = name
        if not isinstance(given, str) or not given:
            raise usage.name(
                "the name of a state is a non-empty str", detail=f"not this {type(given).__name__}"
            )
        try:
            name.encode("utf-8")
        except UnicodeEncodeError:
            raise usage.name("the name of a state has a lone surrogate, which no file can hold") from None
        old: Any = renamed_from
        if old is not None and (not isinstance(old, str) or old in ("", name)):
            raise usage.name("renamed_from is the old name of the state, a str", detail=f"state {name!r}")
        if migrate is not None and not callable(migrate):
            raise usage.descriptor("migrate is a function from old to new value", detail=f"state {name!r}")
        if new_fields is not None and (migrate is not None or not isinstance(new_fields, Mapping)):
            raise usage.descriptor(
                "new_fields is a dict of values by field, without migrate=", detail=f"state {name!r}"
            )
        self.name = name
        self.renamed_from, self.migrate, self.new_fields = renamed_from, migrate, dict(new_fields or {})
        self._ttl_config = StateTtlConfig.DISABLED

    @property
    def ttl_config(self) -> StateTtlConfig | None:
        """The time to live, or None if the state does not expire."""
        return self._ttl_config if self._ttl_config.is_enabled else None

    def enable_time_to_live(self: D, ttl_config: StateTtlConfig) -> D:
        """Let the state expire; returns the descriptor. A config with ``UpdateType.Disabled`` turns expiry off."""
        if not isinstance(ttl_config, StateTtlConfig):
            raise usage.ttl(
                f"enable_time_to_live does not take a {type(ttl_config).__name__}",
                detail=f"state {self.name!r}",
                hint="write enable_time_to_live(StateTtlConfig(timedelta(hours=1)))",
            )
        self._ttl_config = ttl_config
        return self

    def stored_types(self) -> dict[str, Type]:
        """The stored types, by role; two descriptors of one state agree on them."""
        raise NotImplementedError

    def config(self) -> dict[str, Any]:
        """A JSON-able description of the stored form: kind, types, and if entries have timestamps."""
        types = {role: declared.config() for role, declared in self.stored_types().items()}
        return {"kind": self.kind, "types": types, "ttl": self.ttl_config is not None}

    def check_same_state(self, other: StateDescriptor) -> None:
        """Raise `StateMigrationError`, naming both, unless ``other`` describes the same state as this one.

        Kind, types, time to live and named functions must agree. A user's own functions and defaults may differ: the
        newest descriptor's are used.
        """
        if type(self) is type(other) and self.stored_types() == other.stored_types():
            if self.ttl_config != other.ttl_config:
                mine, theirs = (str(d.ttl_config or "without time to live") for d in (self, other))
                hint = "give one time to live to a state, and the same wherever it is asked for"
            elif self._function_name() != other._function_name():
                mine, theirs = f"by {self._function_name()}", f"by {other._function_name()}"
                hint = "use another name for the other state"
            else:
                return
        else:
            mine, theirs = self.describe(), other.describe()
            hint = "use another name for the other state; stored types change at a restore only"
        raise StateMigrationError(
            f"state {self.name!r} is {mine}, and is asked for as {theirs}",
            code="STATE_MIGRATION.REDECLARED",
            hint=hint,
        )

    def describe(self) -> str:
        """Kind and types in a few words, for messages."""
        return f"{self.kind.upper()}({', '.join(map(repr, self.stored_types().values()))})"

    def _function_name(self) -> str | None:
        """The name of the combining function; "a function" for a user's own."""
        return None

    def _identity(self) -> tuple[Any, ...]:
        return type(self), self.name, tuple(self.stored_types().items()), self.ttl_config

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StateDescriptor) and self._identity() == other._identity()

    def __hash__(self) -> int:
        return hash((type(self), self.name))

    def _arguments(self) -> list[Any]:
        return list(self.stored_types().values())

    def __repr__(self) -> str:
        shown = ", ".join(map(repr, [self.name, *self._arguments()]))
        ttl = f".enable_time_to_live({self.ttl_config!r})" if self.ttl_config is not None else ""
        return f"{type(self).__name__}({shown}){ttl}"


class ValueStateDescriptor(StateDescriptor, Generic[T, A]):
    """One value per key. `value()` of an absent value returns a copy of ``default``.

    >>> ValueStateDescriptor("average", "struct<count:bigint,sum:bigint>", default=(0, 0)).default_copy()
    Row(count=0, sum=0)
    """

    kind = "value"

    @overload
    def __init__(
        self: ValueStateDescriptor[T, None],
        name: str,
        type: Notation[T],
        default: None = None,
        **restore: Any,
    ) -> None: ...
    @overload
    def __init__(
        self: ValueStateDescriptor[T, T], name: str, type: Notation[T], default: T, **restore: Any
    ) -> None: ...
    @overload
    def __init__(
        self: ValueStateDescriptor[Any, None], name: str, type: object, default: None = None, **restore: Any
    ) -> None: ...
    @overload
    def __init__(
        self: ValueStateDescriptor[Any, Any], name: str, type: object, default: object, **restore: Any
    ) -> None: ...
    def __init__(self, name: str, type: Any, default: Any = None, **restore: Any) -> None:
        super().__init__(name, **restore)
        self.type = of(type)
        self._default = _serialized(self.type, default, name, "default")

    def default_copy(self) -> Any:
        """A copy of the default, None if there is none; O(size of it)."""
        return None if self._default is None else serializer_for(self.type).deserialize(self._default)

    def stored_types(self) -> dict[str, Type]:
        return {"value": self.type}

    def _identity(self) -> tuple[Any, ...]:
        return (*super()._identity(), self._default)

    def _arguments(self) -> list[Any]:
        return [self.type] if self._default is None else [self.type, self.default_copy()]


class ListStateDescriptor(StateDescriptor, Generic[T]):
    """A list of elements per key.

    >>> ListStateDescriptor("clicks", int).element_type
    LONG
    """

    kind = "list"

    @overload
    def __init__(
        self: ListStateDescriptor[T], name: str, element_type: Notation[T], **restore: Any
    ) -> None: ...
    @overload
    def __init__(self: ListStateDescriptor[Any], name: str, element_type: object, **restore: Any) -> None: ...
    def __init__(self, name: str, element_type: Any, **restore: Any) -> None:
        super().__init__(name, **restore)
        self.element_type = of(element_type)

    def stored_types(self) -> dict[str, Type]:
        return {"element": self.element_type}


class MapStateDescriptor(StateDescriptor, Generic[K, V]):
    """A map per key; each of its entries is read, written and expires on its own.

    >>> MapStateDescriptor("counts", str, int).key_type
    STRING
    """

    kind = "map"

    @overload
    def __init__(
        self: MapStateDescriptor[K, V],
        name: str,
        key_type: Notation[K],
        value_type: Notation[V],
        **restore: Any,
    ) -> None: ...
    @overload
    def __init__(
        self: MapStateDescriptor[K, Any], name: str, key_type: Notation[K], value_type: object, **restore: Any
    ) -> None: ...
    @overload
    def __init__(
        self: MapStateDescriptor[Any, V], name: str, key_type: object, value_type: Notation[V], **restore: Any
    ) -> None: ...
    @overload
    def __init__(
        self: MapStateDescriptor[Any, Any], name: str, key_type: object, value_type: object, **restore: Any
    ) -> None: ...
    def __init__(self, name: str, key_type: Any, value_type: Any, **restore: Any) -> None:
        super().__init__(name, **restore)
        self.key_type = of(key_type)
        self.value_type = of(value_type)
        if not self.key_type.is_key_type:
            raise UsageError(
                f"{self.key_type.name} cannot be the key type of a map",
                code="USAGE.KEY_TYPE",
                detail=f"state {name!r}",
                hint="map keys are numbers, strings, bytes, dates, timestamps, and tuples and rows of these",
            )

    def stored_types(self) -> dict[str, Type]:
        return {"key": self.key_type, "value": self.value_type}


class ReducingStateDescriptor(StateDescriptor, Generic[T]):
    """One value per key; each added value is reduced into it.

    ``reduce`` is a function ``(old, new) -> merged`` of values of ``type``, or the name of a reduction.

    >>> ReducingStateDescriptor("longest", lambda old, new: max(old, new, key=len), str).reduction is None
    True
    >>> ReducingStateDescriptor("total", "sum", int).reduction
    'sum'
    """

    kind = "reducing"
    #: The function.
    reduce: Callable[[Any, Any], Any]
    #: Its name, or None for a function of the user's own.
    reduction: str | None

    @overload
    def __init__(
        self: ReducingStateDescriptor[T],
        name: str,
        reduce: Callable[[Any, Any], Any] | str,
        type: Notation[T],
        **restore: Any,
    ) -> None: ...
    @overload
    def __init__(
        self: ReducingStateDescriptor[Any],
        name: str,
        reduce: Callable[[Any, Any], Any] | str,
        type: object,
        **restore: Any,
    ) -> None: ...
    def __init__(self, name: str, reduce: Callable[[Any, Any], Any] | str, type: Any, **restore: Any) -> None:
        super().__init__(name, **restore)
        self.type = of(type)
        if isinstance(reduce, str):
            self.reduce = _named(named_reduction, reduce, self.type, name)
        elif isinstance(reduce, Reduction) and reduce.type == self.type:
            self.reduce = reduce
        else:
            self.reduce = _callable(reduce, "reduce", name, "(old, new) -> merged, or a name such as 'sum'")
        self.reduction = self.reduce.name if isinstance(self.reduce, Reduction) else None

    def stored_types(self) -> dict[str, Type]:
        return {"value": self.type}

    def _function_name(self) -> str:
        return "a function" if self.reduction is None else repr(self.reduction)

    def _identity(self) -> tuple[Any, ...]:
        return (*super()._identity(), self.reduce)

    def _arguments(self) -> list[Any]:
        return [self.reduction or self.reduce, self.type]


class AggregatingStateDescriptor(StateDescriptor, Generic[IN, OUT]):
    """One accumulator per key; each added value goes into it, and the result is made from it.

    ``aggregate`` is an `AggregateFunction` or the name of an aggregate. A function needs ``accumulator_type``; without
    ``type``, the type of the values, these reach it unchecked. A named aggregate needs ``type``.

    >>> mean = AggregatingStateDescriptor("mean", "avg", "bigint")
    >>> mean.accumulator_type, mean.result_type
    (ROW(sum=DOUBLE, count=LONG), DOUBLE)
    """

    kind = "aggregating"
    #: The function.
    aggregate: AggregateFunction
    #: Its name, or None for a function of the user's own.
    aggregation: str | None
    #: The type of added values, or None if they are not checked.
    type: Type | None
    accumulator_type: Type
    #: The type of results, or None to let Arrow infer it.
    result_type: Type | None

    @overload
    def __init__(
        self: AggregatingStateDescriptor[IN, OUT],
        name: str,
        aggregate: AggregateFunction[IN, Any, OUT],
        type: object = None,
        accumulator_type: object = None,
        **restore: Any,
    ) -> None: ...
    @overload
    def __init__(
        self: AggregatingStateDescriptor[IN, int],
        name: str,
        aggregate: Literal["count"],
        type: Notation[IN],
        **restore: Any,
    ) -> None: ...
    @overload
    def __init__(
        self: AggregatingStateDescriptor[IN, IN],
        name: str,
        aggregate: Literal["sum", "min", "max"],
        type: Notation[IN],
        **restore: Any,
    ) -> None: ...
    @overload
    def __init__(
        self: AggregatingStateDescriptor[IN, float],
        name: str,
        aggregate: Literal["avg", "variance", "stddev"],
        type: Notation[IN],
        **restore: Any,
    ) -> None: ...
    @overload
    def __init__(
        self: AggregatingStateDescriptor[Any, Any],
        name: str,
        aggregate: AggregateFunction[Any, Any, Any] | str,
        type: object = None,
        accumulator_type: object = None,
        **restore: Any,
    ) -> None: ...
    def __init__(
        self,
        name: str,
        aggregate: AggregateFunction | str,
        type: Any = None,
        accumulator_type: Any = None,
        **restore: Any,
    ) -> None:
        super().__init__(name, **restore)
        where = f"state {name!r}"
        declared = None if type is None else of(type)
        if isinstance(aggregate, str):
            if declared is None:
                raise usage.aggregate(
                    "a named aggregate needs the type of the values",
                    detail=where,
                    hint='write for example AggregatingStateDescriptor(name, "avg", "bigint")',
                )
            aggregate = _named(named_aggregate, aggregate, declared, name)
        if not isinstance(aggregate, AggregateFunction):
            raise usage.aggregate(
                f"an aggregate is not a {aggregate.__class__.__name__}",
                detail=where,
                hint="give an instance of a class derived from AggregateFunction, or a name such as 'avg'",
            )
        self.aggregate = aggregate
        result = aggregate.result_type
        self.result_type = None if result is None else of(result)
        if isinstance(aggregate, NamedAggregate):
            given = None if accumulator_type is None else of(accumulator_type)
            if given not in (None, aggregate.accumulator_type) or declared not in (None, aggregate.type):
                raise usage.aggregate(
                    f"the types do not fit the aggregate {aggregate.name!r}",
                    detail=where,
                    hint="leave accumulator_type out: a named aggregate knows it",
                )
            self.aggregation = aggregate.name
            self.type, self.accumulator_type = aggregate.type, aggregate.accumulator_type
            return
        if accumulator_type is None:
            raise usage.aggregate(
                "an AggregateFunction needs the type of its accumulator",
                detail=where,
                hint="give accumulator_type=, for example 'struct<sum:bigint,n:bigint>', or PICKLE",
            )
        self.aggregation = None
        self.type, self.accumulator_type = declared, of(accumulator_type)

    def stored_types(self) -> dict[str, Type]:
        return {"accumulator": self.accumulator_type}

    def _function_name(self) -> str:
        if self.aggregation is None:
            return "an AggregateFunction"
        return f"{self.aggregation!r} of {self.type!r}"

    def _identity(self) -> tuple[Any, ...]:
        return (*super()._identity(), self.aggregate, self.type)

    def _arguments(self) -> list[Any]:
        if self.aggregation is not None:
            return [self.aggregation, self.type]
        return [self.aggregate, self.type, self.accumulator_type]


class FoldingStateDescriptor(StateDescriptor, Generic[IN, ACC]):
    """One accumulator per key; it begins as ``initial``, and ``fold(accumulator, value)`` advances it.

    It comes from old Flink. Values may have any type and reach ``fold`` unchecked. It cannot be merged across
    namespaces, because two accumulators cannot be folded. Prefer `AggregatingStateDescriptor`.

    >>> path = FoldingStateDescriptor("path", "", lambda path, step: path + "/" + step, str)
    >>> path.fold(path.initial_copy(), "home")
    '/home'
    """

    kind = "folding"

    @overload
    def __init__(
        self: FoldingStateDescriptor[IN, ACC],
        name: str,
        initial: ACC,
        fold: Callable[[ACC, IN], ACC],
        type: Notation[ACC],
        **restore: Any,
    ) -> None: ...
    @overload
    def __init__(
        self: FoldingStateDescriptor[Any, Any],
        name: str,
        initial: object,
        fold: Callable[[Any, Any], Any],
        type: object,
        **restore: Any,
    ) -> None: ...
    def __init__(
        self, name: str, initial: Any, fold: Callable[[Any, Any], Any], type: Any, **restore: Any
    ) -> None:
        super().__init__(name, **restore)
        self.type = of(type)
        if initial is None:
            raise usage.argument(
                "the initial accumulator is None", detail=f"state {name!r}", hint="give a value of the type"
            )
        self._initial: bytes = _serialized(self.type, initial, name, "initial")
        self.fold = _callable(fold, "fold", name, "(accumulator, value) -> accumulator")

    def initial_copy(self) -> Any:
        """A copy of the initial accumulator; O(size of it)."""
        return serializer_for(self.type).deserialize(self._initial)

    def stored_types(self) -> dict[str, Type]:
        return {"accumulator": self.type}

    def _function_name(self) -> str:
        return "a function"

    def _identity(self) -> tuple[Any, ...]:
        return (*super()._identity(), self._initial, self.fold)

    def _arguments(self) -> list[Any]:
        return [self.initial_copy(), self.fold, self.type]


def _serialized(declared: Type, value: Any, state: str, what: str) -> Any:
    if value is None:
        return None
    try:
        return serializer_for(declared).serialize(value)
    except SerializationError as error:
        raise error.at(f"{what} of state {state!r}") from None
    except OverflowError as error:
        raise OverflowError(f"{error}, {what} of state {state!r}") from None


def _named(make: Callable[[str, Type], Any], function: str, declared: Type, state: str) -> Any:
    try:
        return make(function, declared)
    except UsageError as error:
        raise error.at(f"state {state!r}") from None


def _callable(function: Any, what: str, state: str, takes: str) -> Callable[[Any, Any], Any]:
    if not callable(function) or isinstance(function, type):
        raise usage.function(
            f"{what} is not a function, but a {function.__class__.__name__}",
            detail=f"state {state!r}",
            hint=f"give a function {takes}",
        )
    return function  # type: ignore[no-any-return]
