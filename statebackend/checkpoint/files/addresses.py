"""Parsing addresses: their scheme, the parts that messages may show, and those that an object store needs."""

from __future__ import annotations

import os
import re
from typing import NamedTuple
from urllib.parse import parse_qsl, unquote, urlsplit

from statebackend.errors import UsageError

#: Schemes whose addresses name a container, not a user, before the ``@``: ``abfss://container@account``.
_CONTAINERS = {"abfs", "abfss", "wasb", "wasbs"}
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):")


def scheme_of(address: str) -> str | None:
    """The scheme of an address, in lower case; None if it is a path."""
    found = _SCHEME.match(address)
    return None if found is None else found[1].lower()


def local_path(address: str) -> str | None:
    """The absolute path of a path, or of a ``file://`` address of this machine; None for any other address.

    >>> local_path("/data/../out"), local_path("file:///data/a%20b"), local_path("file://host/data")
    ('/out', '/data/a b', None)
    """
    scheme = scheme_of(address)
    if scheme is None:
        return os.path.abspath(address)
    parts = urlsplit(address)
    if scheme == "file" and parts.netloc in ("", "localhost") and parts.path.startswith("/"):
        return os.path.abspath(unquote(parts.path))
    return None


def without_secrets(address: object) -> str:
    """An address as messages may show it: without user, password and options. Paths are shown as they are.

    >>> without_secrets("s3://KEY:SECRET@bucket/state?region=x"), without_secrets("/data/a@b?")
    ('s3://bucket/state', '/data/a@b?')
    >>> without_secrets("s3://KEY:SEC/RET@bucket/state")  # not encoded as it should be, but a secret
    's3://bucket/state'
    """
    text = str(os.fspath(address) if isinstance(address, os.PathLike) else address)
    if scheme_of(text) is None:
        return text
    scheme, slashes, rest = text.partition("://")
    if not slashes:
        return text.partition("?")[0]
    first = re.split("[/?@]", rest, maxsplit=1)[0]
    if "@" in rest and ":" in first:
        rest = rest.rpartition("@")[2]  # also removes a secret that is not encoded as it should be
    elif "@" in re.split("[/?]", rest, maxsplit=1)[0] and scheme.lower() not in _CONTAINERS:
        rest = rest.partition("@")[2]
    return f"{scheme}://{rest.partition('?')[0]}"


#: A bucket, or a container, or one with its account: no colon, which would be part of a password.
_PLACE = re.compile(r"([A-Za-z0-9$][A-Za-z0-9$._-]*@)?[A-Za-z0-9][A-Za-z0-9._-]*", re.ASCII)


class ObjectAddress(NamedTuple):
    """The parts of an address in an object store."""

    #: The bucket or container, as a uri.
    bucket: str
    #: The path of the store in it, without slashes around it.
    root: str
    #: Configuration by obstore's names, which may hold secrets.
    options: dict[str, str]


def parse_object_address(address: str) -> ObjectAddress:
    """Split the address of a store in an object store; options may have the names that Arrow's addresses use.

    >>> parse_object_address("gs://bucket/app/state/")
    ObjectAddress(bucket='gs://bucket', root='app/state', options={})
    >>> parse_object_address("s3://bucket?endpoint_override=localhost:9000&scheme=http&region=here").options
    {'region': 'here', 'endpoint': 'http://localhost:9000', 'allow_http': 'true'}
    """
    # "#" is not special here: with one, two addresses would otherwise be one store.
    try:
        scheme, place, path, query, _ = urlsplit(address, allow_fragments=False)
    except ValueError:  # its message may show a secret
        scheme, place, path, query = scheme_of(address) or "", "", "", ""
    options = dict(parse_qsl(query, keep_blank_values=True))
    if scheme == "s3" and "@" in place:
        user, _, place = place.rpartition("@")
        key, colon, secret = user.partition(":")
        if colon:
            options["access_key_id"], options["secret_access_key"] = unquote(key), unquote(secret)
        else:
            place = ""
    if _PLACE.fullmatch(place) is None or ("@" in place and scheme not in _CONTAINERS):
        raise UsageError(
            "the address of the store cannot be used",
            code="USAGE.ADDRESS",
            detail=f"no bucket can be read from this {scheme}:// address",
            hint="encode the special characters of keys in an address, or pass them in options=",
        )
    _rename_options(options)
    # Object stores take "a//b" for a path with an empty name, which none of our names has.
    return ObjectAddress(f"{scheme}://{place}", "/".join(filter(None, unquote(path).split("/"))), options)


def _rename_options(options: dict[str, str]) -> None:
    endpoint, scheme = options.pop("endpoint_override", ""), options.pop("scheme", "")
    if endpoint:
        options["endpoint"] = endpoint if "://" in endpoint else f"{scheme or 'https'}://{endpoint}"
    if scheme == "http" or endpoint.startswith("http://"):
        options.setdefault("allow_http", "true")
