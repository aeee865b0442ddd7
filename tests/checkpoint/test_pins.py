"""A reader pins a checkpoint: its files stay while it reads, whatever the writer commits, restarts or rewinds."""

from __future__ import annotations

import datetime
import itertools
import os
from pathlib import Path
from typing import Any

import pytest
from simulated_disk import Disk, SimulatedCalls
from stopped_time import StoppedTime
from store_files import commit

import statebackend as sb
from statebackend.checkpoint import CheckpointReader
from statebackend.checkpoint.files import PosixFiles
from statebackend.checkpoint.store import pins, retention, store as stores


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> StoppedTime:
    made = StoppedTime()
    for module in (stores, retention, pins):
        monkeypatch.setattr(module, "time", made)
    return made


def pin_files(path: Path) -> list[str]:
    return sorted(each.name for each in path.glob("pins/*"))


def test_files_stay_until_the_pin_is_released(tmp_path: Path) -> None:
    with sb.CheckpointStore(tmp_path, retain=1).open_for_writing() as store:
        commit(store, 0)
        with sb.CheckpointStore(tmp_path).open_readonly().pin() as pin:
            assert pin.checkpoint.id == 0
            for checkpoint_id in range(1, 6):
                commit(store, checkpoint_id)
            assert store.checkpoints() == [5]
            pin.checkpoint.verify()
        assert pin_files(tmp_path) == []
        commit(store, 6)
        assert not any((tmp_path / name).exists() for name in pin.checkpoint.files)
        pin.release()


def test_openings_restarts_and_rewinds_respect_pins(tmp_path: Path) -> None:
    reader = sb.CheckpointStore(tmp_path).open_readonly()
    with sb.CheckpointStore(tmp_path, retain=3).open_for_writing() as store:
        for checkpoint_id in range(3):
            commit(store, checkpoint_id)
        held = [reader.pin(0), reader.pin(2)]
        store.rewind(1)
        held.append(reader.pin(1))
        store.restart()
        for pin in held:
            pin.checkpoint.verify()
    with sb.CheckpointStore(tmp_path).open_for_writing() as store:
        for pin in held:
            pin.checkpoint.verify()
            pin.release()
        assert list(tmp_path.glob("data/1/*"))
    sb.CheckpointStore(tmp_path).open_for_writing().close()
    assert not list(tmp_path.glob("data/1/*"))


def test_a_lease_ends_and_can_be_renewed(tmp_path: Path, clock: StoppedTime) -> None:
    lease = datetime.timedelta(minutes=5)
    with sb.CheckpointStore(tmp_path, retain=1).open_for_writing() as store:
        commit(store, 0)
        pin = store.pin(0, lease=lease)
        first = pin_files(tmp_path)
        clock.now += 200
        pin.renew()
        assert len(pin_files(tmp_path)) == 1
        assert pin_files(tmp_path) != first
        clock.now += 200
        for checkpoint_id in (1, 2, 3):
            commit(store, checkpoint_id)
        pin.renew()  # the store has dropped the checkpoint; its files are there
        clock.now += 200
        for checkpoint_id in (4, 5):
            commit(store, checkpoint_id)
        pin.checkpoint.verify()
        clock.now += 200
        with pytest.raises(sb.UsageError, match=r"dropped by its writer.*\[USAGE\.NO_CHECKPOINT\]"):
            pin.renew()  # the lease has ended: its files may be gone
        assert pin_files(tmp_path) == []
        pin = store.pin(lease=lease)
        clock.now += 400
        for checkpoint_id in (6, 7, 8):
            commit(store, checkpoint_id)
        assert pin_files(tmp_path) == [], "whoever finds that a lease has ended removes its pin"
        with pytest.raises((sb.UsageError, sb.CorruptCheckpointError)):
            pin.checkpoint.verify()


def test_a_pin_that_cannot_be_read_holds_everything_for_a_while(tmp_path: Path, clock: StoppedTime) -> None:
    """It may be one that is being written, or was damaged."""
    with sb.CheckpointStore(tmp_path, retain=1).open_for_writing() as store:
        commit(store, 0)
        store.pin(0)
        (path,) = tmp_path.glob("pins/*")
        path.write_bytes(path.read_bytes()[:40])
        os.utime(path, (clock.now, clock.now))
        for checkpoint_id in range(1, 5):
            commit(store, checkpoint_id)
        assert len(list(tmp_path.glob("data/*/*"))) == 5
        clock.now += 4000
        commit(store, 5)
        assert pin_files(tmp_path) == []
        assert len(list(tmp_path.glob("data/*/*"))) == 1


def test_missing_checkpoints_cannot_be_pinned(tmp_path: Path) -> None:
    with sb.CheckpointStore(tmp_path).open_for_writing() as store:
        with pytest.raises(sb.UsageError, match="there is no checkpoint"):
            store.pin()
        commit(store, 0)
        with pytest.raises(sb.UsageError, match="there is no checkpoint 7"):
            store.pin(7)
        with pytest.raises(sb.UsageError, match="duration is less than 1 ms"):
            store.pin(0, lease=datetime.timedelta(0))
        assert pin_files(tmp_path) == []


@pytest.mark.parametrize("stopped", ["reader", "writer"])
def test_a_reader_and_a_writer_meet_before_any_call(stopped: str) -> None:
    """Whoever has got a pin reads every byte; whoever comes too late is told so."""
    outcomes = set()
    for at in itertools.count():
        disk = Disk()
        calls = {name: SimulatedCalls(disk) for name in ("reader", "writer")}
        files = {name: PosixFiles("/store", each) for name, each in calls.items()}
        store = sb.CheckpointStore("/", retain=1, _files=files["writer"]).open_for_writing()
        commit(store, 0)
        pins: list[Any] = []

        def read(pins: list[Any] = pins, files: Any = files) -> None:
            try:
                pins.append(CheckpointReader("/", _files=files["reader"]).pin())
            except sb.UsageError as error:
                pins.append(error.code)

        def work(store: sb.CheckpointStore = store) -> None:
            for checkpoint_id in (1, 2, 3):
                commit(store, checkpoint_id)

        first, second = (read, work) if stopped == "reader" else (work, read)
        begun = len(calls[stopped].made)

        def plan(number: int, name: str, at: int = begun + at, act: Any = second) -> None:
            if number == at:
                act()

        calls[stopped].plan = plan
        first()
        if begun + at >= len(calls[stopped].made):
            break
        for pin in pins:
            if pin != "USAGE.NO_CHECKPOINT":
                pin.checkpoint.verify()
                outcomes.add(pin.checkpoint.id)
                pin.release()
        commit(store, 4)
        commit(store, 5)
        assert not [name for name in disk.walk() if "/pins/" in name and name.endswith(".json")]
        assert sum(name.endswith(".arrow") for name in disk.walk()) <= 2
    assert outcomes >= ({0, 3} if stopped == "reader" else {0, 1, 2})
