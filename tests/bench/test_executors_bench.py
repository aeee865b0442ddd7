"""The simulation of many hosts: its counts are those of the protocol, and its store is one that can be read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.executors.__main__ import main


def test_a_run_has_every_figure_for_each_number_of_hosts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "executors.json"
    assert main(["--hosts", "2", "12", "--batches", "1", "--tasks", "3", "--out", str(out)]) == 0
    told = json.loads(out.read_text())
    of_hosts = {
        hosts: {row["name"]: row["ours"] for row in told["rows"] if row.get("hosts") == hosts}
        for hosts in (2, 12)
    }
    for hosts, figures in of_hosts.items():
        assert figures["messages"] == 6 * hosts
        assert figures["pieces"] == 3 * hosts
        assert figures["requests"] > 2 * hosts, "a part, and a look at a file, for each host"
        assert all(figures[name] > 0 for name in ("start", "batch", "run", "commit", "processor"))
        assert figures["committed"] > 0
        assert figures["replaced"] > 0
    assert of_hosts[12]["parts"] > 4 * of_hosts[2]["parts"]
    assert "12 hosts: commit" in capsys.readouterr().out
