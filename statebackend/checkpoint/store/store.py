"""The store of checkpoints: its writer, commits and retention."""

from __future__ import annotations

import dataclasses
import datetime
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from statebackend import types
from statebackend.checkpoint.files import StoreFiles
from statebackend.checkpoint.files.layout import data_folder, entry_name
from statebackend.checkpoint.files.store_files import FencedError, map_in_threads, storing
from statebackend.checkpoint.store.checkpoint_reader import Checkpoint, CheckpointReader
from statebackend.checkpoint.store.data_files import DataWriter
from statebackend.checkpoint.store.encryption import BlockCipher, Encryption
from statebackend.checkpoint.store.log import CheckpointKey, LogState, Record, Restart, TimeOverride
from statebackend.checkpoint.store.log_writer import LogWriter, conflict
from statebackend.checkpoint.store.manifest import Manifest, StateSnapshot, StoredFile, snapshots_of
from statebackend.checkpoint.store.metadata import Metadata, check_same_use
from statebackend.checkpoint.store.retention import AUTO, Retain, Retention, sizes_of
from statebackend.checkpoint.store.sealed import Malformed, integer
from statebackend.errors import CommitConflictError, CorruptCheckpointError, UsageError, usage
from statebackend.state import Duration, milliseconds

_log = logging.getLogger(__name__)


