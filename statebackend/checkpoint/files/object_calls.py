"""All requests that a store in an object store makes, and nothing else.

Tests replace this layer with one that fails, dies, lies or comes late at any request. Credentials, regions, proxies
and time limits follow ``obstore``: it reads the environment variables ``AWS_*``, ``AZURE_*`` and ``GOOGLE_*``,
asks the machine that it runs on for its role, and takes options of the same names.
"""

from __future__ import annotations

import errno
import importlib
import os
import re
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

from statebackend.checkpoint.files.addresses import parse_object_address, without_secrets
from statebackend.checkpoint.files.store_files import BytesLike
from statebackend.errors import UsageError, usage

T = TypeVar("T")

#: An object below this size is one PUT; another one is uploaded in parts of this size.
PART_SIZE = 8 << 20
#: The parts of one object that are under way at once: they are held in memory.
_PARTS_AT_ONCE = 4
#: Prefixes of environment variables, which obstore takes for options, begin with.
_PREFIX = re.compile("^(aws|azure_storage|azure|google)_")
#: Options that would lead to another place than the address.
_PLACE_OPTIONS = ("bucket", "bucket_name", "container_name")
#: The options of obstore's HTTP client, which it takes apart from options of a service.
_CLIENT_OPTIONS = (
    "allow_http",
    "allow_invalid_certificates",
    "connect_timeout",
    "default_content_type",
    "http1_only",
    "http2_keep_alive_interval",
    "http2_keep_alive_timeout",
    "http2_keep_alive_while_idle",
    "http2_only",
    "pool_idle_timeout",
    "pool_max_idle_per_host",
    "proxy_ca_certificate",
    "proxy_excludes",
    "proxy_url",
    "randomize_addresses",
    "read_timeout",
    "root_certificate",
    "timeout",
    "user_agent",
)
#: The parts of an error's text that may be shown: the rest may hold a signed address, or the service's words about a
#: key.
_STATUS = re.compile(r"status code: ([0-9]{3})\b(?: [A-Z][A-Za-z]*)*")
_CODE = re.compile(r"<Code>([A-Za-z]{1,60})</Code>")


#: The process that has used obstore, or the one that it was forked from.
_used_in: int | None = None


class ObjectStatus(NamedTuple):
    """The facts about an object that the store needs."""

    size: int
    #: When it was written, in seconds since 1970.
    modified: float


class ObjectCalls:
    """One method per request, by the object's full name in its bucket. Each raises `OSError` without secrets."""

    def __init__(self, uri: str, options: Mapping[str, str] | None = None) -> None:
        self._uri = uri
        self._options = dict(options or {})
        self._opened: Any = None

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self._uri, self._options)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({without_secrets(self._uri)!r})"

    def put(self, name: str, content: bytes) -> None:
        """Write an object, in the place of any other. One request."""
        # Never in parts: a small object that is replaced is seen as the old one or the new one.
        self._ask("write", name, lambda obs, store: obs.put(store, name, content, use_multipart=False))

    def create(self, name: str, content: bytes) -> None:
        """Write an object that must not exist, or raise `FileExistsError`. One request.

        `FileExistsError` may be the answer to a repeated request that succeeded: read the object. ``ENOTSUP`` says
        that the service can create nothing exclusively.
        """
        # A multipart upload would overwrite whatever is there.
        self._ask(
            "create",
            name,
            lambda obs, store: obs.put(store, name, content, mode="create", use_multipart=False),
        )

    def head(self, name: str) -> ObjectStatus:
        """The size of an object, and when it was written. One request."""
        found = self._ask("look at", name, lambda obs, store: obs.head(store, name))
        return ObjectStatus(found["size"], found["last_modified"].timestamp())

    def get(self, name: str) -> bytes:
        """A whole object. One request."""
        found: BytesLike = self._ask("read", name, lambda obs, store: obs.get(store, name).bytes())
        return bytes(found)

    def get_range(self, name: str, start: int, end: int) -> BytesLike:
        """The bytes of an object from ``start`` to before ``end``; fewer, but some, if it ends earlier. One request."""
        found: BytesLike = self._ask(
            "read", name, lambda obs, store: obs.get_range(store, name, start=start, end=end)
        )
        return found

    def names(self, folder: str) -> list[str]:
        """The base names of the objects and of the folders in a folder, in any order. One request per 1000."""
        found = self._ask("list", folder, lambda obs, store: obs.list_with_delimiter(store, folder or None))
        names = [*(each["path"] for each in found["objects"]), *found["common_prefixes"]]
        # A console makes folders as empty objects of the folder's own name.
        return [base for base in (name[len(folder) :].strip("/") for name in names) if base]

    def names_below(self, folder: str) -> list[str]:
        """The full names of all objects below a folder, in any order. One request per 1000."""
        found = self._ask("list", folder, lambda obs, store: obs.list(store, folder or None).collect())
        return [each["path"] for each in found]

    def delete(self, name: str) -> None:
        """Remove an object; a service may or may not raise `FileNotFoundError` if it is gone. One request.

        It is S3's POST for many: a service without that needs the option ``disable_bulk_delete``.
        """
        self._ask("remove", name, lambda obs, store: obs.delete(store, name))

    def copy(self, name: str, other: str) -> None:
        """Copy an object within the bucket, in the place of any other of that name. One request to the service."""
        self._ask("copy", name, lambda obs, store: obs.copy(store, name, other, overwrite=True))

    def open_writer(self, name: str) -> Upload:
        """Begin an object: one PUT if it stays below `PART_SIZE`, else a request per part and two more."""
        opened = self._ask(
            "write",
            name,
            lambda obs, store: obs.open_writer(
                store, name, buffer_size=PART_SIZE, max_concurrency=_PARTS_AT_ONCE
            ),
        )
        return Upload(self, name, opened)

    # --- obstore ---

    def _ask(self, doing: str, name: str, request: Callable[[Any, Any], T]) -> T:
        """Make a request, and translate its error. The raised error hides its cause, whose text could hold a secret."""
        obstore = _obstore()
        _refuse_forked()
        if self._opened is None:
            self._opened = self._open(obstore)
        try:
            return request(obstore, self._opened)
        except (OSError, ValueError, NotImplementedError, obstore.exceptions.BaseError) as error:
            raise _translated(obstore.exceptions, error, doing, name) from None

    def _open(self, obstore: Any) -> Any:
        bucket, _, options = parse_object_address(self._uri)
        options.update(self._options)
        service: dict[str, str] = {}
        client: dict[str, str] = {}
        retry: dict[str, object] = {}
        try:
            for name, value in options.items():
                bare = _PREFIX.sub("", name.lower())
                if bare in _PLACE_OPTIONS:
                    raise ValueError("the bucket is given by the address")
                if bare == "max_retries":
                    retry[bare] = int(value)
                elif bare == "retry_timeout":
                    retry[bare] = timedelta(seconds=float(value))
                elif bare in _CLIENT_OPTIONS:
                    client[bare] = value
                else:
                    service[name] = value
            return obstore.store.from_url(
                bucket, config=service, client_options=client or None, retry_config=retry or None
            )
        except (OSError, ValueError, TypeError, obstore.exceptions.BaseError) as error:
            raise usage.address(
                f"the address of the store cannot be used: {_reason(error, options)}",
                hint="the options in the address, or in options=, are obstore's",
            ) from None


