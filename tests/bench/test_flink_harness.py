"""The Flink peer measures what it says, and notices when it is handed something else.

The tests that start a JVM are skipped without a JDK or without Flink in the cache; they never download it.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from bench.flink import (
    BACKEND_OPS,
    MAP_OPS,
    TIMER_OPS,
    FlinkPeer,
    KeyFile,
    PeerFailed,
    PeerUnavailable,
    provision,
    random_keys,
    round_order,
)
from bench.flink.__main__ import table
from bench.flink.keys import checksum

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


class TestKeys:
    def test_a_round_visits_every_key_once_in_an_order_of_its_own(self):
        keys = random_keys(N)
        first, second = round_order(keys, 1, 0), round_order(keys, 1, 1)
        assert np.array_equal(np.sort(first), np.sort(keys))
        assert np.array_equal(np.sort(second), np.sort(keys))
        assert not np.array_equal(first, second)

    def test_extreme_keys_survive_the_mixing(self):
        keys = np.array([0, 1, -1, 2**63 - 1, -(2**63)], dtype=np.int64)
        assert sorted(round_order(keys, -7, 3).tolist()) == sorted(keys.tolist())

    def test_the_checksum_depends_on_the_order(self):
        keys = random_keys(N)
        assert checksum(keys) != checksum(keys[::-1].copy())

    @pytest.mark.parametrize("keys", [[1, 1], [], [0.5], [[1]]])
    def test_keys_that_are_not_distinct_integers_are_refused(self, keys, tmp_path):
        with pytest.raises(ValueError, match="keys must be"):
            KeyFile.write(tmp_path / "keys", np.array(keys), seed=1)


class TestProvision:
    def test_without_java_the_peer_says_what_to_install(self, monkeypatch, tmp_path):
        monkeypatch.setenv("PATH", str(tmp_path))
        monkeypatch.delenv("JAVA_HOME", raising=False)
        there, reason = FlinkPeer(tmp_path).available()
        assert not there
        assert "JDK" in reason
        assert list(tmp_path.iterdir()) == []

    def test_without_the_wheel_the_peer_says_how_to_get_it(self, monkeypatch, tmp_path):
        monkeypatch.setattr(provision, "_find_tool", Path)
        with pytest.raises(PeerUnavailable, match="bench.flink prepare"):
            FlinkPeer(tmp_path, download=False).run_map(["get"], random_keys(N))

    def test_a_failed_download_is_a_reason_and_leaves_nothing_behind(self, monkeypatch, tmp_path):
        monkeypatch.setattr(provision, "_find_tool", Path)
        monkeypatch.setattr(provision, "_REQUIREMENT", "not a requirement")
        there, reason = FlinkPeer(tmp_path).available()
        assert not there
        assert "pip download" in reason
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

    def test_string_keys(self, peer):
        measurements = peer.run_strings(["add", "get"], random_keys(N), **SMALL, fork=False)
        for one in measurements:
            assert_plausible(one)
            assert one["key_type"] == "string"

    @pytest.mark.parametrize("ttl", ["off", "default", "no_cleanup"])
    def test_state_api(self, peer, ttl):
        measurements = peer.run_backend(BACKEND_OPS, random_keys(N), **SMALL, ttl=ttl, fork=False)
        assert tuple(one["name"] for one in measurements) == BACKEND_OPS
        for one in measurements:
            assert_plausible(one)
            assert one["ttl"] == ttl

    def test_timers(self, peer):
        for one in peer.run_timers(TIMER_OPS, random_keys(N), **SMALL, fork=False):
            assert_plausible(one)

    def test_snapshot_of_a_backend(self, peer):
        (one,) = peer.run_snapshot_pause(random_keys(N), states=3, **SMALL)
        assert_plausible(one)
        assert one["entries"] == 3 * N
        assert one["bytes_written"] >= 17 * 3 * N
        # Whether a batch fits in before so little is written is chance.
        assert one["median_slowdown"] is None or one["median_slowdown"] > 0

    def test_each_operation_has_a_jvm_of_its_own_and_the_named_collector(self, peer):
        settings = {**SMALL, "gc": "Parallel"}
        measurements = peer.run_map(["add", "get"], random_keys(N), **settings, settled=True)
        assert [one["name"] for one in measurements] == ["add", "get"]
        for one in measurements:
            assert one["gc"] == "Parallel"
            assert one["settled"]
            assert "PS MarkSweep" in one["jvm"]["collectors"]

    def test_the_better_of_both_collectors_is_reported_with_the_other(self, peer):
        settings = {**SMALL, "gc": "best"}
        get, worst_put = peer.run_map(["get", "worst_put_cpu"], random_keys(N), **settings)
        for one in (get, worst_put):
            assert {one["gc"], one["other_gc"]["gc"]} == {"G1", "Parallel"}
        assert get["median_ns_per_op"] <= get["other_gc"]["median_ns_per_op"]


class TestFaults:
    ARGUMENTS = {"ops": "get", "key-groups": 16, "samples": 1, "warmup": 0, "key-type": "long"}

    def launch(self, peer: FlinkPeer, key_file: KeyFile) -> list[dict]:
        return peer.launch("map", key_file, self.ARGUMENTS, heap="256m")

    def test_other_keys_than_announced_are_noticed(self, peer, tmp_path):
        key_file = KeyFile.write(tmp_path / "keys", random_keys(N), seed=1)
        KeyFile.write(tmp_path / "keys", random_keys(N, seed=2), seed=1)
        with pytest.raises(PeerFailed, match="key file: the checksum differs"):
            self.launch(peer, key_file)

    def test_a_cut_key_file_is_noticed(self, peer, tmp_path):
        key_file = KeyFile.write(tmp_path / "keys", random_keys(N), seed=1)
        key_file.path.write_bytes(key_file.path.read_bytes()[:-3])
        with pytest.raises(PeerFailed, match="key file: size is 7997 bytes, 8000 expected"):
            self.launch(peer, key_file)

    def test_repeated_keys_are_noticed(self, peer, tmp_path):
        repeated = np.repeat(random_keys(N // 2), 2)
        repeated.tofile(tmp_path / "keys")
        key_file = KeyFile(tmp_path / "keys", N, checksum(repeated), 1, 0)
        with pytest.raises(PeerFailed, match="key file: keys repeat"):
            self.launch(peer, key_file)

    def test_another_order_of_visits_is_noticed(self, peer, tmp_path):
        key_file = KeyFile.write(tmp_path / "keys", random_keys(N), seed=1)
        with pytest.raises(PeerFailed, match="order of round_order"):
            self.launch(peer, dataclasses.replace(key_file, seed=2))

    def test_a_run_that_takes_too_long_is_ended(self, peer, tmp_path):
        impatient = FlinkPeer(peer.cache, download=False, timeout=0.01)
        key_file = KeyFile.write(tmp_path / "keys", random_keys(N), seed=1)
        with pytest.raises(PeerFailed, match="ran longer than"):
            self.launch(impatient, key_file)
