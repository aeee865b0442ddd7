"""The operator state of one instance."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from statebackend.checkpoint import Checkpoint, CheckpointStore, DataWriter, Snapshot, StateSnapshot
from statebackend.checkpoint.store.pending import WritingThreads, tell
from statebackend.checkpoint.store.savepoint_folder import Savepoint
from statebackend.checkpoint.store.store import target_for
from statebackend.errors import ClosedError, StateMigrationError, overlapping_call, usage
from statebackend.operator_state.operator_snapshots import (
    BROADCAST,
    PART,
    SPLIT,
    UNION,
    OperatorContents,
    OperatorSnapshot,
    StateView,
    redistribute,
    restored_contents,
    savepoint_contents,
    write_savepoint,
)
from statebackend.operator_state.operator_states import BroadcastState, OperatorListState
from statebackend.state import (
    BackendMark,
    ListStateDescriptor,
    MapStateDescriptor,
    MarkStack,
    StateDescriptor,
)
from statebackend.types import Compatibility, K, T, Type, V
from statebackend.types.serializers import serializer_for


class OperatorStateBackend:
    """List and broadcast states of instance ``subtask_index`` of ``parallelism``.

    ``restore`` is a `Checkpoint`, a savepoint or its path, or a list of the `contents` of each instance of an earlier
    run, in order; their number may differ. The backend keeps restored states that are not declared, and includes them
    in snapshots and `contents` again.

    >>> first = OperatorStateBackend()
    >>> first.get_list_state(ListStateDescriptor("buffer", str)).add("a")
    >>> again = OperatorStateBackend(restore=[first.contents()])
    >>> again.is_restored, again.get_list_state(ListStateDescriptor("buffer", str)).get()
    (True, ['a'])
    """

    def __init__(
        self,
        *,
        subtask_index: int = 0,
        parallelism: int = 1,
        restore: Checkpoint | Savepoint | str | os.PathLike[str] | Sequence[Mapping[str, Any]] = (),
    ) -> None:
        if type(parallelism) is not int or parallelism < 1:
            raise usage.key_groups("parallelism is a positive int")
        if type(subtask_index) is not int or not 0 <= subtask_index < parallelism:
            raise usage.key_groups(
                "no instance has this index", detail=f"index {subtask_index}, parallelism {parallelism}"
            )
        self.subtask_index = subtask_index
        self.parallelism = parallelism
        #: True if it began with the state of an earlier run.
        self.is_restored = bool(restore)
        self._states: dict[str, OperatorListState | BroadcastState] = {}
        #: The restored states that are not declared yet; their parts never change.
        self._undeclared = _restored(restore, subtask_index, parallelism)
        #: The time of the restored batch; the backend itself lacks a clock.
        self._restored_now = _restored_now(restore)
        #: The newest committed snapshot, and those after it that may still be committed.
        self._taken: list[OperatorSnapshot] = []
        self._threads = WritingThreads()
        self._marks = MarkStack("OperatorStateBackend")
        self._closed = self._is_alone = False

    def check_open(self) -> None:
        """Raise `ClosedError` if the backend is closed."""
        if self._closed:
            raise ClosedError("the operator state backend is closed", hint="create another one")
        if self._is_alone:
            raise overlapping_call()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Refuse other calls, of finalisers and threads, while all states are taken to one moment."""
        self._is_alone = True
        try:
            yield
        finally:
            self._is_alone = False

    # --- states ---

    def get_list_state(self, descriptor: ListStateDescriptor[T]) -> OperatorListState[T]:
        """A list whose elements are split evenly over the instances when their number changes."""
        state: OperatorListState[T] = self._state(descriptor, ListStateDescriptor, SPLIT)
        return state

    def get_union_list_state(self, descriptor: ListStateDescriptor[T]) -> OperatorListState[T]:
        """A list that gives every instance all elements of all instances at a restore.

        Clear and rewrite it after a restore, or it grows with each one.
        """
        state: OperatorListState[T] = self._state(descriptor, ListStateDescriptor, UNION)
        return state

    def get_broadcast_state(self, descriptor: MapStateDescriptor[K, V]) -> BroadcastState[K, V]:
        """A map that is the same in every instance; `BroadcastState.read_only` is the side that reads."""
        state: BroadcastState[K, V] = self._state(descriptor, MapStateDescriptor, BROADCAST)
        return state

    def registered_state_names(self) -> list[str]:
        """The names of all states that were asked for, sorted."""
        self.check_open()
        return sorted(self._states)

    def undeclared_states(self) -> list[str]:
        """The names of restored states that are not declared yet, sorted; they are kept and written again.

        >>> first = OperatorStateBackend()
        >>> first.get_list_state(ListStateDescriptor("buffer", str)).add("a")
        >>> again = OperatorStateBackend(restore=[first.contents()])
        >>> again.undeclared_states()
        ['buffer']
        >>> _ = again.get_list_state(ListStateDescriptor("buffer", str))
        >>> again.undeclared_states()
        []
        """
        self.check_open()
        return sorted(self._undeclared)

    def _state(self, descriptor: Any, wanted: type[StateDescriptor], mode: str) -> Any:
        self.check_open()
        if not isinstance(descriptor, wanted):
            raise usage.descriptor(
                f"a {mode} state takes a {wanted.__name__}, not a {type(descriptor).__name__}",
                detail="operator state",
            )
        if descriptor.ttl_config is not None:
            raise usage.ttl(
                "operator state does not support TTL", detail=f"operator state {descriptor.name!r}"
            )
        if descriptor.renamed_from or descriptor.migrate or descriptor.new_fields:
            raise usage.descriptor(
                "operator state does not support renamed_from=, migrate= and new_fields=",
                detail=f"operator state {descriptor.name!r}",
                hint="read the old state in initialize_state, and write the new one",
            )
        state = self._states.get(descriptor.name)
        if state is not None:
            if state.mode != mode:
                raise _other_mode(descriptor.name, state.mode, mode)
            state.descriptor.check_same_state(descriptor)
            return state
        restored = self._undeclared.get(descriptor.name)
        state = self._create(copy.copy(descriptor), mode, restored)
        self._undeclared.pop(descriptor.name, None)
        self._states[descriptor.name] = state
        return state

    def _create(
        self, descriptor: Any, mode: str, restored: dict[str, Any] | None
    ) -> OperatorListState | BroadcastState:
        if restored is not None and restored["mode"] != mode:
            raise _other_mode(descriptor.name, restored["mode"], mode)
        types = {} if restored is None else restored["config"]["types"]
        if mode != BROADCAST:
            elements = [] if restored is None else restored["elements"]
            elements = _migrated(elements, types.get("element"), descriptor.element_type, descriptor.name)
            return OperatorListState(self, descriptor, mode, elements)
        entries = [] if restored is None else restored["entries"]
        keys = [key for key, _ in entries]
        keys = _migrated(keys, types.get("key"), descriptor.key_type, descriptor.name, as_is_only=True)
        values = [value for _, value in entries]
        values = _migrated(values, types.get("value"), descriptor.value_type, descriptor.name)
        return BroadcastState(self, descriptor, list(zip(keys, values, strict=True)))

    def contents(self) -> OperatorContents:
        """All contents as plain data, for ``restore=`` and `redistribute`. O(elements)."""
        self.check_open()
        declared = {name: state.contents() for name, state in self._states.items()}
        return {**_copied(self._undeclared), **declared}

    # --- checkpoints ---

    def snapshot(
        self, checkpoint_id: int, store: CheckpointStore | DataWriter, *, incremental: bool = True
    ) -> Snapshot:
        """Begin to write all contents, as they are now, for a checkpoint of a store. O(number of states).

        The rest runs in the background. It writes nothing if all states are empty, or if they are as they were in the
        newest committed checkpoint; with ``incremental=False`` it writes the latter again.
        """
        self.check_open()
        views = self._views()
        writer = target_for(store, checkpoint_id)
        try:
            before = self._newest_committed()
            states = tuple([views[name].described(name) for name in sorted(views)])
            if not incremental or before is None or not before.can_stand_for(writer, views, states):
                before = None
            contents = StateSnapshot(
                checkpoint_id,
                writer.epoch,
                self.subtask_index,
                self.parallelism,
                files=() if before is None else before.contents.files,
                states=states,
                extra={"part": PART},
            )
            snapshot = OperatorSnapshot(writer, views, contents)
            snapshot.begin(snapshot.write, self._threads)
        except BaseException:
            writer.abort()
            raise
        self._taken.append(snapshot)
        return snapshot

    def _newest_committed(self) -> OperatorSnapshot | None:
        self._taken = [each for each in self._taken if not each.writer.is_aborted]
        for at in range(len(self._taken) - 1, -1, -1):
            if self._taken[at].writer.is_committed:
                del self._taken[:at]
                return self._taken[0]
        return None

    def notify_checkpoint_complete(self, checkpoint_id: int) -> None:
        """Tell that a checkpoint is committed, if another process commits."""
        tell(self._taken, checkpoint_id, is_committed=True)

    def notify_checkpoint_aborted(self, checkpoint_id: int) -> None:
        """Tell that a checkpoint will never be committed, if another process commits."""
        tell(self._taken, checkpoint_id, is_committed=False)

    def savepoint(self, store_or_uri: Any) -> Savepoint:
        """Write all contents, as they are now, next to the keyed state in the folder of a savepoint. O(elements).

        The savepoint has the time of the restored batch, if any, unless the keyed state has a time.
        """
        self.check_open()
        savepoint = Savepoint.at(store_or_uri)
        write_savepoint(savepoint, self._views(), self.subtask_index, self.parallelism, self._restored_now)
        return savepoint

    def _views(self) -> dict[str, StateView]:
        with self._alone():
            views = {name: _view_of(state) for name, state in self._undeclared.items()}
            return views | {name: state.view() for name, state in self._states.items()}

    # --- marks ---

    def mark(self) -> BackendMark:
        """Open a point to roll back to. O(number of states)."""
        self.check_open()
        with self._alone():
            return self._marks.open({name: state.keep() for name, state in self._states.items()})

    def rollback(self, mark: BackendMark) -> None:
        """Return all states to their contents at ``mark``; rules as for keyed backends. O(number of states).

        A state that was first asked for since then gets its restored contents, or none.
        """
        self.check_open()
        with self._alone():
            kept = self._marks.back_to(mark)
            for name, state in self._states.items():
                state.put_back(kept.get(name))

    def release(self, mark: BackendMark) -> None:
        """Give up the possibility to roll back to ``mark``. Idempotent."""
        if not self._closed:
            self._marks.release(mark)

    # --- the end ---

    def close(self) -> None:
        """Drop everything; every later call except `close` raises `ClosedError`."""
        self._closed = True
        self._marks.close()
        self._threads.close()  # writes that have begun go on
        self._taken = []
        self._states = {}
        self._undeclared = {}

    def __enter__(self) -> OperatorStateBackend:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return (
            f"<OperatorStateBackend {self.subtask_index} of {self.parallelism}, {len(self._states)} states>"
        )


