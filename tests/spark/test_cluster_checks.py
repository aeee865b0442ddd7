"""What executors mode asks of Spark's settings before it begins: those of clusters that no test can run on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import statebackend as sb
from statebackend.spark.cluster_checks import check_memory, check_not_encrypted

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
