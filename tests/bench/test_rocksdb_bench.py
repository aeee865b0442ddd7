"""The comparison of maps measures what it says, notices wrong results, and renews its page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.rocksdb.__main__ import main
from bench.rocksdb.maps import KINDS, Held
from bench.rocksdb.page import main as renew
from bench.rocksdb.vectorised import OPERATIONS, Side, main as measure_calls, sample

PAGE = "<!-- maps -->\nold\n<!-- end maps -->\n<!-- jobs -->\nstays\n<!-- end jobs -->\n"


@pytest.mark.parametrize("backend", ["heap", "rocksdb"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_wrong_result_is_noticed(backend: str, kind: str) -> None:
    held = Held(backend, kind, 3, 4)
    rows = held.prepared(10)
    held.check_write(rows, held.time_write(rows))
    held.check_read(rows, held.time_read(rows))
    held.check()
    with pytest.raises(AssertionError, match="other entries"):
        held.check_read(rows, held.time_read(rows) + 1)
    held.time_write([(key, name) for key, name in rows[:1]] * 20)  # behind its back
    with pytest.raises(AssertionError, match="not what was written"):
        held.check()
    held.close()


def test_a_run_renews_the_page(tmp_path: Path) -> None:
    run, page = tmp_path / "run.json", tmp_path / "rocksdb.md"
    page.write_text(PAGE)
    sizes = ["--entries", "1", "20", "--total", "40", "--least-keys", "2"]
    small = [*sizes, "--samples", "2", "--seconds", "0.001"]
    assert main([*small, "--out", str(run)]) == 0
    rows = json.loads(run.read_text())["rows"]
    assert len(rows) == 2 * 2 * 2 * len(KINDS)
    assert {(row["kind"], row["peer"] is None) for row in rows} == {
        ("value", False),
        ("pickle", False),
        ("map", True),
    }
    none = str(tmp_path / "none")
    others = ["--spark-run", none, "--scalars-run", none, "--vectorised-run", none]
    assert renew(["--run", str(run), *others, "--page", str(page)]) == 0
    text = page.read_text()
    assert "old" not in text
    assert "| write, MapState, `rocksdb` |" in text
    assert "stays" in text
    drawn = (tmp_path / "rocksdb.svg").read_text()
    assert drawn.count("<svg") == 1
    renew(["--run", str(run), *others, "--page", str(page)])
    assert (tmp_path / "rocksdb.svg").read_text() == drawn
    assert page.read_text() == text


def test_a_run_of_calls_renews_their_table(tmp_path: Path) -> None:
    run, page, none = tmp_path / "run.json", tmp_path / "rocksdb.md", str(tmp_path / "none")
    page.write_text("<!-- calls -->\nold\n<!-- end calls -->\n")
    assert measure_calls(["--keys", "50", "--samples", "2", "--out", str(run)]) == 0
    others = ["--run", none, "--spark-run", none, "--scalars-run", none]
    assert renew([*others, "--vectorised-run", str(run), "--page", str(page)]) == 0
    text = page.read_text()
    assert "old" not in text
    assert text.count(" × |") == len(OPERATIONS)


def test_a_vectorised_call_that_does_something_else_is_noticed() -> None:
    sides = (Side("rocksdb", "value", 50), Side("rocksdb", "value", 50))
    sample(sides, OPERATIONS[1], 1, 0)
    sides[1].state.update_many([7 << 20], [-1])
    with pytest.raises(AssertionError, match="get_many does not do what value does"):
        sample(sides, OPERATIONS[1], 1, 1)
