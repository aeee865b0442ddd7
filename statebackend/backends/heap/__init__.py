"""The heap backend: Flink's copy-on-write state maps, compiled, with values of declared types stored natively.

Importing this module loads nothing compiled, so that it can tell the user what to do if the extension is not built.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from statebackend.errors import BackendUnavailableError, usage
from statebackend.operator_state import OperatorStateBackend
from statebackend.state import Size, StateBackend, number_of_bytes

if TYPE_CHECKING:
    from statebackend.backends.heap.keyed_backend import HeapKeyedBackend

__all__ = ["HeapBackend"]


class HeapBackend(StateBackend):
    """Makes heap backends.

    ``max_bytes`` limits the memory for state: a call that would pass it raises `MemoryLimitError`, which names the
    state, and changes nothing. It is a size such as ``"4g"``; 0 means no limit.
    ``check_mutations`` turns on a debug mode that finds objects of PICKLE and of a user's serializer that were changed
    in place; it looks at every mark and snapshot. ``threads`` is the number of threads for vectorised calls; by default
    all cores in a driver, 1 in a Spark worker.

    >>> import pickle
    >>> pickle.loads(pickle.dumps(HeapBackend(threads=2, max_bytes=1 << 30)))
    HeapBackend(max_bytes=1073741824, threads=2)
    """

    name = "heap"

    def __init__(
        self, *, max_bytes: Size = 0, check_mutations: bool = False, threads: int | None = None
    ) -> None:
        if type(check_mutations) is not bool:
            raise usage.option(f"unknown check_mutations={check_mutations!r}; expected True or False")
        if threads is not None and (type(threads) is not int or threads < 1):
            raise usage.option(f"unknown threads={threads!r}; expected a number from 1, or None")
        self.max_bytes = number_of_bytes("max_bytes", max_bytes)
        self.check_mutations = check_mutations
        self.threads = threads

    @classmethod
    def unavailable_reason(cls) -> str | None:
        try:
            importlib.import_module("statebackend._core.handles.map_table_handle")
        except ImportError as error:
            return (
                f"its extension is not built ({error}); build it with 'python setup.py build_ext --inplace'"
            )
        return None

    def create_keyed_backend(self, key_type: Any, **options: Any) -> HeapKeyedBackend:
        reason = self.unavailable_reason()
        if reason is not None:
            raise BackendUnavailableError(f"backend 'heap' cannot be used here: {reason}")
        from statebackend.backends.heap.keyed_backend import HeapKeyedBackend

        return HeapKeyedBackend(
            key_type,
            max_bytes=self.max_bytes,
            check_mutations=self.check_mutations,
            threads=self.threads,
            **options,
        )

    def create_operator_backend(
        self, *, subtask_index: int = 0, parallelism: int = 1, restore: Any = ()
    ) -> OperatorStateBackend:
        return OperatorStateBackend(subtask_index=subtask_index, parallelism=parallelism, restore=restore)

    def __repr__(self) -> str:
        options = {
            "max_bytes": self.max_bytes or None,
            "check_mutations": self.check_mutations or None,
            "threads": self.threads,
        }
        shown = ", ".join(f"{name}={value!r}" for name, value in options.items() if value is not None)
        return f"HeapBackend({shown})"
