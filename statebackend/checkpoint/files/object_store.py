"""A store in an object store: objects appear whole, and a conditional PUT keeps a second writer out.

Nothing here can be fenced, and nothing needs to be: the log of the store has numbered entries, and each comes into
being by a PUT that succeeds only if its name is free. A new writer takes the number after the newest
entry for its own first one. Whichever of several writers creates that object has won; the others, and the writer
before, whose next entry would have the same number, fail to create theirs and know why. All else that a writer does
to objects that others may rely on has been decided in the log before.

A refusal may be the answer to a repetition of a request whose first answer was lost; an error may follow a request
that was carried out, or will be. So `ObjectFiles.publish` reads the object back. No two contents are ever the same.

Requests, each a round trip to the service:

====================  ==========================================================================================
``take_epoch``        LIST; PUT, PUT and DELETE to try out if the service keeps its word, once in an object's life;
``publish``           PUT; a GET after any error; before, with ``single_writer``, a HEAD
``holds``             HEAD
``retire``            a DELETE for each name
``remove``            DELETE, which on S3 is a POST
``remove_leftovers``  LIST for each 1000 data files, a DELETE for each one left over
``names``             LIST for each 1000 names
``size, modified``    HEAD
``read``              GET
``open_input``        none if the size is given, else HEAD; then a GET for a megabyte or more
``create``            a PUT if less than 8 MB are written; else POST, a PUT for each 8 MB, POST
====================  ==========================================================================================

Arrow reads files by ranges: a few bytes of a footer, then batches one after the other. A request takes as long as the
transfer of some hundred kilobytes, so none asks for less, unless the object ends. `RangedFile` keeps the bytes of the
last request, and the end of the object, which Arrow reads first.
"""

from __future__ import annotations

import errno
import logging
import secrets
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial

import pyarrow as pa

from statebackend.checkpoint.files.addresses import parse_object_address, without_secrets
from statebackend.checkpoint.files.layout import (
    CHECKPOINTS,
    DATA,
    data_epoch,
    entry_name,
    is_data_file,
    parse_entry_name,
)
from statebackend.checkpoint.files.object_calls import ObjectCalls, Upload
from statebackend.checkpoint.files.store_files import (
    BytesLike,
    FileSink,
    NameConflictError,
    SeekableFile,
    StoreFiles,
)
from statebackend.errors import UsageError

#: The fewest bytes to ask for.
LEAST = 1 << 20
#: The most to ask for unwanted. A request that goes on where the one before ended asks for twice as much as that one.
MOST_AHEAD = 4 << 20


class RangedFile(SeekableFile):
    """A seekable file of ``size`` bytes over ``fetch(start, end)``, which makes one request."""

    def __init__(self, fetch: Callable[[int, int], BytesLike], size: int) -> None:
        super().__init__(size)
        self._fetch = fetch
        #: Where the last request ended, and how much it asked for at least.
        self._next = -1
        self._ahead = LEAST
        #: Pieces of the object by where they begin: the one read last, and its end.
        self._last: tuple[int, memoryview] = (0, memoryview(b""))
        self._tail: tuple[int, memoryview] = (size, memoryview(b""))

    def readinto(self, buffer: BytesLike) -> int:
        target = memoryview(buffer).cast("B")
        found = memoryview(self.read(len(target)))
        target[: len(found)] = found
        return len(found)

    def read(self, size: int | None = -1, /) -> BytesLike:
        """The next bytes: as many as asked for, unless the object ends."""
        end = self._size if size is None or size < 0 else min(self._at + size, self._size)
        pieces = []
        while self._at < end:
            piece = self._piece(self._at, end)
            if not piece:
                break  # the object is shorter than it should be
            pieces.append(piece)
            self._at += len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _piece(self, start: int, end: int) -> memoryview:
        """Some bytes from ``start`` on, at most until ``end``."""
        for begin, held in (self._last, self._tail):
            if begin <= start < begin + len(held):
                return held[start - begin : end - begin]
        goes_on = start == self._next
        self._ahead = min(2 * self._ahead, MOST_AHEAD) if goes_on else LEAST
        until = min(max(end, start + self._ahead), self._size)
        ends = until == self._size and not goes_on
        # A reader of the end reads a little before it next.
        begin = min(start, max(until - LEAST, 0)) if ends else start
        held = memoryview(self._fetch(begin, until)).cast("B")
        self._next = until
        if len(held) <= MOST_AHEAD:
            if ends:
                self._tail = begin, held
            else:
                self._last = begin, held
        return held[start - begin : end - begin]

    def close(self) -> None:
        self._last = self._tail = (0, memoryview(b""))
        super().close()


