"""The writer that appends to the log of a store, until a newer writer opens the store.

Opening takes the next place in the log for a takeover. An older writer that still wants this place finds it taken, and
cannot write any more.
"""

from __future__ import annotations

import os
from contextlib import suppress

from statebackend.checkpoint.files import StoreFiles
from statebackend.checkpoint.files.layout import METADATA, data_folder
from statebackend.checkpoint.files.store_files import FencedError, NameConflictError, storing
from statebackend.checkpoint.store.log import (
    Entry,
    LogState,
    Record,
    StoreLog,
    read_log,
    read_metadata,
    without_metadata,
)
from statebackend.checkpoint.store.manifest import Manifest
from statebackend.checkpoint.store.metadata import Metadata, check_same_use
from statebackend.checkpoint.store.sealed import seal
from statebackend.errors import ClosedError, CommitConflictError, StoreError, UsageError, usage

#: A writer that loses this many races in a row has another problem.
_ATTEMPTS = 100
_OVERTAKEN = "another writer has opened the store"
_AT_THE_SAME_TIME = "another writer has opened the store at the same time"


class LogWriter:
    """Appends entries, one after the other. Not open at first; the caller holds a lock around each call."""

    def __init__(self, files: StoreFiles) -> None:
        self._files = files
        self._epoch: int | None = None
        self._process: int | None = None
        self._metadata: Metadata | None = None
        self._log = StoreLog(0, LogState("0" * 32), ())
        #: The error that ended this writer: a conflict, or a write of unknown outcome. None while it can write.
        self._over: CommitConflictError | StoreError | None = None
        #: is there during each write. A write that is broken off ends the writer, so it is raised once.
        self._unknown = _broken_off()

    # --- what it knows ---

    @property
    def is_open(self) -> bool:
        """True if it holds an epoch, as far as it knows."""
        return self._epoch is not None and self._over is None and self._process == os.getpid()

    @property
    def is_over(self) -> bool:
        return self._over is not None

    @property
    def is_unknown(self) -> bool:
        """True if it is over because the outcome of its last write is not known; opening the store again shows it."""
        return isinstance(self._over, StoreError)

    @property
    def epoch(self) -> int:
        """Its epoch; an error if it is not open, or over."""
        if self._epoch is None:
            raise ClosedError(
                "the store is not open for writing",
                detail=self._files.uri,
                hint="call open_for_writing() first",
            )
        if self._process != os.getpid():
            raise UsageError(
                "the store was opened for writing by another process",
                code="USAGE.FORKED",
                detail=self._files.uri,
                hint="a forked process opens it itself, or writes with data_writer()",
            )
        if self._over is not None:
            raise _again(self._over) from self._over
        return self._epoch

    @property
    def metadata(self) -> Metadata:
        assert self._metadata is not None
        return self._metadata

    @property
    def state(self) -> LogState:
        return self._log.state

    @property
    def names(self) -> tuple[str, ...]:
        """What lay in the folder of the log when it was opened."""
        return self._log.names

    @property
    def next_sequence(self) -> int:
        return self._log.sequence + 1

    # --- becoming the writer ---

    def open(
        self,
        wanted: Metadata,
        *,
        refuse_live: bool = False,
        is_whole_later: bool = False,
        over_damage: bool = False,
    ) -> None:
        """Take the next epoch, and fence every other writer; see `CheckpointStore.open_for_writing`.

        With ``is_whole_later``, a new store gets its metadata from `complete`; until then every opening refuses it.
        With ``over_damage``, a log whose newest entries are damaged is gone on with from the newest whole one.
        """
        existing = read_metadata(self._files)
        if existing is not None:
            if is_whole_later:
                raise self._is_there()
            check_same_use(existing, wanted, self._files.uri)  # before another writer is disturbed
            read_log(self._files, existing, over_damage=over_damage)
        elif read_log(self._files, over_damage=True).sequence and read_metadata(self._files) is None:
            # Entries are made only by writers with metadata. Look again: another writer may be making the store.
            raise without_metadata(self._files)
        self._release()
        for _ in range(_ATTEMPTS):
            epoch = self._take_epoch(refuse_live)
            try:
                existing = read_metadata(self._files)
                if is_whole_later:
                    if existing is not None:
                        raise self._is_there()
                    metadata = wanted
                else:
                    metadata = existing or self._write_metadata(wanted, epoch)
                check_same_use(metadata, wanted, self._files.uri)
                if self._took_over(epoch, metadata, over_damage):
                    return
            except BaseException:
                self._files.release(epoch)
                raise
            self._files.release(epoch)
        raise self._conflict(_AT_THE_SAME_TIME)

    def complete(self) -> None:
        """Write the metadata of a new store, which makes it one: everything before must be durable."""
        self._publish(METADATA, seal(self.metadata.to_json()), "completing the store")

    def _is_there(self) -> UsageError:
        return usage.target_exists(
            "the target is a store already",
            detail=self._files.uri,
            hint="give the path of a new or an empty folder",
        )

    def _take_epoch(self, refuse_live: bool) -> int:
        try:
            with storing("taking an epoch", hint="the folder of the store must be writable, and not full"):
                return self._files.take_epoch(refuse_live=refuse_live)
        except FencedError:
            raise self._conflict(_AT_THE_SAME_TIME) from None
        except StoreError as error:
            if isinstance(error.__cause__, BlockingIOError):
                raise UsageError(
                    "another query is writing to this store",
                    code="USAGE.STORE_IN_USE",
                    detail=self._files.uri,
                    hint="stop it, or use another store for each query",
                ) from error
            raise

    def _write_metadata(self, wanted: Metadata, epoch: int) -> Metadata:
        try:
            with storing(f"writing {METADATA}"):
                self._files.publish(METADATA, seal(wanted.to_json()), epoch)
        except FencedError:
            raise self._conflict(_OVERTAKEN) from None
        except NameConflictError:
            existing = read_metadata(self._files)
            if existing is None:
                raise self._conflict(_OVERTAKEN) from None
            return existing
        return wanted

    def _took_over(self, epoch: int, metadata: Metadata, over_damage: bool) -> bool:
        """Become the writer of an epoch that was taken; False if another writer was quicker."""
        log = read_log(self._files, metadata, over_damage=over_damage)
        if log.sequence >= epoch:
            return False
        takeover = Entry("takeover", epoch, epoch, metadata.store, log.state)
        try:
            with storing(f"writing {takeover.name}"):
                # The maker of the metadata may have died before their name was durable, and the log names them.
                self._files.sync_folder("")
                self._files.publish(takeover.name, takeover.sealed(), epoch)
        except FencedError:
            raise self._conflict(_AT_THE_SAME_TIME) from None
        except NameConflictError:
            return False
        self._epoch, self._process, self._over = epoch, os.getpid(), None
        self._unknown = _broken_off()
        self._metadata, self._log = metadata, log._replace(sequence=epoch)
        return True

    # --- appending ---

    def append(
        self,
        kind: str,
        state: LogState,
        *,
        manifest: Manifest | None = None,
        record: Record | None = None,
        doing: str,
        names_new_files: bool = False,
    ) -> None:
        """Append an entry: from the return of this call on, it has happened. Durable.

        With ``names_new_files``, the names in the folder of this epoch are made durable first.
        """
        entry = Entry(kind, self.next_sequence, self.epoch, self.metadata.store, state, manifest, record)
        self._publish(entry.name, entry.sealed(), doing, names_new_files=names_new_files)
        self._log = self._log._replace(sequence=entry.sequence, state=entry.state)

    def _publish(self, name: str, content: bytes, doing: str, *, names_new_files: bool = False) -> None:
        epoch = self.epoch
        detail = f"{doing}, {name}"
        # Whatever else comes out of the calls, an interrupt too, leaves open what is durable.
        unknown = self._over = self._unknown
        unknown.detail = detail
        try:
            if names_new_files:
                # After a failed sync of a folder, another one would not tell what has become of its names.
                with storing(f"syncing {data_folder(epoch)}", hint="open the store again for writing"):
                    self._files.sync_folder(data_folder(epoch))
            self._files.publish(name, content, epoch)
        except (FencedError, NameConflictError):
            raise self.fenced() from None
        except StoreError as error:
            self._over = error
            with suppress(OSError):
                if not self._files.holds(epoch, self.next_sequence):
                    # A newer writer has removed the folder.
                    self.fenced()
            raise self._over from error.__cause__
        except OSError as error:
            if getattr(error, "unknown", False):
                unknown.errno = error.errno
                raise unknown from error
            self._over = None
            raise StoreError.of(
                error, detail, hint="nothing was committed; try again, or abort it"
            ) from error
        except UsageError:
            self._over = None
            raise
        self._over = None

    # --- other writers ---

    def holds(self) -> bool:
        """Look whether no newer writer has come; one look at the store."""
        epoch = self.epoch
        with storing("looking for a newer writer"):
            return self._files.holds(epoch, self.next_sequence)

    def check_held(self) -> None:
        """Raise `CommitConflictError` if a newer writer has come."""
        if not self.holds():
            raise self.fenced()

    def fenced(self) -> CommitConflictError:
        """Note that a newer writer has taken the store, and return the error that says so."""
        error = self._over = self._conflict(_OVERTAKEN)
        return error

    def _conflict(self, message: str) -> CommitConflictError:
        return conflict(message, self._files.uri)

    # --- the end ---

    def close(self) -> None:
        """Stop being the writer. Idempotent."""
        self._release()
        self._over = None

    def _release(self) -> None:
        if self._epoch is not None and self._process == os.getpid():
            self._files.release(self._epoch)
        self._epoch = None


def _broken_off() -> StoreError:
    return StoreError(
        "a write was broken off: whether it has happened is not known",
        code="STORE.UNKNOWN",
        hint="open the store again for writing, and look",
    )


def _again(error: CommitConflictError | StoreError) -> CommitConflictError | StoreError:
    """The same error as a new object: an error that is raised twice would collect two tracebacks."""
    again = type(error)(error.message, code=error.code, detail=error.detail, hint=error.hint)
    if isinstance(again, StoreError):
        again.errno = error.errno  # type: ignore[union-attr]
    return again


def conflict(message: str, uri: str) -> CommitConflictError:
    """The error of a writer that another one has overtaken, or whose checkpoint is there already."""
    return CommitConflictError(
        message, detail=uri, hint="one query writes to a store; the memory of this one is unchanged"
    )
