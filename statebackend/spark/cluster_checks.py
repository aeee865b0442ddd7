"""What the cluster of a frame gives to executors mode: slots, memory, addresses. Too little is told at the start."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from statebackend.cluster.cluster_execution import Executors
from statebackend.cluster.hosts import TELL
from statebackend.errors import UsageError
from statebackend.spark.session import is_connect, is_set

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_log = logging.getLogger("statebackend.spark")


def check_not_encrypted(frame: DataFrame) -> None:
    """Raise if Spark encrypts what goes between its processes, or rows on local disks: we do not."""
    sent = "what goes between its processes, and rows would go to hosts"
    for name, what in (
        ("spark.network.crypto.enabled", sent),
        ("spark.ssl.rpc.enabled", sent),
        ("spark.authenticate.enableSaslEncryption", sent),
        ("spark.io.encryption.enabled", "what it keeps on local disks, and rows would wait there"),
    ):
        if is_set(frame.sparkSession.conf.get, name):
            raise UsageError(
                f"Spark encrypts {what} as plain text",
                code="USAGE.NOT_AVAILABLE",
                detail=name,
                hint="use run_on=sb.spark.Driver()",
            )


def check_memory(frame: DataFrame, parallelism: int, needed: int) -> None:
    """Raise if an executor's container is to hold hosts that take ``needed`` bytes each, and is too small for that.

    Looks where containers have limits: on YARN and Kubernetes. 0: the need of hosts is unknown.
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
            detail=f"{room >> 20} MiB outside the JVM, and {hosts} hosts of up to {needed >> 20} MiB each, which "
            "is max_bytes and batch_memory",
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
    for name in ("spark.executor.pyspark.memory", "spark.executor.memoryOverhead"):
        given = get(name, None)
        if given is not None:
            return name, _bytes(given)
    factor = get(f"{name}Factor", None)
    if factor is None and is_kubernetes:  # Spark gives Python applications 0.4 there
        factor = get("spark.kubernetes.memoryOverheadFactor", "0.4")
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
        raise UsageError("a setting of Spark is not a size of memory", code="USAGE.SIZE", detail=given)
    return int(found[1]) << _UNITS[found[2] or "m"]


def check_slots(frame: DataFrame, parallelism: int, limit: float, taken_by_others: Callable[[], int]) -> None:
    """Raise if hosts would take all slots of the application, as far as that can be told.

    Raises at once if the settings exclude more slots. Otherwise executors may still be on their way, and the hosts of a
    query that has ended may go: that is waited for, ``limit`` seconds long.
    """
    conf = frame.sparkSession.conf
    if is_set(conf.get, "spark.dynamicAllocation.enabled"):
        return
    most = most_slots(conf.get)
    if most is not None and parallelism >= most:
        raise _too_few_slots(parallelism, f"{most} slots")
    if is_connect(frame):
        return
    context = frame.sparkSession.sparkContext
    began = told_at = time.monotonic()
    while True:
        slots, taken = _slots(context), taken_by_others()
        if parallelism < slots - taken:
            return
        there = f"{slots} slots" + (f", {taken} of them taken by hosts of other queries" if taken else "")
        now = time.monotonic()
        if now - began > limit or (_is_local(context.master or "") and not taken):
            raise _too_few_slots(parallelism, there)
        if now - told_at > TELL:
            told_at = now
            _log.warning(
                "waiting for slots: %d hosts and the batches need %d, the application has %s (%.0f of %g s)",
                parallelism,
                parallelism + 1,
                there,
                now - began,
                limit,
            )
        time.sleep(0.1)


def _too_few_slots(parallelism: int, there: str) -> UsageError:
    return UsageError(
        "the hosts would take all slots of the application, and its batches need one",
        code="USAGE.SLOTS",
        detail=f"Executors({parallelism}), {there}",
        hint="give the application more cores, or pass a smaller n to Executors(n)",
    )


def most_slots(get: Callable[[str, str | None], str | None]) -> int | None:
    """The most tasks that the application can ever run at once by its settings; None if they do not say.

    >>> most_slots({"spark.master": "local-cluster[2,1,1024]"}.get)
    2
    >>> most_slots({"spark.master": "yarn", "spark.executor.instances": "4", "spark.executor.cores": "3"}.get)
    12
    >>> most_slots({"spark.master": "spark://host:7077", "spark.cores.max": "8", "spark.executor.cores": "3"}.get)
    6
    """
    master = get("spark.master", None) or ""
    cores, most = get("spark.executor.cores", None), get("spark.cores.max", None)
    given = re.fullmatch(r"local(?:-cluster)?\[\s*(\d+)\s*(?:,\s*(\d+)\s*)?(?:,\s*\d+\s*)?\]", master)
    if master.startswith("local-cluster") and given is not None:
        executors, each = int(given[1]), int(given[2])
    elif master.startswith("local") and given is not None:
        executors, each = 1, int(given[1])  # the second number is of failures
    elif master.startswith("spark://") and most is not None:
        each = min(int(cores or most), int(most))
        executors = int(most) // each if each else 0
    elif master.startswith(("yarn", "k8s")):
        executors, each = int(get("spark.executor.instances", None) or 2), int(cores or 1)
    else:
        return None
    return executors * (each // int(get("spark.task.cpus", None) or 1))


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


def options_at(frame: DataFrame, options: Executors) -> Executors:
    """Options with the addresses at which Spark's own driver listens, and is found, unless they have others."""
    if options.bind is not None:
        return options
    conf = frame.sparkSession.conf
    host = conf.get("spark.driver.host", None)
    bind = conf.get("spark.driver.bindAddress", None) or host
    return replace(options, bind=bind, advertised_address=options.advertised_address or host)
