"""What a user may say of hosts: how long to wait for what, and where the driver listens for them.

>>> HostOptions(start_timeout=60).max_tries
3
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from statebackend.errors import UsageError


@dataclass(frozen=True)
class HostOptions:
    """Options of executors mode: pass it as ``hosts=``.

    Hosts must be there after ``start_timeout`` seconds. A host whose process is silent for ``silence`` seconds is lost;
    it ends by itself if it has not heard from the driver for as long. A long call of the function is not silence.
    ``host_timeout`` is the longest that the function may take for a batch on a host; None: any time. A batch is tried
    ``max_tries`` times while hosts are lost. Rows that wait for their batch take ``staged_on_disk`` bytes at most on
    the disk of each host, beside ``memory=`` bytes in memory. The driver listens at ``bind``, the interface at which
    Spark's own listens unless given, at one of ``ports``, and hosts find it at ``advertise``, which is the same unless
    given. Each host is a task with the resources of ``profile``, a ``pyspark.resource.ResourceProfile``; None: with
    those of any task. With ``local_copies``, a host keeps the newest base of its range on its disk as well, where a
    host that takes its place reads it; None: if the checkpoint is in an object store.

    >>> HostOptions(max_tries=0)
    Traceback (most recent call last):
    statebackend.errors.UsageError: max_tries is a whole number, at least 1 [USAGE]
    """

    start_timeout: float = 120.0
    silence: float = 30.0
    host_timeout: float | None = None
    max_tries: int = 3
    staged_on_disk: int = 64 << 30
    bind: str | None = None
    ports: Sequence[int] = (0,)
    advertise: str | None = None
    profile: Any = None
    local_copies: bool | None = None

    def __post_init__(self) -> None:
        for name in ("start_timeout", "silence", "host_timeout"):
            given = getattr(self, name)
            if name == "host_timeout" and given is None:
                continue
            if isinstance(given, bool) or not isinstance(given, (int, float)) or not 0 < given < 1e9:
                raise UsageError(f"{name} is a number of seconds, above 0")
        for name, least in (("max_tries", 1), ("staged_on_disk", 0)):
            if type(getattr(self, name)) is not int or getattr(self, name) < least:
                raise UsageError(f"{name} is a whole number, at least {least}")
        if self.local_copies not in (None, True, False):
            raise UsageError("local_copies is True, False or None")
        if not self.ports or not all(type(port) is int and 0 <= port < 65536 for port in self.ports):
            raise UsageError("ports is a list of ports, 0 for any")
