"""Plans a start: the outcome for each stored state, and approval to lose states that the function does not request."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from statebackend.checkpoint import Checkpoint
from statebackend.checkpoint.keyed.description import StateDescription
from statebackend.errors import StateMigrationError, UsageError, usage
from statebackend.functions import ProcessFunction, WholeKeysFunction
from statebackend.operator_state.operator_snapshots import PART as OPERATOR
from statebackend.runtime import Job, Task
from statebackend.runtime.batch_identity import BatchRecord
from statebackend.runtime.start_checks import (
    KEPT,
    MIGRATED,
    NOT_DECLARED,
    REFUSED,
    PlannedState,
    planned,
    without_renamed,
)
from statebackend.state import RESERVED, StateDescriptor
from statebackend.tools.rewrite import drop_state
from statebackend.tools.sources import CheckpointSource, source_of
from statebackend.types import Compatibility


@dataclass(frozen=True, repr=False)
class Plan:
    """The result of `plan`."""

    #: The checkpoint that the program would start from.
    checkpoint: int
    states: list[PlannedState]
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
        for dry_run in (True, False):
            for each in self._with(NOT_DECLARED):
                drop_state(self._store, each.name, dry_run=dry_run)
        return plan(self._store, self._function)


def plan(store: Any, function: Any) -> Plan:
    """Compare the states that a program declares with those in the newest checkpoint of a store. Reads no rows.

    ``function`` is the function of the query, whose method ``open`` is called; or the callable of
    `statebackend.spark.stateful`; or a list of descriptors of keyed states. ``store`` is a store or its path, or a
    checkpoint.

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
    declared, operators, others = _declared(function, source)
    states = {name: each for name, each in source.states().items() if not each.is_reserved}
    stored = {name: states[old] for name, old in without_renamed(states, declared.values()).items()}
    actions = {name: _action(stored.get(name), each) for name, each in declared.items()}
    found = planned("keyed", stored, actions, others)
    if operators is not None:
        found += planned(OPERATOR, source.operator_states(), dict.fromkeys(operators, (KEPT, None)), others)
    given = None if isinstance(store, Checkpoint) else store
    return Plan(source.checkpoint.id, found, given, function)


def _action(stored: StateDescription | None, declared: StateDescriptor) -> tuple[str, str | None]:
    try:
        if stored is None or stored.check(declared) is Compatibility.AS_IS:
            return KEPT, None
        return MIGRATED, stored.how(declared)
    except StateMigrationError as error:
        return REFUSED, error.message


def _declared(
    function: Any, source: CheckpointSource
) -> tuple[dict[str, StateDescriptor], list[str] | None, str]:
    """The keyed states that a program declares; the names of its operator states, None if they are not known; and what
    becomes of other states.
    """
    job = getattr(function, "_job", None)  # of a query
    if not isinstance(function, ProcessFunction) and not isinstance(job, Job):
        if isinstance(function, Iterable):
            return {each.name: each for each in function}, None, NOT_DECLARED
        raise usage.argument(
            f"cannot plan the start of a {type(function).__name__}",
            hint="give an object of the query's function, or a list of descriptors",
        )
    if source.key_type is None:
        raise usage.no_key_type("the checkpoint does not say what type its keys have", detail=source.where)
    if not isinstance(job, Job):
        columns = BatchRecord.of(source.checkpoint.manifest).key or ("key",)
        job = Job(
            function,
            key=columns if len(columns) > 1 else columns[0],
            backend="reference",
            max_parallelism=source.max_parallelism or 128,
            event_time=None if source.watermark is None else f"{RESERVED}time",
        )
    task = Task(job, source.key_type)
    try:
        task.check()
        keeps = isinstance(job.function, WholeKeysFunction)
        return (*task.declared(), KEPT if keeps else NOT_DECLARED)
    finally:
        task.close()
