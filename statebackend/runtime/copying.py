"""Which part of an object cannot be copied or pickled, for an error that names it.

>>> import copy, threading
>>> class Client:
...     def __init__(self):
...         self.pool = {"idle": [threading.Lock()]}
>>> client = Client()
>>> client.me = client
>>> culprit(client, copy.deepcopy)
'pool[...][0], a lock'
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

__all__ = ["culprit"]

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
