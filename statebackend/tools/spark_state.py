"""Moves a stopped query of Spark's own stateful functions over: its state into a savepoint, its stream with it.

Spark's sources ``state-metadata`` and ``statestore`` read the state. Spark writes the rows of a state as files, from
which they go into the savepoint piece by piece. A variable becomes a state of its name, timers become timers. A group
state becomes the value state of `statebackend.spark_functions.group_states`. The new checkpointLocation has the part of
the old one that says which rows come next, and none of Spark's state.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from statebackend.checkpoint.files import PosixFiles
from statebackend.checkpoint.keyed.description import StateDescription, state_schema
from statebackend.checkpoint.keyed.savepoint_rows import keyed_part
from statebackend.checkpoint.store.savepoint_folder import Savepoint
from statebackend.errors import StateBackendError, UsageError, usage
from statebackend.keys import KeyGroupRange
from statebackend.state import (
    Duration,
    ListStateDescriptor,
    MapStateDescriptor,
    StateDescriptor,
    StateTtlConfig,
    ValueStateDescriptor,
    milliseconds,
    timer_state,
)
from statebackend.tools.progress_line import Progress
from statebackend.tools.results import Emigrated
from statebackend.tools.stream_rewind import Numbered, SparkCheckpoint
from statebackend.types import RowType, Type, of

#: A savepoint knows no key groups: a query with any ``max_parallelism`` starts from it.
_KEY_GROUPS = KeyGroupRange(0, 127)
_PIECE_BYTES = 64 << 20
#: The timers of a ``StatefulProcessor``, by the name that Spark's metadata have for them.
_TIMERS = {"$procTimers_keyToTimestamp": "processing", "$eventTimers_keyToTimestamp": "event"}
#: Spark's time of an entry without a timeout.
_NONE = -1
_GROUP_STATES = ("applyInPandasWithState", "flatMapGroupsWithState")
_LOGS = ("offsets", "commits")


def from_spark_state(
    spark: Any,
    checkpoint_location: str | os.PathLike[str],
    *,
    savepoint: str | os.PathLike[str],
    new_checkpoint_location: str | os.PathLike[str],
    operator: int = 0,
    ttl: Duration | Mapping[str, Duration] | None = None,
) -> Emigrated:
    """Move a stopped Spark query over: make a savepoint of its state, and a checkpointLocation to go on with.

    The query is one with ``transformWithState`` or ``applyInPandasWithState``. ``spark`` is a session on this machine,
    where all paths are folders. The query that goes on has the same source, a processor or function with the same
    grouping columns, ``start=StartFrom(savepoint, first_batch=...)``, and the new checkpointLocation; the result has
    these. A batch that Spark has planned and not committed is the first batch. Spark stores when a value expires, and
    not its time to live: ``ttl`` names that, for all variables or by the name of the variable. The old
    checkpointLocation stays as it is. O(state); memory: some 64 MB, or one key. If it raises, nothing is left.
    """
    query = _Query(spark, checkpoint_location)
    states = list(_states(query, operator, ttl))
    target = Savepoint(savepoint)
    with (
        _made(Path(os.path.abspath(os.fspath(new_checkpoint_location)))) as unfinished,
        Progress("moving Spark's state", len(states)) as progress,
    ):
        query.copy(PosixFiles(str(unfinished)))
        part = keyed_part(states[0].key_type.config(), _KEY_GROUPS.end + 1, _KEY_GROUPS, query.times())
        with target.write_whole([part]) as (writer,):
            for at, state in enumerate(states):
                rows = unfinished / f"rows-{at}"
                try:
                    writer.write_state(
                        StateDescription.of(state.descriptor).to_json(), state.batches(rows), state.schema
                    )
                finally:
                    shutil.rmtree(rows, ignore_errors=True)
                progress.advance(1)
    names = [each.descriptor.name for each in states]
    return Emigrated(target.uri, os.path.abspath(new_checkpoint_location), query.last + 1, names)


def _refused(reason: str, where: object, hint: str) -> UsageError:
    return UsageError(
        f"cannot move a query of Spark over: {reason}", code="USAGE.SPARK_STATE", detail=str(where), hint=hint
    )


@contextmanager
def _made(folder: Path) -> Iterator[Path]:
    """A folder to fill, which gets its name when the block ends; if that raises, it is removed."""
    unfinished = folder.with_name(f"{folder.name}.unfinished")
    for each in (folder, unfinished):
        if each.exists() and (not each.is_dir() or any(each.iterdir())):
            raise usage.target_exists(
                "new_checkpoint_location is not a new folder",
                detail=str(each),
                hint="give a path at which there is nothing, or remove what an earlier attempt left there",
            )
    files = PosixFiles(str(folder.parent))
    files.make_folder(unfinished.name)
    try:
        yield unfinished
        os.rename(unfinished, folder)
        files.sync_folder("")
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


class _Query:
    """A stopped query, by its checkpointLocation."""

    def __init__(self, spark: Any, location: str | os.PathLike[str]) -> None:
        self._spark = spark
        self._checkpoint = SparkCheckpoint(location, _refused, "copy it to a folder first")
        self.folder = self._checkpoint.folder
        if any(str(each.id) == self._checkpoint.id for each in spark.streams.active):
            raise _refused("it is running", self.folder, "stop it, and move it over then")
        commits = self._numbers("commits")
        planned = self._numbers("offsets")
        if not commits or not planned or planned[0] not in (commits[0], commits[0] + 1):
            raise _refused(
                "it has no committed batch, or its logs do not fit together",
                self.folder,
                "give the checkpointLocation of a query that has committed a batch, and let it run without "
                "asynchronous progress tracking",
            )
        #: The newest batch that is committed.
        self.last = commits[0]

    def _numbers(self, log: str) -> list[int]:
        return [each.number for each in self._newest(log)]

    def _newest(self, log: str) -> list[Numbered]:
        return self._checkpoint.numbered(self.folder / log)[:2]

    def times(self) -> dict[str, int | None]:
        """The time of the newest batch, and the watermark after it."""
        offsets, commit = (self._entry(f"{log}/{self.last}") for log in _LOGS)
        return {
            "now": offsets.get("batchTimestampMs"),
            "watermark": commit.get("nextBatchWatermarkMs") or None,
        }

    def _entry(self, name: str) -> dict[str, Any]:
        try:
            found = json.loads((self.folder / name).read_text(encoding="utf-8").splitlines()[1])
        except (OSError, IndexError, ValueError) as error:
            raise _refused(
                "an entry of its log cannot be read", self.folder / name, "give a whole one"
            ) from error
        return dict(found)

    def copy(self, files: PosixFiles) -> None:
        """Copy what says which rows come next: its id, the logs of its sources, and its own newest entries."""
        found = [self.folder / "metadata", *(self.folder / "sources").rglob("*")]
        found += [entry.path for log in _LOGS for entry in self._newest(log)]
        paths = [*found, *(path.with_name(f".{path.name}.crc") for path in found)]
        folders = {"", *_LOGS, "sources"}
        for path in sorted({path for path in paths if path.is_file()}):
            name = path.relative_to(self.folder)
            folders |= {str(each) for each in name.parents if each.name}
            files.make_folder(str(name.parent) if name.parent.name else "")
            sink = files.create(str(name))
            sink.write(path.read_bytes())
            sink.finish()
        for folder in sorted(folders):
            files.make_folder(folder)
            files.sync_folder(folder)

    # --- Spark's sources ---

    def operator(self, number: int) -> tuple[str, dict[str, Any]]:
        """The name of an operator and its properties; raises unless it alone has state."""
        rows = self._spark.read.format("state-metadata").load(str(self.folder)).collect()
        names = {row.operatorId: row.operatorName for row in rows}
        listed = ", ".join(f"{each} {name}" for each, name in sorted(names.items())) or "none"
        if number not in names:
            raise _refused(f"it has no operator {number} with state", listed, "pass operator= one of these")
        if len(names) > 1:
            raise _refused(
                "another operator of it has state of its own, which the new checkpointLocation would not have",
                listed,
                "run that operator in a separate query, before this query",
            )
        texts = [row.operatorProperties for row in rows]
        return names[number], json.loads(texts[0] or "{}")

    def frame(self, operator: int, *columns: str, **options: str) -> Any:
        """Columns of the state of an operator after the newest committed batch."""
        reader = self._spark.read.format("statestore").option("batchId", self.last)
        return (
            reader.option("operatorId", operator).options(**options).load(str(self.folder)).select(*columns)
        )


class _State(NamedTuple):
    """A state of the savepoint, and the frame of Spark's that it is made of."""

    descriptor: StateDescriptor
    key_type: Type
    frame: Any
    #: Makes the columns of a state, without the key, from the columns of the frame. A mask may leave out rows.
    shaped: Callable[..., list[pa.Array]]
    kept: Callable[..., Any] | None = None

    @property
    def schema(self) -> pa.Schema:
        return state_schema(self.key_type, self.descriptor, namespaces=False, ops=False)

    def batches(self, folder: Path) -> Iterator[pa.RecordBatch]:
        """The rows of the state; Spark writes its own into a folder that is not there yet."""
        schema = self.schema
        from statebackend.spark.driver_mode import by_place, write_files

        for table in write_files(self.frame, by_place(self.frame), str(folder), _PIECE_BYTES).pieces():
            key, *columns = (column.combine_chunks() for column in table.columns)
            if self.kept is not None:
                mask = self.kept(*columns)
                key, columns = key.filter(mask), [column.filter(mask) for column in columns]
            arrays = [key, *self.shaped(*columns)]
            yield pa.RecordBatch.from_arrays(
                [array.cast(field.type) for array, field in zip(arrays, schema, strict=True)], schema=schema
            )


