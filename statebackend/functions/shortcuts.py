"""Functions from a plain callable and one value state.

>>> from statebackend.testing import Harness
>>> def total(row, before):
...     after = (before or 0) + row.n
...     return (row.user, after), after
>>> with Harness(map_with_state(total, int), str) as harness:
...     harness.process_element("a", {"user": "a", "n": 1}), harness.process_element("a", {"user": "a", "n": 2})
([('a', 1)], [('a', 3)])
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from statebackend.errors import SerializationTypeError, UsageError
from statebackend.functions.context import FunctionContext
from statebackend.functions.process import KeyedProcessFunction
from statebackend.state import ValueStateDescriptor
from statebackend.types import of

__all__ = ["flat_map_with_state", "map_with_state"]

STATE = "state"


class _WithState(KeyedProcessFunction):
    def __init__(self, function: Callable[[Any, Any], tuple[Any, Any]], state_type: Any) -> None:
        if not callable(function):
            raise UsageError("a function (row, state) -> (out, new_state) is needed")
        self._function = function
        self._type = of(state_type)

    def open(self, ctx: FunctionContext) -> None:
        self._state = ctx.get_value_state(ValueStateDescriptor(STATE, self._type))

    def __repr__(self) -> str:
        name = getattr(self._function, "__qualname__", type(self._function).__qualname__)
        return f"<{type(self).__name__.strip('_')} of {name}, {self._type!r}>"

    def _call(self, row: Any) -> tuple[Any, Any]:
        """What the function gives for a row: what goes out, and the new state."""
        given: Any = self._function(row, self._state.value())
        if not isinstance(given, tuple) or len(given) != 2:
            what = f"a tuple of {len(given)}" if isinstance(given, tuple) else f"a {type(given).__name__}"
            raise SerializationTypeError(
                f"the function gave {what}, not what goes out and the new state",
                code="SERIALIZATION.OUTPUT",
                detail=getattr(self._function, "__qualname__", type(self._function).__qualname__),
                hint="return (out, new_state); None for out gives nothing, None for new_state clears it",
            )
        return given


class _MapWithState(_WithState):
    def process_element(self, row: Any, ctx: FunctionContext) -> Iterable[Any]:
        out, new = self._call(row)
        self._state.update(new)
        return () if out is None else (out,)


class _FlatMapWithState(_WithState):
    def process_element(self, row: Any, ctx: FunctionContext) -> Iterable[Any] | None:
        out, new = self._call(row)
        if out is not None and (isinstance(out, (str, bytes, dict)) or not isinstance(out, Iterable)):
            raise SerializationTypeError(
                f"the function gave a {type(out).__name__} for the rows that go out",
                code="SERIALIZATION.OUTPUT",
                detail=getattr(self._function, "__qualname__", type(self._function).__qualname__),
                hint="return (rows, new_state) with a list of rows; map_with_state gives one row",
            )
        # The result may be a generator that has yet to run and may read the state as it was.
        rows = None if out is None else list(out)
        self._state.update(new)
        return rows


def map_with_state(function: Callable[[Any, Any], tuple[Any, Any]], state_type: Any) -> KeyedProcessFunction:
    """Make a function from ``function(row, state or None) -> (row out or None, new state or None)``.

    Each key has one value of ``state_type``, in a state called "state"; returning None as the new state clears it.

    >>> def numbered(row, seen):
    ...     seen = (seen or 0) + 1
    ...     return (row.word, seen), seen
    >>> from statebackend.testing import Harness
    >>> with Harness(map_with_state(numbered, int), str, key="word") as harness:
    ...     harness.process_batch([{"word": "to"}, {"word": "be"}, {"word": "to"}])
    [('to', 1), ('be', 1), ('to', 2)]
    """
    return _MapWithState(function, state_type)


def flat_map_with_state(
    function: Callable[[Any, Any], tuple[Iterable[Any] | None, Any]], state_type: Any
) -> KeyedProcessFunction:
    """The same for a function that returns any number of rows: ``(rows, new state or None)``.

    >>> def pairs(row, first):
    ...     return ([], row.n) if first is None else ([(first, row.n)], None)
    >>> from statebackend.testing import Harness
    >>> with Harness(flat_map_with_state(pairs, int), str, key="user") as harness:
    ...     harness.process_batch([{"user": "a", "n": n} for n in (1, 2, 3)])
    [(1, 2)]
    """
    return _FlatMapWithState(function, state_type)
