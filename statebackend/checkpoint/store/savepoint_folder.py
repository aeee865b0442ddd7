"""Savepoints: state as Parquet files that other programs read, in a folder that can be moved.

A savepoint consists of *parts*. Each instance writes one part for its keyed state and one for its operator state. A
part is a Parquet file for each of its states, followed by a description of them, sealed by its own checksum. So a
part that was broken off does not exist, and the parts that exist tell if any are missing.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote

import pyarrow as pa

from statebackend.checkpoint.files import FileSink, StoreFiles, open_files
from statebackend.checkpoint.files.store_files import BytesLike, map_in_threads, storing
from statebackend.checkpoint.store.checkpoint_reader import CheckpointReader
from statebackend.checkpoint.store.sealed import (
    JsonObject,
    Malformed,
    check_format,
    crc32c,
    instance,
    integer,
    seal,
    unseal,
)
from statebackend.errors import CorruptCheckpointError, StateBackendError, UsageError, usage

if TYPE_CHECKING:
    import pyarrow.parquet as pq

#: The folder of descriptions. Spark and Arrow skip folders whose names begin like this.
_PARTS = "_savepoint"
_CHUNK = 4 << 20
#: So many files, or `_CHUNK` bytes of them, wait until they are made durable together.
_WAIT = 64
#: The version of savepoints. Every version of the library reads it, so a savepoint is the way back to an older one.
_FORMAT = 1
#: Bytes of a column to read at a time; buffered as a whole, row groups would cost a restore memory.
_BUFFER = 1 << 20
_LONGEST_NAME = 180


class SavepointState(NamedTuple):
    """A state of a part: its description, and its file, which a state without rows does not have."""

    described: dict[str, Any]
    file: str
    size: int
    checksum: int
    rows: int


class SavepointPart(NamedTuple):
    """The part that one instance has written."""

    name: str
    described: dict[str, Any]
    states: tuple[SavepointState, ...]


class Savepoint:
    """The savepoint at a path or uri, to write or to restore from. Making the object touches nothing."""

    def __init__(
        self, uri: str | os.PathLike[str], *, timeless: bool = False, _files: StoreFiles | None = None
    ) -> None:
        self._files = open_files(uri, single_writer=True) if _files is None else _files
        #: True if its parts carry no time: it belongs to no batch.
        self._timeless = timeless
        self._dropped: frozenset[str] = frozenset()

    def __repr__(self) -> str:
        return f"Savepoint({self.uri!r})"

    @classmethod
    def at(cls, where: Savepoint | CheckpointReader | str | os.PathLike[str]) -> Savepoint:
        """Make one from a savepoint, its path or uri, or a store; in a store, the one after its newest checkpoint."""
        if isinstance(where, Savepoint):
            return where
        if not isinstance(where, CheckpointReader):
            return cls(where)
        if where.encryption is not None:
            raise UsageError(
                "a savepoint is in plain text, and would be in an encrypted store",
                code="USAGE.ENCRYPTION",
                detail=where.uri,
                hint="give the path of a new folder, in a place that may hold plain text",
            )
        newest = where.latest()
        if newest is None:
            raise UsageError(
                "the store lacks a checkpoint, after which a savepoint in it would be named",
                code="USAGE.NO_CHECKPOINT",
                detail=where.uri,
                hint="give the path of a new folder",
            )
        return cls(where.uri, _files=where._files.below(f"savepoints/{newest}"))

    def without(self, states: frozenset[str]) -> Savepoint:
        """The same savepoint without some of its states; nothing is written."""
        left = Savepoint(self.uri, timeless=self._timeless, _files=self._files)
        left._dropped = self._dropped | states
        return left

    @property
    def uri(self) -> str:
        """The address of the savepoint, without secrets."""
        return self._files.uri

    @property
    def now(self) -> int | None:
        """The time of the batch after which it was taken; None if it was taken after none.

        The latest time of the parts with keyed state. If these have none, those with operator state count, which know
        only the time that they were restored with.
        """
        for kind in ("keyed", "operator"):
            times = [part.described.get("now") for part in self.parts(kind)]
            known: list[int] = [each for each in times if each is not None]
            if known:
                return max(known)
        return None

    @property
    def watermark(self) -> int | None:
        """The watermark after that batch, or one that was set since; None if there is none."""
        found = [part.described.get("watermark") for part in self.parts("keyed")]
        return max((each for each in found if each is not None), default=None)

    # --- reading ---

    def check_exists(self) -> None:
        """Raise `UsageError` without a part, and `CorruptCheckpointError` if one that others name is missing."""
        parts = [*self.parts("keyed"), *self.parts("operator")]
        if not parts:
            raise UsageError(
                "no savepoint found",
                code="USAGE.NO_CHECKPOINT",
                detail=self.uri,
                hint="give the folder that was given to savepoint(), or store.open(id) for a checkpoint",
            )
        missing = {name for part in parts for name in _named_by(part)} - {part.name for part in parts}
        if missing:
            raise CorruptCheckpointError(
                "the savepoint was not written to its end, or has lost a part",
                code="CORRUPT_CHECKPOINT.INCOMPLETE",
                detail=f"{self.uri} has no {min(missing)}",
                hint="remove the folder, and make the savepoint again",
            )

    def parts(self, kind: str) -> list[SavepointPart]:
        """The existing parts of a kind, ``"keyed"`` or ``"operator"``."""
        with storing(f"listing {_PARTS}"):
            names = self._files.names(_PARTS)
        wanted = [name for name in names if name.startswith(f"{kind}-") and name.endswith(".json")]
        return [self._read_part(f"{_PARTS}/{name}") for name in wanted]

    def _read_part(self, name: str) -> SavepointPart:
        with storing(f"reading {name}"):
            data = self._files.read(name)
        described = unseal(data, name)
        check_format(described, _FORMAT, name)
        with reading_part(name):
            states = tuple(
                _savepoint_state(each) for each in instance(described.get("states"), list, "states")
            )
        left = tuple(each for each in states if each.described.get("name") not in self._dropped)
        return SavepointPart(name, described, left)

    @contextmanager
    def open_state(self, state: SavepointState) -> Iterator[pq.ParquetFile]:
        """Compare the whole file of a state with its checksum, then open it."""
        import pyarrow.parquet as pq  # the import loads Arrow's file systems

        with self.open_bytes(state) as source:
            checksum = size = 0
            with storing(f"reading {state.file}"):
                while chunk := source.read(_CHUNK):
                    checksum = crc32c(chunk, checksum)
                    size += len(chunk)
            if (size, checksum) != (state.size, state.checksum):
                raise _mismatch(state.file)
            source.seek(0)
            try:
                yield pq.ParquetFile(source, pre_buffer=False, buffer_size=_BUFFER)
            except StateBackendError:
                raise
            except (pa.ArrowException, OSError) as error:
                raise CorruptCheckpointError("a file cannot be read as Parquet", detail=state.file) from error

    def open_bytes(self, state: SavepointState) -> pa.NativeFile:
        """Open the file of a state, compared with nothing."""
        missing = partial(CorruptCheckpointError, "a file is missing", detail=state.file)
        with storing(f"opening {state.file}", missing=missing):
            return self._files.open_input(state.file)

    # --- writing ---

    def write_part(self, kind: str, own: str, described: Mapping[str, object]) -> PartWriter:
        """Write a part in a ``with`` block; it exists when the block ends. ``own`` names the instance in the file."""
        return self._write_part(kind, own, described, _SyncQueue(self._files))

    def _write_part(
        self, kind: str, own: str, described: Mapping[str, object], waiting: _SyncQueue
    ) -> PartWriter:
        name = _part_name(kind, own)
        if name in self._part_names():
            raise self._is_there()
        times = {"now": None} if self._timeless else {}
        return PartWriter(self._files, kind, own, name, {**described, **times}, waiting)

    @contextmanager
    def write_whole(
        self, parts: Sequence[tuple[str, str, Mapping[str, object]]]
    ) -> Iterator[list[PartWriter]]:
        """Write all parts in one ``with`` block; each is given by the arguments of `write_part`.

        When the block ends, all of the savepoint exists; if anything fails, nothing of it. Each part names all of them,
        so that files left by a crash are not taken for a savepoint.
        """
        if self._part_names():
            raise self._is_there()
        names = [_part_name(kind, own) for kind, own, _ in parts]
        waiting = _SyncQueue(self._files)
        writers = [
            self._write_part(kind, own, {**each, "parts": names}, waiting) for kind, own, each in parts
        ]
        with ExitStack() as undo:
            for writer in writers:
                undo.callback(writer.remove)
            yield writers
            for writer in writers:
                writer.finish()
            undo.pop_all()

    def _part_names(self) -> list[str]:
        with storing(f"listing {_PARTS}"):
            return [f"{_PARTS}/{name}" for name in self._files.names(_PARTS)]

    def _is_there(self) -> UsageError:
        return usage.target_exists(
            "there is a savepoint already", detail=self.uri, hint="give each savepoint its own folder"
        )


@contextmanager
def reading_part(name: str) -> Iterator[None]:
    """Report a member of a part that is missing or wrong."""
    try:
        yield
    except Malformed as error:
        raise CorruptCheckpointError(f"a part of a savepoint cannot be read: {error}", detail=name) from error


def _mismatch(file: str) -> CorruptCheckpointError:
    return CorruptCheckpointError("a file does not match its checksum", detail=file)


def _part_name(kind: str, own: str) -> str:
    return f"{_PARTS}/{kind}-{own}.json"


def _named_by(part: SavepointPart) -> list[str]:
    """The parts that this one says there are; none if its instance wrote it by itself."""
    with reading_part(part.name):
        names = instance(part.described.get("parts", []), list, "parts")
        return [instance(name, str, "a part") for name in names]


def _savepoint_state(data: object) -> SavepointState:
    members = instance(data, dict, "a state")
    described = {key: value for key, value in members.items() if key != "file"}
    if members.get("file") is None:
        return SavepointState(described, "", 0, 0, 0)
    file = instance(members.get("file"), dict, "the file of a state")
    name = instance(file.get("name"), str, "the name of a file")
    if ".." in name.split("/") or name.startswith("/"):
        raise Malformed("a file is not in the savepoint")
    return SavepointState(
        described,
        name,
        integer(file.get("size"), "the size of a file"),
        integer(file.get("checksum"), "the checksum of a file", 0, 2**32 - 1),
        integer(file.get("rows"), "the rows of a file"),
    )


class PartWriter:
    """Writes the files of a part, and its description at the end of the ``with`` block.

    On any earlier error it removes its files.
    """

    def __init__(
        self, files: StoreFiles, kind: str, own: str, name: str, described: JsonObject, waiting: _SyncQueue
    ) -> None:
        self._files = files
        self._waiting = waiting
        self._kind = kind
        self._own = own
        self._name = name
        self._described = described
        self._states: list[JsonObject] = []
        #: The files to remove unless everything succeeds, the description first.
        self._made: list[str] = []

    def __enter__(self) -> PartWriter:
        return self

    def write_state(
        self, described: Mapping[str, Any], batches: Iterable[pa.RecordBatch], schema: pa.Schema | None = None
    ) -> None:
        """Write a state to its own Parquet file, which is durable before the part exists.

        Without batches, a state with a schema has a file without rows, and any other state has none.
        """
        import pyarrow.parquet as pq  # the import loads Arrow's file systems

        given = iter(batches)
        first = next(given, None)
        schema = schema if first is None else first.schema
        if schema is None:
            self._states.append({**described, "file": None})
            return
        rows = 0
        with (
            self._creating(described["name"]) as sink,
            storing(f"writing {sink.name}"),
            pq.ParquetWriter(sink, schema) as writer,
        ):
            for batch in itertools.chain([] if first is None else [first], given):
                writer.write_batch(batch)
                rows += batch.num_rows
        self._add_file(described, sink, rows)

    @contextmanager
    def _creating(self, state: str) -> Iterator[_Sink]:
        """Create the file of a state; when the block ends, it is written, and waits with others to be made durable."""
        folder = f"{self._kind}/{_folder_name(state)}"
        with storing(f"creating {folder}"):
            self._files.make_folder(folder, durably=False)
        with ExitStack() as undo:
            sink = undo.enter_context(_Sink(self._files, f"{folder}/{self._own}.parquet"))
            yield sink
            undo.pop_all()
        self._waiting.add(sink, folder, self._made)

    def _add_file(self, described: Mapping[str, Any], sink: _Sink, rows: int) -> None:
        file = {"name": sink.name, "size": sink.size, "checksum": sink.checksum, "rows": rows}
        self._states.append({**described, "file": file})

    def copy_state(self, source: Savepoint, state: SavepointState, meanwhile: Callable[[int], None]) -> None:
        """Copy a state of another savepoint as it is, compared with its checksum; tells how many bytes are done."""
        if not state.file:
            self.write_state(state.described, ())
            return
        with self._creating(state.described["name"]) as sink, source.open_bytes(state) as opened:
            with storing(f"reading {state.file}"):
                while chunk := opened.read(_CHUNK):
                    sink.write(chunk)
                    meanwhile(len(chunk))
            if (sink.size, sink.checksum) != (state.size, state.checksum):
                raise _mismatch(state.file)
        self._add_file(state.described, sink, state.rows)

    def finish(self) -> None:
        """Write the description: from now on the part exists."""
        self._waiting.settle()
        with storing(f"syncing {self._kind}"):
            self._files.make_folder(self._kind)  # the names of the folders of all states
        content = seal({"format": _FORMAT, **self._described, "states": self._states})
        with storing(f"writing {self._name}"):
            self._files.make_folder(_PARTS)
            self._files.write(self._name, content)
            self._made.insert(0, self._name)
            self._files.sync_folder(_PARTS)

    def remove(self) -> None:
        self._waiting.drop()
        while self._made:
            with storing(f"removing {self._made[0]}"):
                self._files.remove(self._made[0])
            del self._made[0]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self.finish()
                self._made = []
        finally:
            self.remove()


class _SyncQueue:
    """Files that are written and not durable yet. The disk takes little longer for many of them than for one."""

    def __init__(self, files: StoreFiles) -> None:
        self._files = files
        #: With the folder of each, and the list in which to note it.
        self._sinks: list[tuple[_Sink, str, list[str]]] = []

    def add(self, sink: _Sink, folder: str, made: list[str]) -> None:
        """Have a file wait; ``made`` gets its name when it is durable."""
        self._sinks.append((sink, folder, made))
        if len(self._sinks) == _WAIT or sum(each.size for each, _, _ in self._sinks) >= _CHUNK:
            self.settle()

    def settle(self) -> None:

        def settle(waiting: tuple[_Sink, str, list[str]]) -> None:
            sink, folder, made = waiting
            sink.finish()
            made.append(sink.name)
            with storing(f"syncing {folder}"):
                self._files.sync_folder(folder)

        try:
            map_in_threads(settle, self._sinks)
        finally:
            self.drop()

    def drop(self) -> None:
        sinks, self._sinks = self._sinks, []
        for sink, _, _ in sinks:
            sink.close()


class _Sink(io.RawIOBase):
    """A file that computes its own checksum; it is removed unless it is finished."""

    def __init__(self, files: StoreFiles, name: str) -> None:
        super().__init__()
        self.name = name
        self.size = self.checksum = 0
        with storing(f"creating {name}"):
            try:
                self._sink: FileSink | None = files.create(name)
            except FileExistsError as error:
                raise usage.target_exists(
                    "the folder has a file of a savepoint that was not finished",
                    detail=f"{name}, {files.uri}",
                    hint="remove the folder, or give another one",
                ) from error

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.size

    def write(self, data: BytesLike) -> int:
        view = memoryview(data).cast("B")
        assert self._sink is not None
        self._sink.write(view)
        self.checksum = crc32c(view, self.checksum)
        self.size += len(view)
        return len(view)

    def finish(self) -> None:
        assert self._sink is not None
        with storing("syncing a file of a savepoint"):
            self._sink.finish()
        self._sink = None

    def close(self) -> None:
        sink, self._sink = getattr(self, "_sink", None), None
        if sink is not None:
            sink.abandon()
        super().close()


def _folder_name(state: str) -> str:
    """Turn the name of a state into a folder name that every program reads: not hidden, no special characters.

    >>> _folder_name("sum"), _folder_name("_a/b=ü"), len(_folder_name("x" * 1000))
    ('sum', '%5Fa%2Fb%3D%C3%BC', 180)
    """
    name = quote(state, safe="")
    if name[0] in "_.":
        name = f"%{ord(name[0]):02X}{name[1:]}"
    if len(name) > _LONGEST_NAME:
        name = name[: _LONGEST_NAME - 33] + "-" + hashlib.sha256(state.encode()).hexdigest()[:32]
    return name
