"""The store of checkpoints: who writes, what is committed, what is retained.

>>> import tempfile
>>> folder = tempfile.TemporaryDirectory()
>>> store = CheckpointStore(folder.name).open_for_writing(key_type=int, max_parallelism=128)
>>> snapshot = store.begin_snapshot(0)
>>> with snapshot.create("base") as file:
...     _ = file.write(b"state")
...     stored = file.finish()
>>> _ = store.commit(0, [StateSnapshot(0, store.epoch, files=(stored,))], now=1000)
>>> store.checkpoints(), store.latest()
([0], 0)
>>> checkpoint = store.open(0)
>>> checkpoint.now, checkpoint.read_file(stored)
(1000, b'state')
>>> store.close()
>>> folder.cleanup()
"""

from __future__ import annotations

import datetime
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from types import TracebackType

from statebackend import types
from statebackend.checkpoint.files import StoreFiles
from statebackend.checkpoint.files.interface import Fenced, Taken
from statebackend.checkpoint.files.layout import CHECKPOINTS, METADATA, data_folder, manifest_name
from statebackend.checkpoint.store.data_files import DataWriter, storing
from statebackend.checkpoint.store.json_checks import Malformed, integer
from statebackend.checkpoint.store.manifest import Manifest, StateSnapshot, StoredFile
from statebackend.checkpoint.store.metadata import Metadata, check_same_use
from statebackend.checkpoint.store.pins import held_by_pins
from statebackend.checkpoint.store.reader import Checkpoint, CheckpointReader
from statebackend.checkpoint.store.records import Record, Records
from statebackend.checkpoint.store.retention import Key, Retain, Retention
from statebackend.checkpoint.store.sealed import seal
from statebackend.checkpoint.store.writer_end import Over, Reason
from statebackend.errors import (
    ClosedError,
    CommitConflictError,
    CorruptCheckpointError,
    StoreError,
    UsageError,
)

__all__ = ["CheckpointStore"]

_log = logging.getLogger(__name__)

_MAX_CLOCK_JUMP = datetime.timedelta(days=30)


