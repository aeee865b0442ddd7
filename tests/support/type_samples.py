"""Samples of every sort of type: a type, drawn at random where it has parts, and values of it.

>>> import random
>>> given = sample("row", random.Random(1))
>>> given.shown(given.column("plain")) == texts(given.values)
True
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import pyarrow as pa
from arrow_layouts import laid_out
from random_types import LEAVES, random_type, random_value

from statebackend import types as t
from statebackend.keys import KeyEncoder, key_encoder
from statebackend.state.value_columns import from_arrow, has_objects, to_arrow, to_values
from statebackend.types.serializers import serializer_for

#: How a sort of types is drawn; a leaf stands for itself.
NESTED: dict[str, Callable[[random.Random], Any]] = {
    "list": lambda rng: t.LIST(random_type(rng, 1)),
    "map": lambda rng: t.MAP(t.of(rng.choice(list(LEAVES))), random_type(rng, 1)),
    "tuple": lambda rng: t.TUPLE(*[random_type(rng, 1) for _ in range(3)]),
    "row": lambda rng: t.ROW(a=random_type(rng, 1), b=random_type(rng, 1), c=t.STRING),
    "tuple of fixed width": lambda rng: t.TUPLE(
        t.LONG, t.of(rng.choice(["date", "double", "decimal(18,2)"]))
    ),
    "key": lambda rng: t.ROW(
        a=t.of(rng.choice(list(LEAVES))), b=t.TUPLE(t.STRING, t.of(rng.choice(list(LEAVES))))
    ),
    "five deep": lambda rng: _deep(rng, 5),
}


class Backwards(t.Serializer):
    """Text, stored back to front."""

    def serialize(self, value: Any) -> bytes:
        return bytes(value[::-1].encode())

    def deserialize(self, data: bytes) -> Any:
        return data.decode()[::-1]


#: Types that hold objects, and values of them.
OBJECTS: dict[str, tuple[Any, list[Any]]] = {
    "object": (t.PICKLE, [1j, (None, b"x"), frozenset()]),
    "list of objects": (t.LIST(t.PICKLE), [[1j, None], [], [frozenset([7])]]),
    "row with an object": (t.ROW(a=t.LONG, b=t.PICKLE), [(1, 1j), (None, None)]),
    "map of objects": (t.MAP(t.STRING, t.PICKLE), [{"a": 1j, "b": None}, {}]),
    "custom": (t.of(Backwards()), ["ab", ""]),
    "tuple with a custom": (t.TUPLE(t.DATE, t.LIST(t.of(Backwards()))), [(None, ["ab", None]), (None, None)]),
}
#: Each sort of type, and those that keys may have.
SORTS = [*LEAVES, *NESTED]
SORTS_OF_KEYS = [*LEAVES, "tuple of fixed width", "key"]


def _deep(rng: random.Random, depth: int) -> Any:
    if depth == 0:
        return t.of(rng.choice(list(LEAVES)))
    inner = _deep(rng, depth - 1)
    beside = random_type(rng, 0)
    return rng.choice(
        [
            t.LIST(inner),
            t.MAP(beside, inner),
            t.TUPLE(beside, inner),
            t.ROW(f=inner, g=beside),
        ]
    )


class Sample(NamedTuple):
    """Values of a type, each as the serializer gives it back, with a null now and then."""

    declared: t.Type
    values: list[Any]

    @property
    def present(self) -> list[Any]:
        return [value for value in self.values if value is not None]

    def column(self, layout: str, values: list[Any] | None = None) -> Any:
        return laid_out(
            to_arrow(self.values if values is None else values, self.declared), self.declared, layout
        )

    def shown(self, array: pa.Array) -> list[str]:
        """What Python makes of a result, which must be of the type."""
        array.validate(full=True)
        assert array.type == self.declared.arrow
        found = (
            from_arrow(array, self.declared)
            if has_objects(self.declared)
            else to_values(array, self.declared)
        )
        return texts([None if each is None else stored_and_read(self.declared, each) for each in found])


def stored_and_read(declared: t.Type, value: Any) -> Any:
    serializer = serializer_for(declared)
    return serializer.deserialize(serializer.serialize(value))


def texts(values: Any) -> list[str]:
    """Values in a form that compares: NaN is NaN, and -0.0 is not 0.0."""
    return [repr(value) for value in values]


def sample(sort: str, rng: random.Random) -> Sample:
    """Values of a sort of type, with a null in the second place and in the last."""
    if sort in OBJECTS:
        declared, values = OBJECTS[sort]
        values = [stored_and_read(declared, value) for value in values]
        return Sample(declared, [values[0], None, *values[1:], None])
    declared = NESTED[sort](rng) if sort in NESTED else t.of(sort)
    values = [random_value(rng, declared) for _ in range(12)] if sort in NESTED else list(LEAVES[sort])
    values = [stored_and_read(declared, value) for value in values]
    return Sample(declared, [values[0], None, *values[1:], None])


def keys_of(given: Sample) -> tuple[KeyEncoder, list[Any]]:
    """Different keys among the values, in the one form that equal keys share."""
    encoder = key_encoder(given.declared)
    found = {encoder.encode(value): None for value in given.present}
    return encoder, [encoder.decode(key) for key in found]