def _restored(restore: Any, subtask_index: int, parallelism: int) -> OperatorContents:
    """The share of an instance in the contents to restore."""
    if isinstance(restore, Checkpoint):
        return restored_contents(restore, subtask_index, parallelism)
    if _is_savepoint(restore):
        return savepoint_contents(Savepoint.at(restore), subtask_index, parallelism)
    if not isinstance(restore, (list, tuple)) or not all(isinstance(each, Mapping) for each in restore):
        raise usage.restore(
            "restore is a Checkpoint, a savepoint, or a list with the contents of each old instance",
            hint="write restore=store.open(id), restore=store.open_snapshots(snapshots) or restore=[contents]",
        )
    if not restore:
        return {}
    # Copy it: the caller may go on changing it.
    return _copied(redistribute(restore, parallelism)[subtask_index])


def _copied(contents: Mapping[str, Mapping[str, Any]]) -> OperatorContents:
    """A copy that shares stored values only, which are bytes. O(elements)."""
    parts = ("elements", "entries")
    return {
        name: {part: list(held) if part in parts else copy.deepcopy(held) for part, held in state.items()}
        for name, state in contents.items()
    }


def _restored_now(restore: Any) -> int | None:
    if isinstance(restore, Checkpoint):
        return restore.now
    return Savepoint.at(restore).now if _is_savepoint(restore) else None


