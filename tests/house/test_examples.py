"""Every example runs as a newcomer would run it, and prints what it promises."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pyarrow as pa
import pytest
from house_tools import ROOT
from processes import environment, run_command

from statebackend import demo

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
#: What an example prints, in this order, among other things.
PRINTS = {
    "buffering_sink.py": [
        "buffered:  [('d', 3), ('e', 4)]",
        "instance 0 buffered:  [('d', 3)]",
        "instance 1 buffered:  [('e', 4)]",
        "sent:      [[('d', 3), ('e', 4), ('f', 5)]]",
    ],
    "count_window_average.py": ["(1, 4)\n", "(1, 5)\n", "keys with state are [1]"],
    "counter_source.py": ["[0, 1, 2]", "[3, 4]", "[3, 4, 5, 6]"],
    "encrypted_store.py": [
        "restored:        ['Casablanca', 'Yokohama']",
        "in plain text:   False",
        "damaged:         []",
        "without cipher:  the store is encrypted, and no cipher was given",
        "with other key:  a block of a file cannot be decrypted",
    ],
    "map_demo.py": ["state equals a recomputation: True"],
}
AUDITED = ROOT / "examples/audited_backend"


def run(*command: str, path: Path | None = None, cwd: Path) -> str:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, filter(None, [path, ROOT])))}
    done = run_command(sys.executable, *command, cwd=cwd, env=environment)
    assert done.stderr == ""
    return str(done.stdout)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_an_example_runs(example: Path, tmp_path: Path) -> None:
    out = run(str(example), cwd=tmp_path)
    at = 0
    for expected in PRINTS[example.name]:
        at = out.find(expected, at) + 1
        assert at, f"{expected!r} is not printed in its turn:\n{out}"


def test_the_page_shows_the_package_as_it_is() -> None:
    page = (ROOT / "docs/internals/writing-a-backend.md").read_text(encoding="utf-8")
    for path in sorted(AUDITED.iterdir()):
        if path.is_file():
            assert path.read_text(encoding="utf-8") in page, path.name


def test_demo_runs_in_the_harness_without_java(tmp_path: Path) -> None:
    done = run_command(
        *(sys.executable, "-m", "statebackend.demo", "--rows=20000", "--customers=5000"),
        cwd=tmp_path,
        env=environment(PATH="", JAVA_HOME=""),
    )
    assert re.search("needs (PySpark 4.0|Java 17) or newer.*(pip install|found: none)", done.stdout)
    assert "batch 6 is committed, and its output is lost" in done.stdout
    assert "State and output equal the computation of pyarrow" in done.stdout


def test_demo_check_names_each_difference() -> None:
    orders = [
        pa.table({"customer": [1, 2, 1], "cents": [5, 7, 3]}),
        pa.table({"customer": [2], "cents": [1]}),
    ]
    columns = ["customer", *demo.STATES]
    outputs = [pa.table([[2, 1], [1, 2], [7, 8], [7, 5]], columns), pa.table([[2], [2], [8], [7]], columns)]
    state = {"orders": [2, 2], "spent": [8, 8], "largest": [5, 7]}

    def stored(name: str) -> pa.Table:
        return pa.table({"key": [1, 2], "value": state[name]})

    assert demo.check(orders, outputs, stored) == []
    state["spent"][0] = 9
    assert demo.check(orders, outputs, stored) == [
        "the state 'spent' differs from the computation of pyarrow"
    ]
    lost = demo.check(orders, [outputs[0], outputs[0]], stored)
    assert lost[0] == "the output of batch 1 differs from the computation of pyarrow"


@pytest.mark.slow
def test_the_package_is_found_once_it_is_installed(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for path in AUDITED.iterdir():
        if path.is_file():
            (source / path.name).write_bytes(path.read_bytes())
    target = tmp_path / "installed"
    options = ["--no-build-isolation", "--no-deps", "--disable-pip-version-check", "-q"]
    command = ["-m", "pip", "install", *options, "--target", str(target), str(source)]
    run(*command, cwd=tmp_path)
    code = (
        "import logging, statebackend as sb\n"
        "logging.basicConfig(format='%(message)s', level=logging.INFO, stream=__import__('sys').stdout)\n"
        "backend = sb.create_backend('audited', label='users')\n"
        "print(backend)\n"
        "with backend.create_keyed_backend(int) as keyed:\n"
        "    keyed.set_current_key(1)\n"
        "    keyed.clear_key()\n"
    )
    out = run("-c", code, path=target, cwd=tmp_path)
    assert out.splitlines() == ["AuditedBackend(label='users')", "users: a key was erased"]
