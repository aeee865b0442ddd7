"""CRC-32C of bytes, computed by the compiled core.

>>> hex(crc32c(b"123456789"))
'0xe3069283'
"""

from __future__ import annotations

from collections.abc import Callable

from statebackend.checkpoint.files.interface import Buffer
from statebackend.errors import BackendUnavailableError

__all__ = ["crc32c"]

_compiled: Callable[[Buffer, int], int] | None = None


def crc32c(data: Buffer, value: int = 0) -> int:
    """The CRC-32C of ``data``; ``value``, if given, is the CRC of the bytes in front of it. O(n), no copy.

    The first call loads the core: importing the library loads nothing compiled.

    >>> crc32c(b"456789", crc32c(b"123")) == crc32c(b"123456789")
    True
    """
    if _compiled is None:
        return _load()(data, value)
    return _compiled(data, value)


def _load() -> Callable[[Buffer, int], int]:
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
    return compiled
