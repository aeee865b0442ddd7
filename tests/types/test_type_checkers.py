"""Handles are typed by their descriptors: what mypy and pyright infer of a program is what it asserts."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from house_tools import ROOT

import statebackend as sb

PROGRAM = ROOT / "tests" / "support" / "typed_states.py"


def run(*command: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "MYPYPATH": str(ROOT), "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=600
    )


@pytest.mark.slow
@pytest.mark.parametrize("breaks", [False, True])
def test_mypy_infers_what_the_program_asserts(tmp_path: Path, breaks: bool) -> None:
    options = ["--strict", "--cache-dir", str(tmp_path), "--config-file", str(ROOT / "pyproject.toml")]
    check(run(sys.executable, "-m", "mypy", *options, str(program(tmp_path, breaks))), breaks)


@pytest.mark.slow
@pytest.mark.parametrize("breaks", [False, True])
def test_pyright_infers_what_the_program_asserts(tmp_path: Path, breaks: bool) -> None:
    beside = Path(sys.executable).with_name("pyright")
    pyright = str(beside) if beside.exists() else shutil.which("pyright")
    if pyright is None:
        pytest.skip("needs pyright")
    settings = tmp_path / "pyrightconfig.json"
    path = program(tmp_path, breaks)
    settings.write_text(
        f'{{"include": ["{path}"], "extraPaths": ["{ROOT}"], "typeCheckingMode": "standard",'
        '"reportUnnecessaryTypeIgnoreComment": "error", "enableTypeIgnoreComments": false}'
    )
    done = run(pyright, "--project", str(settings), "--pythonpath", sys.executable)
    if "error" not in done.stdout and "informations" not in done.stdout:
        pytest.skip(
            f"pyright does not run here: {done.stderr[-200:]}"
        )  # it fetches its own program at first use
    check(done, breaks)


def program(folder: Path, breaks: bool) -> Path:
    """The program, or one with a wrong claim in it."""
    text = PROGRAM.read_text(encoding="utf-8")
    right = "assert_type(n, sb.ValueState[int])"
    assert right in text
    path = folder / "program.py"
    path.write_text(text.replace(right, right.replace("int", "str")) if breaks else text, encoding="utf-8")
    return path


def check(done: subprocess.CompletedProcess[str], breaks: bool) -> None:
    assert (done.returncode != 0) == breaks, done.stdout + done.stderr
    assert done.stdout.count("error:") + done.stdout.count("- error") >= breaks


def test_classes_take_type_arguments_when_a_program_runs() -> None:
    for each in (sb.ValueState, sb.MapState, sb.ListState, sb.ReducingState, sb.BroadcastState):
        assert each[int].__origin__ is each  # type: ignore[index]
    assert sb.ValueStateDescriptor[int]("n", int) == sb.ValueStateDescriptor("n", int)

    class Longest(sb.AggregateFunction[str, str, str]):
        pass

    assert issubclass(Longest, sb.AggregateFunction)
