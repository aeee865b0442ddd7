"""What a backend is: a picklable factory, and the keyed backends that it makes.

`StateBackend` and `KeyedStateBackend` are the interfaces. `BaseKeyedStateBackend` has what all
implementations share; a backend derives from it and writes what it says is missing.

>>> from statebackend.registry import create_backend
>>> with create_backend("reference").create_keyed_backend("bigint", max_parallelism=4) as keyed:
...     keyed.set_current_key(7)
...     keyed.current_key, keyed.current_namespace
(7, VOID)
"""

from statebackend.backend.base import BaseKeyedStateBackend
from statebackend.backend.interface import KeyedStateBackend, StateBackend
from statebackend.backend.marks import Mark, MarkStack

__all__ = ["BaseKeyedStateBackend", "KeyedStateBackend", "Mark", "MarkStack", "StateBackend"]
