"""Tells before a start what becomes of each stored state, and approves the loss of those that nobody requests."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from statebackend.checkpoint import Checkpoint
from statebackend.errors import StateMigrationError, UsageError, usage
from statebackend.functions import ProcessFunction
from statebackend.runtime import Job, Task
from statebackend.runtime.batch_identity import BatchRecord
from statebackend.state import StateDescriptor
from statebackend.tools.rewrite import drop_state
from statebackend.tools.sources import CheckpointSource, source_of
from statebackend.types import Compatibility

KEPT, MIGRATED, EMPTY = "kept", "migrated", "begun empty"
NOT_DECLARED, REFUSED = "stored, not declared", "refused"
_ACTIONS = {Compatibility.AS_IS: KEPT, Compatibility.AFTER_MIGRATION: MIGRATED}


@dataclass(frozen=True)
class PlannedState:
    """A state, and what becomes of it: its ``action``, with the reason if it is refused."""

    name: str
    #: ``"keyed"`` or ``"operator"``.
    part: str
    #: "kept", "migrated", "begun empty", "stored, not declared" or "refused".
    action: str
    reason: str | None = None

    def __str__(self) -> str:
        return f"{self.name!r}: {self.action}" + ("" if self.reason is None else f" - {self.reason}")


@dataclass(frozen=True, repr=False)
class Plan:
    """The result of `plan`."""

    #: The checkpoint that the program would start from.
    checkpoint: int
    states: tuple[PlannedState, ...]
    _store: Any = None
    _function: Any = None

    def __repr__(self) -> str:
        return "\n".join([f"Plan, checkpoint {self.checkpoint}", *(f"  {each}" for each in self.states)])

    @property
    def is_safe(self) -> bool:
        """True if the program starts, and no stored state is lost."""
        return not self._with(NOT_DECLARED) and not self._with(REFUSED)

    def _with(self, action: str) -> list[PlannedState]:
        return [each for each in self.states if each.action == action]

    def approve(self) -> Plan:
        """Drop the states that are stored and not declared from the store, and return the plan of then.

        The query must not run. `UsageError` if the plan is not the present one, `StateMigrationError` if a state is
        refused; then nothing changes.
        """
        if plan(self._store, self._function).states != self.states:
            raise UsageError(
                "cannot approve this plan: the store or the program has changed since",
                code="USAGE.PLAN",
                hint="make a new plan, and look at it",
            )
        for each in self._with(REFUSED):
            raise StateMigrationError(
                f"cannot approve this plan: {each.reason}",
                code="STATE_MIGRATION.INCOMPATIBLE",
                detail=f"state {each.name!r}",
            )
        for each in self._with(NOT_DECLARED):
            drop_state(self._store, each.name)
        return plan(self._store, self._function)


def plan(store: Any, function: ProcessFunction | Iterable[StateDescriptor]) -> Plan:
    """Compare the states that a program declares with those in the newest checkpoint of a store. Reads no rows.

    ``function`` is the function of the query, whose method ``open`` is called, or the descriptors of its keyed states.
    ``store`` is a store or its path, or a checkpoint.

    >>> plan("/nowhere", [])
    Traceback (most recent call last):
    statebackend.errors.UsageError: there is no checkpoint (/nowhere). Hint: give the uri of a store ...
    """
    source = source_of(store)
    if not isinstance(source, CheckpointSource):
        raise usage.not_a_store(
            f"cannot plan a start from a {type(store).__name__}",
            hint="give a store, its path or a checkpoint",
        )
    declared, operators = _declared(function, source)
    found = []
    stored = {name: each for name, each in source.states().items() if not each.is_reserved}
    for name in sorted({*stored, *declared}):
        if name not in declared:
            found.append(PlannedState(name, "keyed", NOT_DECLARED))
        elif name not in stored:
            found.append(PlannedState(name, "keyed", EMPTY))
        else:
            try:
                found.append(PlannedState(name, "keyed", _ACTIONS[stored[name].check(declared[name])]))
            except StateMigrationError as error:
                found.append(PlannedState(name, "keyed", REFUSED, error.message))
    if operators is not None:
        kept = source.operator_states()
        for name in sorted({*kept, *operators}):
            action = EMPTY if name not in kept else KEPT if name in operators else NOT_DECLARED
            found.append(PlannedState(name, "operator", action))
    given = None if isinstance(store, Checkpoint) else store
    return Plan(source.checkpoint.id, tuple(found), given, function)


def _declared(
    function: ProcessFunction | Iterable[StateDescriptor], source: CheckpointSource
) -> tuple[dict[str, StateDescriptor], list[str] | None]:
    """The keyed states that a program declares, and the names of its operator states; None if they are not known."""
    if not isinstance(function, ProcessFunction):
        return {each.name: each for each in function}, None
    if source.key_type is None:
        raise usage.no_key_type("the checkpoint does not say what type its keys have", detail=source.where)
    columns = BatchRecord.of(source.checkpoint.manifest).key or ("key",)
    key = columns if len(columns) > 1 else columns[0]
    job = Job(function, key=key, backend="reference", max_parallelism=source.max_parallelism or 128)
    task = Task(job, source.key_type)
    try:
        task.check()
        return task.declared()
    finally:
        task.close()