class CheckpointStore(CheckpointReader):
    """A store of checkpoints at a path or ``s3://`` address, of which the newest ``retain`` are kept.

    ``retain`` may be a ``timedelta``: a checkpoint goes when it is older than that, and not one of the newest two.
    Making one touches nothing; reading needs nothing more. `open_for_writing` takes an epoch, which ends that
    of every other writer. ``single_writer`` is needed where nothing can keep a second writer out: for ``s3://``, and on
    mounts that have neither links nor exclusive renames. Whoever passes it vouches that there is none.
    ``compression`` of data files is ``"zstd"``, ``"lz4"`` or None; it may change from one opening to the next.
    ``max_clock_jump``, a timedelta or milliseconds, is how far the clock of a job may be ahead of the last committed
    time; None allows any. All methods may be called from any thread. A pickled store is one that is not open for
    writing.

    >>> CheckpointStore("/nowhere", retain=3).checkpoints()
    []
    """

    def __init__(
        self,
        uri: str | os.PathLike[str],
        *,
        retain: Retain = 2,
        single_writer: bool = False,
        compression: str | None = "zstd",
        max_clock_jump: int | datetime.timedelta | None = _MAX_CLOCK_JUMP,
        _files: StoreFiles | None = None,
    ) -> None:
        if isinstance(retain, datetime.timedelta):
            is_retain = retain >= datetime.timedelta(0)
        else:
            is_retain = type(retain) is int and retain >= 1
        if not is_retain:
            raise UsageError("retain is the number of checkpoints to keep, at least 1, or a timedelta")
        if compression not in ("zstd", "lz4", None):
            raise UsageError('compression is "zstd", "lz4" or None')
        super().__init__(uri, single_writer=single_writer, _files=_files)
        self._retain = retain
        self._compression = compression
        #: How far, in milliseconds, a clock may be ahead of the last committed time; None: any distance.
        self.max_clock_jump = _milliseconds(max_clock_jump)
        self._lock = threading.RLock()
        self._epoch: int | None = None
        self._process: int | None = None
        self._metadata: Metadata | None = None
        self._retention = Retention()
        self._records = Records("")
        #: Snapshots in flight, and what each builds on.
        self._in_flight: dict[DataWriter, frozenset[str]] = {}
        #: What snapshots of other processes may build on, by the id of their checkpoint.
        self._lent: dict[int, frozenset[str]] = {}
        #: Why this writer can write no more; None while it can.
        self._over: Over | None = None

    def __reduce__(self) -> tuple[object, ...]:
        return self._maker(), ()

    def unopened(self) -> CheckpointStore:
        """Another store at the same place with the same options, not open for writing.

        >>> CheckpointStore("/data/state", retain=3).unopened()
        CheckpointStore('/data/state')
        """
        return self._maker()()

    def _maker(self) -> Callable[[], CheckpointStore]:
        return partial(
            CheckpointStore,
            self.address,
            retain=self._retain,
            compression=self._compression,
            max_clock_jump=self.max_clock_jump,
            _files=self._files,
        )

    # --- reading ---

    def open_readonly(self) -> CheckpointReader:
        """The same store for reading only.

        >>> CheckpointStore("/nowhere").open_readonly()
        CheckpointReader('/nowhere')
        """
        return CheckpointReader(self.uri, _files=self._files)

    # --- becoming the writer ---

    @property
    def epoch(self) -> int:
        """The epoch of this writer; `UsageError` if the store is not open for writing."""
        return self._writing()

    @property
    def is_open_for_writing(self) -> bool:
        """True if this store holds an epoch, as far as it knows."""
        return self._epoch is not None and self._over is None and self._process == os.getpid()

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
        another query. What is None is not compared.

        Every other writer is fenced: its commits raise `CommitConflictError` from now on. With ``refuse_live``
        a writer that is known to be alive makes this call raise `UsageError` instead; on shared file systems
        without locks, in object stores, and within one process after a fork, that cannot always be known. A
        store that is open already, and has not been fenced or failed, only compares.
        """
        wanted = Metadata(
            secrets.token_hex(16),
            query,
            None if key_type is None else types.of(key_type).config(),
            max_parallelism,
        )
        with self._lock:
            if self.is_open_for_writing:
                assert self._metadata is not None
                check_same_use(self._metadata, wanted, self.uri)
                return self
            # In this order: another writer may be making the store.
            committed = self._committed()
            existing = self.metadata()
            if existing is not None:
                check_same_use(existing, wanted, self.uri)  # before another writer is disturbed
            elif committed:
                raise CorruptCheckpointError(
                    "a file is missing", detail=METADATA, hint="restore it from a copy of the store"
                )
            if self._epoch is not None and self._process == os.getpid():
                self._files.release(self._epoch)
                self._epoch = None
            epoch = self._take_epoch(refuse_live)
            try:
                metadata = self._write_metadata(wanted, epoch) if existing is None else existing
                check_same_use(metadata, wanted, self.uri)
                self._begin(epoch, metadata)
            except BaseException:
                self._files.release(epoch)
                raise
        return self

    def _take_epoch(self, refuse_live: bool) -> int:
        try:
            with storing("taking an epoch", hint="the folder of the store must be writable, and not full"):
                return self._files.take_epoch(refuse_live=refuse_live)
        except Fenced:
            raise self._conflict("another writer has opened the store at the same time") from None
        except StoreError as error:
            if isinstance(error.__cause__, BlockingIOError):
                raise UsageError(
                    "another query is writing to this store",
                    code="USAGE.STORE_IN_USE",
                    detail=self.uri,
                    hint="stop it, or use a store of its own for each query",
                ) from error
            raise

    def _write_metadata(self, wanted: Metadata, epoch: int) -> Metadata:
        try:
            with storing(f"writing {METADATA}"):
                self._files.publish(METADATA, seal(wanted.to_json()), epoch)
        except Fenced:
            raise self._conflict("another writer has opened the store") from None
        except Taken:
            existing = self.metadata()
            if existing is None:
                raise self._conflict("another writer has opened the store") from None
            return existing
        return wanted

    def _begin(self, epoch: int, metadata: Metadata) -> None:
        retention = Retention()
        for key in self._committed():
            try:
                names = self._manifest(key, metadata).all_files.keys()
            except CorruptCheckpointError as error:
                _log.warning("no file of the store will be removed while this one cannot be read: %s", error)
                retention.committed(key, None, self._committed_at(key))
            except UsageError as error:  # dropped, which only a newer writer could
                raise self._conflict("another writer has opened the store") from error
            else:
                retention.committed(key, names, self._committed_at(key))
        named = retention.named()
        if named is not None:
            with storing("removing files that no checkpoint names"):
                is_held = held_by_pins(self._files, time.time())
                removed = self._files.remove_leftovers(lambda name: name in named or is_held(name), epoch)
            if removed:
                _log.info("removed %d files that no checkpoint names from %s", removed, self.uri)
        records = Records(metadata.store, self.records())
        with storing("looking for a newer writer"):
            if not self._files.holds(epoch):
                raise self._conflict("another writer has opened the store")
        self._retention, self._records, self._metadata = retention, records, metadata
        self._in_flight, self._lent = {}, {}
        self._epoch, self._process, self._over = epoch, os.getpid(), None

    def _committed_at(self, key: Key) -> float:
        """When a manifest was written, in seconds since 1970; asked only where that decides how long it stays."""
        if not isinstance(self._retain, datetime.timedelta):
            return 0.0
        name = manifest_name(*key)
        with storing(f"looking for {name}"):
            return self._files.modified(name)

    # --- taking a checkpoint ---

    def begin_snapshot(self, checkpoint_id: int | None = None) -> DataWriter:
        """Make the writer for one snapshot's files; one for each subtask, and any number in flight.

        Until ``checkpoint_id`` is committed, or the snapshot aborted, the files of the checkpoint that is newest now
        are kept, because the snapshot may build on them. None: for files of the next manifest, whichever that is, such
        as a base written in the background. The writer stays in flight until they are named.
        """
        if checkpoint_id is not None:
            _check_id(checkpoint_id)
        with self._lock:
            epoch = self._writing()
            newest = None if checkpoint_id is None else self._retention.newest
            names = self._retention.names_of(newest)
            writer = DataWriter(
                self._files, epoch, checkpoint_id, self._ended, builds_on=names, compression=self._compression
            )
            self._in_flight[writer] = names
            return writer

    def data_writer(self, checkpoint_id: int | None = None) -> DataWriter:
        """The same for another process, to be pickled. This process does not know what it makes: discard it.

        Until a checkpoint of this id or a later one is committed, or this one aborted, what it may build on is kept.
        """
        if checkpoint_id is not None:
            _check_id(checkpoint_id)
        with self._lock:
            epoch = self._writing()
            names = self._retention.names_of(None if checkpoint_id is None else self._retention.newest)
            if checkpoint_id is not None:
                self._lent[checkpoint_id] = self._lent.get(checkpoint_id, frozenset()) | names
            return DataWriter(
                self._files, epoch, checkpoint_id, builds_on=names, compression=self._compression
            )

    def commit(
        self,
        checkpoint_id: int,
        snapshots: Iterable[StateSnapshot | Mapping[str, object]] = (),
        *,
        files: Iterable[StoredFile] = (),
        now: int | None = None,
        progress: Mapping[str, object] | None = None,
    ) -> Checkpoint:
        """Publish a checkpoint: from the return of this call on, it is what a restart finds. Durable.

        ``snapshots``, one of each subtask, may be given as JSON; ``files`` belong to none of them, such as the
        batch's output; ``now`` is that of the snapshots unless given; ``progress`` is free.

        `CommitConflictError`: this id is committed already, or another writer has opened the store. Nothing
        has been published then, and nothing removed: `abort` does that. `CorruptCheckpointError`: a file is
        missing or of another length. `StoreError` with code ``STORE.UNKNOWN``: the system failed at the last step; the
        store must be opened again to learn whether the checkpoint is there. Any other error: it is not there.
        """
        with self._lock:
            epoch = self._writing()
            manifest = self._manifest_of(checkpoint_id, epoch, snapshots, files, now, progress)
            newest = self._retention.newest
            if checkpoint_id in self._retention.ids():
                raise self._conflict(f"checkpoint {checkpoint_id} is already committed")
            if newest is not None and checkpoint_id < newest[0]:
                raise UsageError(
                    f"checkpoint {checkpoint_id} cannot follow checkpoint {newest[0]}",
                    hint="checkpoints are committed in the order of their ids",
                )
            self._check_files(manifest, epoch)
            self._publish(manifest, epoch)
            self._after_commit(manifest)
            assert self._metadata is not None
            return Checkpoint(self._files, self._metadata, manifest)

    def check_held(self) -> None:
        """Raise `CommitConflictError` if a newer writer has opened the store; one look at the store."""
        with self._lock:
            epoch = self._writing()
            with storing("looking for a newer writer"):
                if not self._files.holds(epoch):
                    raise self._fenced()

    def _manifest_of(
        self,
        checkpoint_id: int,
        epoch: int,
        snapshots: Iterable[StateSnapshot | Mapping[str, object]],
        files: Iterable[StoredFile],
        now: int | None,
        progress: Mapping[str, object] | None,
    ) -> Manifest:
        assert self._metadata is not None
        made = tuple(
            each if isinstance(each, StateSnapshot) else StateSnapshot.from_json(each) for each in snapshots
        )
        if now is None:
            now = max((each.now for each in made if each.now is not None), default=None)
        store = self._metadata.store
        return Manifest(checkpoint_id, epoch, store, made, tuple(files), now, dict(progress or {}))

    def _check_files(self, manifest: Manifest, epoch: int) -> None:
        """Every named file is there with its size, and nothing that this writer may remove is named."""
        kept = set[str]().union(*self._built_on())
        for file in manifest.all_files.values():
            is_ours = file.epoch == epoch or file.name in kept or self._retention.is_known(file.name)
            with storing(f"looking for {file.name}"):
                size = self._files.size(file.name)
                is_held = (is_ours and size == file.size) or self._files.holds(epoch)
            if not is_held:
                # A newer writer has removed the file, or made it.
                raise self._fenced()
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

    def _publish(self, manifest: Manifest, epoch: int) -> None:
        content = seal(manifest.to_json())
        detail = f"committing checkpoint {manifest.checkpoint_id}, {manifest.name}"
        # Whatever else comes out of the two calls, an interrupt too, leaves open what is durable.
        unknown = StoreError(
            "a commit was broken off: whether the checkpoint is there is not known",
            code="STORE.UNKNOWN",
            detail=detail,
            hint="open the store again for writing, and look",
        )
        self._over = Over(Reason.UNKNOWN, unknown)
        try:
            if any(file.epoch == epoch for file in manifest.all_files.values()):
                # After a failed sync of a folder, another one would not tell what has become of its names.
                with storing(f"syncing {data_folder(epoch)}", hint="open the store again for writing"):
                    self._files.sync_folder(data_folder(epoch))
            self._files.publish(manifest.name, content, epoch)
        except Fenced:
            raise self._fenced() from None
        except Taken:
            self._over = None
            raise self._conflict(f"checkpoint {manifest.checkpoint_id} is already committed") from None
        except StoreError as error:
            self._over = Over(Reason.UNKNOWN, error)
            with suppress(OSError):
                if not self._files.holds(epoch):
                    # A newer writer has removed the folder.
                    self._fenced()
            raise self._over.error from error.__cause__
        except OSError as error:
            if getattr(error, "unknown", False):
                unknown.errno = error.errno
                raise unknown from error
            self._over = None
            raise StoreError.of(
                error, detail, hint="nothing was committed; try again, or abort it"
            ) from error
        self._over = None

    def _after_commit(self, manifest: Manifest) -> None:
        key = (manifest.checkpoint_id, manifest.epoch)
        names = set(manifest.all_files)
        self._retention.committed(key, names, time.time())
        self._retention.synced()  # publishing has synced the folder
        for writer in list(self._in_flight):
            settled = writer.settle(names)
            past = writer.checkpoint_id is not None and writer.checkpoint_id <= manifest.checkpoint_id
            if writer.checkpoint_id == manifest.checkpoint_id and not writer.unsettled:
                writer.committed()
            if past:
                self._in_flight[writer] = frozenset()
            if (settled or past) and not writer.unsettled:
                del self._in_flight[writer]
        self._lent = {each: lent for each, lent in self._lent.items() if each > manifest.checkpoint_id}
        self._retain_newest()

    def abort(self, checkpoint_id: int) -> None:
        """Give up a checkpoint that is not committed: the files of its snapshots in this process are removed."""
        with self._lock:
            writers = [writer for writer in self._in_flight if writer.checkpoint_id == checkpoint_id]
            self._lent.pop(checkpoint_id, None)
        for writer in writers:
            writer.abort()

    def discard(self, snapshot: StateSnapshot | Mapping[str, object]) -> None:
        """Remove the files of a snapshot that another process made for this writer and that is given up.

        Only what lies in the folder of this epoch and is named by no checkpoint is removed. This is for a process that
        is gone: one that goes on may still build on some of the files, and removes the others itself when it is told,
        by `notify_checkpoint_aborted`.
        """
        if not isinstance(snapshot, StateSnapshot):
            snapshot = StateSnapshot.from_json(snapshot)
        with self._lock:
            epoch = self._writing()
            named = self._retention.named()
            for file in snapshot.files:
                if file.epoch == epoch and named is not None and file.name not in named:
                    with storing(f"removing {file.name}"):
                        self._files.remove(file.name)

    def _built_on(self) -> list[frozenset[str]]:
        """The names that snapshots on their way may build on, in this process and in others."""
        return [*self._in_flight.values(), *self._lent.values()]

    def _ended(self, writer: DataWriter) -> None:
        with self._lock:
            self._in_flight.pop(writer, None)

    # --- retention ---

    def _retain_newest(self) -> None:
        """Drop what is too old. A commit has happened: whatever goes wrong here is put off, not raised."""
        try:
            self._remove_dropped()
            self._drop(self._retention.excess(self._retain, time.time()))
        except Fenced:
            self._fenced()
        except OSError as error:
            _log.warning("old checkpoints stay until the next commit: %s", error)

    def _remove_dropped(self) -> None:
        assert self._epoch is not None
        waiting = sorted(self._retention.removable(self._built_on()))
        if not waiting:
            return
        is_held = held_by_pins(self._files, time.time())
        for name in waiting:
            if not is_held(name):  # else it is tried again after the next commit
                self._files.retire([name], self._epoch)
                self._retention.removed([name])

    def _drop(self, keys: list[Key]) -> None:
        assert self._epoch is not None
        for key in keys:
            self._files.retire([manifest_name(*key)], self._epoch)
            self._retention.dropped(key)

    # --- beginning anew, going back, another time ---

    @property
    def incarnation(self) -> str:
        """The incarnation of this writer's commits: new after every restart and rewind, not by opening."""
        self._writing()
        return self._records.incarnation

    @property
    def done(self) -> Records:
        """The changes made to the store other than commits."""
        self._writing()
        return self._records

    def restart(self, *, begins_at: int = 0, first_batch: int | None = None) -> None:
        """Drop every checkpoint, oldest first, so that ids may begin anew. What the store is for stays.

        Where and why the stream begins anew is put down first: a restart that is cut off can be told from none.
        """
        with self._lock:
            self._begin_anew("restart", begins_at=begins_at, first_batch=first_batch)
            self._drop_all(self._retention.excess(0, 0.0))

    def rewind(self, to: int | None) -> list[Checkpoint]:
        """Drop every checkpoint after ``to``, newest first, or all for None; what was dropped, oldest first.

        `UsageError` if ``to`` is not there, `CorruptCheckpointError` if it is damaged: every file of it is read first.
        Cut off at any point, what is left is a whole store, and the call can be repeated.
        """
        with self._lock:
            self._writing()
            if to is not None and to not in self._retention.ids():
                there = ", ".join(map(str, sorted(self._retention.ids()))) or "none"
                raise UsageError(
                    f"there is no checkpoint {to} to go back to",
                    code="USAGE.NO_CHECKPOINT",
                    detail=self.uri,
                    hint=f"there are: {there}; to=None begins again as at first",
                )
            keys = [key for key in self._retention.excess(0, 0.0) if to is None or key[0] > to]
            dropped = [checkpoint for key in keys if (checkpoint := self._readable(key)) is not None]
            if keys:
                if to is not None:
                    self.open(to).verify()  # what would be dropped may be the only one that is whole
                self._begin_anew("rewind", keeps=to)
                self._drop_all(keys if to is None else keys[::-1])
            return dropped

    def _readable(self, key: Key) -> Checkpoint | None:
        try:
            return self._open(key)
        except CorruptCheckpointError as error:
            _log.warning("what this checkpoint holds cannot be told: %s", error)
            return None

    def set_time(self, now: int) -> None:
        """Let the newest checkpoint have another time than its batch had: the next batch goes on from it."""
        with self._lock:
            self._writing()
            newest = self._retention.newest
            if newest is None:
                raise UsageError("there is no checkpoint", code="USAGE.NO_CHECKPOINT", detail=self.uri)
            self._put_down("time", now=now, upon=newest)

    def _begin_anew(
        self,
        kind: str,
        *,
        keeps: int | None = None,
        begins_at: int | None = None,
        first_batch: int | None = None,
    ) -> None:
        if any(writer.checkpoint_id is not None for writer in self._in_flight):
            raise UsageError("snapshots are in flight", hint="commit or abort them first")
        for writer in list(self._in_flight):
            writer.abort()  # what is merged in the background would be named by nothing
        self._put_down(kind, secrets.token_hex(16), keeps=keeps, begins_at=begins_at, first_batch=first_batch)

    def _put_down(
        self,
        kind: str,
        incarnation: str | None = None,
        *,
        keeps: int | None = None,
        begins_at: int | None = None,
        first_batch: int | None = None,
        now: int | None = None,
        upon: Key | None = None,
    ) -> None:
        epoch = self._writing()
        assert self._metadata is not None
        number = self._records.next_number(epoch)
        store = self._metadata.store
        record = Record(kind, epoch, number, store, incarnation, keeps, begins_at, first_batch, now, upon)
        try:
            with storing(f"writing {record.name}", hint="open the store again for writing, and look"):
                self._files.publish(record.name, seal(record.to_json()), epoch)
        except (Fenced, Taken):
            raise self._fenced() from None
        except StoreError as error:
            self._over = Over(Reason.UNKNOWN, error)  # it may be there, now or after a crash
            raise
        self._records.add(record)

    def _drop_all(self, keys: list[Key]) -> None:
        try:
            with storing("dropping checkpoints"):
                self._drop(keys)
                self._finish_removing()
        except Fenced:
            raise self._fenced() from None

    def _finish_removing(self) -> None:
        if self._retention.is_pending:
            self._files.sync_folder(CHECKPOINTS)
            self._retention.synced()
            self._remove_dropped()

    # --- the end ---

    def close(self) -> None:
        """Stop being the writer: abort what is in flight and remove what retention has put off. Idempotent.

        The store may be opened for writing again. Nothing needs this call: a crash leaves the same checkpoints.
        """
        with self._lock:
            if self.is_open_for_writing:
                for writer in list(self._in_flight):
                    writer.abort()
                try:
                    self._finish_removing()
                except (OSError, Fenced) as error:
                    _log.warning("old files stay until the store is next opened: %s", error)
            if self._epoch is not None and self._process == os.getpid():
                self._files.release(self._epoch)
            self._epoch = self._over = None
            self._in_flight, self._lent = {}, {}

    def __enter__(self) -> CheckpointStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- checks ---

    def _writing(self) -> int:
        if self._epoch is None:
            raise ClosedError(
                "the store is not open for writing", detail=self.uri, hint="call open_for_writing() first"
            )
        if self._process != os.getpid():
            raise UsageError(
                "the store was opened for writing by another process",
                detail=self.uri,
                hint="a forked process opens it itself, or writes with data_writer()",
            )
        if self._over is not None:
            raise self._over.again() from self._over.error
        return self._epoch

    def _fenced(self) -> CommitConflictError:
        """Note that a newer writer has taken the store, and return the error that says so."""
        error = self._conflict(Reason.FENCED.value)
        self._over = Over(Reason.FENCED, error)
        return error

    def _conflict(self, message: str) -> CommitConflictError:
        return CommitConflictError(
            message,
            detail=self.uri,
            hint="one query writes to a store; the memory of this one is unchanged",
        )


