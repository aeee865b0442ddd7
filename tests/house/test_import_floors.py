"""A file imports only from folders on lower floors, or from its own folder.

The table below is the house as docs/internals/house.md describes it. A new folder has to be given its floor here before
the suite passes. Imports for types only, imports in functions and ``cimport`` count like any other.
"""

from __future__ import annotations

import ast
import functools
import graphlib
import re
import sys
from pathlib import Path

import pytest
from house_tools import ROOT, SOURCES, module_name, reads_sources

#: Every folder of the package, from the ground up. Folders on one floor never import each other.
HOUSE: tuple[tuple[str, ...], ...] = (
    ("errors", "_version"),  # the two files that lie at the door
    ("types",),
    ("types.serializers",),
    ("keys",),
    ("state",),
    ("_core",),
    ("_core.memory",),
    ("_core.tables",),
    ("_core.codecs",),
    ("_core.snapshots", "_core.kernels", "_core.handles", "columns"),
    ("_core.rocksdb", "_core.rocksdb.binding"),
    ("_core.rocksdb.overlay",),
    ("_core.rocksdb.handles",),
    ("checkpoint.files",),
    ("checkpoint.store",),
    ("checkpoint",),
    ("checkpoint.format",),
    ("checkpoint.keyed",),
    ("operator_state",),
    ("backends", "backends.heap", "backends.reference", "backends.rocksdb"),
    ("functions",),
    ("runtime",),
    ("spark.sinks", "spark_functions", "cluster"),
    ("testing", "tools"),
    ("spark",),
    ("command_line",),
    ("",),  # the package's own __init__: the public names
)
FLOORS = {f"statebackend.{name}".rstrip("."): floor for floor, names in enumerate(HOUSE) for name in names}

#: Folders that others import as a whole: what their ``__init__`` names, modules among it, and nothing behind it.
FACES = ("statebackend.types", "statebackend.types.serializers", "statebackend.keys", "statebackend.state")

#: Folders that may import less of the package than their floor allows.
ONLY = {
    "statebackend._core": ("statebackend.errors", "statebackend.types.layout", "statebackend._core"),
}

#: The exceptions, each imported on first use: a core makes its snapshots, and a tool lets a Spark session write files.
EXCEPTIONS = {
    ("statebackend._core.tables.state_core", "statebackend._core.snapshots.snapshot_view"),
    ("statebackend.tools.spark_state", "statebackend.spark.driver_mode"),
}

#: The one circle: a serializer of a changed type reads old values with the serializer of the old type.
CIRCLES = {("statebackend.types.serializers.scalars", "statebackend.types.serializers")}

#: What may be imported from outside, beside the standard library: by every module, and by some.
OUTSIDE = ("numpy", "pyarrow")
OUTSIDE_OF = {
    "statebackend.types.model": ("typing_extensions",),  # type checkers know it; no program imports it
    "statebackend.demo": ("pyspark",),
    "statebackend.spark": ("pyspark", "py4j"),
    "statebackend.spark_functions": ("pyspark", "pandas"),
    "statebackend.tools.state_rows": ("duckdb",),  # for `sql`, if it is installed
    "statebackend.testing.tws_tester": ("pyspark", "pandas"),
    "statebackend._core": ("cython", "cpython", "libc", "posix"),  # Cython's own
}


