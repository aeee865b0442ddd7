"""``retain`` as a timedelta: checkpoints go when they are old enough, and the newest two stay."""

from __future__ import annotations

import datetime
import random
from pathlib import Path

import pytest
from keyed_stores import create, open_store
from stopped_time import StoppedTime
from store_files import commit

import statebackend as sb
from statebackend.checkpoint.store import retention, store as stores

HOUR = datetime.timedelta(hours=1)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> StoppedTime:
    made = StoppedTime()
    monkeypatch.setattr(stores, "time", made)
    return made


def test_checkpoints_go_when_they_are_older(tmp_path: Path, clock: StoppedTime) -> None:
    with sb.CheckpointStore(tmp_path, retain=HOUR).open_for_writing() as store:
        for checkpoint_id in range(10):
            commit(store, checkpoint_id)
            clock.now += 1200
        assert store.checkpoints() == [6, 7, 8, 9]  # 9 was committed 3,600 seconds after 6
        assert len(list(tmp_path.glob("data/*/*"))) == 4, "files go with their checkpoint"
    # The next writer reads how old they are.
    clock.now += 600
    with sb.CheckpointStore(tmp_path, retain=HOUR).open_for_writing() as store:
        commit(store, 10)
        assert store.checkpoints() == [8, 9, 10]
        clock.now += 1_000_000
        commit(store, 11)
        assert store.checkpoints() == [10, 11]
        commit(store, 12)
        assert store.checkpoints() == [11, 12]
    with sb.CheckpointStore(tmp_path, retain=1).open_for_writing() as store:
        assert store.checkpoints() == [11, 12], "opening drops none: one of them may be asked for"
        commit(store, 13)
        assert store.checkpoints() == [13]


def test_many_kept_checkpoints_cost_a_commit_nothing(tmp_path: Path, clock: StoppedTime) -> None:
    """A file that a hundred manifests name is known by one look, and stays until the last of them has gone."""
    with sb.CheckpointStore(tmp_path, retain=HOUR).open_for_writing() as store:
        writer = store.begin_snapshot(0)
        with writer.create("base") as file:
            file.write(b"state")
            shared = file.finish()
        for checkpoint_id in range(120):
            store.commit(
                checkpoint_id, [sb.StateSnapshot(checkpoint_id, store.epoch, files=(shared,))], now=0
            )
        assert len(store.checkpoints()) == 120
        clock.now += 10_000
        commit(store, 120)
        assert store.checkpoints() == [119, 120]
        assert (tmp_path / shared.name).exists()
        commit(store, 121)
        commit(store, 122)
        assert not (tmp_path / shared.name).exists()


@pytest.mark.parametrize("wrong", [0, -1, True, 2.0, datetime.timedelta(-1), "1 moon"])
def test_wrong_retention_is_refused(tmp_path: Path, wrong: object) -> None:
    with pytest.raises(sb.UsageError, match="unknown retain=|not a duration|is less than 0"):
        sb.CheckpointStore(tmp_path, retain=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(("share", "fewest"), [(0.001, 113), (0.1, 20), (1.0, 8)])
def test_auto_keeps_the_newest_and_one_an_hour_within_its_limit(
    tmp_path: Path,
    clock: StoppedTime,
    monkeypatch: pytest.MonkeyPatch,
    no_fsync: None,
    rng: random.Random,
    share: float,
    fewest: int,
) -> None:
    """300 batches, one in six minutes, touch a share of the keys."""
    monkeypatch.setattr(retention, "_BYTES_MORE", 1 << 19)
    keys = 4000
    with open_store(tmp_path) as store, create("heap") as keyed:
        state = keyed.get_value_state(sb.ValueStateDescriptor("n", int))
        state.update_many(range(keys), [rng.getrandbits(62) for _ in range(keys)])
        for batch_id in range(300):
            touched = [rng.randrange(keys) for _ in range(int(keys * share))] if share < 1 else range(keys)
            state.update_many(touched, [rng.getrandbits(62) for _ in touched])
            store.commit(batch_id, [keyed.snapshot(batch_id, store).result()])
            keyed.notify_checkpoint_complete(batch_id)
            clock.now += 360
            if batch_id % 50 == 49:
                opened = [store.open(each) for each in store.checkpoints()]
                sizes = {name: file.size for each in opened[:-1] for name, file in each.files.items()}
                beside = sum(size for name, size in sizes.items() if name not in opened[-1].files)
                assert len(opened) == 2 or beside <= 3 * 16.5 * keys + (1 << 19)
    kept = store.checkpoints()
    assert len(kept) >= fewest
    assert (len(kept) >= 100) == (share == 0.001)
    if share == 0.001:
        assert kept[-100:] == list(range(200, 300))
        assert [each // 10 for each in kept[:-100]] == list(range(7, 20))