def _states(query: _Query, operator: int, ttl: Duration | Mapping[str, Duration] | None) -> Iterator[_State]:
    """The states of an operator."""
    name, properties = query.operator(operator)
    if "stateVariables" in properties:
        variables = {each["stateName"]: each for each in properties["stateVariables"]}
        durations = _durations(variables, ttl)
        for variable, each in sorted(variables.items()):
            domain = _TIMERS.get(variable)
            if domain is not None:
                frame = query.frame(operator, "key", "expiration_timestamp_ms", readRegisteredTimers="true")
                yield _State(timer_state(domain), _type(frame, "key"), frame, _timers)
            elif not variable.startswith("$"):
                yield _variable(query, operator, each, durations.get(variable))
    elif name.startswith(_GROUP_STATES):
        yield from _group_states(query, operator)
    else:
        raise _refused(
            f"its operator is {name}",
            query.folder,
            "give a query with transformWithState or applyInPandasWithState",
        )


def _durations(
    variables: Mapping[str, Mapping[str, Any]], ttl: Duration | Mapping[str, Duration] | None
) -> dict[str, int]:
    """The time to live of each variable that has one, in milliseconds."""
    names = [name for name, each in variables.items() if each["ttlEnabled"]]
    given = ttl if isinstance(ttl, Mapping) else {} if ttl is None else dict.fromkeys(names, ttl)
    missing, unknown = sorted(set(names) - set(given)), sorted(set(given) - set(names))
    if missing:
        raise _refused(
            "Spark does not store how long values live",
            f"missing in ttl: {', '.join(missing)}",
            'pass the ttlDurationMs of the processor, for example ttl={"seen": "1 hour"}',
        )
    if unknown or (ttl is not None and not names):
        raise usage.option(
            "ttl= names variables without a time to live",
            detail=", ".join(unknown) or "no variable has one",
            hint=f"variables with one: {', '.join(sorted(names)) or 'none'}",
        )
    return {name: milliseconds("ttl", duration) for name, duration in given.items()}


