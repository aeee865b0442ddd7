"""What the cluster of a frame gives to executors mode: slots, memory, addresses. Too little is told at the start."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from statebackend.cluster.options import HostOptions
from statebackend.errors import UsageError
from statebackend.spark.session import is_connect

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["check_memory", "check_not_encrypted", "check_slots", "options_at", "python_memory"]


def check_not_encrypted(frame: DataFrame) -> None:
    """Raise if Spark encrypts what goes between its processes, or rows on local disks: we do not."""
    conf = frame.sparkSession.conf
    for name, what in (
        ("spark.network.crypto.enabled", "what goes between its processes, and rows would go to hosts"),
        ("spark.ssl.rpc.enabled", "what goes between its processes, and rows would go to hosts"),
        (
            "spark.authenticate.enableSaslEncryption",
            "what goes between its processes, and rows would go to hosts",
        ),
        ("spark.io.encryption.enabled", "what it keeps on local disks, and rows would wait there"),
    ):
        if str(conf.get(name, "false")).lower() == "true":
            raise UsageError(
                f"Spark encrypts {what} as plain text",
                code="USAGE.NOT_AVAILABLE",
                detail=name,
                hint="use mode='driver'",
            )


def check_memory(frame: DataFrame, parallelism: int, needed: int) -> None:
    """Raise if an executor's container is to hold hosts that take ``needed`` bytes each, and is too small for that.

    Looks where containers have limits: on YARN and Kubernetes. 0: nobody knows what hosts take.
    """
    conf = frame.sparkSession.conf
    master = conf.get("spark.master", None) or ""
    if not needed or not master.startswith(("yarn", "k8s")):
        return
    name, room = python_memory(conf.get, is_kubernetes=master.startswith("k8s"))
    executors = int(conf.get("spark.executor.instances", None) or 0)
    hosts = -(-parallelism // executors) if executors else 1
    if hosts * needed > room:
        raise UsageError(
            "the memory of an executor's container is too small for its hosts",
            code="USAGE.MEMORY",
            detail=f"{room >> 20} MiB beside the JVM, and {hosts} hosts of up to {needed >> 20} MiB each, which "
            "is max_bytes and memory=",
            hint=f"raise {name}, give the application more executors, or lower max_bytes",
        )


def python_memory(get: Callable[[str, str | None], str | None], *, is_kubernetes: bool) -> tuple[str, int]:
    """The setting that says what all Python processes of an executor may take in its container, and the bytes.

    >>> given = {"spark.executor.memory": "4g"}
    >>> python_memory(given.get, is_kubernetes=False)
    ('spark.executor.memoryOverhead', 429496729)
    >>> python_memory({**given, "spark.executor.pyspark.memory": "2g"}.get, is_kubernetes=True)
    ('spark.executor.pyspark.memory', 2147483648)
    """
    name = "spark.executor.pyspark.memory"
    given = get(name, None)
    if given is not None:
        return name, _bytes(given)
    name = "spark.executor.memoryOverhead"
    given = get(name, None)
    if given is not None:
        return name, _bytes(given)
    factor = get(f"{name}Factor", None)
    if factor is None and is_kubernetes:
        factor = get(
            "spark.kubernetes.memoryOverheadFactor", "0.4"
        )  # what Spark gives Python applications there
    heap = _bytes(get("spark.executor.memory", None) or "1g")
    least = _bytes(get("spark.executor.minMemoryOverhead", None) or "384m")
    return name, max(int(heap * float(factor or "0.1")), least)


_UNITS = {"b": 0, "k": 10, "m": 20, "g": 30, "t": 40, "p": 50}


def _bytes(given: str) -> int:
    """The bytes that a setting of Spark's means; it takes a plain number for MiB.

    >>> _bytes("2g") == _bytes("2048") == _bytes(" 2048MB ") == 2 << 30
    True
    """
    found = re.fullmatch(r"(\d+)\s*([bkmgtp]?)b?", given.strip().lower())
    if found is None:
        raise UsageError("a setting of Spark is no size of memory", detail=given)
    return int(found[1]) << _UNITS[found[2] or "m"]


def check_slots(frame: DataFrame, parallelism: int, limit: float, taken_by_others: Callable[[], int]) -> None:
    """Raise if hosts would take all slots of the application, as far as that can be told.

    Executors may still be on their way, and the hosts of a query that has ended may go: that is waited for, ``limit``
    seconds long.
    """
    if is_connect(frame):
        return
    context = frame.sparkSession.sparkContext
    if context.getConf().get("spark.dynamicAllocation.enabled", "false") == "true":
        return
    until = time.monotonic() + limit
    while True:
        slots, taken = _slots(context), taken_by_others()
        if parallelism < slots - taken:
            return
        if time.monotonic() > until or (_is_local(context.master or "") and not taken):
            break
        time.sleep(0.1)
    others = f", {taken} of them taken by hosts of other queries" if taken else ""
    raise UsageError(
        "the hosts would take all slots of the application, and its batches need one",
        code="USAGE.SLOTS",
        detail=f"parallelism={parallelism}, {slots} slots{others}",
        hint="give the application more cores, or pass a smaller parallelism",
    )


def _slots(context: Any) -> int:
    """The tasks that the executors that are there can run at once."""
    scala = context._jsc.sc()
    return int(scala.maxNumConcurrentTasks(scala.resourceProfileManager().defaultResourceProfile()))


def _is_local(master: str) -> bool:
    """True if the driver is the one executor, so that there are never more.

    >>> _is_local("local[2]"), _is_local("local"), _is_local("local-cluster[2,1,1024]")
    (True, True, False)
    """
    return master.partition("[")[0] == "local"


def options_at(frame: DataFrame, options: HostOptions) -> HostOptions:
    """Options with the addresses at which Spark's own driver listens, and is found, unless they have others."""
    if options.bind is not None:
        return options
    conf = frame.sparkSession.conf
    host = conf.get("spark.driver.host", None)
    bind = conf.get("spark.driver.bindAddress", None) or host
    return replace(options, bind=bind, advertise=options.advertise or host)
