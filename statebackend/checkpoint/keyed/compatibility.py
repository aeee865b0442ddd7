"""Checks, before a restart, if descriptors can take over what a checkpoint holds.

>>> import tempfile
>>> import pyarrow as pa
>>> from statebackend.checkpoint import CheckpointStore
>>> from statebackend.state import ValueStateDescriptor
>>> from statebackend.backends import create_backend
>>> folder = tempfile.TemporaryDirectory()
>>> store = CheckpointStore(folder.name).open_for_writing(key_type=int, max_parallelism=128)
>>> keyed = create_backend("reference").create_keyed_backend(int)
>>> _ = keyed.get_state(ValueStateDescriptor("count", "int"))
>>> _ = keyed.get_state(ValueStateDescriptor("old", "int"))
>>> _ = store.commit(0, [keyed.snapshot(0, store).result()])
>>> print(check_compatibility(store, [ValueStateDescriptor("count", str), ValueStateDescriptor("fresh", int)]))
count: incompatible - state 'count' is VALUE of int in the checkpoint, and is asked for as VALUE(STRING)
fresh: new
old: undeclared
>>> store.close()
>>> folder.cleanup()
"""

from __future__ import annotations

import enum
import os
from collections.abc import Iterable
from typing import NamedTuple

from statebackend.checkpoint.keyed.description import StateDescription
from statebackend.checkpoint.keyed.restored_states import keyed_snapshots
from statebackend.checkpoint.store.reader import Checkpoint, CheckpointReader
from statebackend.errors import StateMigrationError
from statebackend.state import StateDescriptor
from statebackend.types import Compatibility

__all__ = ["CompatibilityReport", "StateCheck", "StateOutcome", "check_compatibility"]


class StateOutcome(enum.Enum):
    """The outcome of a restart for one state.

    >>> StateOutcome.NEW.value
    'new'
    """

    AS_IS = "as is"
    #: Values are converted when the state is asked for.
    AFTER_MIGRATION = "after migration"
    #: Asking for the state would raise.
    INCOMPATIBLE = "incompatible"
    #: The checkpoint does not have it.
    NEW = "new"
    #: No descriptor asks for it: the backend keeps it and writes it again.
    UNDECLARED = "undeclared"


_OUTCOMES = {
    Compatibility.AS_IS: StateOutcome.AS_IS,
    Compatibility.AFTER_MIGRATION: StateOutcome.AFTER_MIGRATION,
}


class StateCheck(NamedTuple):
    """A state, its outcome, and the reason if it is refused.

    >>> StateCheck("fresh", StateOutcome.NEW).reason is None
    True
    """

    name: str
    outcome: StateOutcome
    reason: str | None = None


class CompatibilityReport(tuple[StateCheck, ...]):
    """The checks of all states, by name; as text, one line each.

    >>> CompatibilityReport([StateCheck("fresh", StateOutcome.NEW)]).is_compatible
    True
    """

    __slots__ = ()

    @property
    def is_compatible(self) -> bool:
        """True if no state is refused."""
        return all(check.outcome is not StateOutcome.INCOMPATIBLE for check in self)

    def __str__(self) -> str:
        return "\n".join(
            f"{check.name}: {check.outcome.value}" + ("" if check.reason is None else f" - {check.reason}")
            for check in self
        )


def check_compatibility(
    store: Checkpoint | CheckpointReader | str | os.PathLike[str], descriptors: Iterable[StateDescriptor]
) -> CompatibilityReport:
    """Check the effect of a restart with these descriptors on each keyed state. Reads a manifest, and no data.

    ``store`` is a store, its path or uri, or a checkpoint. Of a store, the newest checkpoint is checked.

    >>> check_compatibility("/nowhere", [])
    Traceback (most recent call last):
    statebackend.errors.UsageError: there is no checkpoint (/nowhere). Hint: give the uri of a store ...
    """
    checkpoint = _checkpoint_of(store)
    found = {
        description.name: description
        for snapshot in keyed_snapshots(checkpoint)
        for description in (StateDescription.read(data, checkpoint.manifest.name) for data in snapshot.states)
        if not description.is_reserved
    }
    checks = {name: StateCheck(name, StateOutcome.UNDECLARED) for name in found}
    for descriptor in descriptors:
        name = descriptor.name
        if name not in found:
            checks[name] = StateCheck(name, StateOutcome.NEW)
            continue
        try:
            checks[name] = StateCheck(name, _OUTCOMES[found[name].check(descriptor)])
        except StateMigrationError as error:
            checks[name] = StateCheck(name, StateOutcome.INCOMPATIBLE, error.message)
    return CompatibilityReport(checks[name] for name in sorted(checks))


def _checkpoint_of(store: Checkpoint | CheckpointReader | str | os.PathLike[str]) -> Checkpoint:
    if isinstance(store, Checkpoint):
        return store
    reader = store if isinstance(store, CheckpointReader) else CheckpointReader(store)
    return reader.open_latest()
