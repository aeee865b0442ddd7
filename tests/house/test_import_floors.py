"""A file imports only from lower floors of the house, or from its own folder on its own floor.

The table below is the house as docs/internals/house.md describes it. A new module has to be given its floor
here before the suite passes.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest
from house_tools import ROOT, module_name

#: Floor of every module. A folder's floor holds for all that is in it, unless a longer name says otherwise.
FLOORS: dict[str, int] = {
    "statebackend": 8,  # the package's own __init__: the public names
    "statebackend._version": 0,
    "statebackend.errors": 0,
    "statebackend.types": 1,
    "statebackend.key_encoding": 1,
    "statebackend.key_groups": 1,
    "statebackend.serializers": 1,
    "statebackend.descriptors": 1,
    "statebackend.ttl": 1,
    "statebackend.timers": 1,
    "statebackend.clocks": 1,
    "statebackend._core": 2,
    "statebackend.state": 3,
    "statebackend.backend": 3,
    "statebackend.checkpoint": 4,
    "statebackend.operator_state": 4,
    "statebackend.backends": 5,
    "statebackend.backends.reference": 5,  # entries of their own: siblings never import each other
    "statebackend.backends.heap": 5,
    "statebackend.backends.rocksdb": 5,
    "statebackend.registry": 6,
    "statebackend.functions": 6,
    "statebackend.runtime": 7,
    "statebackend.tools": 8,
    "statebackend.testing": 8,
    "statebackend.spark": 8,
}

#: Floors whose modules lie together in the package's own folder, and so may import each other. On the
#: other floors each folder is on its own: backends never import each other, nor do `spark` and `tools`.
OPEN_FLOORS = (1, 3, 4, 6)

#: Modules that may import less of the package than their floor allows.
ONLY = {"statebackend._core": ("statebackend.errors", "statebackend._core")}

#: What may be imported from outside, beside the standard library: by every module, and by some.
OUTSIDE = ("numpy", "pyarrow")
OUTSIDE_OF = {
    "statebackend.spark": ("pyspark", "py4j"),
    "statebackend._core": ("cython", "cpython", "libc", "posix"),  # Cython's own
}


def within(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def entry_of(module: str, table: dict[str, object]) -> str | None:
    """The longest name of the table that holds for the module. The bare package holds for itself only."""
    names = [n for n in table if module == n or (n != "statebackend" and within(module, n))]
    return max(names, key=len, default=None)


def python_imports(source: str, module: str, is_package: bool) -> set[str]:
    """Every module that Python source imports, at any depth of it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.split(".")
                parts = parts[: len(parts) - node.level + is_package]
                base = ".".join([*parts, *([node.module] if node.module else [])])
            found.update(f"{base}.{alias.name}" for alias in node.names)
    return found


_CIMPORT = re.compile(
    r"^[ \t]*(?:from[ \t]+(?P<base>[\w.]+)[ \t]+c?import[ \t]+(?P<names>\([^)]*\)|[^\n#]+)"
    r"|c?import[ \t]+(?P<modules>[^\n#]+))",
    re.M,
)


def cython_imports(source: str, module: str) -> set[str]:
    """Every module that a .pyx or .pxd imports or cimports."""
    source = re.sub(r'("""|\'\'\')(?:.|\n)*?\1', "", source)
    found: set[str] = set()
    for match in _CIMPORT.finditer(source):
        if match["modules"]:
            found.update(part.split()[0] for part in match["modules"].split(",") if part.strip())
            continue
        base = match["base"]
        level = len(base) - len(base.lstrip("."))
        if level:
            parts = module.split(".")[:-level]
            base = ".".join([*parts, *filter(None, [base.lstrip(".")])])
        names = re.sub(r"#[^\n]*", "", match["names"]).strip("() \t\n").split(",")
        found.update(f"{base}.{name.split()[0]}" for name in names if name.strip())
    return found


def sources(root: Path = ROOT) -> list[Path]:
    return sorted(p for p in root.glob("statebackend/**/*") if p.suffix in (".py", ".pyi", ".pyx", ".pxd"))


def known_modules(root: Path = ROOT) -> set[str]:
    return {module_name(path, root) for path in sources(root)}


