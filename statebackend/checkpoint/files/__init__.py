"""The places of a store, and their guarantees: POSIX folders and object stores."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from statebackend.checkpoint.files.addresses import (
    local_path as local_path,
    scheme_of as scheme_of,
    without_secrets as without_secrets,
)
from statebackend.checkpoint.files.object_store import ObjectFiles
from statebackend.checkpoint.files.posix import PosixFiles as PosixFiles
from statebackend.checkpoint.files.posix_calls import PosixCalls as PosixCalls
from statebackend.checkpoint.files.store_files import FileSink as FileSink, StoreFiles as StoreFiles
from statebackend.checkpoint.files.target_folder import (
    TargetFolder as TargetFolder,
    open_target_folder as open_target_folder,
)
from statebackend.errors import UsageError, usage

#: The schemes of the object stores that a store can be in.
_OBJECT_STORES = ("s3", "gs", "abfss")


def open_files(
    uri: str | os.PathLike[str], *, single_writer: bool = False, options: Mapping[str, str] | None = None
) -> StoreFiles:
    """The files of the store at ``uri``: a path, ``file://``, ``s3://``, ``gs://`` or ``abfss://``. Asks nothing yet.

    ``options`` are an object store's, by obstore's names.
    """
    text: Any = os.fspath(uri) if isinstance(uri, os.PathLike) else uri
    if not isinstance(text, str) or not text:
        raise usage.address("a store is given by its path or uri, a str")
    name = scheme_of(text)
    if name in _OBJECT_STORES and text.lower().startswith(f"{name}://"):
        return ObjectFiles(text, single_writer=single_writer, options=options)
    if options:
        raise usage.option("only an object store takes options", hint="leave options= out for a path")
    if (path := local_path(text)) is not None:
        return PosixFiles(path, single_writer=single_writer)
    if name == "file":
        raise usage.address(
            "a file:// address is file:///path", detail="it names a host, or no absolute path"
        )
    raise UsageError(
        f"a store cannot lie at a {name}: address",
        code="USAGE.ADDRESS",
        hint="use a path, or s3://bucket/path, gs://bucket/path or abfss://container@account.dfs.core.windows.net/path "
        "as a str; for a folder that has a colon in its name, ./name:more",
    )
