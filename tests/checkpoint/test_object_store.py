"""A store in an object store: the same story, with the same promises.

On a simulated one, where every request may fail, be the last, be answered to nobody or come late, and on servers of S3,
Azure and GCS.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Iterator
from urllib.parse import quote

import numpy as np
import pyarrow as pa
import pytest
from keyed_story import Story, contents
from object_servers import SERVERS, object_server
from simulated_disk import Dead
from simulated_objects import Bucket, SimulatedObjectCalls
from store_files import commit
from store_story import (
    QUERY,
    Told,
    check_checkpoints,
    check_recovery,
    entries_beside_commits,
    give_up,
    open_store,
    take,
    tell,
)

from statebackend.backends import create_backend
from statebackend.checkpoint import CheckpointStore, StateSnapshot
from statebackend.checkpoint.files.object_calls import ObjectCalls
from statebackend.checkpoint.files.object_store import ObjectFiles
from statebackend.checkpoint.store.checkpoint_reader import CheckpointReader
from statebackend.errors import CorruptCheckpointError, StateBackendError, UsageError
from statebackend.keys.key_groups import range_for
from statebackend.state import ListStateDescriptor
from statebackend.tools import Repaired, repair, state

__all__ = ["object_server"]  # a fixture


def files_of(calls: ObjectCalls) -> ObjectFiles:
    return ObjectFiles("s3://bucket/store", calls)


def check_left(reader: CheckpointReader, there: Iterable[str], epoch: int) -> None:
    expected = {"metadata.json", *entries_beside_commits(reader)}
    for checkpoint_id in reader.checkpoints():
        checkpoint = reader.open(checkpoint_id)
        expected |= {checkpoint.manifest.name, *checkpoint.files}
    # What was created to try out the service may be left by a writer that died.
    assert sorted(name for name in there if not name.startswith("probes/")) == sorted(expected)


def names_in(bucket: Bucket) -> Callable[[], Iterator[str]]:
    return lambda: (name.removeprefix("store/") for name in bucket.objects)


def story() -> list[str]:
    calls = SimulatedObjectCalls(Bucket())
    tell(lambda: files_of(calls), Told())
    return calls.made


STORY = story()


@pytest.mark.parametrize("what", ["die", "fail", "lie", "late"])
def test_every_request_is_the_last_or_fails(what: str) -> None:
    assert set(STORY) == {"create", "head", "list", "list_all", "get", "range", "put", "delete"}
    for at in range(len(STORY)):
        bucket, told = Bucket(), Told()
        calls = SimulatedObjectCalls(bucket, lambda number, name, at=at: what if number == at else None)
        try:
            tell(lambda calls=calls: files_of(calls), told)
        except (Dead, StateBackendError) as error:
            is_known = what != "die" and error.code != "STORE.UNKNOWN"
            if told.tried is not None and not told.rewinds and is_known:
                told.tried = None  # the checkpoint is not there
        try:
            if what == "late":
                open_store(files_of(SimulatedObjectCalls(bucket))).close()  # meanwhile the request arrives
            check_recovery(files_of(SimulatedObjectCalls(bucket)), names_in(bucket), told, check_left)
        except BaseException as failure:
            raise AssertionError(f"request {at} ({STORY[at]}), {what}") from failure


def test_a_commit_that_comes_late_finds_its_place_taken() -> None:
    """It timed out, and was not there when its writer looked. The next opening takes its place in the log."""
    bucket = Bucket()
    calls = SimulatedObjectCalls(bucket)
    store = open_store(files_of(calls))
    take(store, 0, Told())
    calls.plan = lambda number, name: "late" if name == "create" else None
    with pytest.raises(StateBackendError, match=r"\[STORE\.UNKNOWN\]"):
        take(store, 1, Told())
    assert not store.is_open_for_writing
    calls.plan = lambda number, name: None
    second = open_store(files_of(SimulatedObjectCalls(bucket)))  # its requests let the late one arrive
    bucket.arrive()
    there = second.checkpoints()
    assert there in ([0], [0, 1])
    take(second, there[-1] + 1, Told())
    check_checkpoints(second, Told(there[-1] + 1))


def test_requests_of_a_commit_do_not_grow() -> None:
    calls = SimulatedObjectCalls(Bucket())
    store = CheckpointStore("/", _files=files_of(calls), retain=2).open_for_writing()
    chain = []
    counts = []
    for checkpoint_id in range(60):
        chain.append(commit(store, checkpoint_id, *chain))
        before = len(calls.made)
        store.check_held()
        assert calls.made[before:] == ["head"]
        counts.append(before)
    own = [newer - older for older, newer in itertools.pairwise(counts[5:])]
    # The data file and a look at it, the entry, and the manifest that goes; and the look of `check_held`.
    assert set(own) == {5}, own


class Place:
    """A place for a store on a server."""

    def __init__(self, uri: str, options: dict[str, str]) -> None:
        self.uri = uri
        self.options = options
        self.files = ObjectFiles(uri, options=options)

    def store(self, **more: object) -> CheckpointStore:
        return CheckpointStore(self.uri, options=self.options, **more)  # type: ignore[arg-type]

    def names(self) -> Iterator[str]:
        calls = ObjectCalls(self.uri, self.options)
        root = self.files._path("")
        return (name.removeprefix(root + "/") for name in calls.names_below(root))

    def overwrite(self, name: str, content: bytes) -> None:
        self.files._calls.put(self.files._path(name), content)


@pytest.fixture(params=SERVERS)
def place(
    object_server: Callable[[str], tuple[str, dict[str, str]]], request: pytest.FixtureRequest
) -> Place:
    uri, options = object_server(request.param)
    own = "".join(c for c in request.node.name.lower() if c.isalnum())[:50]
    return Place(f"{uri}/{own}/state", options)


def test_the_story(place: Place) -> None:
    told = Told()
    tell(lambda: place.files, told)
    assert told == Told(6)
    check_recovery(place.files, place.names, told, check_left)


def test_a_store_is_written_and_read(place: Place) -> None:
    store = place.store()
    assert "secret" not in repr(store) + store.uri
    assert store.latest() is None
    store.open_for_writing(query=QUERY, key_type=int, max_parallelism=128)
    table = pa.table({"key": np.arange(2_000_000), "value": np.random.default_rng(1).random(2_000_000)})
    file = store.begin_snapshot(0).create("base")
    with pa.ipc.new_file(file, table.schema) as arrow:
        arrow.write_table(table, 65_536)  # 32 MB: several parts
    stored = file.finish()
    store.commit(0, [StateSnapshot(0, store.epoch, files=(stored,))])
    give_up(store, 1)

    checkpoint = store.open_readonly().open(0)
    checkpoint.verify()
    with checkpoint.open_file(stored) as source:
        assert pa.ipc.open_file(source).read_all() == table
    assert checkpoint.address(stored) == f"{store.uri}/{stored.name}"
    assert set(place.names()) == {"metadata.json", "checkpoints/1.json", "checkpoints/2.json", stored.name}
    with pytest.raises(UsageError, match="another query"):
        place.store().open_for_writing(query="other")


@pytest.mark.sampled(1)
def test_keyed_state_goes_on_incrementally_after_a_restart(place: Place, rng: random.Random) -> None:
    restore: object = ()
    with place.store(retain=1) as store:
        store.open_for_writing(key_type=int, max_parallelism=32)
        for step in range(3):
            keyed = create_backend("heap").create_keyed_backend(int, max_parallelism=32, restore=restore)
            story = Story(keyed, rng, int)
            for checkpoint_id in range(3 * step, 3 * step + 3):
                story.change(500 if checkpoint_id == 0 else 20)
                restore = store.commit(checkpoint_id, [keyed.snapshot(checkpoint_id, store).result()])
            held = contents(keyed)
            keyed.close()
        assert [file.kind for file in restore.files.values()] == ["base"] + ["delta"] * 8
    checkpoint = CheckpointReader(place.uri, options=place.options).open(8)
    checkpoint.verify()
    with create_backend("reference").create_keyed_backend(
        int, max_parallelism=32, restore=checkpoint
    ) as keyed:
        assert contents(keyed) == held


@pytest.mark.parametrize("backend", ["heap", "reference", "rocksdb"])
def test_a_savepoint_is_restored_and_read(
    object_server: Callable[[str], tuple[str, dict[str, str]]], rng: random.Random, backend: str
) -> None:
    uri, options = object_server("S3")
    where = f"{uri}/{backend}/savepoint?" + "&".join(
        f"{name}={quote(each)}" for name, each in options.items()
    )
    place = Place(where, {})
    held = []
    for index in range(2):
        own = range_for(32, 2, index)
        with create_backend(backend).create_keyed_backend(
            int, max_parallelism=32, key_group_range=own
        ) as keyed:
            story = Story(keyed, rng, int)
            story.keys = [key for key in story.keys if keyed._encoder.key_group(key, 32) in own]
            story.change(800)
            savepoint = keyed.savepoint(where)
            held += contents(keyed)
    assert "secret" not in repr(savepoint)
    with create_backend(backend).create_operator_backend() as operator:
        operator.get_list_state(ListStateDescriptor("offsets", int)).add_all([7, 9])
        operator.savepoint(where)
    other = create_backend("reference" if backend == "heap" else "heap")
    for given in (where, savepoint):
        with other.create_keyed_backend(int, max_parallelism=32, restore=given) as again:
            assert sorted(contents(again), key=repr) == sorted(held, key=repr)
        operator = other.create_operator_backend(restore=given)
        assert operator.get_list_state(ListStateDescriptor("offsets", int)).get() == [7, 9]
        counts = sorted(row["value"] for row in state(given, "count").to_table().to_pylist())
        assert counts == sorted(row[3] for row in held if row[0] == "count")
        assert state(given, "offsets").to_table().to_pydict() == {"subtask": [0, 0], "value": [7, 9]}
    first = range_for(32, 2, 0)
    with (
        create_backend(backend).create_keyed_backend(int, max_parallelism=32, key_group_range=first) as again,
        pytest.raises(UsageError, match="there is a savepoint already"),
    ):
        again.savepoint(where)
    (name,) = [name for name in place.names() if name.startswith("keyed/count/0-")]
    content = place.files.read(name)
    place.overwrite(name, content[:-9] + bytes([content[-9] ^ 1]) + content[-8:])
    with pytest.raises(CorruptCheckpointError, match=name.split("/")[-1]):
        state(where, "count").to_table()
    place.files.remove(name)
    with pytest.raises(CorruptCheckpointError, match="a file is missing"):
        other.create_keyed_backend(int, max_parallelism=32, restore=where)


@pytest.mark.sampled(1)
def test_damage_is_found(place: Place) -> None:
    store = place.store(retain=3).open_for_writing()
    stored = [commit(store, checkpoint_id) for checkpoint_id in range(3)]
    place.overwrite("checkpoints/4.json", b"{}")
    place.overwrite(stored[1].name, b"of x")
    with pytest.raises(CorruptCheckpointError, match=r"checkpoints/4\.json"):
        store.open(2)
    store.close()
    assert repair(place.store(retain=3)) == Repaired(0, ["checkpoints/4.json"])
    assert place.store(retain=3).checkpoints() == [0]
