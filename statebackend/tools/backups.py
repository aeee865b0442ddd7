"""Copies a query as of one batch, its store and Spark's checkpointLocation, and puts such a copy back.

A backup is a store with one checkpoint. Spark's files are files of this checkpoint of kind ``stream``, whose labels are
their paths in the checkpointLocation. So they have checksums, and one entry of the log commits all of the backup.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from statebackend.checkpoint import Checkpoint, CheckpointReader, StoredFile
from statebackend.checkpoint.files import PosixFiles, local_path, open_target_folder
from statebackend.checkpoint.files.store_files import storing
from statebackend.errors import CorruptCheckpointError, StoreError, UsageError, usage
from statebackend.tools.history import check_stream
from statebackend.tools.read import open_checkpoint, pinned_checkpoint
from statebackend.tools.results import Copied
from statebackend.tools.rewrite import Copy, Source, Target, copying
from statebackend.tools.stream_rewind import SparkCheckpoint

_CHUNK = 4 << 20


def backup(
    store: Source,
    target: Target,
    *,
    checkpoint_location: str | os.PathLike[str] | None,
    id: int | None = None,
) -> Copied:
    """Copy a query as of one batch into the new folder ``target``: its store and Spark's checkpointLocation.

    By default it takes the newest batch that both have finished. The query may run meanwhile. With
    ``checkpoint_location=None`` it copies the store alone. Every copied file is read back and compared. The backup is a
    store with one checkpoint, so `verify` and the readers work on it. The copy of an encrypted store is encrypted by
    the same cipher, Spark's files included. Files that sinks have published are not copied. If the call fails, no
    backup is left. If its process is killed, opening the backup raises `CorruptCheckpointError`. O(bytes)
    """
    reader = store if isinstance(store, CheckpointReader) else CheckpointReader(store)
    stream = None if checkpoint_location is None else SparkCheckpoint(checkpoint_location)
    if stream is not None and id is None:
        id = _newest_of_both(reader, stream)
    with pinned_checkpoint(reader, id) as (checkpoint, keep):
        if stream is not None:
            check_stream(stream, checkpoint, reader.uri)
        with copying(checkpoint, target, "backing up", *_unchanged(checkpoint), keep) as copy:
            files = [] if stream is None else list(_added(stream, checkpoint.id, copy))
            _commit(checkpoint, copy, files)
    return _copied(checkpoint, files)


def restore(backup: Source, store: Target, *, checkpoint_location: str | os.PathLike[str] | None) -> Copied:
    """Put a backup back: the store into the new folder ``store``, Spark's files into ``checkpoint_location``.

    Neither may exist; move what is damaged away. Then start the query with both. Batches after the backup run again,
    under another incarnation, so a sink that remembers what it has done does not take them for done. With
    ``checkpoint_location=None`` only the store comes back. Every file of the backup is checked first, and every file of
    the copy is read back. If the call fails, nothing is left. If its process is killed, the query refuses to start:
    remove both folders, and call it again. O(bytes)
    """
    checkpoint = open_checkpoint(backup, None)
    checkpoint.verify()
    files = [file for file in checkpoint.manifest.files if file.kind == "stream"]
    if checkpoint_location is not None and not files:
        raise UsageError(
            "the backup has no files of Spark's checkpointLocation",
            code="USAGE.STREAM_REWIND",
            detail=f"{checkpoint!r}",
            hint="pass checkpoint_location=None, and bring the stream to this batch yourself",
        )
    if checkpoint_location is None:
        files = []
    with (
        copying(checkpoint, store, "restoring", *_unchanged(checkpoint)) as copy,
        _new_location(checkpoint_location) as folder,
    ):
        for file in files:
            _restore_file(checkpoint, file, folder)
        _commit(checkpoint, copy, [])
    return _copied(checkpoint, files)


def _unchanged(checkpoint: Checkpoint) -> tuple[int | None, frozenset[str]]:
    return checkpoint.metadata.max_parallelism, checkpoint.dropped_states


def _commit(checkpoint: Checkpoint, copy: Copy, stream: Sequence[StoredFile]) -> None:
    copy.commit([copy.moved(each) for each in checkpoint.snapshots], stream)
    copy.verify(stream)


def _copied(checkpoint: Checkpoint, stream: Sequence[StoredFile]) -> Copied:
    own = [file for file in checkpoint.files.values() if file.kind not in ("manifest", "stream")]
    size = sum(file.size for file in (*own, *stream))
    return Copied(checkpoint.id, len(own), len(stream), size)


# --- Spark's files ---


def _newest_of_both(reader: CheckpointReader, stream: SparkCheckpoint) -> int:
    both = {batch for batch, _ in stream.batches()}.intersection(reader.checkpoints())
    if both:
        return max(both)
    reader.open_latest()  # raises the error for a store that is not there
    raise UsageError(
        "the store has no batch that Spark's log has finished",
        code="USAGE.STREAM_REWIND",
        detail=f"{reader.uri}, {stream.folder}",
        hint="give the store and the checkpointLocation of one query, once it has finished two batches",
    )


def _added(stream: SparkCheckpoint, batch: int, copy: Copy) -> Iterator[StoredFile]:
    """Copy Spark's files as of a batch. Spark may remove old ones meanwhile, but none that this batch needs."""
    for path in stream.files_until(batch):
        try:
            yield copy.added(path, path.relative_to(stream.folder).as_posix())
        except StoreError as error:
            if error.errno != errno.ENOENT:
                raise
    stream.files_after(batch, again=False)  # raises if it has removed one that is needed


@contextmanager
def _new_location(location: str | os.PathLike[str] | None) -> Iterator[Path]:
    """A folder that becomes the checkpointLocation at the end of the block, or is removed after an error."""
    if location is None:
        yield Path()
        return
    path = local_path(os.fspath(location))
    if path is None or (os.path.isdir(path) and os.listdir(path)) or os.path.isfile(path):
        raise usage.target_exists(
            "cannot restore Spark's files: expected a new or empty folder of this machine",
            detail=f"checkpoint_location {os.fspath(location)}",
            hint="move the old folder away; in an object store, restore to a folder and upload it",
        )
    folder = Path(f"{path}.restoring-{secrets.token_hex(8)}")
    parent = PosixFiles(os.path.dirname(path))
    with storing(f"restoring {path}"):
        parent.make_folder(folder.name)
        try:
            yield folder
            os.rename(folder, path)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        parent.sync_folder("")


def _restore_file(checkpoint: Checkpoint, file: StoredFile, folder: Path) -> None:
    label = PurePosixPath(file.label or "")
    if label.is_absolute() or not label.parts or ".." in label.parts:
        raise CorruptCheckpointError("a file of the stream has no path", detail=file.name)
    place = open_target_folder(folder)
    place.prepare(str(label.parent))
    with checkpoint.open_file(file) as source:
        place.write(str(label), iter(lambda: source.read(_CHUNK), b""))
