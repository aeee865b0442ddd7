"""The Flink peer measures what it says, and notices when it is handed something else.

The tests that start a JVM are skipped without a JDK or without Flink in the cache; they never download it.
"""

from __future__ import annotations

import pytest

from bench.flink import (
    BACKEND_OPS,
    MAP_OPS,
    FlinkPeer,
    provision,
    random_keys,
)
from bench.flink.__main__ import table

N = 1000
SMALL = {"key_groups": 16, "samples": 2, "warmup": 1, "heap": "256m", "gc": "G1"}


def assert_plausible(measurement: dict, samples: int = 2) -> None:
    assert measurement["n"] == N
    assert measurement["key_groups"] == 16
    assert len(measurement["samples_ns_per_op"]) == len(measurement["samples_ms"]) == samples
    assert all(0 < nanos < 1e9 for nanos in measurement["samples_ns_per_op"])
    assert measurement["median_mops"] == pytest.approx(1e3 / measurement["median_ns_per_op"], rel=0.01)
    assert {"-Xms256m", "-Xmx256m"} <= set(measurement["jvm"]["vm_flags"])
    assert measurement["jvm"]["flink_version"] == provision.FLINK_VERSION


class TestProvision:
    def test_without_java_the_peer_says_what_to_install(self, monkeypatch, tmp_path):
        monkeypatch.setenv("PATH", str(tmp_path))
        monkeypatch.delenv("JAVA_HOME", raising=False)
        there, reason = FlinkPeer(tmp_path).available()
        assert not there
        assert "JDK" in reason
        assert list(tmp_path.iterdir()) == []

    def test_an_unknown_operation_is_refused_before_anything_starts(self, tmp_path):
        with pytest.raises(ValueError, match="unknown: fly"):
            FlinkPeer(tmp_path, download=False).run_map(["fly"], random_keys(N))


class TestRuns:
    def test_raw_maps(self, peer):
        measurements = peer.run_map(MAP_OPS, random_keys(N), **SMALL, fork=False)
        assert tuple(one["name"] for one in measurements) == MAP_OPS
        for one in measurements[:7]:
            assert_plausible(one)
            assert one["operations"] == (1 if one["name"] == "snapshot_pause" else N)
        for one in measurements[7:9]:
            quantiles = list(one["quantiles_ns"].values())
            assert quantiles == sorted(quantiles)
            assert quantiles[-1] > 0
        # An entry of 48 bytes, a key and a value of at least 16: what is near zero or huge was not measured.
        assert 50 < measurements[9]["bytes_per_entry"] < 1000
        assert "update_under_snapshot" in table(measurements)

    @pytest.mark.parametrize("ttl", ["off", "default", "no_cleanup"])
    def test_state_api(self, peer, ttl):
        measurements = peer.run_backend(BACKEND_OPS, random_keys(N), **SMALL, ttl=ttl, fork=False)
        assert tuple(one["name"] for one in measurements) == BACKEND_OPS
        for one in measurements:
            assert_plausible(one)
            assert one["ttl"] == ttl

    def test_snapshot_of_a_backend(self, peer):
        (one,) = peer.run_snapshot_pause(random_keys(N), states=3, **SMALL)
        assert_plausible(one)
        assert one["entries"] == 3 * N
        assert one["bytes_written"] >= 17 * 3 * N
        # Whether a batch fits in before so little is written is chance.
        assert one["median_slowdown"] is None or one["median_slowdown"] > 0
