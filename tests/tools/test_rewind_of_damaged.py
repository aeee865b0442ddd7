"""Sinks take back batches of which the store no longer knows what they are of."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

import statebackend as sb
from statebackend.runtime.batch_identity import BatchRecord
from statebackend.spark.sinks import parquet


class Published:
    def __init__(self, folder: Path) -> None:
        self.state, self.out = folder / "state", folder / "out"
        self.sink = parquet(self.out)
        self.out.mkdir()
        for batch_id in range(3):
            self.commit(batch_id)

    def commit(self, batch_id: int) -> Path:
        with sb.CheckpointStore(self.state, retain=5).open_for_writing() as store:
            store.commit(batch_id, batch=BatchRecord(incarnation=store.incarnation).to_json())
            name = self.sink.target("main", batch_id, store.incarnation).partition("], ")[2]
            path = Path(self.sink.address, name)
        path.touch()
        return path

    def damage(self, batch_id: int) -> None:
        sb.CheckpointStore(self.state).open_for_writing().close()  # the newest entry of the log stays whole
        (entry,) = (
            path
            for path in (self.state / "checkpoints").glob("*.json")
            if f'"id": {batch_id},' in path.read_text() or f'"id":{batch_id},' in path.read_text()
        )
        content = entry.read_text()
        entry.write_text(content[: len(content) // 2] + "#" + content[len(content) // 2 + 1 :])

    def published(self) -> list[int]:
        return sorted(int(path.name.split("-")[1]) for path in self.out.iterdir())


@pytest.fixture
def published(tmp_path: Path) -> Published:
    return Published(tmp_path)


@pytest.mark.parametrize("damaged", [1, 2])
def test_it_is_found_by_the_batches_around_it(published: Published, damaged: int) -> None:
    published.damage(damaged)
    taken = sb.tools.rewind(published.state, to=0, checkpoint_location=None, sink=published.sink)
    assert published.published() == [0]
    assert [len(batch.removed) for batch in taken.taken_back] == [1, 1]
    assert taken.taken_back[damaged - 1].incarnation is None


def test_output_of_an_earlier_rewind_without_its_sink_stays(published: Published) -> None:
    """Two files have the number of the batch: that of the newer incarnation is the one that the store has."""
    sb.tools.rewind(published.state, to=0, checkpoint_location=None)
    published.commit(1)
    newest = published.commit(2)
    published.damage(2)
    sb.tools.rewind(published.state, to=1, checkpoint_location=None, sink=published.sink)
    assert not newest.exists()
    assert published.published() == [0, 1, 1, 2]


def test_a_sink_that_finds_nothing_is_told_of(published: Published, caplog: pytest.LogCaptureFixture) -> None:
    for path in published.out.iterdir():
        path.rename(path.with_name("moved-" + path.name.split("-")[1]))
    published.damage(2)
    with caplog.at_level(logging.WARNING):
        sb.tools.rewind(published.state, to=1, checkpoint_location=None, sink=published.sink)
    assert "batch 2: its manifest cannot be read, and no sink has found anything of it" in caplog.text