class Upload:
    """An upload by obstore. The object appears, whole, when it is closed; if it never is, it never appears."""

    def __init__(self, calls: ObjectCalls, name: str, opened: Any) -> None:
        self._calls = calls
        self._name = name
        self._opened = opened

    def write(self, data: BytesLike) -> None:
        self._calls._ask("write", self._name, lambda obs, store: self._opened.write(data))

    def close(self) -> None:
        self._calls._ask("write", self._name, lambda obs, store: self._opened.close())


def _obstore() -> Any:
    try:
        importlib.import_module("obstore.exceptions")
        return importlib.import_module("obstore")
    except ImportError:
        raise usage.package(
            "a store in an object store needs the package obstore", hint="pip install obstore"
        ) from None


def _refuse_forked() -> None:
    """Raise where obstore would wait forever: its threads are gone in a process forked from one that has used it."""
    global _used_in
    if _used_in is None:
        _used_in = os.getpid()
    elif _used_in != os.getpid():
        raise UsageError(
            "an object store cannot be used in a process that was forked from one that has used it",
            code="USAGE.FORKED",
            hint="start processes with multiprocessing's 'spawn' or 'forkserver'",
        )


def _translated(exceptions: Any, error: Exception, doing: str, name: str) -> OSError:
    """The `OSError` of a kind that callers know, with nothing in it but the object's name and a reason."""
    if isinstance(error, FileNotFoundError) and doing in ("read", "look at", "remove"):
        return FileNotFoundError(errno.ENOENT, "no such object", name)
    text = str(error)
    status = _STATUS.search(text)
    code = _CODE.search(text)
    number = status[1] if status else ""
    if isinstance(error, (exceptions.AlreadyExistsError, exceptions.PreconditionError)):
        return FileExistsError(errno.EEXIST, "an object of this name exists", name)
    # 501 is what services answer that do not know the condition's header.
    if isinstance(error, (NotImplementedError, exceptions.NotSupportedError)) or number == "501":
        return OSError(errno.ENOTSUP, "not supported by the object store", name)
    if status:
        reason = " ".join(filter(None, [status[0].removeprefix("status code: "), code and code[1]]))
    elif isinstance(error, FileNotFoundError):
        reason = "no such bucket"
    elif isinstance(error, TimeoutError) or "kind: Timeout" in text:
        reason = "timed out"
    elif isinstance(error, ConnectionError) or "kind: Connect" in text:
        reason = "no connection"
    elif "error sending request" in text:
        reason = "the request could not be sent"
    else:
        reason = type(error).__name__
    message = f"the object store failed to {doing} {name or 'the bucket'}: {reason}"
    refused = (PermissionError, exceptions.PermissionDeniedError, exceptions.UnauthenticatedError)
    # A missing bucket is not a missing file, which callers may take for an empty folder.
    return PermissionError(errno.EACCES, message) if isinstance(error, refused) else OSError(message)


def _reason(error: Exception, options: Mapping[str, str]) -> str:
    """The first line of an error about the configuration, without any of the configuration's values."""
    text = f"{type(error).__name__}: {error}".partition("\n")[0]
    for value in sorted(options.values(), key=len, reverse=True):
        if value:
            text = text.replace(value, "...")
    return re.sub(r"'[^']*'|\"[^\"]*\"|\S*://\S*", "...", text)
