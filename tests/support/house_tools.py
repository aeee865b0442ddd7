"""What the tests of the house share: where things are, and which modules there are."""

from __future__ import annotations

import importlib.machinery
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "statebackend"


def module_name(path: Path, root: Path = ROOT) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def compiled_modules() -> list[str]:
    """The names of the modules that have a .pyx and are built."""
    suffixes = importlib.machinery.EXTENSION_SUFFIXES
    return sorted(
        module_name(path)
        for path in PACKAGE.glob("**/*.pyx")
        if any(path.with_name(path.stem + suffix).exists() for suffix in suffixes)
    )


def python_modules() -> list[str]:
    return sorted(module_name(path) for path in PACKAGE.glob("**/*.py"))