class CheckpointStore(CheckpointReader):
    """A store of checkpoints, some of which are kept.

    It is at a path, or in an object store, at ``s3://``, ``gs://`` or ``abfss://``, which takes the ``options`` of
    obstore in addition to those that obstore finds in the environment.

    ``retain`` is the number of checkpoints to keep, or a duration, after which a checkpoint goes. ``"auto"`` keeps the
    newest 100 and one for each of the last 24 hours, as long as their files take at most 3 times the size of the state
    and 1 GB in addition to the newest checkpoint. A duration and ``"auto"`` always keep the newest two.

    Making one touches nothing; reading needs nothing more. `open_for_writing` takes an epoch, which ends every other
    writer's. ``single_writer`` is needed where nothing can keep a second writer out: on mounts that have
    neither links nor exclusive renames, and in object stores without conditional writes. By passing it you vouch that
    one process writes.
    ``compression`` of data files is ``"zstd"``, ``"lz4"`` or None; it may change from one opening to the next.
    ``encryption`` is a picklable object with the methods ``encrypt`` and ``decrypt``, both of a file's name, an offset
    in it and a block of bytes; a store is made with it or without, and stays so.
    ``max_clock_jump``, a duration, is how far the clock of a job may be ahead of the last committed
    time; None allows any. All methods may be called from any thread. A pickled store is one that is not open for
    writing.

    >>> CheckpointStore("/nowhere", retain=3).checkpoints()
    []
    """

    def __init__(
        self,
        uri: str | os.PathLike[str],
        *,
        retain: int | Duration = AUTO,
        single_writer: bool = False,
        options: Mapping[str, str] | None = None,
        compression: str | None = "zstd",
        encryption: BlockCipher | None = None,
        max_clock_jump: Duration | None = "30 days",
        _files: StoreFiles | None = None,
    ) -> None:
        if isinstance(retain, (str, datetime.timedelta)) and retain != AUTO:
            retain = datetime.timedelta(milliseconds=milliseconds("retain", retain, least=0))
        elif retain != AUTO and (type(retain) is not int or retain < 1):
            raise usage.option(f'unknown retain={retain!r}; expected a number from 1, a duration or "auto"')
        if compression not in ("zstd", "lz4", None):
            raise usage.option(f'unknown compression={compression!r}; expected "zstd", "lz4" or None')
        super().__init__(
            uri, single_writer=single_writer, options=options, encryption=encryption, _files=_files
        )
        self._retain: Retain = retain
        self._compression = compression
        #: How far, in milliseconds, a clock may be ahead of the last committed time; None: any distance.
        self.max_clock_jump = (
            None if max_clock_jump is None else milliseconds("max_clock_jump", max_clock_jump)
        )
        self._lock = threading.RLock()
        self._writer = LogWriter(self._files)
        self._retention = Retention(self._files, self._writer, self._built_on)
        #: The newest checkpoint that this writer has committed or found; None if it cannot be read.
        self._newest: Manifest | None = None
        #: The encryption of data files, once the store is open for writing.
        self._encryption: Encryption | None = None
        #: Snapshots in flight, and the files that each builds on.
        self._in_flight: dict[DataWriter, frozenset[str]] = {}
        #: Files that snapshots of other processes may build on, by the id of their checkpoint.
        self._lent: dict[int, frozenset[str]] = {}

    def __reduce__(self) -> tuple[object, ...]:
        return self._maker(), ()

    def unopened(self) -> CheckpointStore:
        """Another store at the same place with the same options, not open for writing."""
        return self._maker()()

    def over(self, wrap: Callable[[StoreFiles], StoreFiles]) -> CheckpointStore:
        """Another store like `unopened`, over what ``wrap`` makes of its files."""
        return self._maker(wrap(self._files))()

    def _maker(self, files: StoreFiles | None = None) -> Callable[[], CheckpointStore]:
        return partial(
            CheckpointStore,
            self.address,
            retain=self._retain,
            compression=self._compression,
            encryption=self.encryption,
            max_clock_jump=self.max_clock_jump,
            _files=self._files if files is None else files,
        )

    # --- reading ---

    def open_readonly(self) -> CheckpointReader:
        """The same store for reading only."""
        return CheckpointReader(self.uri, encryption=self.encryption, _files=self._files)

    # --- becoming the writer ---

    @property
    def epoch(self) -> int:
        """The epoch of this writer; `UsageError` if the store is not open for writing."""
        return self._writer.epoch

    @property
    def is_open_for_writing(self) -> bool:
        """True if this store holds an epoch, as far as it knows."""
        return self._writer.is_open

    def open_for_writing(
        self,
        *,
        query: str | None = None,
        key_type: object = None,
        max_parallelism: int | None = None,
        refuse_live: bool = False,
    ) -> CheckpointStore:
        """Become the writer of the store, and return it. Reads all manifests; removes files that no manifest names.

        A new store is made for this query, type of keys and number of key groups; an existing one must have
        been made for them: `StateMigrationError` for another key type or ``max_parallelism``, `UsageError` for
        another query. Arguments that are None are not compared.

        Every other writer is fenced: its commits raise `CommitConflictError` from now on. With ``refuse_live``
        a writer that is known to be alive makes this call raise `UsageError` instead; on shared file systems
        without locks, in object stores, and within one process after a fork, that cannot always be known. A
        store that is open already, and has not been fenced or failed, only compares.
        """
        wanted = self._wanted(query, key_type, max_parallelism)
        with self._lock:
            if self.is_open_for_writing:
                check_same_use(self._writer.metadata, wanted, self.uri)
                return self
            self._writer.open(wanted, refuse_live=refuse_live)
            self._begin_or_close()
        return self

    def check_use(self, *, query: str | None, key_type: object, max_parallelism: int | None) -> None:
        """Raise if `open_for_writing` would refuse this use of the store; a new store takes any. Changes nothing."""
        existing = self.metadata()
        if existing is not None:
            check_same_use(existing, self._wanted(query, key_type, max_parallelism), self.uri)

    def log_state(self) -> LogState | None:
        """The state of the log, also of a store that is not open; None without a store."""
        return None if self.metadata() is None else self._log().state

    def repair(self, to: int, damaged: list[str]) -> None:
        """Continue from checkpoint ``to`` although the newest entries of the log are damaged; remove those entries.

        `sb.tools.repair` finds both.
        """
        with self._lock:
            self._writer.open(self._wanted(None, None, None), refuse_live=True, over_damage=True)
            self._begin_or_close()
            with self:
                self.rewind(to)
                with storing("removing damaged entries"):
                    self._files.retire(damaged, self.epoch)

    def _begin_or_close(self) -> None:
        try:
            self._begin()
        except BaseException:
            self._writer.close()
            raise

    def _wanted(self, query: str | None, key_type: object, max_parallelism: int | None) -> Metadata:
        return Metadata(
            secrets.token_hex(16),
            query,
            None if key_type is None else types.of(key_type).config(),
            max_parallelism,
            None if self.encryption is None else Encryption.probed(self.encryption).to_json(),
        )

    @contextmanager
    def made_whole(
        self, *, query: str | None, key_type: object, max_parallelism: int | None
    ) -> Iterator[CheckpointStore]:
        """Make a new store in a ``with`` block. When the block ends, all of it exists; if anything fails, nothing.

        After a crash within the block, opening the store raises `CorruptCheckpointError`.

        >>> import tempfile
        >>> folder = tempfile.TemporaryDirectory()
        >>> with CheckpointStore(folder.name).made_whole(query="q", key_type=int, max_parallelism=128) as store:
        ...     _ = store.commit(7)
        >>> CheckpointStore(folder.name).latest()
        7
        >>> folder.cleanup()
        """
        with self._lock:
            self._writer.open(self._wanted(query, key_type, max_parallelism), is_whole_later=True)
        with self:
            try:
                self._begin()
                yield self
                with self._lock:
                    self._writer.complete()
            except BaseException:
                # If the outcome of a write is not known, the store is refused, or it is whole.
                if self.is_open_for_writing:
                    self._unmake()
                raise

    def _unmake(self) -> None:
        """Remove what this writer has made in a new store: the entries of its log last, which refuse other writers."""
        with self._lock:
            epoch = self.epoch
            for writer in list(self._in_flight):
                writer.abort()
            files = [f"{data_folder(epoch)}/{name}" for name in self._files.names(data_folder(epoch))]
            try:
                with storing("removing a store that was not finished"):
                    self._files.retire(files, epoch)
                    self._files.retire(map(entry_name, range(epoch, self._writer.next_sequence)), epoch)
            except (OSError, FencedError) as error:
                _log.warning("a store that was not finished stays, and cannot be opened: %s", error)

    def _begin(self) -> None:
        self._encryption = self._agreed(self._writer.metadata)
        self._retention, self._newest = Retention(self._files, self._writer, self._built_on), None
        self._in_flight, self._lent = {}, {}
        kept = self._writer.state.kept
        try:
            manifests = map_in_threads(self._manifest_if_whole, kept)
        except UsageError as error:  # dropped, which only a newer writer could
            raise self._overtaken() from error
        for key, manifest in zip(kept, manifests, strict=True):
            if manifest is not None:
                self._note(key, manifest, self._committed_at(key, manifest))
            else:
                self._retention.committed(key, None, self._committed_at(key, None))
                self._newest = None
        self._retention.drop_outputs()
        self._retention.clear_away()
        if not self._writer.holds():
            raise self._overtaken()

    def _manifest_if_whole(self, key: CheckpointKey) -> Manifest | None:
        try:
            return self._manifest(key, self._writer.metadata)
        except CorruptCheckpointError as error:
            _log.warning("no file of the store will be removed while this one cannot be read: %s", error)
            return None

    def _note(self, key: CheckpointKey, manifest: Manifest, at: float) -> None:
        self._retention.committed(key, sizes_of(manifest), at, manifest.output_names)
        self._newest = manifest

    def _committed_at(self, key: CheckpointKey, manifest: Manifest | None) -> float:
        """When a checkpoint was committed, in seconds since 1970; asked only where that decides how long it stays."""
        if manifest is not None and manifest.written is not None:
            return manifest.written / 1000
        if isinstance(self._retain, int):
            return 0.0
        with storing(f"looking for {key.name}"):
            return self._files.modified(key.name)

    # --- taking a checkpoint ---

    def begin_snapshot(self, checkpoint_id: int | None = None) -> DataWriter:
        """Make the writer for one snapshot's files; one for each subtask, and any number in flight.

        Until ``checkpoint_id`` is committed, or the snapshot aborted, the files of the checkpoint that is newest now
        are kept, because the snapshot may build on them. None: for files of the next manifest, whichever that is, such
        as a base written in the background. The writer stays in flight until they are named.
        """
        with self._lock:
            writer = self._data_writer(checkpoint_id, self._ended)
            self._in_flight[writer] = writer.builds_on
            return writer

    def data_writer(self, checkpoint_id: int | None = None) -> DataWriter:
        """The same for another process, to be pickled. This process does not know its files: discard them.

        The files that it may build on are kept until a checkpoint of this id or a later one is committed, or this one
        is aborted.
        """
        with self._lock:
            writer = self._data_writer(checkpoint_id, None)
            if checkpoint_id is not None:
                self._lent[checkpoint_id] = self._lent.get(checkpoint_id, frozenset()) | writer.builds_on
            return writer

    def _data_writer(
        self, checkpoint_id: int | None, ended: Callable[[DataWriter], None] | None
    ) -> DataWriter:
        if checkpoint_id is not None:
            try:
                integer(checkpoint_id, "the checkpoint id")
            except Malformed as error:
                raise usage.snapshot(
                    f"no snapshot can be taken: {error}", hint="write int(...) of a numpy number"
                ) from None
        epoch = self._writer.epoch
        builds_on = self._retention.names_of(None if checkpoint_id is None else self._retention.newest)
        return DataWriter(
            self._files, epoch, checkpoint_id, ended, builds_on, self._compression, self._encryption
        )

    def commit(
        self,
        checkpoint_id: int,
        snapshots: Iterable[StateSnapshot | Mapping[str, object]] = (),
        *,
        outputs: Mapping[str, Iterable[StoredFile]] | None = None,
        files: Iterable[StoredFile] = (),
        now: int | None = None,
        watermark: int | None = None,
        batch: Mapping[str, object] | None = None,
        progress: Mapping[str, object] | None = None,
    ) -> Checkpoint:
        """Publish a checkpoint: once this call has returned, a restart finds it. Durable.

        ``snapshots``, one of each subtask, may be given as JSON; ``outputs`` are the batch's, by name, and ``files``
        belong to none of these. ``now`` is by default the time of the snapshots. ``batch`` tells it from other batches
        of this number, and ``progress`` is free. The same call drops the checkpoints that are no longer retained.

        `CommitConflictError`: this id is committed already, or another writer has opened the store. Nothing
        has been published then, and nothing removed: `abort` does that. `CorruptCheckpointError`: a file is
        missing or of another length. `StoreError` with code ``STORE.UNKNOWN``: the system failed at the last step; the
        store must be opened again to learn whether the checkpoint is there. Any other error: it is not there.
        """
        with self._lock:
            # 1. Describe the checkpoint.
            epoch = self._writer.epoch
            taken = snapshots_of(snapshots)
            if now is None:
                now = max((each.now for each in taken if each.now is not None), default=None)
            manifest = Manifest(
                checkpoint_id,
                epoch,
                self._writer.metadata.store,
                taken,
                tuple(files),
                now,
                dict(progress or {}),
                self._writer.next_sequence,
                self._writer.state.incarnation,
                watermark,
                dict(batch or {}),
                {name: tuple(each) for name, each in (outputs or {}).items()},
                written=int(1000 * time.time()),
            )
            # 2. Check that it follows the newest one, and that its files are there.
            self._check_order(checkpoint_id)
            self._check_files(manifest)
            # 3. Write the parts of the manifest that the newest one does not share.
            manifest, made = self._parts.written(manifest, self._newest)
            # 4. Append the entry: the checkpoint exists once this returns, and older ones are dropped.
            dropped = self._append_commit(manifest, made)
            # 5. Tell its snapshots, and remove files. Errors from here on are put off, not raised.
            self._settle(manifest)
            self._retention.dropped(dropped)
            try:
                self._retention.remove()
            except FencedError:
                self._writer.fenced()
            except OSError as error:
                _log.warning("old checkpoints stay until the next commit: %s", error)
            return Checkpoint(self._files, self._writer.metadata, manifest, encryption=self._encryption)

    def _check_order(self, checkpoint_id: int) -> None:
        newest = self._retention.newest
        if newest is None or checkpoint_id > newest.checkpoint_id:
            return
        if checkpoint_id in self._kept_ids():
            raise conflict(f"checkpoint {checkpoint_id} is already committed", self.uri)
        if checkpoint_id < newest.checkpoint_id:
            raise usage.checkpoint_id(
                f"checkpoint {checkpoint_id} cannot follow checkpoint {newest.checkpoint_id}",
                hint="checkpoints are committed in the order of their ids",
            )

    def _kept_ids(self) -> set[int]:
        return {key.checkpoint_id for key in self._writer.state.kept}

    def _append_commit(self, manifest: Manifest, parts: Sequence[StoredFile]) -> list[CheckpointKey]:
        """Append the entry of a commit; return the checkpoints that it drops. ``parts`` are new files."""
        key = CheckpointKey(manifest.checkpoint_id, manifest.name)
        dropped = self._retention.excess(self._retain, time.time(), manifest)
        state = self._writer.state.committed(key, dropped, self._retention.swept(dropped))
        try:
            self._writer.append(
                "commit",
                state,
                manifest=manifest,
                doing=f"committing checkpoint {key.checkpoint_id}",
                names_new_files=any(file.epoch == manifest.epoch for file in manifest.all_files.values()),
            )
        except BaseException:
            if self._writer.is_unknown:
                # The checkpoint may exist, so its files have to stay. The next opening shows the outcome.
                for writer in self._in_flight:
                    writer.settle(set(manifest.all_files))
            elif not self._writer.is_over:
                self._parts.remove(parts)
            raise
        return dropped

    def check_held(self) -> None:
        """Raise `CommitConflictError` if a newer writer has opened the store; one look at the store."""
        with self._lock:
            self._writer.check_held()

    def _check_files(self, manifest: Manifest) -> None:
        """Every file that the checkpoint before did not name is there with its size, and is not about to be removed."""
        kept = set[str]().union(*self._built_on())
        before = self._retention.names_of(self._retention.newest)
        new = [file for file in manifest.all_files.values() if file.name not in before]

        def size_of(file: StoredFile) -> int | None:
            with storing(f"looking for {file.name}"):
                return self._files.size(file.name)

        for file, size in zip(new, map_in_threads(size_of, new), strict=True):
            is_ours = file.epoch == manifest.epoch or file.name in kept or self._retention.is_known(file.name)
            if not (is_ours and size == file.size) and not self._writer.holds():
                # A newer writer has removed the file, or made it.
                raise self._writer.fenced()
            if not is_ours:
                raise UsageError(
                    "a snapshot names a file of an earlier writer that no checkpoint names",
                    code="USAGE.STALE_SNAPSHOT",
                    detail=f"{file.name}, checkpoint {manifest.checkpoint_id}",
                    hint="take the snapshot again",
                )
            if size != file.size:
                what = "missing" if size is None else "not as long as it was written"
                raise CorruptCheckpointError(
                    f"a file of the snapshot is {what}",
                    detail=f"{file.name}, checkpoint {manifest.checkpoint_id}",
                    hint="it is not committed; abort it and take the snapshot again",
                )

    def _settle(self, manifest: Manifest) -> None:
        """Note a commit here and in the writers of its snapshots, which give up the files that it names."""
        self._note(CheckpointKey(manifest.checkpoint_id, manifest.name), manifest, time.time())
        self._parts.keep_only(manifest)
        names = set(manifest.all_files)
        for writer in list(self._in_flight):
            settled, is_whole = writer.settle(names)
            past = writer.checkpoint_id is not None and writer.checkpoint_id <= manifest.checkpoint_id
            if writer.checkpoint_id == manifest.checkpoint_id and is_whole:
                writer.committed()
            if past:
                self._in_flight[writer] = frozenset()
            if (settled or past) and is_whole:
                del self._in_flight[writer]
        self._lent = {each: lent for each, lent in self._lent.items() if each > manifest.checkpoint_id}

    def abort(self, checkpoint_id: int) -> None:
        """Give up a checkpoint that is not committed: the files of its snapshots in this process are removed."""
        with self._lock:
            writers = [writer for writer in self._in_flight if writer.checkpoint_id == checkpoint_id]
            self._lent.pop(checkpoint_id, None)
        for writer in writers:
            writer.abort()

    def discard(self, snapshot: StateSnapshot | Mapping[str, object]) -> None:
        """Remove the files of a snapshot that another process made for this writer and that is given up.

        Only files in the folder of this epoch that no checkpoint names are removed. This is for a process that
        is gone: one that goes on may still build on some of the files, and removes the others itself when it is told,
        by `notify_checkpoint_aborted`.
        """
        (given,) = snapshots_of([snapshot])
        with self._lock:
            epoch = self._writer.epoch
            named = self._retention.named()
            for file in given.files:
                if file.epoch == epoch and named is not None and file.name not in named:
                    with storing(f"removing {file.name}"):
                        self._files.remove(file.name)

    def _built_on(self) -> list[frozenset[str]]:
        """The names that snapshots on their way may build on, in this process and in others."""
        return [*self._in_flight.values(), *self._lent.values()]

    def _ended(self, writer: DataWriter) -> None:
        with self._lock:
            self._in_flight.pop(writer, None)

    # --- restart, rewind, other times, dropped states ---

    @property
    def incarnation(self) -> str:
        """The incarnation of this writer's commits: new after every restart and rewind, not by opening."""
        return self.done.incarnation

    @property
    def done(self) -> LogState:
        """The state of the log: the kept checkpoints, and the changes other than commits."""
        _ = self._writer.epoch
        return self._writer.state

    def restart(self, *, begins_at: int = 0) -> None:
        """Drop every checkpoint, so that ids may start again. The purpose of the store stays.

        One entry of the log does it; removing the files follows.
        """
        with self._lock:
            self._check_quiet()
            restart = Restart(secrets.token_hex(16), begins_at)
            self._change(
                "restart",
                self._writer.state.restarted(restart),
                incarnation=restart.incarnation,
                begins_at=begins_at,
            )

    def rewind(self, to: int | None) -> list[Checkpoint]:
        """Drop every checkpoint after ``to``, or all for None; return the dropped ones, oldest first.

        `UsageError` if ``to`` is not there, `CorruptCheckpointError` if it is damaged: every file of it is read first.
        One entry of the log does it; removing the files follows. For None, states that were dropped from the source of
        the first batch are there again.
        """
        with self._lock:
            state = self.done
            if to is not None and to not in self._kept_ids():
                there = ", ".join(map(str, sorted(self._kept_ids()))) or "none"
                raise UsageError(
                    f"checkpoint {to} to go back to does not exist",
                    code="USAGE.NO_CHECKPOINT",
                    detail=self.uri,
                    hint=f"there are: {there}; to=None begins again as at first",
                )
            keys = [key for key in state.kept if to is None or key.checkpoint_id > to]
            try:
                dropped = [checkpoint for key in keys if (checkpoint := self._readable(key)) is not None]
                if keys and to is not None:
                    self.open(to).verify()  # what would be dropped may be the only one that is whole
            except (UsageError, CorruptCheckpointError):
                self._writer.check_held()  # a newer writer may have dropped what is read here
                raise
            if keys or (to is None and state.dropped_states):
                self._check_quiet()
                incarnation = secrets.token_hex(16)
                self._change("rewind", state.rewound(incarnation, keys), incarnation=incarnation, keeps=to)
            return dropped

    def _readable(self, key: CheckpointKey) -> Checkpoint | None:
        try:
            return self._open(key)
        except CorruptCheckpointError as error:
            _log.warning("what this checkpoint holds cannot be told: %s", error)
            return None

    def set_time(self, now: int | None = None, *, watermark: int | None = None) -> None:
        """Let the newest checkpoint have other times than its batch had: the next batch goes on from them."""
        with self._lock:
            state = self.done
            if state.newest is None:
                raise UsageError("there is no checkpoint", code="USAGE.NO_CHECKPOINT", detail=self.uri)
            checkpoint_id = state.newest.checkpoint_id
            before = state.times_of(checkpoint_id)
            times = TimeOverride(
                before.now if now is None else now, before.watermark if watermark is None else watermark
            )
            changed = state.with_times(checkpoint_id, times)
            self._change("time", changed, now=now, watermark=watermark, upon=state.newest)

    def drop_state(self, name: str) -> None:
        """Drop a state from the newest checkpoint or, if there is none, from the source of the first batch.

        One entry of the log does it. The rows go with the next checkpoint, which names no file that has any of them.
        """
        with self._lock:
            state = self.done
            self._check_quiet()
            changed = state.with_dropped_state(
                None if state.newest is None else state.newest.checkpoint_id, name
            )
            self._change("drop", changed, upon=state.newest, dropped_state=name)

    def _check_quiet(self) -> None:
        _ = self._writer.epoch
        if any(writer.checkpoint_id is not None for writer in self._in_flight):
            raise usage.snapshot("snapshots are in flight", hint="commit or abort them first")
        for writer in list(self._in_flight):
            writer.abort()  # no manifest would name files that are merged in the background
        self._lent = {}

    def _change(self, kind: str, state: LogState, **what: Any) -> None:
        """Append a record of a change other than a commit, and remove the checkpoints that it drops."""
        dropped = [key for key in self._writer.state.kept if not state.keeps(key)]
        record = Record(kind, self._writer.epoch, entry_name(self._writer.next_sequence), **what)
        state = dataclasses.replace(state, swept=self._retention.swept(dropped))
        self._writer.append(kind, state, record=record, doing=f"writing a {kind}")
        if self._newest is not None and any(key.name == self._newest.name for key in dropped):
            self._newest = None
        self._retention.dropped(dropped)
        try:
            with storing("removing dropped checkpoints"):
                self._retention.remove()
        except FencedError:
            raise self._writer.fenced() from None

    # --- the end ---

    def close(self) -> None:
        """Stop being the writer: abort snapshots in flight and remove files that retention has put off. Idempotent.

        The store may be opened for writing again. Nothing needs this call: a crash leaves the same checkpoints.
        """
        with self._lock:
            if self._writer.is_open:
                for writer in list(self._in_flight):
                    writer.abort()
                try:
                    self._retention.remove()
                except (OSError, FencedError) as error:
                    _log.warning("old files stay until the store is next opened: %s", error)
            self._writer.close()
            self._in_flight, self._lent = {}, {}

    def __enter__(self) -> CheckpointStore:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def _overtaken(self) -> CommitConflictError:
        return conflict("another writer has opened the store", self.uri)


def target_for(store: CheckpointStore | DataWriter, checkpoint_id: int) -> DataWriter:
    """The writer for a snapshot: a new one of the store, or the one that another process has sent."""
    if isinstance(store, CheckpointStore):
        return store.begin_snapshot(checkpoint_id)
    if not isinstance(store, DataWriter):
        raise usage.not_a_store(
            f"a {type(store).__name__} is not a store of checkpoints",
            hint='write sb.CheckpointStore("/path").open_for_writing(...)',
        )
    if store.checkpoint_id != checkpoint_id:
        raise usage.snapshot(
            f"the writer was made for checkpoint {store.checkpoint_id}, not for {checkpoint_id}",
            hint=f"write store.data_writer({checkpoint_id}) where the store is open",
        )
    return store
