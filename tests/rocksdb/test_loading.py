"""Restores into RocksDB: many rows go into files that the database takes in, and none of it can be told from puts."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import statebackend as sb
from statebackend.backends.rocksdb import row_loader
from statebackend.checkpoint.format import Op

pytestmark = pytest.mark.checked

COUNT = sb.ValueStateDescriptor("count", int)
TAGS = sb.ListStateDescriptor("tags", str)
PARTS = sb.MapStateDescriptor("parts", str, int)


def create() -> Any:
    return sb.create_backend("rocksdb").create_keyed_backend(int, max_parallelism=8)


def small_files(monkeypatch: pytest.MonkeyPatch, *, gathered: int, file: int, fewest: int = 1) -> None:
    monkeypatch.setattr(row_loader, "GATHERED_BYTES", gathered)
    monkeypatch.setattr(row_loader, "FILE_BYTES", file)
    monkeypatch.setattr(row_loader, "FEWEST_IN_FILE", fewest)


def puts(keys: list[int], values: list[Any]) -> tuple[Op, pa.RecordBatch]:
    return Op.PUT, pa.record_batch({"key": pa.array(keys, pa.int64()), "value": values})


def files_of(keyed: Any) -> list[dict[str, Any]]:
    return [each for each in keyed.scratch.database.live_files() if each["entries"]]


def left_over(keyed: Any) -> list[str]:
    return [each.name for each in Path(keyed.scratch.folder).iterdir() if each.suffix == ".sst"]


@pytest.mark.parametrize(("gathered", "file"), [(200, 1), (2_000, 1), (2_000, 1 << 20), (1 << 20, 1 << 20)])
def test_any_rows_in_any_order_are_what_puts_would_have_made(
    gathered: int, file: int, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sorted by key group as in a file or not, keys again and again, removals in between: the last row counts."""
    small_files(monkeypatch, gathered=gathered, file=file)
    with create() as keyed:
        count, expected = keyed.get_state(COUNT), {}
        for _ in range(20):
            batches = []
            for _ in range(rng.randrange(5)):
                keys = [rng.randrange(300) for _ in range(rng.randrange(1, 60))]
                if rng.random() < 0.6:
                    keys.sort(key=lambda key: keyed.groups_of(np.array([key]))[0])
                if rng.random() < 0.2:
                    batches.append((Op.REMOVE, pa.record_batch({"key": pa.array(keys, pa.int64())})))
                    for key in keys:
                        expected.pop(key, None)
                else:
                    values = [rng.randrange(1000) for _ in keys]
                    batches.append(puts(keys, values))
                    expected.update(zip(keys, values, strict=True))
            keyed._load(count, iter(batches))
            found = count.get_many(list(range(300))).to_pylist()
            assert found == [expected.get(key) for key in range(300)]
        assert left_over(keyed) == []


def test_many_rows_are_on_the_last_level_in_few_files(monkeypatch: pytest.MonkeyPatch) -> None:
    small_files(monkeypatch, gathered=100_000, file=200_000)
    with create() as keyed:
        count = keyed.get_state(COUNT)
        keys = np.arange(50_000)
        groups = keyed.groups_of(keys)
        ordered = keys[np.argsort(groups, kind="stable")].tolist()
        batches = [puts(part, part) for part in (ordered[at : at + 1000] for at in range(0, 50_000, 1000))]
        keyed._load(count, iter(batches))
        files = files_of(keyed)
        assert {each["level"] for each in files} == {6}
        assert 1 < len(files) < 8, "each has about 200 KB, though rows are gathered in smaller pieces"
        assert sum(each["entries"] for each in files) == 50_000
        assert count.get_many(keys).to_pylist() == keys.tolist()
        assert left_over(keyed) == []


def test_few_rows_make_no_file() -> None:
    with create() as keyed:
        keyed._load(keyed.get_state(COUNT), iter([puts([1, 2], [10, 20])]))
        assert keyed.get_state(COUNT).get_many([1, 2]).to_pylist() == [10, 20]
        assert files_of(keyed) == []


