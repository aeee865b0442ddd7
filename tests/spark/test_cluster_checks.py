"""What executors mode asks of Spark's settings before it begins: those of clusters that no test can run on."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

import statebackend as sb
from statebackend.spark import cluster_checks
from statebackend.spark.cluster_checks import check_memory, check_not_encrypted, check_slots

pytestmark = pytest.mark.spark


def frame_with(**settings: str) -> Any:
    """As much of a frame as the checks look at: the settings of its session."""
    return SimpleNamespace(sparkSession=SimpleNamespace(conf=settings))


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("spark.network.crypto.enabled", "between its processes"),
        ("spark.ssl.rpc.enabled", "between its processes"),
        ("spark.authenticate.enableSaslEncryption", "between its processes"),
        ("spark.io.encryption.enabled", "on local disks"),
    ],
)
def test_a_cluster_that_encrypts_is_refused(name: str, what: str) -> None:
    check_not_encrypted(frame_with())
    check_not_encrypted(frame_with(**{name: "false"}))
    with pytest.raises(sb.UsageError, match=what) as caught:
        check_not_encrypted(frame_with(**{name: "TRUE"}))
    assert (caught.value.code, caught.value.detail) == ("USAGE.NOT_AVAILABLE", name)


@pytest.mark.parametrize(
    ("settings", "parallelism", "fits", "raises"),
    [
        ({"spark.executor.memoryOverhead": "4g"}, 4, True, ""),
        ({"spark.executor.memoryOverhead": "4g"}, 5, False, "spark.executor.memoryOverhead"),
        ({"spark.executor.memory": "40g"}, 4, True, ""),
        ({"spark.executor.memory": "4g"}, 1, False, "spark.executor.memoryOverhead"),
        ({"spark.executor.pyspark.memory": "2048m"}, 2, True, ""),
        ({"spark.executor.pyspark.memory": "2048m"}, 3, False, "spark.executor.pyspark.memory"),
        ({"spark.executor.memoryOverhead": "4g", "spark.executor.instances": "2"}, 8, True, ""),
        ({"spark.executor.memoryOverhead": "4g", "spark.executor.instances": "2"}, 9, False, "5 hosts"),
    ],
)
def test_hosts_fit_into_the_containers_of_yarn(
    settings: dict[str, str], parallelism: int, fits: bool, raises: str
) -> None:
    """Each host takes one GiB, and there is one executor unless the settings say how many."""
    frame = frame_with(**{"spark.master": "yarn", "spark.executor.instances": "1", **settings})
    if fits:
        check_memory(frame, parallelism, 1 << 30)
        return
    with pytest.raises(sb.UsageError) as caught:
        check_memory(frame, parallelism, 1 << 30)
    assert caught.value.code == "USAGE.MEMORY"
    assert raises in f"{caught.value.detail} {caught.value.hint}"


def test_memory_is_looked_at_where_containers_have_limits() -> None:
    for master in ("local[4]", "spark://host:7077"):
        check_memory(frame_with(**{"spark.master": master}), 100, 1 << 40)
    check_memory(frame_with(**{"spark.master": "yarn"}), 100, 0)  # nobody knows what hosts take
    with pytest.raises(sb.UsageError, match="too small for its hosts"):
        check_memory(frame_with(**{"spark.master": "k8s://host"}), 1, 1 << 30)


class ConnectFrame(SimpleNamespace):
    """A frame of Spark Connect, which tells its settings alone."""

    __module__ = "pyspark.sql.connect.dataframe"


@pytest.mark.parametrize("make", [SimpleNamespace, ConnectFrame])
@pytest.mark.parametrize(
    ("settings", "slots"),
    [
        ({"spark.master": "local-cluster[2,3,1024]", "spark.task.cpus": "2"}, 2),
        ({"spark.master": "spark://host:7077", "spark.cores.max": "8", "spark.executor.cores": "3"}, 6),
        ({"spark.master": "spark://host:7077", "spark.cores.max": "4"}, 4),
        ({"spark.master": "yarn", "spark.executor.instances": "4", "spark.executor.cores": "2"}, 8),
        ({"spark.master": "k8s://host"}, 2),
        ({"spark.master": "local[4,2]"}, 4),
    ],
)
def test_slots_that_the_settings_exclude_are_refused_at_once(
    make: Any, settings: dict[str, str], slots: int
) -> None:
    frame = make(sparkSession=SimpleNamespace(conf=settings))
    with pytest.raises(sb.UsageError) as caught:
        check_slots(frame, slots, 1e9, lambda: 0)
    assert caught.value.code == "USAGE.SLOTS"
    assert caught.value.detail == f"Executors({slots}), {slots} slots"
    elastic = {**settings, "spark.dynamicAllocation.enabled": "true"}
    check_slots(make(sparkSession=SimpleNamespace(conf=elastic)), slots, 1e9, lambda: 0)


@pytest.mark.parametrize("master", ["spark://host:7077", "yarn", "local[*]"])
def test_slots_that_may_come_are_waited_for_with_a_word(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, master: str
) -> None:
    settings = {"spark.master": master, "spark.executor.instances": "4"}
    context = SimpleNamespace(master="spark://host:7077")
    frame: Any = SimpleNamespace(sparkSession=SimpleNamespace(conf=settings, sparkContext=context))
    slots = iter([0, 2, 2, 4])
    monkeypatch.setattr(cluster_checks, "_slots", lambda context: next(slots))
    monkeypatch.setattr(cluster_checks, "TELL", 0.0)
    with caplog.at_level(logging.WARNING):
        check_slots(frame, 2, 1e9, lambda: 1)
    assert "2 hosts and the batches need 3, the application has 2 slots, 1 of them taken" in caplog.text
