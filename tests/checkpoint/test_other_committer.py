"""Who takes snapshots need not commit: writers reach the backends pickled, and these are told what became of them."""

from __future__ import annotations

import pickle
import random
from pathlib import Path
from typing import Any

import pytest
from all_backends import BACKENDS

import statebackend as sb
from statebackend.checkpoint import DataWriter
from statebackend.checkpoint.keyed import chain

pytestmark = pytest.mark.usefixtures("no_fsync")


class Host:
    """A process with state, as far as the store is concerned: all that it has of it comes in pickles."""

    def __init__(self, backend: str, restore: Any = ()) -> None:
        factory = sb.create_backend(backend)
        self.keyed = factory.create_keyed_backend("bigint", max_parallelism=8, restore=restore)
        self.operator = factory.create_operator_backend(restore=restore)
        self.counts = self.keyed.get_value_state(sb.ValueStateDescriptor("count", int))
        self.offsets = self.operator.get_list_state(sb.ListStateDescriptor("offsets", int))

    def count(self, keys: list[int]) -> None:
        for key in keys:
            self.keyed.set_current_key(key)
            self.counts.update((self.counts.value() or 0) + 1)

    def write(self, checkpoint_id: int, targets: bytes) -> bytes:
        one, other = pickle.loads(targets)
        snapshots = [
            self.keyed.snapshot(checkpoint_id, one).result().to_json(),
            self.operator.snapshot(checkpoint_id, other).result().to_json(),
        ]
        one.sync()
        return pickle.dumps(snapshots)

    def told(self, checkpoint_id: int, is_committed: bool) -> None:
        for backend in (self.keyed, self.operator):
            if is_committed:
                backend.notify_checkpoint_complete(checkpoint_id)
            else:
                backend.notify_checkpoint_aborted(checkpoint_id)

    def contents(self) -> dict[int, int]:
        found = {}
        for key in self.keyed.keys("count"):
            self.keyed.set_current_key(key)
            found[key] = self.counts.value()
        return found

    def close(self) -> None:
        self.keyed.close()
        self.operator.close()


def targets(store: sb.CheckpointStore, checkpoint_id: int) -> bytes:
    return pickle.dumps([store.data_writer(checkpoint_id) for _ in range(2)])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_long_story(
    tmp_path: Path, backend: str, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some are aborted, files are merged or bases rewritten, batches are rolled back: every commit is whole."""
    monkeypatch.setattr(chain, *("FAN", 2) if backend == "heap" else ("SMALLEST_BASE", 0))
    store = sb.CheckpointStore(tmp_path, retain=1).open_for_writing(key_type="bigint", max_parallelism=8)
    host = Host(backend)
    host.count(list(range(200)))
    kinds: list[str] = []
    bases = set()
    aborted, offsets = 0, None
    for checkpoint_id in range(36):
        mark = host.keyed.mark()
        host.count([rng.randrange(300) for _ in range(3)])
        if rng.random() < 0.2:
            host.keyed.rollback(mark)
        host.keyed.release(mark)
        if rng.random() < 0.3:
            host.offsets.add(checkpoint_id)
        written = pickle.loads(host.write(checkpoint_id, targets(store, checkpoint_id)))
        if host.keyed._log.rewriting is not None and rng.random() < 0.7:
            host.keyed._log.rewriting.wait()
        if rng.random() < 0.2:
            aborted += 1
            store.abort(checkpoint_id)
            host.told(checkpoint_id, False)
            continue
        before = store.open_latest().snapshots[1] if store.checkpoints() else None
        committed = store.commit(checkpoint_id, written)
        host.told(checkpoint_id, True)
        committed.verify()
        if before is not None and host.offsets.get() == offsets:
            assert committed.snapshots[1].files == before.files, "what did not change is named again"
        offsets = host.offsets.get()
        kinds += [file.kind for file in committed.snapshots[0].files]
        bases.add(committed.snapshots[0].files[0].name)
        again = Host(backend, committed)
        assert again.contents() == host.contents()
        assert again.offsets.get() == host.offsets.get()
        again.close()
    assert aborted > 2
    assert kinds.count("delta") > 20
    assert backend == "heap" or len(bases) > 3, "bases are rewritten, named and built on"
    newest = store.latest()
    assert newest is not None
    host.close()
    store.close()
    named = set(sb.CheckpointStore(tmp_path).open(newest).files)
    before = {file.relative_to(tmp_path).as_posix() for file in tmp_path.glob("data/*/*")}
    assert named <= before
    assert len(before - named) <= 3, "aborted snapshots leave nothing"
    sb.CheckpointStore(tmp_path).open(newest).verify()


def test_what_is_lent_is_kept_until_it_is_decided(tmp_path: Path) -> None:
    """Three snapshots on their way: the last builds on files that the first two no longer name."""
    store = sb.CheckpointStore(tmp_path, retain=1).open_for_writing(key_type="bigint", max_parallelism=8)
    host = Host("heap")
    host.count(list(range(100)))
    store.commit(0, pickle.loads(host.write(0, targets(store, 0))))
    host.told(0, True)
    whole = [host.keyed.snapshot(n, store.data_writer(n), incremental=False).result() for n in (1, 2)]
    host.count([2])
    delta = host.keyed.snapshot(3, store.data_writer(3)).result()
    assert [file.kind for file in delta.files] == ["base", "delta"]
    for snapshot in whole:
        store.commit(snapshot.checkpoint_id, [snapshot])
    store.commit(3, [delta]).verify()
    store.commit(4, [])
    store.commit(5, [])
    assert len(list(tmp_path.glob("data/*/*.arrow"))) == 0, "what was lent is removed like everything else"
    host.close()
    store.close()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_writer_for_another_checkpoint_is_refused(tmp_path: Path, backend: str) -> None:
    store = sb.CheckpointStore(tmp_path).open_for_writing(key_type="bigint", max_parallelism=8)
    host = Host(backend)
    for each in (host.keyed, host.operator):
        with pytest.raises(sb.UsageError, match="the writer was made for checkpoint 7, not for 8"):
            each.snapshot(8, store.data_writer(7))
        with pytest.raises(sb.UsageError):
            each.snapshot(8, "not a store")
    assert isinstance(store.data_writer(7), DataWriter)
    host.close()
    store.close()