def test_appends_and_clears_apply_after_earlier_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    small_files(monkeypatch, gathered=50, file=1)
    with create() as keyed:
        tags, parts = keyed.get_state(TAGS), keyed.get_state(PARTS)
        keyed._load(
            tags,
            iter([
                puts([1, 2], [["a"], ["b"]]),
                (Op.APPEND, pa.record_batch({"key": [1], "value": [["more"]]})),
                puts([2], [["again"]]),
            ]),
        )  # fmt: skip
        entries = {"key": [1, 1, 2], "map_key": ["x", "y", "x"], "value": [1, 2, 3]}
        keyed._load(
            parts,
            iter([
                (Op.PUT, pa.record_batch(entries)),
                (Op.CLEAR, pa.record_batch({"key": [1], "map_key": pa.array([None], pa.string())})),
                (Op.PUT, pa.record_batch({"key": [1], "map_key": ["z"], "value": [4]})),
            ]),
        )  # fmt: skip
        found = []
        for key in (1, 2):
            keyed.set_current_key(key)
            found.append((tags.get(), dict(parts.items())))
        assert found == [(["a", "more"], {"z": 4}), (["again"], {"x": 3})]


def test_loading_is_not_a_change_and_survives_a_rollback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_files(monkeypatch, gathered=1000, file=1000)
    with sb.CheckpointStore(tmp_path).open_for_writing(key_type=int) as store:
        with sb.create_backend("heap").create_keyed_backend(int) as heap:
            heap.get_state(COUNT).update_many(range(5000), range(5000))
            store.commit(0, [heap.snapshot(0, store).result()])
        restored = store.open(0)
        with sb.create_backend("rocksdb").create_keyed_backend(int, restore=restored) as keyed:
            mark = keyed.mark()
            count = keyed.get_state(COUNT)
            count.update_many([7], [-7])
            keyed.rollback(mark)
            assert count.get_many([7, 4999]).to_pylist() == [7, 4999]
            assert keyed.count_changes(mark) == (0, 0)
            count.update_many([8], [-8])
            snapshot = keyed.snapshot(1, store).result()
            assert [file.kind for file in snapshot.files] == ["base", "delta"]


def test_an_error_at_any_step_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The state is as if nobody had asked for it; the next attempt has it whole."""
    small_files(monkeypatch, gathered=10_000, file=20_000)
    with (
        sb.CheckpointStore(tmp_path).open_for_writing(key_type=int) as store,
        sb.create_backend("heap").create_keyed_backend(int) as heap,
    ):
        heap.get_state(COUNT).update_many(range(150_000), range(150_000))
        restored = store.commit(0, [heap.snapshot(0, store).result()])
    for step in ("begin", "add", "finish", "ingest", "rows"):
        with sb.create_backend("rocksdb").create_keyed_backend(int, restore=restored) as keyed:
            with monkeypatch.context() as broken:
                break_at(broken, step)
                with pytest.raises(sb.StoreError, match="the disk is full"):
                    keyed.get_state(COUNT)
            assert keyed.undeclared_states() == ["count"], step
            assert left_over(keyed) == []
            count = keyed.get_state(COUNT)
            assert count.get_many([0, 90_000, 149_999]).to_pylist() == [0, 90_000, 149_999]
            assert keyed.metrics()["states"]["count"]["estimated_keys"] >= 150_000
            assert left_over(keyed) == []


def break_at(monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    """Let the third call of a step fail."""
    calls = 0

    def count() -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise sb.StoreError("the disk is full", code="STORE.NO_SPACE")

    class Breaking:
        def __init__(self, *arguments: Any) -> None:
            self._file = load_rows_file(*arguments)
            if step == "begin":
                count()

        def add(self, *rows: Any) -> None:
            if step == "add":
                count()
            self._file.add(*rows)

        def finish(self) -> None:
            if step == "finish":
                count()
            self._file.finish()

        def __getattr__(self, name: str) -> Any:
            return getattr(self._file, name)

    load_rows_file, really_ingest, values = row_loader.TableFile, row_loader.ingest, row_loader._values

    def ingest(*arguments: Any) -> None:
        if step == "ingest":
            count()
        really_ingest(*arguments)

    def breaking_values(*arguments: Any) -> Any:
        if step == "rows":
            count()
        return values(*arguments)

    monkeypatch.setattr(row_loader, "TableFile", Breaking)
    monkeypatch.setattr(row_loader, "ingest", ingest)
    monkeypatch.setattr(row_loader, "_values", breaking_values)
