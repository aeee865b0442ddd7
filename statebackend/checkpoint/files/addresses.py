"""Parsing addresses: their scheme, and the parts that messages may show.

>>> scheme_of("s3://bucket/state"), without_secrets("s3://KEY:SECRET@bucket/state")
('s3', 's3://bucket/state')
"""

from __future__ import annotations

import os
import re

__all__ = ["scheme_of", "without_secrets"]

#: Schemes whose addresses name a container, not a user, before the ``@``: ``abfss://container@account``.
_CONTAINERS = {"abfs", "abfss", "wasb", "wasbs"}
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):")


def scheme_of(address: str) -> str | None:
    """The scheme of an address, in lower case; None if it is a path.

    >>> scheme_of("dbfs:/state"), scheme_of("/data/10:30"), scheme_of("./a:b")
    ('dbfs', None, None)
    """
    found = _SCHEME.match(address)
    return None if found is None else found[1].lower()


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
