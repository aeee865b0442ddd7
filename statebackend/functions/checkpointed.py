"""The interface of a function that keeps operator state, and the contexts that it gets.

>>> class Source(CheckpointedFunction):
...     offset = 0
...     def initialize_state(self, ctx):
...         from statebackend.state import ListStateDescriptor
...         self.state = ctx.operator_state_store.get_list_state(ListStateDescriptor("offset", int))
...         for offset in self.state.get():
...             self.offset = offset
...     def snapshot_state(self, ctx):
...         self.state.update([self.offset])
>>> from statebackend.operator_state import OperatorStateBackend
>>> source, store = Source(), OperatorStateBackend()
>>> source.initialize_state(FunctionInitializationContext(store))
>>> source.offset = 7
>>> source.snapshot_state(FunctionSnapshotContext(checkpoint_id=1, checkpoint_timestamp=0))
>>> source.state.get()
[7]
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from statebackend.errors import UsageError

if TYPE_CHECKING:
    from statebackend.operator_state.operator_backend import OperatorStateBackend
    from statebackend.state import KeyedStateBackend

__all__ = ["CheckpointedFunction", "FunctionInitializationContext", "FunctionSnapshotContext"]


class CheckpointedFunction(ABC):
    """A function that keeps operator state.

    `initialize_state` runs once before the first row, both at a first start and after a restore; `snapshot_state` runs
    before every checkpoint.
    """

    @abstractmethod
    def initialize_state(self, ctx: FunctionInitializationContext) -> None:
        """Ask for states; if ``ctx.is_restored``, read from them what an earlier run left."""

    @abstractmethod
    def snapshot_state(self, ctx: FunctionSnapshotContext) -> None:
        """Write into the states what a restart must restore."""


class FunctionInitializationContext:
    """The context for `CheckpointedFunction.initialize_state`.

    >>> from statebackend.operator_state import OperatorStateBackend
    >>> ctx = FunctionInitializationContext(OperatorStateBackend())
    >>> ctx.is_restored, ctx.restored_checkpoint_id
    (False, None)
    """

    def __init__(
        self,
        operator_state_store: OperatorStateBackend,
        keyed_state_store: KeyedStateBackend | None = None,
        *,
        restored_checkpoint_id: int | None = None,
    ) -> None:
        #: Provides list and broadcast states.
        self.operator_state_store = operator_state_store
        self._keyed_state_store = keyed_state_store
        #: The id of the restored checkpoint; None at a first start.
        self.restored_checkpoint_id = restored_checkpoint_id

    @property
    def is_restored(self) -> bool:
        """True if an earlier run left state.

        >>> from statebackend.operator_state import OperatorStateBackend
        >>> store = OperatorStateBackend(restore=[{}])
        >>> FunctionInitializationContext(store, restored_checkpoint_id=3).is_restored
        True
        """
        return self.restored_checkpoint_id is not None or self.operator_state_store.is_restored

    @property
    def keyed_state_store(self) -> KeyedStateBackend:
        """The backend that provides keyed states; `UsageError` in a function without keys.

        >>> from statebackend.operator_state import OperatorStateBackend
        >>> from statebackend.backends import create_backend
        >>> keyed = create_backend("reference").create_keyed_backend(int)
        >>> FunctionInitializationContext(OperatorStateBackend(), keyed).keyed_state_store is keyed
        True
        """
        if self._keyed_state_store is None:
            raise UsageError("this function has no keys, and so no keyed state")
        return self._keyed_state_store


class FunctionSnapshotContext:
    """The context for `CheckpointedFunction.snapshot_state`.

    >>> FunctionSnapshotContext(checkpoint_id=4, checkpoint_timestamp=1000).checkpoint_id
    4
    """

    def __init__(self, *, checkpoint_id: int, checkpoint_timestamp: int) -> None:
        #: The id of the checkpoint that is being taken.
        self.checkpoint_id = checkpoint_id
        #: Its time, in milliseconds.
        self.checkpoint_timestamp = checkpoint_timestamp
