"""The comparison with DuckDB and Polars runs every form, notices wrong results, and says where others are faster."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from bench.frames import __main__ as frames
from bench.frames.runs import CONTENDERS, Cell, apart, forms, restored, run

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

CELL = Cell(durable=True, threads=1, keys=500, rows=200, touched=50)


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process of its own takes half a second to start."""
    monkeypatch.setattr(frames, "apart", lambda threads, function, *arguments: function(*arguments))


@pytest.mark.usefixtures("in_this_process")
def test_quick_run_reports_every_contender_and_the_crossover(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "frames.json"
    assert frames.main(["--quick", "--threads", "1", "--shares", "1", "--out", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [row["figure"] for row in rows] == ["P27"] + ["P26"] * 8
    assert [row["contender"] for row in rows if "contender" in row] == [*CONTENDERS] * 2
    assert [row["target"] for row in rows if row["peer"]] == [1.5, 3.0, 1.5]
    durable = [row for row in rows if row.get("durable")]
    for figure in ("lines of code", "seconds of a restore", "disk bytes a key", "CPU ns a changed entry"):
        assert min(row[figure] for row in durable) > 0
    assert "Where another one is faster:" in capsys.readouterr().out


@pytest.mark.parametrize("durable", [False, True], ids=["memory", "durable"])
@pytest.mark.parametrize("contender", CONTENDERS)
def test_every_form_returns_and_restores_what_numpy_computes(
    tmp_path: Path, contender: str, durable: bool
) -> None:
    cell = CELL._replace(durable=durable)
    for number, form in enumerate(forms(contender, durable)):
        folder = tmp_path / str(number)
        folder.mkdir()
        found = run(contender, form, cell, 3, 1, 1, str(folder) if durable else None)
        if durable:
            again = restored(contender, form, cell, 4, found["added"], 1, str(folder))
            assert again["disk bytes a key"] > 0


@pytest.mark.parametrize("contender", CONTENDERS)
def test_run_fails_when_a_form_loses_a_row(monkeypatch: pytest.MonkeyPatch, contender: str) -> None:
    name, kind = next(iter(forms(contender, False).items()))
    add = kind.add

    def without_the_first(self: Any, keys: pa.Array, values: pa.Array) -> Any:
        return add(self, keys[1:], values[1:])

    monkeypatch.setattr(kind, "add", without_the_first)
    with pytest.raises(AssertionError, match="other sums or counts"):
        run(contender, name, CELL._replace(durable=False), 1, 0, 1, None)


def test_apart_raises_the_error_of_the_other_process() -> None:
    with pytest.raises(RuntimeError, match="KeyError: 'none'"):
        apart(1, run, "duckdb", "none", CELL, 1, 0, 1, None)
