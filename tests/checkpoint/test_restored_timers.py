"""Timers come back from a base and what has changed since, on every backend, as if they had been registered there."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from all_backends import BACKENDS

import statebackend as sb
from statebackend.backends.rocksdb import row_loader
from statebackend.checkpoint.format import GroupedBatch, Op
from statebackend.keys import TimeWindow, range_for

pytestmark = [pytest.mark.checked, pytest.mark.usefixtures("no_fsync")]

GROUPS = 8
NAMESPACES: list[Any] = [sb.VOID, sb.VOID, "text", TimeWindow(0, 60)]


def change(keyed: Any, rng: random.Random, keys: list[Any], spaces: list[Any], changes: int) -> None:
    for _ in range(changes):
        keyed.set_current_key(rng.choice(keys))
        keyed.set_current_namespace(rng.choice(spaces))
        domain, time = rng.choice(["event", "processing"]), rng.randrange(-30, 60)
        verb = "register" if rng.random() < 0.7 else "delete"
        getattr(keyed.timers, f"{verb}_{domain}_time_timer")(time)
    keyed.timers.take_due(rng.randrange(-30, -20), "event")


def fired(keyed: Any) -> list[Any]:
    found = []
    for domain in ("event", "processing"):
        assert keyed.timers.count(domain) == sum(row.domain == domain for row in keyed.timers.rows())
        found += [
            (domain, at, keyed.current_key, keyed.current_namespace) for at in keyed.timers.due(10**6, domain)
        ]
        assert keyed.timers.count(domain) == 0
        assert keyed.timers.next_due(domain) is None
    assert keyed.timers.rows() == []
    return found


@pytest.mark.sampled(5)
@pytest.mark.parametrize("has_namespaces", [False, True])
@pytest.mark.parametrize(
    ("key_type", "keys"), [(int, list(range(-20, 20))), (str, ["", "a\0b", *"cdefgh"])], ids=["int", "str"]
)
@pytest.mark.parametrize("written_by", BACKENDS)
def test_timers_of_a_base_and_deltas_fire_in_the_same_order(
    written_by: str,
    key_type: Any,
    keys: list[Any],
    has_namespaces: bool,
    tmp_path: Path,
    rng: random.Random,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(row_loader, "FEWEST_IN_FILE", 20)
    monkeypatch.setattr(row_loader, "GATHERED_BYTES", 2_000)
    spaces = NAMESPACES if has_namespaces else [sb.VOID]
    written = sb.create_backend(written_by).create_keyed_backend(key_type, max_parallelism=GROUPS)
    with sb.CheckpointStore(tmp_path).open_for_writing(key_type=key_type, max_parallelism=GROUPS) as store:
        for number in range(4):
            change(written, rng, keys, spaces, 400 if number == 0 else 60)
            stored = store.commit(number, [written.snapshot(number, store).result()])
            written.notify_checkpoint_complete(number)
        expected = written.timers.rows()
        assert len(expected) > 50
        halves = [range_for(GROUPS, 2, index) for index in (0, 1)]
        for read_by in BACKENDS:
            restored = sb.create_backend(read_by).create_keyed_backend(
                key_type, max_parallelism=GROUPS, restore=stored
            )
            assert restored.timers.rows() == expected
            parts = [
                sb.create_backend(read_by).create_keyed_backend(
                    key_type, max_parallelism=GROUPS, key_group_range=half, restore=stored
                )
                for half in halves
            ]
            assert sorted(row for part in parts for row in part.timers.rows()) == expected
            # What is restored can be rolled back to, and is not rolled back itself.
            mark = restored.mark()
            change(restored, rng, keys, spaces, 30)
            restored.rollback(mark)
            restored.release(mark)
            assert restored.timers.rows() == expected
            order = fired(restored)
            if read_by == BACKENDS[0]:
                first = order
            assert order == first
            for each in (restored, *parts):
                each.close()
    written.close()


@pytest.mark.parametrize("read_by", ["heap", "rocksdb"])
def test_cleared_timers_are_gone(read_by: str) -> None:
    """No backend writes this of timers now; a map state may have it, and so may a file."""
    times = {"key": [1, 1, 2, 1], "map_key": [20, 10, 15, 30], "namespace": [b"", b"", b"", b"\x02n"]}
    base = pa.record_batch({**times, "value": [False] * 4})
    changes = {
        "key": [1, 1],
        "map_key": pa.array([None, 25], pa.int64()),
        "namespace": [b"", b""],
        "value": pa.array([None, False]),
        "op": pa.array([Op.CLEAR, Op.PUT], pa.uint8()),
    }
    with sb.create_backend(read_by).create_keyed_backend(int, max_parallelism=1) as keyed:
        rows = [GroupedBatch.of(base, [0] * 4), GroupedBatch.of(pa.record_batch(changes), [0, 0])]
        keyed.timers.load_rows("event", rows)
        assert keyed.timers.count() == 3
        assert [(row.key, row.timestamp) for row in keyed.timers.rows()] == [(1, 25), (1, 30), (2, 15)]
        assert list(keyed.timers.due(100)) == [15, 25, 30]


def test_many_timers_come_as_files_of_the_database(tmp_path: Path) -> None:
    heap = sb.create_backend("heap").create_keyed_backend(int, max_parallelism=GROUPS)
    heap.timers.register_event_time_timers(list(range(30_000)), list(range(30_000)))
    with heap, sb.CheckpointStore(tmp_path).open_for_writing(key_type=int, max_parallelism=GROUPS) as store:
        stored = store.commit(0, [heap.snapshot(0, store).result()])
        with sb.create_backend("rocksdb").create_keyed_backend(
            int, max_parallelism=GROUPS, restore=stored
        ) as keyed:
            held = [each for each in keyed.scratch.database.live_files() if each["entries"]]
            assert sorted(each["entries"] for each in held) == [30_000, 30_000], "by key, and by time"
            assert keyed.timers.count() == 30_000
            assert keyed.timers.take_due(99).timestamps.to_pylist() == list(range(100))