def violations(path: Path, root: Path = ROOT) -> list[str]:
    """What one file imports that its floor does not allow, in words."""
    module, is_package = module_name(path, root), path.stem == "__init__"
    own = entry_of(module, FLOORS)
    if own is None:
        return [f"{module} has no floor: add it to FLOORS"]
    text = path.read_text(encoding="utf-8")
    if path.suffix in (".py", ".pyi"):
        imported = python_imports(text, module, is_package)
    else:
        imported = cython_imports(text, module)

    known = known_modules(root)

    found: list[str] = []
    for name in sorted(imported):
        if not within(name, "statebackend"):
            top = name.partition(".")[0]
            allowed = {*OUTSIDE, *OUTSIDE_OF.get(entry_of(module, OUTSIDE_OF) or "", ())}
            if top not in sys.stdlib_module_names and top not in allowed:
                found.append(f"{module} imports {top}")
            continue
        # `from statebackend.types import LONG` names an object: what is imported is the module before it.
        target = name if name in known else name.rpartition(".")[0]
        if target == module:
            continue
        floor = entry_of(target, FLOORS)
        if floor is None:
            found.append(f"{module} imports {target}, which has no floor")
            continue
        only = ONLY.get(entry_of(module, ONLY) or "")
        if only is not None and not any(within(target, allowed) for allowed in only):
            found.append(f"{module} imports {target}; of the package it may import {' and '.join(only)} only")
        neighbours = FLOORS[floor] == FLOORS[own] in OPEN_FLOORS
        own_folder = floor == own or neighbours
        if not (FLOORS[floor] < FLOORS[own] or own_folder):
            found.append(f"{module} [{FLOORS[own]}] imports {target} [{FLOORS[floor]}]")
    return found


@pytest.mark.parametrize("path", sources(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_imports_stay_below(path: Path) -> None:
    assert violations(path) == []


def test_every_module_has_a_floor() -> None:
    assert [module for module in sorted(known_modules()) if entry_of(module, FLOORS) is None] == []


def test_the_package_loads_its_heavy_parts_lazily() -> None:
    init = ROOT / "statebackend" / "__init__.py"
    tree = ast.parse(init.read_text(encoding="utf-8"))
    eager = {
        alias.name
        for node in tree.body
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    assert not eager & {"spark", "testing", "_core", "tools"}


def write_package(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / "statebackend" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        ("errors.py", "from statebackend import types\n", "errors [0] imports statebackend.types [1]"),
        ("errors.py", "from .types import LONG\n", "errors [0] imports statebackend.types [1]"),
        ("types.py", "def f():\n    import statebackend.state\n", "types [1] imports statebackend.state"),
        ("state.py", "from statebackend.backends.heap import Heap\n", "imports statebackend.backends.heap"),
        ("state.py", "import pyspark\n", "statebackend.state imports pyspark"),
        ("checkpoint/store.py", "from ..runtime import run\n", "imports statebackend.runtime [7]"),
        (
            "backends/heap.py",
            "from . import rocksdb\n",
            "backends.heap [5] imports statebackend.backends.rocksdb",
        ),
        ("_core/arena.pyx", "from statebackend.types cimport X\n", "may import statebackend.errors and"),
        ("_core/arena.pxd", "from .. import state\n", "arena [2] imports statebackend.state [3]"),
        (
            "_core/arena.pyx",
            "def f():\n  from statebackend import (\n    state,\n  )\n",
            "[2] imports statebackend.state",
        ),
        ("testing/x.py", "from statebackend import spark\n", "testing.x [8] imports statebackend.spark [8]"),
        ("novelty.py", "", "statebackend.novelty has no floor"),
    ],
)
def test_a_violation_is_found(tmp_path: Path, name: str, text: str, complaint: str) -> None:
    base = ["__init__.py", "errors.py", "types.py", "state.py", "runtime.py", "_core/__init__.py"]
    base += ["backends/__init__.py", "backends/heap.py", "backends/rocksdb.py", "checkpoint/__init__.py"]
    base += ["testing/__init__.py", "spark/__init__.py"]
    write_package(tmp_path, dict.fromkeys(base, ""))
    write_package(tmp_path, {name: text})
    found = "\n".join(violations(tmp_path / "statebackend" / name, tmp_path))
    assert complaint in found


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("types.py", "from statebackend.errors import UsageError\nimport statebackend.key_encoding\n"),
        ("state.py", '"""import pyspark"""\nimport os, numpy as np\nfrom . import types\n'),
        (
            "_core/cow_map.pyx",
            "cimport cython\nfrom libc.stdint cimport (\n    int64_t,  # a\n    uint32_t,\n)\n"
            "from statebackend._core.arena cimport A\nfrom . cimport arena\n"
            "from statebackend.errors import UsageError\n",
        ),
        ("spark/driver.py", "import pyspark.sql\nfrom ..runtime import run\nfrom .rows import r\n"),
    ],
)
def test_what_is_allowed_passes(tmp_path: Path, name: str, text: str) -> None:
    base = ["__init__.py", "errors.py", "types.py", "key_encoding.py", "runtime.py", "_core/__init__.py"]
    base += ["_core/arena.pyx", "spark/__init__.py", "spark/rows.py"]
    write_package(tmp_path, dict.fromkeys(base, ""))
    write_package(tmp_path, {name: text})
    assert violations(tmp_path / "statebackend" / name, tmp_path) == []
