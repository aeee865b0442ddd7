"""Handles are typed by their descriptors: what mypy and pyright infer of a program is what it asserts."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from house_tools import ROOT
from processes import run_command

import statebackend as sb

PROGRAM = ROOT / "tests" / "types" / "typed_states.py"


def run(*command: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "MYPYPATH": str(ROOT), "PYTHONPATH": str(ROOT)}
    return run_command(*command, cwd=ROOT, env=environment, status=None)


@pytest.fixture
def programs(tmp_path: Path) -> list[str]:
    """The program, one with a wrong claim in it, and the examples."""
    text = PROGRAM.read_text(encoding="utf-8")
    right = "assert_type(n, sb.ValueState[int])"
    assert right in text
    (tmp_path / "right.py").write_text(text, encoding="utf-8")
    (tmp_path / "wrong.py").write_text(text.replace(right, right.replace("int", "str")), encoding="utf-8")
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    return [str(tmp_path / each) for each in ("right.py", "wrong.py", "examples")]


def check(done: subprocess.CompletedProcess[str]) -> None:
    """Only the wrong program is refused. The functions of pyarrow.compute have no types."""
    said = re.findall(r"(\w+)\.py:.*\berror\b(?!.*of module .pyarrow)", done.stdout)
    assert set(said) == {"wrong"}, done.stdout + done.stderr


@pytest.mark.slow
def test_mypy_infers_what_the_program_asserts(tmp_path: Path, programs: list[str]) -> None:
    options = ["--cache-dir", str(tmp_path), "--config-file", str(ROOT / "pyproject.toml")]
    check(run(sys.executable, "-m", "mypy", *options, *programs))


@pytest.mark.slow
def test_pyright_infers_what_the_program_asserts(tmp_path: Path, programs: list[str]) -> None:
    beside = Path(sys.executable).with_name("pyright")
    pyright = str(beside) if beside.exists() else shutil.which("pyright")
    if pyright is None:
        pytest.skip("needs pyright")
    settings = tmp_path / "pyrightconfig.json"
    settings.write_text(
        f'{{"include": {json.dumps(programs)}, "extraPaths": ["{ROOT}"], "typeCheckingMode": "standard",'
        '"reportUnnecessaryTypeIgnoreComment": "error", "enableTypeIgnoreComments": false}'
    )
    done = run(pyright, "--project", str(settings), "--pythonpath", sys.executable)
    if "error" not in done.stdout and "informations" not in done.stdout:
        pytest.skip(
            f"pyright does not run here: {done.stderr[-200:]}"
        )  # it fetches its own program at first use
    check(done)


def test_classes_take_type_arguments_when_a_program_runs() -> None:
    for each in (sb.ValueState, sb.MapState, sb.ListState, sb.ReducingState, sb.BroadcastState):
        assert each[int].__origin__ is each  # type: ignore[index]
    assert sb.ValueStateDescriptor[int]("n", int) == sb.ValueStateDescriptor("n", int)

    class Longest(sb.AggregateFunction[str, str, str]):
        pass

    assert issubclass(Longest, sb.AggregateFunction)
