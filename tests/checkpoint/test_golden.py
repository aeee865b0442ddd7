"""Checkpoints and savepoints of every version that was released are read, by every backend."""

from __future__ import annotations

import ast
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from all_backends import BACKENDS
from house_tools import module

import statebackend as sb

GOLDEN = Path(__file__).parents[1] / "golden"
VERSIONS = sorted(path for path in GOLDEN.iterdir() if (path / "expected.txt").exists())


@pytest.fixture(scope="module")
def make() -> ModuleType:
    return module(GOLDEN / "make.py", "make_golden")


def with_sorted_maps(text: str) -> list[Any]:
    """The lines, those of maps as tuples with their entries sorted."""
    rows: list[Any] = text.splitlines()
    for at, line in enumerate(rows):
        if line.startswith(("('seen'", "('deep'", "('aging'")):
            *place, entries = ast.literal_eval(line)
            rows[at] = (*place, sorted(entries))
    return rows


def check(make: ModuleType, folder: Path, backend: str, restore: Any, of_operator: Any = None) -> None:
    clock = sb.testing.ManualClock(1030)
    factory = sb.create_backend(backend)
    keyed = factory.create_keyed_backend("string", max_parallelism=16, clock=clock, restore=restore)
    operator = factory.create_operator_backend(restore=of_operator or restore)
    held, expected = make.held(keyed, operator), (folder / "expected.txt").read_text(encoding="utf-8")
    if not factory.keeps_insertion_order:
        held, expected = with_sorted_maps(held), with_sorted_maps(expected)
    assert held == expected
    keyed.close()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("folder", VERSIONS, ids=lambda path: path.name)
def test_golden_checkpoints_and_savepoint_are_read(make: ModuleType, folder: Path, backend: str) -> None:
    whole = sb.CheckpointStore(folder / "store").open(2)
    whole.verify()
    check(make, folder, backend, whole)
    check(make, folder, backend, folder / "savepoint")
    if (folder / "ranges").exists():
        ranges = sb.CheckpointStore(folder / "ranges").open(0)
        ranges.verify()
        assert all(part is not None for part in ranges.manifest.parts)
        check(make, folder, backend, ranges, of_operator=whole)


def test_there_is_one_of_this_version() -> None:
    assert str(sb.checkpoint.FORMAT) in [path.name for path in VERSIONS]
