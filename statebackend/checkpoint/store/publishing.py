"""Publishing a file of a store: it appears in a place where other programs read, under a name that is its own.

>>> import tempfile
>>> from statebackend.checkpoint.files import open_place
>>> with tempfile.TemporaryDirectory() as folder:
...     place = open_place(folder)
...     [published(place, "a", lambda: pa.BufferReader(b"rows")) for _ in range(2)]
['copied', 'there']
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pyarrow as pa

from statebackend.checkpoint.files import Place, StoreFiles
from statebackend.checkpoint.store.data_files import storing
from statebackend.errors import UsageError

__all__ = ["published"]

_CHUNK = 4 << 20


def published(
    place: Place,
    name: str,
    opened: Callable[[], pa.NativeFile],
    source: StoreFiles | None = None,
    source_name: str = "",
) -> str:
    """Make what ``opened`` gives appear under this name, and say how; ``source`` has just this content as a file.

    Linked from there if it lies on the same file system; else O(bytes).
    """
    with storing(f"publishing {place.address(name)}"):
        if place.size(name) is None:
            try:
                how = None if source is None else place.adopt(name, source, source_name)
                if how is not None:
                    return how
                with opened() as content:
                    place.write(name, _chunks(content))
                return "copied"
            except FileExistsError:
                pass  # another process has made it meanwhile
        with opened() as content:
            _check_same(content, place, name)
        place.tidy(name)
        place.settle(name)
        return "there"


def _check_same(content: pa.NativeFile, place: Place, name: str) -> None:
    """Raise unless this name has the content. O(bytes)."""
    with place.open_input(name) as other:
        is_same = content.size() == other.size()
        while is_same and (chunk := content.read(_CHUNK)):
            is_same = other.read(_CHUNK) == chunk
    if not is_same:
        raise UsageError(
            "a file of this name is there, with other content",
            code="USAGE.PUBLISHED",
            detail=place.address(name),
            hint="the name belongs to one batch of one store. If the store was brought back from an older copy, bring "
            "the folder back to the same moment: its files of later batches are read, too. If something else has "
            "changed the file, move it away. Then run the query again",
        )


def _chunks(content: pa.NativeFile) -> Iterator[bytes]:
    while chunk := content.read(_CHUNK):
        yield chunk
