"""The comparison of jobs under Spark: what a run says becomes the page, and what failed is told."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from house_tools import ROOT

import statebackend
from bench.spark.__main__ import main
from bench.spark.page import main as renew_page
from bench.spark.parts import LABELS, batch_parts


def said(ms: list[int], rows: int, **parts: list[float]) -> dict[str, Any]:
    durations = [dict(zip(parts, values, strict=True)) for values in zip(*parts.values(), strict=True)]
    kernels = 0
    progress = []
    for number, each in enumerate(durations):
        kernels += 1000 * (number + 1)
        progress.append({"durationMs": {**each, "batch": 0.0}, "customMetrics": {"kernels_us": kernels}})
    return {"batches": [{"rows": rows, "ms": each} for each in ms], "parts": progress}


def write_run(folder: Path, count: int, runs: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    run = {
        "machine": {"processor": "a processor", "cores": 2, "python": "3.11"},
        "arguments": {"rows": count, "keys": 5, "small_rows": 7, "small_keys": 3, "batches": 1, "warmup": 1},
        "session": {"spark": "4.3", "java": "17", "collector": "G1", "cores": 2, "heap": "4g"},
        "statebackend": "0.1",
    }
    (folder / "run.json").write_text(json.dumps({**run, "runs": runs, "rows": rows}))


def row(figure: str, contender: str, peer: str, ours: float, theirs: float, ratio: float, target: Any) -> Any:
    """A row of a run that has not met its target."""
    names = {"figure": figure, "contender": contender, "peer_name": peer, "sizes": ["large", "large"]}
    met = None if target is None else False
    return {**names, "ours": ours, "peer": theirs, "ratio": ratio, "met": met, "target": target}


def test_parts_are_medians_after_the_warm_up_and_the_rest_is_sparks() -> None:
    whole, parts = batch_parts(said([900, 100, 120, 110], 10, function=[9, 30, 40, 50], sink=[9, 5, 5, 5]), 1)
    assert whole == 110
    assert [(part.name, part.ms) for part in parts] == [
        ("function", 40),
        ("kernels", 3),
        ("sink", 5),
        ("Spark", 65),
    ]


def test_a_run_becomes_the_page(tmp_path: Path) -> None:
    runs = {
        "batches/large": said([9000, 1000], 2_000_000, function=[9, 300], sink=[9, 500]),
        "spark/large": {"batches": [{"rows": 2_000_000, "ms": 4000}] * 2, "parts": []},
    }
    write_run(tmp_path, 2_000_000, runs, [row("P12", "batches", "spark", 2000.0, 500.0, 4.0, 5.0)])
    page = tmp_path / "spark.md"
    page.write_text((ROOT / "docs/performance/spark.md").read_text())
    for _ in range(2):  # a page that was renewed can be renewed
        assert renew_page(["--run", str(tmp_path / "run.json"), "--page", str(page)]) == 0
    text = page.read_text()
    assert "| whole batches, large | 2,000k | Spark's aggregation, in the JVM, large | 500k | 4.0 × |" in text
    assert "| the whole micro-batch | 1000 |" in text
    assert "Not measured yet" not in text
    assert (tmp_path / "spark.svg").exists()


def test_a_run_of_hosts_renews_its_own_tables_alone(tmp_path: Path) -> None:
    hosts = ["one host", "two hosts", "four hosts"]
    runs = {"batches/large": said([900, 100], 1000, read=[9, 30], function=[9, 20], sink=[9, 10])}
    for name in hosts:
        runs[f"{name}/large"] = said([900, 200], 1000, scatter=[9, 40], run=[9, 60])
        for number, each in enumerate(runs[f"{name}/large"]["parts"]):
            each["hosts"] = [{"durationMs": {"function": 10.0 + number}}, {"durationMs": {"function": 5.0}}]
    targets = {"two hosts": 0.5, "one host": None, "four hosts": None}
    rows = [row("P24", name, "batches", 5.0, 10.0, 0.45, target) for name, target in targets.items()]
    write_run(tmp_path, 1000, runs, rows)
    page = tmp_path / "spark.md"
    before = (ROOT / "docs/performance/spark.md").read_text()
    page.write_text(before)
    assert renew_page(["--run", str(tmp_path / "run.json"), "--page", str(page)]) == 0
    text = page.read_text()
    begins = "<!-- executors -->"
    assert text.partition(begins)[0] == before.partition(begins)[0]
    assert not (tmp_path / "spark.svg").exists()
    table = text.partition(begins)[2]
    assert re.findall(r"^\| (\w+ hosts?) \|", table, re.M) == hosts
    assert "| two hosts | 5,000 | 0.45 × |" in table
    assert "| nanoseconds a row | whole batches | one host | two hosts | four hosts |" in table
    assert f"| {LABELS['scatter']} |  | 40000 | 40000 | 40000 |" in table
    assert f"| … {LABELS['function']} | 20 | 11 | 11 | 11 |" in table


def test_figures_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["P99"])
    assert "no figure P99; there are P12, P13, P14" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "P13 batches against the two Python ones" in capsys.readouterr().out


def test_every_part_of_a_batch_has_a_label() -> None:
    folder = Path(statebackend.__file__).parent
    named = {
        name
        for source in (*folder.glob("runtime/*.py"), *folder.glob("spark/*.py"))
        for name in re.findall(r"watch\.part\(\"(\w+)\"\)", source.read_text(encoding="utf-8"))
    }
    assert len(named) > 8
    assert named <= LABELS.keys()
