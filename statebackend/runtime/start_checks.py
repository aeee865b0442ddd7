"""Checks on the beginning of a job: its allowed and forbidden sources."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeAlias

from statebackend.checkpoint import Checkpoint, CheckpointReader, CheckpointStore
from statebackend.checkpoint.files import without_secrets
from statebackend.checkpoint.store.log import LogState
from statebackend.checkpoint.store.savepoint_folder import Savepoint
from statebackend.errors import StateBackendError, StateMigrationError, UsageError, usage
from statebackend.operator_state.operator_snapshots import PART as OPERATOR
from statebackend.runtime.batch_identity import BatchRecord
from statebackend.state import RESERVED, StateDescriptor

_TIMERS = f"{RESERVED}timers."

KEPT, MIGRATED, EMPTY = "kept", "migrated", "begun empty"
NOT_DECLARED, REFUSED = "stored, not declared", "refused"


@dataclass(frozen=True)
class PlannedState:
    """A state and its ``action`` at a start, with the reason if it is refused."""

    name: str
    #: ``"keyed"`` or ``"operator"``.
    part: str
    #: "kept", "migrated", "begun empty", "stored, not declared" or "refused".
    action: str
    reason: str | None = None

    def __str__(self) -> str:
        part = "operator state " if self.part == OPERATOR else ""
        return f"{part}{self.name!r}: {self.action}" + ("" if self.reason is None else f" - {self.reason}")


def planned(
    part: str,
    stored: Collection[str],
    requested: Mapping[str, tuple[str, str | None]],
    others: str = NOT_DECLARED,
) -> list[PlannedState]:
    """The plan of one part of the states, by name.

    ``requested`` has the action for a stored state, and its reason; ``others`` is that of states not requested.
    """
    found = []
    for name in sorted({*stored, *requested}):
        action: tuple[str, str | None] = (others, None)
        if name in requested:
            action = requested[name] if name in stored else (EMPTY, None)
        found.append(PlannedState(name, part, *action))
    return found


def without_renamed(stored: Collection[str], declared: Iterable[StateDescriptor]) -> dict[str, str]:
    """The name in the store of each stored state, by the name that it is to have."""
    found = {name: name for name in stored}
    for each in declared:
        if each.renamed_from in found and each.name not in found:
            found[each.name] = found.pop(each.renamed_from)
    return found


def check_name(name: object) -> None:
    """Raise unless a state of this name can be dropped from its source."""
    if not isinstance(name, str):
        raise usage.name(f"the name of a state is a str, not a {type(name).__name__}")
    if name.startswith(_TIMERS):
        raise usage.state_kind(
            "timers cannot be dropped", detail=name, hint="delete them in the function, or let them fire"
        )


def check_droppable(name: str, saved: Checkpoint | Savepoint) -> None:
    """Raise unless exactly one state has the name, which can be dropped."""
    check_name(name)
    named = _named(saved)
    where = f"checkpoint {saved.id}" if isinstance(saved, Checkpoint) else f"savepoint {saved.uri}"
    parts = {part for part, each in named if each == name}
    if not parts:
        raise no_state(name, [each for _, each in named if not each.startswith(_TIMERS)], where)
    if len(parts) > 1:
        raise ambiguous(name, where)


def names_of(saved: Checkpoint | Savepoint) -> list[str]:
    return [name for _, name in _named(saved)]


def _named(saved: Checkpoint | Savepoint) -> list[tuple[str, str]]:
    """The part, keyed or operator, and the name of each state."""
    if isinstance(saved, Checkpoint):
        return [
            (OPERATOR if each.extra.get("part") == OPERATOR else "keyed", state["name"])
            for each in saved.snapshots
            for state in each.states
        ]
    return [
        (part, state.described["name"])
        for part in ("keyed", OPERATOR)
        for each in saved.parts(part)
        for state in each.states
    ]


def no_state(name: str, known: Iterable[str], where: str) -> UsageError:
    """The error for a state that a checkpoint or savepoint does not have."""
    return UsageError(
        f"state {name!r} not found",
        code="USAGE.NO_STATE",
        detail=where,
        hint=f"there are: {', '.join(map(repr, sorted(set(known)))) or 'none'}",
    )


def ambiguous(name: str, where: str) -> UsageError:
    """The error for a name that two states share."""
    return usage.name(
        f"both a keyed state and an operator state are called {name!r}",
        detail=where,
        hint="give one of them another name",
    )


#: The sources of a job: a checkpoint, a store, a savepoint, or the path or uri of a store or a savepoint.
Beginning: TypeAlias = Checkpoint | CheckpointReader | Savepoint | str | os.PathLike[str]


def checked_first_batch(first_batch: object) -> None:
    """Raise unless a stream can be at such a batch."""
    if type(first_batch) is not int or first_batch < 0:
        raise usage.option("first_batch is the id of a batch, an int from 0")


@dataclass(frozen=True)
class StartFrom:
    """The beginning of a new store: pass it as ``start=``.

    The store begins with the state of ``source``: a savepoint, another store, or one of its checkpoints. The query
    begins with batch 0 or, in a running stream, with ``first_batch``. ``source`` then holds all rows before that batch.
    Once a batch is committed, or after a reset, the option is ignored.

    >>> StartFrom("backups/2024-03-01", first_batch=57)
    StartFrom('backups/2024-03-01', first_batch=57)
    """

    source: Beginning
    first_batch: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.source, (str, list, tuple)) and not self.source:
            raise usage.restore(
                "the source of StartFrom is empty", hint="leave start= out to begin with no state"
            )
        if not isinstance(self.source, (Checkpoint, CheckpointReader, Savepoint, str, os.PathLike)):
            raise usage.restore(
                f"cannot start from a {type(self.source).__name__}; expected a savepoint, a store, one of its "
                "checkpoints, or the address of a savepoint or a store"
            )
        if self.first_batch is not None:
            checked_first_batch(self.first_batch)

    def __repr__(self) -> str:
        source = self.source
        shown = without_secrets(os.fspath(source)) if isinstance(source, (str, os.PathLike)) else source
        return f"StartFrom({shown!r}, first_batch={self.first_batch})"


def source_of(source: Beginning) -> Checkpoint | Savepoint:
    """The source that backends restore from: the newest checkpoint of a store, a savepoint, or the given object."""
    if isinstance(source, CheckpointReader):
        return source.open_latest()
    if not isinstance(source, (str, os.PathLike)):
        return source
    store = CheckpointStore(source, single_writer=True)
    newest = store.latest()
    return Savepoint(source) if newest is None else store.open(newest)


def source_uri(source: Beginning) -> str | None:
    """Where a source is, without credentials; None for a checkpoint, which belongs to a store that is read."""
    if isinstance(source, (str, os.PathLike)):
        return CheckpointStore(source, single_writer=True).uri
    return None if isinstance(source, Checkpoint) else source.uri


def beginning_of(
    log: LogState | None, start: StartFrom | None, uri: str
) -> tuple[Checkpoint | Savepoint | None, set[int]]:
    """The source that a job begins with in an empty store, and the batches that may come; None is for a new store."""
    source: Checkpoint | Savepoint | None = None
    first_ids = {0}
    if log is not None and log.begins_at is not None:  # ``start`` no longer counts
        first_ids = {log.begins_at} if log.newest_restart else {0, log.begins_at}
    elif start is not None:
        source, first_ids = source_of(start.source), {start.first_batch or 0}
    dropped = frozenset() if log is None else log.dropped_states_of(None)
    return without_dropped(source, dropped, uri), first_ids


def without_dropped(
    source: Checkpoint | Savepoint | None, dropped: frozenset[str], uri: str
) -> Checkpoint | Savepoint | None:
    """What a job begins with, less the states that were dropped from it; `UsageError` if it lacks the state."""
    if not dropped:
        return source
    if isinstance(source, Savepoint):
        source.check_exists()
    try:
        for name in sorted(dropped):
            if source is None:
                raise no_state(name, [], "the job begins without state")
            check_droppable(name, source)
    except UsageError as error:
        raise UsageError(
            error.message,
            code=error.code,
            detail=error.detail,
            hint=f"{error.hint}. The state was dropped in {uri} before the first batch: "
            "sb.tools.rewind(store, to=None, checkpoint_location=None) takes that back",
        ) from None
    return None if source is None else source.without(dropped)


def check_key_columns(checkpoint: Checkpoint, columns: tuple[str, ...], uri: str) -> None:
    """Raise if a job with other key columns made the checkpoint; older versions did not record theirs."""
    noted = BatchRecord.of(checkpoint.manifest).key
    if noted is not None and noted != columns:
        raise StateMigrationError(
            "the state was kept by another key",
            code="STATE_MIGRATION.KEY_COLUMNS",
            detail=f"columns {', '.join(noted)} there, {', '.join(columns)} here, {uri}",
            hint="name the same columns with key=; if one has only been renamed, rename it back before "
            "foreachBatch: withColumnRenamed",
        )


def check_fixed(checkpoint: Checkpoint, fixed: Mapping[str, str], uri: str) -> None:
    """Raise if the function that made the checkpoint had other settings that a restart must not change."""
    noted = BatchRecord.of(checkpoint.manifest).fixed or {}
    for name in fixed:
        before = noted.get(name, fixed[name])
        if before != fixed[name]:
            raise StateMigrationError(
                f"[STATE_STORE_INVALID_CONFIG_AFTER_RESTART] Cannot change {name} from {before} to {fixed[name]} "
                "between restarts",
                code="STATE_MIGRATION.CONFIG",
                detail=uri,
                hint=f"set {name} to {before}, or begin with a new state=",
            )


def other_query(error: UsageError, store: CheckpointStore, location: str | None) -> UsageError:
    """The error for a store of another query, which may also be this query after it lost its place in the stream.

    ``error`` comes from the store; ``location`` is the folder in which the engine keeps the refused query's place.
    """
    newest, noted = None, None
    with suppress(StateBackendError):  # the query's own error matters more than damage in the store
        newest = store.latest()
        noted = None if newest is None else BatchRecord.of(store.open(newest).manifest).location
    if noted is None or location is None:
        return UsageError(error.message, code=error.code, detail=error.detail, hint=error.hint)
    if noted == location:
        return UsageError(
            "Spark's checkpointLocation was lost: the query that keeps its state here had the same one, and another "
            "id",
            code="USAGE.LOST_LOCATION",
            detail=f"{location}, state at {store.uri}, batch {newest}",
            hint="bring the checkpointLocation back from a copy. If there is none, begin the stream again where "
            f"batch {newest} ended, with a new state= and start=sb.spark.StartFrom(...) of this one",
        )
    return UsageError(
        error.message,
        code=error.code,
        detail=f"{store.uri}; its checkpointLocation is {noted}, this query's is {location}",
        hint=error.hint,
    )
