"""The places in which a store can lie, and what each can promise: POSIX folders and object stores.

>>> open_files("/data/app/state").uri
'/data/app/state'
>>> open_files("s3://bucket/state", single_writer=False)
Traceback (most recent call last):
statebackend.errors.UsageError: an object store cannot keep a second writer out. Hint: ...
"""

from __future__ import annotations

import os
from typing import Any
from urllib.parse import unquote, urlsplit

from statebackend.checkpoint.files.addresses import scheme_of, without_secrets
from statebackend.checkpoint.files.calls import PosixCalls
from statebackend.checkpoint.files.interface import FileSink, StoreFiles
from statebackend.checkpoint.files.posix import PosixFiles
from statebackend.errors import UsageError

__all__ = ["FileSink", "PosixCalls", "PosixFiles", "StoreFiles", "open_files", "scheme_of", "without_secrets"]


def open_files(uri: str | os.PathLike[str], *, single_writer: bool = False) -> StoreFiles:
    """The files of the store at ``uri``: a path, ``file://...`` or ``s3://...``. Touches nothing on POSIX paths.

    >>> open_files("file:///data/app/state").uri
    '/data/app/state'
    >>> open_files("ftp://host/state")
    Traceback (most recent call last):
    statebackend.errors.UsageError: a store cannot lie at a ftp: address. Hint: ...
    """
    text: Any = os.fspath(uri)
    if not isinstance(text, str) or not text:
        raise UsageError("a store is given by its path or uri, a str")
    name = scheme_of(text)
    if name is None:
        return PosixFiles(os.path.abspath(text), single_writer=single_writer)
    if name == "file":
        parts = urlsplit(text)
        if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
            raise UsageError(
                "a file:// address is file:///path", detail="it names a host, or no absolute path"
            )
        return PosixFiles(os.path.abspath(unquote(parts.path)), single_writer=single_writer)
    if name != "s3" or not text.lower().startswith("s3://"):
        raise UsageError(
            f"a store cannot lie at a {name}: address",
            code="USAGE.ADDRESS",
            hint="use a path, or s3://bucket/path as a str; for a folder that has a colon in its name, ./name:more",
        )
    if not single_writer:
        raise UsageError(
            "an object store cannot keep a second writer out",
            code="USAGE.SINGLE_WRITER",
            hint="pass single_writer=True if you vouch that no second one writes there; "
            "otherwise use a local or shared POSIX path",
        )
    from statebackend.checkpoint.files.objects import ObjectFiles  # the import loads Arrow's file systems

    return ObjectFiles(text)
