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

The members are checked one by one. A mistake is the caller's if it makes an object, which raises `UsageError`, and
damage if it comes from a file, which raises `CorruptCheckpointError`. Messages name members and types, never values.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection
from typing import TypeAlias, TypeVar

from statebackend.checkpoint.files.store_files import BytesLike
from statebackend.errors import BackendUnavailableError, CorruptCheckpointError, UsageError, usage
from statebackend.keys import MAX_PARALLELISM, KeyGroupRange

_compiled: Callable[[BytesLike, int], int] | None = None


def crc32c(data: BytesLike, value: int = 0) -> int:
    """The CRC-32C of ``data``; ``value``, if given, is the CRC of the bytes in front of it. O(n), no copy.

    The first call loads the core: importing the library loads nothing compiled.
    """
    if _compiled is None:
        return _load()(data, value)
    return _compiled(data, value)


def _load() -> Callable[[BytesLike, int], int]:
    global _compiled
    try:
        from statebackend._core.crc32c import crc32c as compiled
    except ImportError as error:
        raise BackendUnavailableError(
            "the compiled core, which takes the checksums of checkpoints, cannot be loaded",
            detail=str(error),
            hint="build it: run 'make test', or 'python setup.py build_ext --inplace'",
        ) from error
    _compiled = compiled
    return _compiled


#: An object as JSON has it. Members are checked where they are read.
JsonObject: TypeAlias = dict[str, object]

_SEAL = re.compile(rb',"checksum":"crc32c:([0-9a-f]{8})"\}\n')
_SEAL_LENGTH = len(b',"checksum":"crc32c:00000000"}\n')


def seal(content: JsonObject) -> bytes:
    """The bytes of a file that holds ``content``, a JSON-able, non-empty object without a member ``checksum``."""
    if not content or "checksum" in content:
        raise usage.json("only a JSON object with members, none of them 'checksum', can be sealed")
    try:
        text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        # The message of json names only types, and circular references or NaN.
        raise usage.json(f"what a checkpoint describes must be JSON-able: {error}") from error
    body = text.encode("ascii")[:-1]
    return body + b',"checksum":"crc32c:%08x"}\n' % crc32c(body)


def unseal(data: bytes, name: str) -> JsonObject:
    """The content of a sealed file; `CorruptCheckpointError`, naming the file, if a single bit has changed."""
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


#: The version of stores that this code makes and reads.
FORMAT = 2

MAX_INTEGER = 10**18 - 1

T = TypeVar("T")


class Malformed(Exception):
    """A member is missing or wrong; the message names it, never its value."""


def integer(value: object, what: str, low: int = 0, high: int = MAX_INTEGER) -> int:
    """Check that a value is an integer within bounds, and no bool."""
    if type(value) is not int or not low <= value <= high:
        raise Malformed(f"{what} is not an integer from {low} to {high}")
    return value


def instance(value: object, cls: type[T], what: str) -> T:
    """Check that a value is an instance of a class."""
    if not isinstance(value, cls):
        raise Malformed(f"{what} is not a {cls.__name__}")
    return value


def match(value: object, pattern: re.Pattern[str], message: str) -> re.Match[str]:
    """Check that a string matches a pattern as a whole; return the match."""
    found = pattern.fullmatch(value) if isinstance(value, str) else None
    if found is None:
        raise Malformed(message)
    return found


def members_of(data: object, what: str, needed: set[str], more: Collection[str] = ()) -> JsonObject:
    """Check that data is a JSON object with all needed members, and no others than these and ``more``."""
    members: JsonObject = instance(data, dict, what)
    if not needed <= members.keys():
        raise Malformed(f"{what} has no {', '.join(sorted(needed - members.keys()))}")
    if not members.keys() <= needed.union(more):
        raise Malformed(f"{what} has members that this version does not know")
    return members


def time_of(value: object) -> int | None:
    """Check a time in milliseconds, or None."""
    return None if value is None else integer(value, "now", -MAX_INTEGER)


def jsonable(value: object, what: str) -> None:
    """Check that JSON can hold a value, before a commit tries to write it."""
    try:
        json.dumps(value, sort_keys=True, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise Malformed(f"{what} is not JSON-able") from error


def groups_of(value: object, what: str) -> KeyGroupRange | None:
    """Key groups, from their range or its JSON form, or None."""
    if value is None or isinstance(value, KeyGroupRange):
        return value
    if not isinstance(value, list) or len(value) != 2:
        raise Malformed(f"key groups of {what} are not a pair")
    start, end = (integer(each, f"a key group of {what}", 0, MAX_PARALLELISM - 1) for each in value)
    if start > end:
        raise Malformed(f"key groups of {what} are not a range")
    return KeyGroupRange(start, end)


def groups_json(groups: KeyGroupRange | None) -> list[int] | None:
    return None if groups is None else [groups.start, groups.end]


class CheckedRecord:
    """A dataclass that checks itself when it is made, and raises `UsageError` if the caller got it wrong."""

    def __post_init__(self) -> None:
        try:
            self._check()
        except Malformed as error:
            raise usage.json(f"not a {type(self).__name__}: {error}") from None

    def _check(self) -> None:
        raise NotImplementedError

    @classmethod
    def from_json(cls: type[T], data: object) -> T:
        """Read the JSON form, with ``_read``; `UsageError` if it is not one."""
        try:
            return cls._read(data)  # type: ignore[attr-defined,no-any-return]
        except Malformed as error:
            raise usage.json(f"not the JSON form of a {cls.__name__}: {error}") from None

    #: Reads a member as it was given, and ignores its declared type.
    _raw_member = object.__getattribute__
    #: Sets a member, although the dataclass is frozen.
    _set = object.__setattr__


def made(cls: type[T], **members: object) -> T:
    """Make an object from data: blames the data where its class would blame the caller."""
    try:
        return cls(**members)
    except UsageError as error:
        raise Malformed(error.message.partition(": ")[2]) from None


def check_format(content: JsonObject, expected: int, name: str) -> None:
    """Raise if the content of a sealed file has another format."""
    version = content.get("format")
    if version != expected:
        raise CorruptCheckpointError(
            f"cannot read format {version if type(version) is int else 'unknown'}; expected format {expected}",
            code="CORRUPT_CHECKPOINT.VERSION",
            detail=name,
            hint="use the version of the library that wrote the file",
        )


def parse(cls: type[T], data: bytes, name: str, read: Callable[[object], T] | None = None) -> T:
    """Make an object from the bytes of the sealed file ``name``, with ``read`` or the ``_read`` of its class."""
    content = unseal(data, name)
    check_format(content, FORMAT, name)
    try:
        return cls._read(content) if read is None else read(content)  # type: ignore[attr-defined]
    except Malformed as error:
        raise CorruptCheckpointError(f"not a {cls.__name__.lower()}: {error}", detail=name) from None
