"""The pages that need a session, and the jobs in ``examples/spark``, on less data."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from house_tools import ROOT, module
from processes import environment, run_command

pytestmark = pytest.mark.spark


def example(name: str) -> ModuleType:
    return module(ROOT / "examples" / "spark" / f"{name}.py", name)


def test_the_query_of_the_readme_prints_what_it_shows(
    spark: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The program runs twice, and adds orders each time, as the page says."""
    pages = module(ROOT / "tests" / "house" / "test_docs.py", "pages")
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    (query,) = [block for block in pages.python_blocks(page) if block.note == "with Spark"]
    # Spark works where its JVM was started.
    code = re.sub(r'"(orders|totals/\w+)"', rf'"{tmp_path}/\1"', query.code)
    first, second, *_ = re.findall(r"^```text\n(.*?)^```$", page, re.M | re.S)
    for output in (first, second):
        namespace: dict[str, Any] = {"__name__": "__main__"}
        exec(compile(code, "README.md", "exec"), namespace)
        namespace["totals"].close()
        namespace.clear()
        assert capsys.readouterr().out.strip() == output.strip()


def test_the_quickstart_runs_from_top_to_bottom(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = module(ROOT / "tests" / "house" / "test_docs.py", "pages")
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    page = (ROOT / "docs/start/first-query.md").read_text(encoding="utf-8")
    # Spark works where its JVM was started.
    for name in ("orders", "totals", "app/stream"):
        page = page.replace(f'"{name}', f'"{tmp_path}/{name}')
    for block in pages.python_blocks(page):
        if block.is_session:
            pages.run_session(block, "quickstart", namespace)
        else:
            exec(compile(block.code, "quickstart", "exec"), namespace)
    namespace["batches"].close()
    namespace.clear()


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("options", ["--backend=heap", "--backend=rocksdb", "--mode=executors"])
def test_demo_finds_equal_state_and_output_after_a_kill(tmp_path: Path, options: str) -> None:
    work, temporary = tmp_path / "work", tmp_path / "tmp"
    work.mkdir(mode=0o555)
    temporary.mkdir()
    small = ["--batches=3", "--rows=2000", "--customers=500", options]
    variables = environment(TMPDIR=str(temporary))
    done = run_command(sys.executable, "-m", "statebackend.demo", *small, cwd=work, env=variables)
    printed = [
        r"    0 ",
        r"    1  committed",
        r"kill -9",
        r"    1  was committed",
        r"    2 ",
        r"State and output equal",
    ]
    assert re.search(".*".join(printed), done.stdout, re.S), done.stdout
    assert [*work.iterdir(), *temporary.iterdir()] == []


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("card_fraud", {"batches": 4, "payments": 500, "cards": 100}),
        ("click_sessions", {"batches": 9, "clicks": 300, "users": 60}),
    ],
)
def test_an_example_finds_what_a_loop_finds(
    spark: Any, tmp_path: Path, name: str, sizes: dict[str, int]
) -> None:
    job = example(name)
    job.generate(tmp_path, **sizes)
    found = job.run(spark, tmp_path)
    assert len(found) > 20
    assert found == job.expected(tmp_path)
