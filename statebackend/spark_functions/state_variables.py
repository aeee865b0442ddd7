"""Spark's state variables over states of the backend: a value, the elements of a list, the entries of a map.

Values are rows of the declared schema. A tuple goes to the state as it is. Only values that the state refuses are
converted as Spark converts them: numpy and pandas scalars, named tuples, dicts for structs, naive times.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import numpy as np
from pyspark.sql.streaming.stateful_processor import ListState, MapState, ValueState

from statebackend.errors import SerializationError
from statebackend.spark_functions.processor_errors import illegal_value
from statebackend.spark_functions.spark_rows import row_class
from statebackend.state import KeyedListState, MapState as Entries, ValueState as Value
from statebackend.types import TIMESTAMP, ListType, MapType, RowType, Type, is_not_a_time

Convert = Callable[[Any], Any]


def fields(value: Any) -> tuple[Any, ...]:
    """The fields of a row that a processor gives; `TypeError` if it is not a tuple, list or named tuple."""
    return value if type(value) is tuple else tuple(value)


def converted(kind: Type) -> Convert:
    """Converts values that Spark accepts for a type, at any depth."""
    if isinstance(kind, RowType):
        parts = list(zip(kind.names, map(converted, kind.types), strict=True))

        def of_row(value: Any) -> Any:
            if isinstance(value, dict):
                return tuple(convert(value.get(name)) for name, convert in parts)
            if isinstance(value, (tuple, list)) and len(value) == len(parts):
                return tuple(convert(each) for (_, convert), each in zip(parts, value, strict=True))
            return value

        return of_row
    if isinstance(kind, ListType):
        of_element = converted(kind.element)
        return lambda value: value if value is None else [of_element(each) for each in value]
    if isinstance(kind, MapType):
        of_key, of_value = converted(kind.key), converted(kind.value)
        return lambda value: (
            {of_key(key): of_value(each) for key, each in value.items()} if isinstance(value, dict) else value
        )
    return _zoned if kind == TIMESTAMP else _plain


def _plain(value: Any) -> Any:
    """A scalar of numpy or pandas as Python's."""
    if isinstance(value, np.generic):
        return value.tolist()
    if is_not_a_time(value):
        return None
    for name in ("to_pytimedelta", "to_pydatetime"):
        if hasattr(value, name):
            return getattr(value, name)()
    return value


def _zoned(value: Any) -> Any:
    """A time; one without a zone is of the machine's, as for Spark."""
    value = _plain(value)
    if isinstance(value, datetime.datetime) and value.tzinfo is None:
        return value.astimezone(datetime.timezone.utc)
    return value


def shown(kind: Type) -> Convert | None:
    """What makes of a stored value the one that Spark gives: rows for structs, times of the machine's zone.

    None if it is the stored one.
    """
    if isinstance(kind, RowType):
        parts, made = [shown(each) for each in kind.types], row_class(kind.names)

        def row(value: Any) -> Any:
            if value is None:
                return None
            return tuple.__new__(
                made,
                [each if part is None else part(each) for part, each in zip(parts, value, strict=True)],
            )

        return row
    if isinstance(kind, ListType):
        of_element = shown(kind.element)
        if of_element is None:
            return None
        return lambda value: None if value is None else list(map(of_element, value))
    if isinstance(kind, MapType):
        of_key, of_value = shown(kind.key) or _same, shown(kind.value) or _same
        if of_key is _same and of_value is _same:
            return None
        return lambda value: (
            None if value is None else {of_key(key): of_value(each) for key, each in value.items()}
        )
    return _local if kind == TIMESTAMP else None


def _same(value: Any) -> Any:
    return value


def _local(value: Any) -> Any:
    return None if value is None else value.astimezone().replace(tzinfo=None)


def fields_shown(kind: RowType) -> Callable[[Any], tuple[Any, ...]]:
    """What makes a plain tuple of a stored row."""
    parts = [shown(each) for each in kind.types]
    if not any(parts):
        return tuple
    return lambda value: tuple(
        each if part is None else part(each) for part, each in zip(parts, value, strict=True)
    )


