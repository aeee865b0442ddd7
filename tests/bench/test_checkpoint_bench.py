"""The figures of checkpoints are measured and reported for every type that they name."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from bench.checkpoint import costs
from bench.checkpoint.__main__ import main

needs_proc = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@needs_proc
def test_full_checkpoints_are_reported_for_numbers_and_for_structs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["bench", "P11", "--n", "3000", "--samples", "1"])
    main()
    rows = json.loads((tmp_path / "build/bench/checkpoint.json").read_text())["rows"]
    assert {row["figure"] for row in rows} == {"P11"}
    for kind, asked in (("bigint", 8), ("struct<a:bigint,b:string>", 2)):
        found = [row["what"] for row in rows if row["what"].endswith(f"LONG to {kind}; at least {asked}")]
        assert [what.split(",")[0] for what in found] == ["full checkpoint", "its restore"]
    peaks = [row["ours"] for row in rows if "at most 1.15" in row["what"]]
    assert len(peaks) == 2
    assert min(row["ours"] for row in rows) > 0
    assert min(peaks) >= 1


@needs_proc
def test_reads_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["bench", "reads", "--n", "3000", "--samples", "1"])
    main()
    rows = json.loads((tmp_path / "build/bench/checkpoint.json").read_text())["rows"]
    assert [row["figure"] for row in rows] == ["reads"] * 5
    assert min(row["ours"] for row in rows) > 0


@pytest.mark.parametrize("layout", costs.LAYOUTS)
def test_every_layout_can_be_filled_and_read(layout: str) -> None:
    keyed, (state,) = costs.filled(1000, layout)
    with keyed:
        assert keyed.num_entries() == 1000
        assert len(state.get_many([5, 999]).drop_null()) == 2