def target_for(store: CheckpointStore | DataWriter, checkpoint_id: int) -> DataWriter:
    """The writer for a snapshot: a new one of the store, or the one that another process has sent.

    >>> target_for(CheckpointStore("/nowhere"), 7)
    Traceback (most recent call last):
    statebackend.errors.ClosedError: the store is not open for writing (/nowhere). Hint: ...
    """
    if isinstance(store, CheckpointStore):
        return store.begin_snapshot(checkpoint_id)
    if store.checkpoint_id != checkpoint_id:
        raise UsageError(
            f"the writer was made for checkpoint {store.checkpoint_id}, not for {checkpoint_id}",
            hint=f"write store.data_writer({checkpoint_id}) where the store is open",
        )
    return store


def _check_id(checkpoint_id: int) -> None:
    try:
        integer(checkpoint_id, "the checkpoint id")
    except Malformed as error:
        raise UsageError(
            f"no snapshot can be taken: {error}", hint="write int(...) of a numpy number"
        ) from None


def _milliseconds(jump: int | datetime.timedelta | None) -> int | None:
    if isinstance(jump, datetime.timedelta):
        jump = jump // datetime.timedelta(milliseconds=1)
    if jump is not None and (type(jump) is not int or jump <= 0):
        raise UsageError("max_clock_jump is a timedelta or a number of milliseconds above 0, or None")
    return jump
