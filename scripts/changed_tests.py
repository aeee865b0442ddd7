#!/usr/bin/env python3
"""Prints the test files of the sources that have changed since main, for ``make test-changed``.

A changed test file is its own test; a changed helper in tests/support has the tests that import it. A changed module of
the package has the tests of its nearest folders that name the module or one of its public names; if there are none, the
nearest folder as a whole. A changed .pyx or .pxd counts as a change of every module that cimports it.
"""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

#: The folders of tests for a part of the package, nearest first. The longest prefix of a module's path counts.
FOLDERS = {
    "": "contract functions runtime",
    "_core": "core heap contract",
    "_core/handles": "heap contract core",
    "_core/rocksdb": "rocksdb contract",
    "backends": "contract heap rocksdb",
    "backends/heap": "heap contract checkpoint",
    "backends/rocksdb": "rocksdb contract checkpoint",
    "checkpoint": "checkpoint tools runtime",
    "cluster": "cluster spark",
    "columns": "heap contract keys",
    "functions": "functions runtime",
    "keys": "keys contract heap",
    "operator_state": "contract checkpoint functions",
    "runtime": "runtime functions cluster",
    "spark": "spark",
    "state": "contract types heap functions",
    "testing": "functions contract",
    "tools": "tools checkpoint",
    "types": "types contract keys",
}


def folders_of(path: str) -> list[str]:
    """The folders of tests for a source file, nearest first.

    >>> folders_of("statebackend/backends/heap/keyed_backend.py")
    ['heap', 'contract', 'checkpoint']
    """
    part = path.removeprefix("statebackend/")
    return FOLDERS[max((name for name in FOLDERS if part.startswith(name)), key=len)].split()


def changed_files() -> set[str]:
    def git(*command: str) -> list[str]:
        return subprocess.check_output(["git", *command], cwd=ROOT, text=True).splitlines()

    base = git("merge-base", "HEAD", "main")[0]
    return {*git("diff", "--name-only", base), *git("ls-files", "--others", "--exclude-standard")}


def cimporting(paths: Iterable[str]) -> set[str]:
    """These Cython files, and those that cimport one of them, through any number of .pxd."""
    importers: dict[str, set[str]] = {}
    for file in ROOT.glob("statebackend/**/*.p[xy][dx]"):
        name = file.relative_to(ROOT).as_posix()
        for module in re.findall(r"^from ([\w.]+) cimport|^cimport ([\w.]+)", file.read_text(), re.M):
            importers.setdefault("".join(module), set()).add(name)
    found, left = set(paths), list(paths)
    while left:
        new = importers.get(left.pop().rpartition(".")[0].replace("/", "."), set()) - found
        found |= new
        left += [path for path in new if path.endswith(".pxd")]
    return found


def names_of(path: str) -> set[str]:
    """The dotted name of a module and its public names."""
    module, _, suffix = path.rpartition(".")
    names = {module.replace("/", ".")}
    if suffix == "py" and (ROOT / path).exists():
        for node in ast.parse((ROOT / path).read_text()).body:
            if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
                names |= set(ast.literal_eval(node.value))
    else:
        parent, _, name = module.rpartition("/")
        names.add(f"{parent.replace('/', '.')} import {name}")
    return names


def tests_of(path: str) -> set[Path]:
    tests = [file for name in folders_of(path)[:2] for file in ROOT.glob(f"tests/{name}/test_*.py")]
    pattern = re.compile("|".join(rf"\b{re.escape(name)}\b" for name in names_of(path)))
    naming = {file for file in tests if pattern.search(file.read_text())}
    return naming or set(ROOT.glob(f"tests/{folders_of(path)[0]}/test_*.py"))


def main() -> None:
    changed = changed_files()
    sources = {path for path in changed if path.startswith("statebackend/")}
    compiled = {path for path in sources if path.endswith((".pyx", ".pxd"))}
    modules = {path for path in sources if path.endswith(".py")}
    tests = {test for path in modules | cimporting(compiled) for test in tests_of(path)}
    for path in changed:
        name = Path(path).stem
        if re.fullmatch(r"tests/\w+/test_\w+\.py", path) and (ROOT / path).exists():
            tests.add(ROOT / path)
        elif re.fullmatch(r"tests/\w+/\w+\.pyx?", path):
            pattern = re.compile(rf"^(from|import) (statebackend\._core\.)?{name}\b", re.M)
            tests |= {file for file in ROOT.glob("tests/*/test_*.py") if pattern.search(file.read_text())}
    if any(path.endswith(".md") for path in changed):
        tests.add(ROOT / "tests/house/test_docs.py")
    print(" ".join(sorted(test.relative_to(ROOT).as_posix() for test in tests)))


if __name__ == "__main__":
    main()