_log = logging.getLogger(__name__)
#: Where objects are created to try out if the service refuses to create one twice.
_PROBES = "probes"


class ObjectSink(FileSink):
    """A new object; it appears when it is finished."""

    def __init__(self, calls: ObjectCalls, path: str) -> None:
        self._calls = calls
        self._path = path
        #: None before the first byte, and once nothing more can be written.
        self._writer: Upload | None = None
        self._may_be_there = False

    def write(self, data: BytesLike) -> None:
        self._open().write(memoryview(data).cast("B"))

    def _open(self) -> Upload:
        if self._writer is None:
            self._writer = self._calls.open_writer(self._path)
        return self._writer

    def sync_written(self) -> None:
        pass  # an object appears when it is finished

    def finish(self) -> None:
        writer = self._open()
        self._may_be_there = True
        writer.close()

    def abandon(self) -> None:
        # An upload that is never closed makes nothing appear. The service keeps its parts until its rule for
        # unfinished uploads removes them.
        self._writer = None
        if not self._may_be_there:
            return
        self._may_be_there = False
        try:
            with suppress(FileNotFoundError):
                self._calls.delete(self._path)
        except (OSError, UsageError) as error:
            _log.warning("an abandoned object stays until the store is next opened: %s", error)


class ObjectFiles(StoreFiles):
    """The files of a store below a path in a bucket.

    ``single_writer`` says that the user vouches for there being one writer, so that a service may be used that can
    create nothing exclusively. ``options`` are obstore's.
    """

    def __init__(
        self,
        uri: str,
        calls: ObjectCalls | None = None,
        *,
        single_writer: bool = False,
        options: Mapping[str, str] | None = None,
    ) -> None:
        self.uri = without_secrets(uri).rstrip("/")
        self._uri = uri
        self._calls = ObjectCalls(uri, options) if calls is None else calls
        self._single_writer = single_writer
        self._root: str | None = None
        self._is_tried_out = single_writer

    def __reduce__(self) -> tuple[object, ...]:
        return partial(ObjectFiles, single_writer=self._single_writer), (self._uri, self._calls)

    def __repr__(self) -> str:
        return f"ObjectFiles({self.uri!r})"

    def _path(self, name: str) -> str:
        if self._root is None:
            # Not before something is asked: an address may be kept, and shown, that cannot be used.
            self._root = parse_object_address(self._uri).root
        return "/".join(filter(None, (self._root, name)))

    # --- reading ---

    def read(self, name: str) -> bytes:
        return self._calls.get(self._path(name))

    def size(self, name: str) -> int | None:
        with suppress(FileNotFoundError):
            return self._calls.head(self._path(name)).size
        return None

    def modified(self, name: str) -> float:
        with suppress(FileNotFoundError):
            return self._calls.head(self._path(name)).modified
        return 0.0

    def names(self, folder: str) -> list[str]:
        # A service that has folders may list one as an object too.
        return sorted({*self._calls.names(self._path(folder))})

    def open_input(self, name: str, size: int | None = None) -> pa.NativeFile:
        path = self._path(name)
        known = self._calls.head(path).size if size is None else size
        return pa.PythonFile(
            RangedFile(lambda start, end: self._calls.get_range(path, start, end), known), mode="r"
        )

    def address(self, name: str) -> str:
        return f"{self.uri}/{name}"

    def below(self, folder: str) -> StoreFiles:
        inner = ObjectFiles(f"{self.uri}/{folder}", self._calls, single_writer=self._single_writer)
        inner._root = self._path(folder)
        return inner

    # --- data files ---

    def create(self, name: str) -> FileSink:
        # Their names have a random part: none is taken.
        return ObjectSink(self._calls, self._path(name))

    def make_folder(self, folder: str, *, durably: bool = True) -> None:
        pass  # object names need no folders

    def sync_folder(self, folder: str) -> None:
        pass  # an object and its name are durable once its upload is acknowledged

    def remove(self, name: str) -> None:
        with suppress(FileNotFoundError):
            self._calls.delete(self._path(name))

    # --- the writer ---

    def take_epoch(self, *, refuse_live: bool) -> int:
        # Nothing tells if an older writer is alive: it finds out with its next entry.
        if not self._is_tried_out:
            self._try_out()
            self._is_tried_out = True
        return max((parse_entry_name(name) or 0 for name in self.names(CHECKPOINTS)), default=0) + 1

    def _try_out(self) -> None:
        """Raise `UsageError` if the service creates an object twice, as those do that ignore the condition."""
        path = self._path(f"{_PROBES}/{secrets.token_hex(16)}")
        refuses = False
        try:
            for content in (b"first", b"second"):
                try:
                    self._calls.create(path, content)
                except FileExistsError:  # the first one too, may be refused if it is repeated on the way
                    refuses = True
        except OSError as error:
            if error.errno != errno.ENOTSUP:
                raise
        finally:
            try:
                with suppress(FileNotFoundError):
                    self._calls.delete(path)
            except OSError as error:
                _log.warning("an object that was created to try out the service stays: %s", error)
        if not refuses:
            raise self._no_exclusion("it does not refuse to create an object of a name that is taken")

    def _no_exclusion(self, reason: str) -> UsageError:
        return UsageError(
            "this object store cannot keep a second writer out",
            code="USAGE.SINGLE_WRITER",
            detail=f"{self.uri}: {reason}",
            hint="use one with conditional writes, such as S3, GCS or Azure, or a local or shared POSIX path; "
            "or pass CheckpointStore(..., single_writer=True) if you vouch that no second one writes there",
        )

    def holds(self, epoch: int, next_sequence: int) -> bool:
        return self.size(entry_name(next_sequence)) is None

    def publish(self, name: str, content: bytes, epoch: int) -> None:
        path = self._path(name)
        # The service may ignore the condition, which was not tried out.
        is_there = self._single_writer and self.size(name) is not None
        try:
            if is_there:
                raise FileExistsError(errno.EEXIST, "an object of this name exists", path)
            self._create(path, content)
        except OSError as error:
            self._settle(path, content, error)

    def _create(self, path: str, content: bytes) -> None:
        try:
            self._calls.create(path, content)
        except OSError as error:
            if error.errno != errno.ENOTSUP:
                raise
            if not self._single_writer:
                raise self._no_exclusion("it lacks conditional writes") from None
            self._calls.put(path, content)

    def _settle(self, path: str, content: bytes, error: OSError) -> None:
        """Return if the object has been created in spite of an error; `NameConflictError` if it is another's."""
        try:
            found = self._calls.get(path)
        except OSError:
            # Without a refusal the request may still be carried out. With a refusal, the object of the first writer has
            # yet to appear, and this may be the first writer.
            if isinstance(error, FileExistsError):
                error = OSError(
                    "the object store refuses to create an object, and cannot show the one that exists"
                )
            error.unknown = True  # type: ignore[attr-defined]
            raise error from None
        if found != content:
            raise NameConflictError from error

    def retire(self, names: Iterable[str], epoch: int) -> None:
        for name in names:
            self.remove(name)  # that they may go was decided in the log

    def remove_leftovers(self, is_kept: Callable[[str], bool], epoch: int) -> int:
        removed = 0
        start = len(self._path("x")) - 1
        for path in self._calls.names_below(self._path(DATA)):
            name = path[start:]
            if 0 < data_epoch(name) < epoch and is_data_file(name) and not is_kept(name):
                self.remove(name)
                removed += 1
        return removed

    def release(self, epoch: int) -> None:
        pass
