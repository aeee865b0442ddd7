"""The Python form of a ROW: a light named tuple, or the user's dataclass or NamedTuple."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Sequence
from functools import lru_cache
from operator import attrgetter
from typing import Any

from statebackend.errors import SerializationTypeError


@lru_cache(maxsize=4096)
def row_class(names: tuple[str, ...]) -> type[tuple[Any, ...]]:
    """The named-tuple class for rows with these field names; one class per tuple of names, and its rows pickle.

    Fields are read by attribute, by position, or by name in brackets, as a Spark ``Row``: so one whose name cannot be
    an attribute (``"a b"``, ``"class"``) has its name too. ``__fields__`` has all names as declared.

    >>> row_class(("a b", "n"))._fields
    ('_0', 'n')
    >>> row_class(("a b", "n"))(1, 2)["a b"]
    1
    >>> row_class(("a b", "n"))(1, 2)._asdict()
    {'a b': 1, 'n': 2}
    """
    base = collections.namedtuple("Row", names, rename=True)  # type: ignore[misc]

    def as_dict(self: tuple[Any, ...]) -> dict[str, Any]:
        return dict(zip(names, self, strict=True))

    def reduce(self: tuple[Any, ...]) -> tuple[Any, ...]:
        return _rebuild_row, (names, tuple(self))

    places = {name: at for at, name in enumerate(names)}

    def get_item(self: tuple[Any, ...], key: Any) -> Any:
        if type(key) is str:
            if key not in places:
                raise KeyError(f"the row lacks the field {key!r}; it has {', '.join(names)}")
            key = places[key]
        return tuple.__getitem__(self, key)

    def get_attribute(self: tuple[Any, ...], name: str) -> Any:
        raise AttributeError(f"the row has no field {name!r}; it has {', '.join(names)}")

    body = {
        "__slots__": (),
        "__getattr__": get_attribute,
        "__fields__": names,
        "_asdict": as_dict,
        "__getitem__": get_item,
        "__reduce__": reduce,
        "__module__": __name__,
    }
    return type("Row", (base,), body)


def _rebuild_row(names: tuple[str, ...], values: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple.__new__(row_class(names), values)


def is_named_tuple_class(cls: object) -> bool:
    """Return True for a class made by ``typing.NamedTuple`` or ``collections.namedtuple``."""
    return (
        isinstance(cls, type) and issubclass(cls, tuple) and isinstance(getattr(cls, "_fields", None), tuple)
    )


def record_field_names(cls: type) -> tuple[str, ...] | None:
    """The field names of a dataclass or NamedTuple class, in order; None for other classes."""
    if is_named_tuple_class(cls):
        return cls._fields  # type: ignore[attr-defined, no-any-return]
    if dataclasses.is_dataclass(cls):
        return tuple(field.name for field in dataclasses.fields(cls))
    return None


def is_frozen_record(cls: type | None) -> bool:
    """Return True if values of the record class cannot be changed in place (None: the light named tuple)."""
    if cls is None or is_named_tuple_class(cls):
        return True
    return bool(cls.__dataclass_params__.frozen)  # type: ignore[attr-defined]


def record_builder(names: tuple[str, ...], cls: type | None) -> Callable[[Sequence[Any]], Any]:
    """A function that makes the row object from its field values, in order.

    It rebuilds a dataclass as unpickling does: it sets the fields, and does not run ``__init__`` or ``__post_init__``.
    """
    if cls is None or is_named_tuple_class(cls):
        target: Any = row_class(names) if cls is None else cls
        return lambda values: tuple.__new__(target, values)

    def build(values: Sequence[Any]) -> Any:
        record: Any = object.__new__(cls)
        for name, value in zip(names, values, strict=True):
            object.__setattr__(record, name, value)
        return record

    return build


def record_reader(names: tuple[str, ...]) -> Callable[[Any], Sequence[Any] | None]:
    """A function that returns the field values, in order, of a user's row; ``None`` if the object is not such a row.

    It takes tuples by position, mappings by name, and dataclass instances by attribute.
    """
    count = len(names)
    wanted = frozenset(names)
    getter: Callable[[Any], Any] | None = None
    if all(name.isidentifier() for name in names):
        getter = attrgetter(*names)

    def read(value: Any) -> Sequence[Any] | None:
        if isinstance(value, tuple):
            return value if len(value) == count else None
        if isinstance(value, collections.abc.Mapping):
            if len(value) != count or not wanted.issuperset(value):
                return None
            return tuple(value[name] for name in names)
        if getter is not None and dataclasses.is_dataclass(value) and not isinstance(value, type):
            if {field.name for field in dataclasses.fields(value)} != wanted:
                return None
            found = getter(value)
            return found if count > 1 else (found,)
        return None

    return read


def record_form(
    declared: Any, title: str
) -> tuple[tuple[str, ...], Callable[[Any], Sequence[Any]], Callable[[Sequence[Any]], Any]]:
    """The names of the fields of a TUPLE or ROW, a function that reads them from a value, and one that builds it.

    The reader raises for a value of another form; the error says that the ``title`` takes no such value.
    """
    read: Callable[[Any], Sequence[Any] | None]
    build: Callable[[Sequence[Any]], Any]
    if declared.name == "TUPLE":
        names = tuple(f"_{i + 1}" for i in range(len(declared.types)))
        read = lambda value: value if isinstance(value, tuple) and len(value) == len(names) else None  # noqa: E731
        takes, build = "a tuple", tuple
    else:
        names, read = declared.names, record_reader(declared.names)
        takes, build = "a tuple, mapping or dataclass", record_builder(names, declared.record_class)

    def given(value: Any) -> str:
        missing = [name for name in names if name not in value] if isinstance(value, dict) else []
        if missing:
            return f" without {', '.join(missing)}"
        return f" with {len(value)} fields" if isinstance(value, (tuple, dict)) else ""

    def fields_of(value: Any) -> Sequence[Any]:
        fields = read(value)
        if fields is None:
            raise SerializationTypeError(
                f"{title} takes {takes} with exactly its fields",
                detail=f"a value of type {type(value).__name__}{given(value)}; fields {', '.join(names)}",
            )
        return fields

    return names, fields_of, build
