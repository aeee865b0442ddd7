"""What the tests of the house share: where things are, and which modules there are.

The package that is tested lies beside the tests, or is installed elsewhere: then its sources may not be here.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

import statebackend

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = Path(statebackend.__file__).resolve().parent
HAS_SOURCES = (ROOT / "statebackend").is_dir()
#: The sources of the package; where they are not, what is installed of them: all but the .pyx.
SOURCES = ROOT / "statebackend" if HAS_SOURCES else PACKAGE

reads_sources = pytest.mark.skipif(
    not HAS_SOURCES, reason="reads the sources of the package, which are not here"
)


def module_name(path: Path, root: Path = SOURCES.parent) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def compiled_modules() -> list[str]:
    """The names of the modules that are built; what an old build has left behind has no source beside it."""
    built = importlib.machinery.EXTENSION_SUFFIXES
    return sorted(
        {
            module_name(path, PACKAGE.parent)
            for path in PACKAGE.glob("**/*.p*")
            if path.suffix in (".pyx", ".pxd")
            and any(path.with_name(path.stem + suffix).exists() for suffix in built)
        }
    )


def python_modules() -> list[str]:
    return sorted(module_name(path, PACKAGE.parent) for path in PACKAGE.glob("**/*.py"))


def module(path: Path, name: str) -> ModuleType:
    """A module of this path, loaded anew."""
    spec = importlib.util.spec_from_file_location(name, path)
    made = importlib.util.module_from_spec(spec)
    sys.modules[name] = made
    spec.loader.exec_module(made)
    return made