def within(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def folder_of(module: str, packages: set[str]) -> str:
    """The folder that a module lies in: of an ``__init__``, its own; a file at the door stands for itself.

    ``__main__`` and ``demo`` are programs: they may import all, like the package's own ``__init__``.
    """
    if module in packages:
        return module
    folder = module.rpartition(".")[0]
    return module if folder == "statebackend" and not module.endswith(("__main__", ".demo")) else folder


def python_imports(source: str, module: str, is_package: bool, *, for_types: bool = True) -> set[str]:
    """Every module that Python source imports, at any depth of it; perhaps without imports for types only."""
    found: set[str] = set()
    tree = ast.parse(source)
    if not for_types:
        tree.body = [each for each in tree.body if not ast.unparse(each).startswith("if TYPE_CHECKING:")]
    for node in ast.walk(tree):
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


def sources(root: Path = SOURCES.parent) -> list[Path]:
    return sorted(p for p in root.glob("statebackend/**/*") if p.suffix in (".py", ".pyx", ".pxd"))


@functools.cache
def known_modules(root: Path = SOURCES.parent) -> set[str]:
    return {module_name(path, root) for path in sources(root)}


@functools.cache
def packages(root: Path = SOURCES.parent) -> set[str]:
    return {module_name(path, root) for path in sources(root) if path.stem == "__init__"}


def imports_of(path: Path, root: Path = SOURCES.parent, *, for_types: bool = True) -> set[str]:
    """Every module that one file imports, of the package or not."""
    module, text = module_name(path, root), path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        imported = python_imports(text, module, path.stem == "__init__", for_types=for_types)
    else:
        imported = cython_imports(text, module)
    known = known_modules(root)
    # `from statebackend.types import LONG` names an object: what is imported is the module before it.
    return {
        name if name in known or not within(name, "statebackend") else name.rpartition(".")[0]
        for name in imported
    } - {module}


@functools.cache
def modules_named_by(face: str, root: Path = SOURCES.parent) -> set[str]:
    """The modules that a face imports as modules, so that others may take them from it."""
    door = root.joinpath(*face.split("."), "__init__.py")
    return python_imports(door.read_text(encoding="utf-8"), face, True) & known_modules(root)


def violations(path: Path, root: Path = SOURCES.parent) -> list[str]:
    """What one file imports that its floor does not allow, in words."""
    module, doors = module_name(path, root), packages(root)
    own = folder_of(module, doors)
    if own not in FLOORS:
        return [f"{own} has no floor: add it to HOUSE"]
    found: list[str] = []
    for target in sorted(imports_of(path, root)):
        if not within(target, "statebackend"):
            top = target.partition(".")[0]
            allowed = {
                *OUTSIDE,
                *(n for where, names in OUTSIDE_OF.items() if within(module, where) for n in names),
            }
            if top not in sys.stdlib_module_names and top not in allowed:
                found.append(f"{module} imports {top}")
            continue
        folder = folder_of(target, doors)
        if folder not in FLOORS:
            found.append(f"{module} imports {target}, which has no floor")
            continue
        for where, only in ONLY.items():
            if within(own, where) and not any(within(target, each) for each in only):
                found.append(
                    f"{module} imports {target}; of the package it may import {' and '.join(only)} only"
                )
        if folder == own or (module, target) in EXCEPTIONS:
            continue
        if FLOORS[folder] >= FLOORS[own]:
            found.append(f"{module} [{FLOORS[own]}] imports {target} [{FLOORS[folder]}]")
        if folder in FACES and target != folder and target not in modules_named_by(folder, root):
            found.append(f"{module} imports {target}, which lies behind {folder}")
    return found


def test_imports_stay_below() -> None:
    assert [found for path in sources() for found in violations(path)] == []


def circle(root: Path = SOURCES.parent) -> list[str]:
    """Modules in Python that import each other at run time, in functions too; empty if there are none."""
    graph = {
        (module := module_name(path, root)): {
            target for target in imports_of(path, root, for_types=False) if (module, target) not in CIRCLES
        }
        for path in sources(root)
        if path.suffix == ".py"
    }
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


def test_no_modules_import_each_other() -> None:
    assert circle() == []


def test_a_circle_is_found(tmp_path: Path) -> None:
    write_package(tmp_path, SAMPLE)
    a, b, c = (f"statebackend.types.{name}" for name in "abc")
    write_package(tmp_path, {"types/a.py": f"import {b}\n", "types/b.py": f"def f():\n    import {c}\n"})
    write_package(tmp_path, {"types/c.py": f"if TYPE_CHECKING:\n    import {a}\n"})
    assert circle(tmp_path) == []
    write_package(tmp_path, {"types/c.py": f"import {a}\n"})
    assert sorted(circle(tmp_path)[1:]) == [a, b, c]


def test_every_folder_has_a_floor() -> None:
    doors = packages()
    assert sorted({folder_of(module, doors) for module in known_modules()} - FLOORS.keys()) == []
    named = {f"statebackend.{name}".rstrip(".") for names in HOUSE for name in names}
    assert sorted(named - doors - known_modules()) == []


def test_the_page_shows_every_folder_on_its_floor() -> None:
    """The tree of docs/internals/house.md is the table above."""
    page = (ROOT / "docs/internals/house.md").read_text(encoding="utf-8")
    shown: dict[str, int] = {}
    inside: list[str] = []
    for indent, names, floor in re.findall(r"^( *)(\w+/|\w+(?:, \w+)+) +(\d+)  \S", page, re.M):
        inside[len(indent) // 4 :] = [names.rstrip("/")]
        for name in names.rstrip("/").split(", "):
            shown[".".join([*inside[:-1], name])] = int(floor)
    assert shown == FLOORS


@reads_sources
@pytest.mark.parametrize("page", ["house", "batch", "entry", "commit"])
def test_page_names_existing_files_and_folders_only(page: str) -> None:
    text = (ROOT / f"docs/internals/{page}.md").read_text(encoding="utf-8")
    named = re.findall(r"`((?:[a-z_]+/)+(?:\w+\.\w+)?)`", text)
    assert len(named) > 15
    assert [each for each in named if not ((SOURCES / each).exists() or (ROOT / each).exists())] == []


def test_the_package_loads_its_heavy_parts_lazily() -> None:
    init = SOURCES / "__init__.py"
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


#: A package to try the rules on: every folder of the house, one module in some of them.
SAMPLE = dict.fromkeys(
    [
        "errors.py",
        *(f"{name.replace('.', '/')}/__init__.py".lstrip("/") for names in HOUSE[1:] for name in names),
        "_core/memory/arena.pyx",
        "_core/tables/cow_map.pyx",
        "_core/tables/state_core.pyx",
        "_core/snapshots/snapshot_view.pyx",
        "checkpoint/store/manifest.py",
        "spark/rows.py",
        "types/model.py",
        "types/convert.py",
    ],
    "",
)
SAMPLE["types/__init__.py"] = (
    "from statebackend.types import convert\nfrom statebackend.types.model import Type\n"
)


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        ("errors.py", "from .types import LONG\n", "errors [0] imports statebackend.types [1]"),
        ("state/a.py", "if TYPE_CHECKING:\n    import statebackend.spark\n", "imports statebackend.spark"),
        ("state/a.py", "from statebackend.types.model import Type\n", "which lies behind statebackend.types"),
        ("state/a.py", "import pyspark\n", "statebackend.state.a imports pyspark"),
        ("checkpoint/store/a.py", "from ...runtime import run\n", "imports statebackend.runtime ["),
        ("_core/memory/a.pyx", "from statebackend.types cimport X\n", "may import statebackend.errors and"),
        (
            "_core/tables/a.pyx",
            "def f():\n  from statebackend._core import (\n    handles,\n  )\n",
            "imports statebackend._core.handles",
        ),
        ("testing/x.py", "from statebackend import spark\n", "[23] imports statebackend.spark [24]"),
        ("novelty/a.py", "", "statebackend.novelty has no floor"),
        ("types/a.py", "from statebackend.novelty import b\n", "statebackend.novelty"),
    ],
)
def test_a_violation_is_found(tmp_path: Path, name: str, text: str, complaint: str) -> None:
    write_package(tmp_path, SAMPLE)
    if name.startswith("novelty/"):
        write_package(tmp_path, {"novelty/__init__.py": ""})
    write_package(tmp_path, {name: text})
    found = "\n".join(violations(tmp_path / "statebackend" / name, tmp_path))
    assert complaint in found
