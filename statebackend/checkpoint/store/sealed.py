"""JSON files that check themselves: an object whose last member is the checksum of all bytes before it.

The file is one line of JSON in ASCII. Its members are sorted by name, except for the last one::

    {"epoch":3,...,"checksum":"crc32c:0a1b2c3d"}

and the checksum covers everything in front of ``,"checksum"``.

>>> sealed = seal({"id": 7})
>>> sealed
b'{"id":7,"checksum":"crc32c:aeea8e84"}\\n'
>>> unseal(sealed, "a.json")
{'id': 7}
>>> unseal(sealed.replace(b"7", b"8", 1), "a.json")
Traceback (most recent call last):
statebackend.errors.CorruptCheckpointError: the file does not match its checksum (a.json, bytes 0 to 7)...
"""

from __future__ import annotations

import json
import re
from typing import TypeAlias

from statebackend.checkpoint.store.checksums import crc32c
from statebackend.errors import CorruptCheckpointError, UsageError

__all__ = ["JsonObject", "seal", "unseal"]

#: An object as JSON has it. What a member is, is checked where it is read, by `json_checks`.
JsonObject: TypeAlias = dict[str, object]

_SEAL = re.compile(rb',"checksum":"crc32c:([0-9a-f]{8})"\}\n')
_SEAL_LENGTH = len(b',"checksum":"crc32c:00000000"}\n')


def seal(content: JsonObject) -> bytes:
    """The bytes of a file that holds ``content``, a JSON-able, non-empty object without a member ``checksum``.

    >>> seal({})
    Traceback (most recent call last):
    statebackend.errors.UsageError: only a JSON object with members, none of them 'checksum', can be sealed ...
    """
    if not content or "checksum" in content:
        raise UsageError("only a JSON object with members, none of them 'checksum', can be sealed")
    try:
        text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        # The message of json names only types, and circular references or NaN.
        raise UsageError(f"what a checkpoint describes must be JSON-able: {error}") from error
    body = text.encode("ascii")[:-1]
    return body + b',"checksum":"crc32c:%08x"}\n' % crc32c(body)


def unseal(data: bytes, name: str) -> JsonObject:
    """The content of a sealed file; `CorruptCheckpointError`, naming the file, if a single bit has changed.

    >>> unseal(b"", "a.json")
    Traceback (most recent call last):
    statebackend.errors.CorruptCheckpointError: the file is cut short or damaged at its end (a.json, ...
    """
    start = max(len(data) - _SEAL_LENGTH, 0)
    found = _SEAL.fullmatch(data, start)
    if found is None:
        raise CorruptCheckpointError(
            "the file is cut short or damaged at its end", detail=f"{name}, bytes {start} to {len(data)}"
        )
    body = data[:start]
    if crc32c(body) != int(found[1], 16):
        raise CorruptCheckpointError(
            "the file does not match its checksum", detail=f"{name}, bytes 0 to {len(body)}"
        )
    try:
        content = json.loads(body + b"}")
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpointError(
            "the file is not JSON, although its checksum is right", detail=name
        ) from error
    if not isinstance(content, dict):
        raise CorruptCheckpointError("the file does not hold a JSON object", detail=name)
    return content