def _is_savepoint(restore: Any) -> bool:
    return isinstance(restore, (Savepoint, os.PathLike)) or (isinstance(restore, str) and restore != "")


def _view_of(state: Mapping[str, Any]) -> StateView:
    rows = state["entries" if state["mode"] == BROADCAST else "elements"]
    return StateView(state["mode"], state["config"]["types"], rows)


def _other_mode(name: str, has: str, wanted: str) -> StateMigrationError:
    return StateMigrationError(
        f"operator state {name!r} is a {has} state, and is asked for as a {wanted} state",
        code="STATE_MIGRATION.REDECLARED",
        hint="use another name for the other state",
    )


def _migrated(
    data: list[Any], old_config: Any, declared: Type, name: str, as_is_only: bool = False
) -> list[Any]:
    """Convert serialised values, written under ``old_config``, to bytes of the declared type."""
    if old_config is None:
        return list(data)
    serializer = serializer_for(declared)
    answer = serializer.compatibility(old_config)
    if answer is Compatibility.AS_IS:
        return list(data)
    if as_is_only:
        raise StateMigrationError(
            "the key type of a broadcast state cannot change",
            code="STATE_MIGRATION.KEY_TYPE",
            detail=f"operator state {name!r}",
        )
    try:
        migrate = serializer.migration(old_config)
    except StateMigrationError as error:
        raise error.at(f"operator state {name!r}") from None
    return [None if each is None else migrate(each) for each in data]
