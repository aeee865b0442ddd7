"""What a process of a query runs on: library, Python and platform, which must be those of the driver, and its limits.

>>> differences(environment())
''
>>> differences({**environment(), "library": "0.0"}).partition(" instead")[0]
"library '0.0'"
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping

from statebackend._version import __version__

__all__ = ["address_space", "differences", "environment"]


def environment() -> dict[str, str]:
    """What has to be the same in all processes, or they would compute and write different things.

    >>> sorted(environment())
    ['library', 'platform', 'python']
    """
    return {
        "library": __version__,
        "python": f"{sys.implementation.name} {sys.version_info[0]}.{sys.version_info[1]}",
        "platform": f"{sys.platform} {platform.machine()}, {sys.maxsize.bit_length() + 1} bit, {sys.byteorder} endian",
    }


def differences(there: Mapping[str, str]) -> str:
    """In what another process differs from this one; empty if in nothing."""
    here = environment()
    return ", ".join(
        f"{name} {there.get(name)!r} instead of {value!r}"
        for name, value in here.items()
        if there.get(name) != value
    )


def address_space() -> int | None:
    """The bytes of memory that this process may map, which ``spark.executor.pyspark.memory`` limits; None: any."""
    try:
        import resource
    except ImportError:  # not on POSIX
        return None
    limit: int = resource.getrlimit(resource.RLIMIT_AS)[0]
    return None if limit == resource.RLIM_INFINITY else limit
