"""For type checkers: the variables that stand for the types of values, and how a type is noted.

A handle is typed by its descriptor, and a descriptor by the types that it is given: a `Type`, or a class such as
``int`` or ``list[str]``. Other notations, such as DDL, tell a checker nothing.
"""

from __future__ import annotations

from types import GenericAlias
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    #: A value or an element, and the result where there is none.
    T = TypeVar("T", default=Any)
    A = TypeVar("A", default=None)
    #: The keys and the values of a map.
    K = TypeVar("K", default=Any)
    V = TypeVar("V", default=Any)
    #: The input, the accumulator and the result.
    IN = TypeVar("IN", default=Any)
    ACC = TypeVar("ACC", default=Any)
    OUT = TypeVar("OUT", default=Any)

    from statebackend.types.model import Type

    Notation: TypeAlias = Type[T] | type[T]
else:
    from typing import TypeVar

    T, A, K, V, IN, ACC, OUT = map(TypeVar, ("T", "A", "K", "V", "IN", "ACC", "OUT"))

    Notation = Any


class Subscriptable:
    """A class that takes any number of type arguments when the program runs, and does nothing with them.

    Those of `typing.Generic` would have to be complete: only Python 3.13 knows defaults of type variables.
    """

    __slots__ = ()

    if not TYPE_CHECKING:
        __class_getitem__ = classmethod(GenericAlias)
