"""Checks on the beginning of a job: what it may begin with, and what it must not."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from typing import TypeAlias

from statebackend.checkpoint import Checkpoint, CheckpointReader, CheckpointStore
from statebackend.checkpoint.store.savepoint_folder import Savepoint
from statebackend.errors import StateBackendError, StateMigrationError, UsageError
from statebackend.operator_state.operator_snapshots import PART as OPERATOR
from statebackend.runtime.batch_identity import BatchRecord
from statebackend.state import RESERVED

_TIMERS = f"{RESERVED}timers."


def check_name(name: object) -> None:
    """Raise unless a state of this name can be dropped from what has it."""
    if not isinstance(name, str):
        raise UsageError(f"the name of a state is a str, not a {type(name).__name__}")
    if name.startswith(_TIMERS):
        raise UsageError(
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
        f"there is no state {name!r}",
        code="USAGE.NO_STATE",
        detail=where,
        hint=f"there are: {', '.join(map(repr, sorted(set(known)))) or 'none'}",
    )


def ambiguous(name: str, where: str) -> UsageError:
    """The error for a name that two states share."""
    return UsageError(
        f"both a keyed state and an operator state are called {name!r}",
        detail=where,
        hint="give one of them another name",
    )


#: What a job may begin with: a checkpoint, a store, a savepoint, or the path or uri of a store or a savepoint.
Beginning: TypeAlias = Checkpoint | CheckpointReader | Savepoint | str | os.PathLike[str]

ON_GAP = ("fail", "restart_from_empty")


def check_beginning(restore_from: object, first_batch: object, on_gap: str) -> None:
    """Raise unless these options of a job make sense together."""
    if on_gap not in ON_GAP:
        raise UsageError("on_gap is 'fail' or 'restart_from_empty'")
    if first_batch is not None and (type(first_batch) is not int or first_batch < 0):
        raise UsageError("first_batch is the id of a batch, an int from 0")
    if isinstance(restore_from, (str, list, tuple)) and not restore_from:
        raise UsageError("restore_from is empty", hint="leave it out to begin with no state")
    kinds = (Checkpoint, CheckpointReader, Savepoint, str, os.PathLike)
    if restore_from is not None and not isinstance(restore_from, kinds):
        raise UsageError(
            "restore_from is a checkpoint, a store, a savepoint, or the address of a store or a savepoint"
        )
    if restore_from is not None and on_gap != "fail":
        raise UsageError(
            "a job begins with the state of restore_from= or, by on_gap=, with none",
            hint="pass first_batch= with restore_from= to begin with that state in a running stream",
        )


def source_of(restore_from: Beginning) -> Checkpoint | Savepoint:
    """The source that backends restore from: the newest checkpoint of a store, a savepoint, or what was given."""
    if isinstance(restore_from, CheckpointReader):
        return restore_from.open_latest()
    if not isinstance(restore_from, (str, os.PathLike)):
        return restore_from
    store = CheckpointStore(restore_from, single_writer=True)
    newest = store.latest()
    return Savepoint(restore_from) if newest is None else store.open(newest)


def without_dropped(
    source: Checkpoint | Savepoint | None, dropped: frozenset[str], uri: str
) -> Checkpoint | Savepoint | None:
    """What a job begins with, less the states that were dropped from it; `UsageError` if it has no such state."""
    if not dropped:
        return source
    if isinstance(source, Savepoint):
        source.check_exists()
    try:
        for name in sorted(dropped):
            if source is None:
                raise no_state(name, [], "the job begins with no state")
            check_droppable(name, source)
    except UsageError as error:
        raise UsageError(
            error.message,
            code=error.code,
            detail=error.detail,
            hint=f"{error.hint}. The state was dropped in {uri} before the first batch: "
            "sb.tools.rewind(store, to=None) takes that back",
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
            hint="bring the checkpointLocation back from a copy. If there is none, begin the stream anew where "
            f"batch {newest} ended, with a new state= and restore_from= this one",
        )
    return UsageError(
        error.message,
        code=error.code,
        detail=f"{store.uri}; its checkpointLocation is {noted}, that of this query is {location}",
        hint=error.hint,
    )
