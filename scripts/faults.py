#!/usr/bin/env python3
"""Plants small deliberate faults, one at a time, and tells which of them the tests catch.

    .venv/bin/python scripts/faults.py --python 60 --compiled 20 --seed 1 --out build/faults.jsonl

The same seed on the same sources chooses the same faults. Each fault is a changed operator, constant or condition, or a
statement left out. It is planted in a copy of the sources below ``build/faults``. There, the test files that name its
module and the doctests run until a test fails, and then those of the two nearest folders (`changed_tests.FOLDERS`), but
for slow ones. A fault that no test catches survives. A line of JSON is written for each fault; a run goes on after the
last line of its file. Call it after a release build, with nothing else running.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from changed_tests import folders_of, tests_of

ROOT = Path(__file__).resolve().parent.parent
COPY = ROOT / "build" / "faults"

COMPARISONS = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "=="}
OPERATORS = {ast.Add: "-", ast.Sub: "+", ast.Mult: "+", ast.FloorDiv: "*", ast.And: "or", ast.Or: "and"}


class Fault(NamedTuple):
    """A span of a file, and the text to put in its place."""

    path: str
    line: int
    start: int
    end: int
    text: str

    def planted(self, source: str) -> str:
        return source[: self.start] + self.text + source[self.end :]


def faults_of_python(path: Path) -> Iterator[Fault]:
    """Every fault that can be planted in the functions of a Python module."""
    source = path.read_text(encoding="utf-8")
    offsets = [0]
    for line in source.splitlines(keepends=True):
        offsets.append(offsets[-1] + len(line))
    name = path.relative_to(ROOT).as_posix()
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]

    def at(line: int, column: int) -> int:
        return offsets[line - 1] + len(source.splitlines()[line - 1].encode()[:column].decode())

    def replaced(node: ast.expr | ast.stmt, text: str) -> Fault:
        end = at(node.end_lineno or 0, node.end_col_offset or 0)
        return Fault(name, node.lineno, at(node.lineno, node.col_offset), end, text)

    def between(left: ast.expr, right: ast.expr, old: str, new: str) -> Iterator[Fault]:
        start = at(left.end_lineno or 0, left.end_col_offset or 0)
        found = source.find(old, start, at(right.lineno, right.col_offset))
        if found >= 0:
            yield Fault(name, left.lineno, found, found + len(old), new)

    symbols = {
        ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!=",
        ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.FloorDiv: "//", ast.And: "and", ast.Or: "or",
    }  # fmt: skip
    for function in functions:
        for node in (node for statement in function.body for node in ast.walk(statement)):
            if isinstance(node, ast.Compare) and type(node.ops[0]) in symbols:
                old = symbols[type(node.ops[0])]
                yield from between(node.left, node.comparators[0], old, COMPARISONS[old])
            elif isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
                old = symbols[type(node.op)]
                yield from between(node.left, node.right, old, OPERATORS[type(node.op)])
            elif isinstance(node, ast.BoolOp):
                yield from between(
                    node.values[0], node.values[1], symbols[type(node.op)], OPERATORS[type(node.op)]
                )
            elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
                yield replaced(node, f"bool({ast.get_source_segment(source, node.operand)})")
            elif isinstance(node, ast.Constant) and type(node.value) is int:
                yield replaced(node, str(node.value + 1))
            elif isinstance(node, ast.Constant) and type(node.value) is bool:
                yield replaced(node, str(not node.value))
            elif isinstance(node, (ast.If, ast.While)) and not isinstance(node.test, ast.Constant):
                yield replaced(node.test, f"not ({ast.get_source_segment(source, node.test)})")
            elif (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)) or isinstance(
                node, ast.AugAssign
            ):
                yield replaced(node, "pass")


#: Lines of Cython that are changed, by what is looked for in them.
CYTHON = [
    (re.compile(r"(?<=\s)(<=|>=|==|!=|<|>)(?=\s)"), lambda found: COMPARISONS[found[1]]),
    (re.compile(r"(?<=\s)\+ 1\b"), lambda found: "+ 2"),
    (re.compile(r"(?<=\s)- 1\b"), lambda found: "- 0"),
    (re.compile(r"\b(and|or)\b"), lambda found: {"and": "or", "or": "and"}[found[1]]),
    (re.compile(r"(?<=if )not "), lambda found: ""),
    (re.compile(r"(?<=return )(True|False)\b"), lambda found: str(found[1] == "False")),
]


def faults_of_cython(path: Path) -> Iterator[Fault]:
    """Every fault that can be planted in the statements of a Cython module; declarations and docstrings are left."""
    source = path.read_text(encoding="utf-8")
    blank = re.sub(
        r'(""".*?"""|#[^\n]*|"[^"\n]*")', lambda found: re.sub(r"[^\n]", " ", found[0]), source, flags=re.S
    )
    name = path.relative_to(ROOT).as_posix()
    start = 0
    for number, line in enumerate(blank.splitlines(keepends=True), 1):
        if line.startswith("    ") and not re.match(
            r"\s*(cdef|cpdef|def|cimport|import|from|assert|@)\b", line
        ):
            for pattern, change in CYTHON:
                for found in pattern.finditer(line):
                    yield Fault(name, number, start + found.start(), start + found.end(), change(found))
            found = re.match(r"(\s+)[\w.\[\]]+ (?:\+=|-=) [^\\]*$", line)
            if found:
                yield Fault(name, number, start + found.end(1), start + len(line.rstrip()), "pass")
        start += len(line)


def chosen(seed: int, python: int, compiled: int) -> list[Fault]:
    """So many faults of each kind; a module is as likely as it has places for them."""
    rng = random.Random(seed)
    package = ROOT / "statebackend"
    of_python = [fault for path in sorted(package.rglob("*.py")) for fault in faults_of_python(path)]
    of_cython = [fault for path in sorted(package.rglob("*.pyx")) for fault in faults_of_cython(path)]
    return rng.sample(of_python, python) + rng.sample(of_cython, compiled)


def outcome(fault: Fault, seconds: int) -> str:
    """``caught by <folder>``, ``caught by the build``, or ``survived``."""
    path = COPY / fault.path
    original = path.read_text(encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(COPY), "STATEBACKEND_BUILD": "release"}
    build = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]

    def run(command: list[str]) -> bool:
        try:
            quiet = subprocess.DEVNULL
            done = subprocess.run(
                command, cwd=COPY, env=environment, stdout=quiet, stderr=quiet, timeout=seconds
            )
        except subprocess.TimeoutExpired:
            return False
        return done.returncode == 0

    path.write_text(fault.planted(original), encoding="utf-8")
    try:
        if path.suffix == ".pyx" and not run(build):
            return "caught by the build"
        naming = sorted(file.relative_to(ROOT).as_posix() for file in tests_of(fault.path))
        naming.append("tests/house/test_docs.py::test_doctests")
        for tests in (naming, *([f"tests/{folder}"] for folder in folders_of(fault.path)[:2])):
            if not run([sys.executable, "-m", "pytest", "-x", "-q", "-n", "2", "-m", "not slow", *tests]):
                return f"caught by {'those that name it' if tests is naming else tests[0]}"
        return "survived"
    finally:
        path.write_text(original, encoding="utf-8")
        if path.suffix == ".pyx":
            run(build)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    arguments.add_argument("--python", type=int, default=60, help="faults in Python modules (%(default)s)")
    arguments.add_argument("--compiled", type=int, default=20, help="faults in compiled ones (%(default)s)")
    arguments.add_argument("--seed", type=int, default=1, help="chooses the faults (%(default)s)")
    arguments.add_argument(
        "--seconds", type=int, default=1800, help="for the tests of a folder (%(default)s)"
    )
    arguments.add_argument("--out", type=Path, default=ROOT / "build" / "faults.jsonl")
    arguments.add_argument("--list", action="store_true", help="only show the faults")
    given = arguments.parse_args()
    faults = chosen(given.seed, given.python, given.compiled)
    done = len(given.out.read_text().splitlines()) if given.out.exists() else 0
    if not given.list:
        ignored = shutil.ignore_patterns(".git", ".venv", "faults*")
        shutil.copytree(ROOT, COPY, ignore=ignored, dirs_exist_ok=True)
    for number, fault in enumerate(faults):
        if number < done and not given.list:
            continue
        line = (ROOT / fault.path).read_text(encoding="utf-8").splitlines()[fault.line - 1].strip()
        found = {"seed": given.seed, "number": number, "at": f"{fault.path}:{fault.line}", "line": line}
        found["becomes"] = fault.text
        if not given.list:
            start = time.monotonic()
            found["outcome"] = outcome(fault, given.seconds)
            found["seconds"] = round(time.monotonic() - start)
            with given.out.open("a") as out:
                out.write(json.dumps(found) + "\n")
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
