"""The comparison of the state API computes the same on all sides, and notices when it does not.

The tests that start a JVM are skipped without a JDK or without Flink in the cache; they never download it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from house_tools import ROOT

from bench.common.report import Report
from bench.flink import BACKEND_OPS, random_keys
from bench.state.__main__ import main
from bench.state.lockstep import Flink, Local, Rounds, WrongResult, make_local, take_turns
from bench.state.operations import OPERATIONS
from bench.state.page import main as renew_page
from bench.state.processes import OwnProcess

N = 300
SMALL = {"key_groups": 16, "samples": 3, "warmup": 2, "heap": "256m", "gc": "G1"}


def rounds(**more: Any) -> Rounds:
    return Rounds(random_keys(N), warmup=2, samples=3, **more)


def local(name: str, who: str, given: Rounds, ttl: str = "off") -> Local:
    return make_local(name, who, given, 16, ttl)


@pytest.fixture(scope="module")
def run(tmp_path_factory, in_this_process) -> Path:
    """The JSON of a small run of all figures on the reference backend."""
    out = tmp_path_factory.mktemp("run") / "state.json"
    figures = ["P1", "P8", "collections", "P2", "--backend", "reference", "--no-flink"]
    sizes = ["--n", "200", "--cached-n", "50", "--samples", "1", "--warmup", "1"]
    assert main([*figures, *sizes, "--out", str(out)]) == 0
    return out


class TestTurns:
    def test_operations_equal_the_flink_peers(self):
        assert set(OPERATIONS) == set(BACKEND_OPS)

    @pytest.mark.parametrize("name", OPERATIONS)
    def test_a_backend_and_a_dict_end_with_the_same_state(self, name):
        given = rounds()
        timings = take_turns(name, {who: local(name, who, given) for who in ("reference", "dict")}, given)
        for timing in timings.values():
            assert len(timing.nanos) == 3
            assert timing.operations == N * OPERATIONS[name].per_key
            assert timing.mops == pytest.approx(1e3 / timing.ns_per_operation)

    def test_a_contender_with_other_state_is_noticed(self, monkeypatch):
        given = rounds()
        wrong = local("value_update", "dict", given)
        monkeypatch.setattr(wrong, "contents", lambda: 7)
        with pytest.raises(WrongResult, match="the state of dict"):
            take_turns("value_update", {"dict": wrong}, given)


def one_that_fails() -> Any:
    class Failing:
        def run_round(self, number: int) -> int:
            raise WrongResult(f"round {number}")

    return Failing()


class TestProcesses:
    def test_errors_of_the_other_process_are_raised(self):
        with OwnProcess(one_that_fails) as failing, pytest.raises(WrongResult, match="round 3"):
            failing.run_round(3)
        assert failing._process.exitcode == 0


class TestFlink:
    @pytest.mark.parametrize("name", OPERATIONS)
    def test_flink_ends_with_the_same_state(self, peer, name):
        given = rounds()
        with peer.session(name, given.keys, **SMALL) as session:
            assert session.rounds == given.count
            contenders = {"Flink": Flink(session), "dict": local(name, "dict", given)}
            timings = take_turns(name, contenders, given)
        measured = contenders["Flink"].measurement
        assert timings["Flink"].nanos == pytest.approx([ms * 1e6 for ms in measured["samples_ms"]])
        assert timings["Flink"].details["gc"] == "G1"


class TestReport:
    def test_targets_are_met_or_not(self, capsys):
        report = Report()
        report.row("P1", "faster", 2.0, "M ops/s", 1.0, target=1.3)
        report.row("P1", "slower", 1.0, "M ops/s", 1.0, target=1.3)
        report.row("P2", "time", 1.2, "ns", 1.0, target=1.3, at_most=True)
        report.row("P1", "alone", 1.0, "M ops/s", target=1.3)
        assert [row["met"] for row in report.rows] == [True, False, True, None]
        assert "NOT MET" in capsys.readouterr().out.splitlines()[1]


class TestPage:
    def test_a_run_fills_every_table_of_the_page(self, run, tmp_path):
        page = tmp_path / "state.md"
        page.write_text((ROOT / "docs/performance/state.md").read_text(encoding="utf-8"), encoding="utf-8")
        renew_page(["--run", str(run), "--page", str(page)])
        text = page.read_text(encoding="utf-8")
        assert text.count("backend `reference`") == 4
        assert text.count("| value: get | ") == 1
        assert "| 50 keys, in cache |" in text
        assert "| value: get, no cleanup | " in text
        assert (tmp_path / "state.svg").read_text(encoding="utf-8").startswith("<?xml")