class NoState:
    """Stands for the state of a variable that cannot be used: every call raises."""

    def __init__(self, refuse: Callable[[str], NoReturn]) -> None:
        self._refuse = refuse

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse(name)


class ValueVariable(ValueState):
    """Spark's ``ValueState``."""

    kind = "Value"

    def __init__(self, state: Value[Any], kind: RowType) -> None:
        self._state: Any = state
        self._shown = fields_shown(kind)
        self._kind = kind

    def exists(self) -> bool:
        return self._state.exists()  # type: ignore[no-any-return]

    def get(self) -> tuple[Any, ...] | None:
        value = self._state.value()
        return None if value is None else self._shown(value)

    def update(self, newValue: Any) -> None:
        row = fields(newValue)
        try:
            self._state.update(row)
        except SerializationError:
            self._state.update(converted(self._kind)(row))

    def clear(self) -> None:
        self._state.clear()


class ListVariable(ListState):
    """Spark's ``ListState``."""

    kind = "List"

    def __init__(self, state: KeyedListState[Any], kind: RowType, name: str) -> None:
        self._state: Any = state
        self._shown = fields_shown(kind)
        self._kind, self._name = kind, name
        #: True if an empty list clears the state, as in Spark's tester.
        self.accepts_empty = False

    def exists(self) -> bool:
        return self._state.exists()  # type: ignore[no-any-return]

    def get(self) -> Iterator[tuple[Any, ...]]:
        yield from map(self._shown, self._state.get())  # read when the first one is asked for

    def put(self, newState: Any) -> None:
        self._write(self._state.update, newState)

    def appendValue(self, newState: Any) -> None:
        row = fields(newState)
        try:
            self._state.add(row)
        except SerializationError:
            self._state.add(converted(self._kind)(row))

    def appendList(self, newState: Any) -> None:
        self._write(self._state.add_all, newState)

    def _write(self, write: Callable[[list[Any]], None], values: Any) -> None:
        rows = [fields(each) for each in values]
        if not rows and not self.accepts_empty:
            raise illegal_value("EMPTY_LIST_VALUE", self._name)
        try:
            write(rows)
        except SerializationError:
            write(list(map(converted(self._kind), rows)))

    def clear(self) -> None:
        self._state.clear()


class MapVariable(MapState):
    """Spark's ``MapState``."""

    kind = "Map"

    def __init__(self, state: Entries[Any, Any], key: RowType, value: RowType) -> None:
        self._state: Any = state
        self._key, self._value = key, value
        self._key_shown, self._value_shown = fields_shown(key), fields_shown(value)
        self._row: Any = shown(value)

    def _with_key(self, call: Callable[[Any], Any], key: Any) -> Any:
        row = fields(key)
        try:
            return call(row)
        except SerializationError:
            return call(converted(self._key)(row))

    def exists(self) -> bool:
        return self._state.exists()  # type: ignore[no-any-return]

    def getValue(self, key: Any) -> Any:
        return self._row(self._with_key(self._state.get, key))

    def containsKey(self, key: Any) -> bool:
        return self._with_key(self._state.contains, key)  # type: ignore[no-any-return]

    def updateValue(self, key: Any, value: Any) -> None:
        row, stored = fields(key), fields(value)
        try:
            self._state.put(row, stored)
        except SerializationError:
            self._state.put(converted(self._key)(row), converted(self._value)(stored))

    def iterator(self) -> Iterator[tuple[tuple[Any, ...], tuple[Any, ...]]]:
        for key, value in list(self._state.items()):
            yield self._key_shown(key), self._value_shown(value)

    def keys(self) -> Iterator[tuple[Any, ...]]:
        yield from map(self._key_shown, list(self._state.keys()))

    def values(self) -> Iterator[tuple[Any, ...]]:
        yield from map(self._value_shown, list(self._state.values()))

    def removeKey(self, key: Any) -> None:
        self._with_key(self._state.remove, key)

    def clear(self) -> None:
        self._state.clear()