def _type(frame: Any, *path: str) -> RowType:
    """The type of a column, or of a field in it."""
    kind = frame.schema
    for name in path:
        kind = getattr(kind, "elementType", kind)[name].dataType
    found = of(getattr(kind, "elementType", kind))
    assert isinstance(found, RowType)
    return found


def _variable(query: _Query, operator: int, about: Mapping[str, Any], ttl: int | None) -> _State:
    name, kind = about["stateName"], about["stateVariableType"]
    inner = () if ttl is None else ("value",)
    made: StateDescriptor
    try:
        if kind == "ValueState":
            frame = query.frame(operator, "key", "value", stateVarName=name)
            made = ValueStateDescriptor(name, _type(frame, "value", *inner))
        elif kind == "ListState":
            options = {"stateVarName": name, "flattenCollectionTypes": "false"}
            frame = query.frame(operator, "key", "list_value", **options)
            made = ListStateDescriptor(name, _type(frame, "list_value", *inner))
        elif kind == "MapState":
            frame = query.frame(operator, "key", "user_map_key", "user_map_value", stateVarName=name)
            made = MapStateDescriptor(
                name, _type(frame, "user_map_key"), _type(frame, "user_map_value", *inner)
            )
        else:
            raise _refused(f"a variable of it is a {kind}", name, "move a query with other variables")
    except StateBackendError as error:
        raise error.at(f"variable {name!r}") from None
    if ttl is not None:
        made.enable_time_to_live(StateTtlConfig(ttl))
    return _State(made, _type(frame, "key"), frame, _shapes(kind, ttl))


def _shapes(kind: str, ttl: int | None) -> Callable[..., list[pa.Array]]:
    """Return the function from columns of a variable to columns of a state. With a TTL, values come with their end."""
    if ttl is None:
        return lambda *columns: list(columns)

    def split(values: pa.Array) -> list[pa.Array]:
        return [
            pc.struct_field(values, "value"),
            pc.subtract(pc.struct_field(values, "ttlExpirationMs"), ttl),
        ]

    def split_lists(lists: pa.Array) -> list[pa.Array]:
        lengths = pc.fill_null(lists.value_lengths(), 0).to_numpy(zero_copy_only=False)
        ends = pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int32())
        return [pa.ListArray.from_arrays(ends, each) for each in split(lists.flatten())]

    if kind == "MapState":
        return lambda map_keys, values: [map_keys, *split(values)]
    return split if kind == "ValueState" else split_lists


def _timers(times: pa.Array) -> list[pa.Array]:
    return [times, pa.array(np.ones(len(times), np.bool_))]


def _group_states(query: _Query, operator: int) -> Iterator[_State]:
    """The state of each group with its timeout, and a timer for the timeout."""
    from statebackend.spark_functions.group_states import TIMERS, group_state

    frame = query.frame(operator, "key", "value.*")
    key_type = _type(frame, "key")
    has_timeouts = "timeoutTimestamp" in frame.columns

    def with_timeout(states: pa.Array, times: pa.Array | None = None) -> list[pa.Array]:
        if times is None:
            times = pa.array(np.full(len(states), _NONE, np.int64))
        return [pa.StructArray.from_arrays([states, times], names=["groupState", "timeoutTimestamp"])]

    yield _State(group_state(_type(frame, "groupState")), key_type, frame, with_timeout)
    if has_timeouts:
        timeouts = frame.select("key", "timeoutTimestamp")
        yield _State(
            timer_state(TIMERS), key_type, timeouts, _timers, lambda times: pc.not_equal(times, _NONE)
        )
