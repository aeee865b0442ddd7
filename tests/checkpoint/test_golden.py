"""Checkpoints and savepoints of every version that was released are read, by every backend."""

from __future__ import annotations

import ast
import json
import os
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import unquote, urlsplit

import pyarrow.parquet as pq
import pytest
from all_backends import BACKENDS
from deltalake import DeltaTable
from house_tools import module

import statebackend as sb
from statebackend.checkpoint.store.sealed import seal, unseal

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


def rows_of(folder: Path) -> dict[str, list[tuple[str, int]]]:
    """What a reader finds in each output; in the one with a log, the files that this names."""
    log, lines = folder / "parts" / "_spark_metadata", []
    numbered = {int(name.split(".")[0]): log / name for name in os.listdir(log) if name[0].isdigit()}
    for _, entry in sorted(numbered.items()):
        later = entry.read_text().splitlines()[1:]
        lines = later if entry.suffix else [*lines, *later]  # a compacted entry has all before it
    found = {"files": pq.read_table(folder / "files").to_pylist(), "parts": []}
    for path in (Path(unquote(urlsplit(json.loads(line)["path"]).path)) for line in lines):
        user = path.parent.name.removeprefix("user=")
        found["parts"] += [{"user": user, **row} for row in pq.ParquetFile(path).read().to_pylist()]
    found["table"] = DeltaTable(str(folder / "table")).to_pyarrow_table().to_pylist()
    return {name: sorted((row["user"], row["v"]) for row in rows) for name, rows in found.items()}


@pytest.mark.parametrize("folder", VERSIONS, ids=lambda path: path.name)
def test_query_continues_over_golden_outputs(make: ModuleType, folder: Path, tmp_path: Path) -> None:
    """All sinks know their batches: one that comes again is not written twice, and a rewind takes it back."""
    shutil.copytree(folder / "outputs", tmp_path / "outputs")
    for entry in (tmp_path / "outputs/parts/_spark_metadata").iterdir():
        entry.write_text(entry.read_text().replace(str(make.WRITTEN_IN), str(tmp_path / "outputs")))

    def check(batches: int) -> None:
        rows = sorted(
            (user, 10 * batch + at) for batch in range(batches) for at, user in enumerate(["a", "b"])
        )
        assert rows_of(tmp_path / "outputs") == dict.fromkeys(("files", "parts", "table"), rows)

    check(3)
    make.run_sinks(tmp_path / "outputs", range(2, 4))
    check(4)
    sinks = make.sinks_in(tmp_path / "outputs")
    sb.tools.rewind(tmp_path / "outputs/state", to=1, checkpoint_location=None, sink=sinks)
    check(2)


@pytest.mark.parametrize("name", ["store/metadata.json", "savepoint/_savepoint/keyed-0-15.json"])
def test_newer_format_is_refused_in_one_sentence(tmp_path: Path, name: str) -> None:
    root = tmp_path / "newer"
    shutil.copytree(VERSIONS[-1], root)
    sealed = unseal((root / name).read_bytes(), name)
    (root / name).write_bytes(seal({**sealed, "format": 9}))
    with pytest.raises(
        sb.CorruptCheckpointError, match=r"^cannot read format 9; expected format \d\b"
    ) as caught:
        sb.tools.state(root / name.split("/")[0], "count")
    assert caught.value.code == "CORRUPT_CHECKPOINT.VERSION"
    assert caught.value.hint == "use the version of the library that wrote the file"


def test_there_is_one_of_this_version() -> None:
    assert str(sb.checkpoint.FORMAT) in [path.name for path in VERSIONS]
