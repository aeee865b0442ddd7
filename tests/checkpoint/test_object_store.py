"""A store in an object store: the same story, with the promises that can be kept there.

On a simulated one, where every call may fail or be the last, and on moto's S3 server, through Arrow's own client.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Iterator
from urllib.parse import quote

import numpy as np
import pyarrow as pa
import pytest
from keyed_story import Story, contents
from pyarrow import fs
from simulated_disk import Dead
from simulated_objects import Bucket, Client
from store_files import commit, write
from store_story import QUERY, RETAIN, Told, check_checkpoints, give_up, open_store, take, tell

from statebackend.backends import create_backend
from statebackend.checkpoint import CheckpointStore, StateSnapshot
from statebackend.checkpoint.files.objects import ObjectFiles
from statebackend.checkpoint.store.reader import CheckpointReader
from statebackend.errors import CommitConflictError, CorruptCheckpointError, StateBackendError, UsageError
from statebackend.keys.key_groups import range_for
from statebackend.state import ListStateDescriptor, ValueStateDescriptor
from statebackend.tools import read_state


def files_of(client: Client) -> ObjectFiles:
    return ObjectFiles("s3://bucket/store", fs.PyFileSystem(client), "bucket/store")


def check_left(reader: CheckpointReader, there: Iterator[str], epoch: int) -> None:
    expected = {"metadata.json", f"checkpoints/epoch-{epoch}/owner.json"}
    expected.update(record.name for record in reader.records())
    for checkpoint_id in reader.checkpoints():
        checkpoint = reader.open(checkpoint_id)
        expected |= {checkpoint.manifest.name, *checkpoint.files}
    assert sorted(there) == sorted(expected)


def check_recovery(files: ObjectFiles, list_all: Callable[[], Iterator[str]], told: Told) -> None:
    reader = CheckpointReader("/", _files=files)
    check_checkpoints(reader, told)
    store = open_store(files)
    check_checkpoints(store, told)
    check_left(store, list_all(), store.epoch)
    newest = store.latest()
    told, first = Told(newest), 0 if newest is None else newest + 1
    for checkpoint_id in range(first, first + RETAIN + 1):
        take(store, checkpoint_id, told)
    store.close()
    check_checkpoints(store, told)
    store.open_for_writing()
    check_left(store, list_all(), store.epoch)


# ------------------------------------------------------------------------------------ simulated


def names_in(bucket: Bucket) -> Callable[[], Iterator[str]]:
    return lambda: (name.removeprefix("bucket/store/") for name in bucket.objects)


def story() -> list[str]:
    client = Client(Bucket())
    tell(lambda: files_of(client), Told())
    return client.made


STORY = story()


@pytest.mark.parametrize("what", ["die", "fail", "lie"])
def test_every_call_is_the_last_or_fails(what: str) -> None:
    assert set(STORY) == {"head", "list", "get", "open", "part", "put", "delete", "delete_folder"}
    for at in range(len(STORY)):
        bucket, told = Bucket(), Told()
        client = Client(bucket, lambda number, name, at=at: what if number == at else None)
        try:
            tell(lambda client=client: files_of(client), told)
        except (Dead, StateBackendError) as error:
            if (
                told.tried is not None
                and not told.rewinds
                and what != "die"
                and error.code != "STORE.UNKNOWN"
            ):
                told.tried = None  # the checkpoint is not there
        try:
            check_recovery(files_of(Client(bucket)), names_in(bucket), told)
        except BaseException as failure:
            raise AssertionError(f"call {at} ({STORY[at]}), {what}") from failure


def test_two_writers_at_once_are_found_at_the_next_open() -> None:
    """Both look, then both write: nothing can prevent that, but it does not stay unseen."""
    clean = Client(Bucket())
    store = open_store(files_of(clean))
    for checkpoint_id in range(2):
        take(store, checkpoint_id, Told())
    start = len(clean.made)
    take(store, 2, Told())
    found = set()
    for at in range(start, len(clean.made)):
        bucket = Bucket()
        second: list[CheckpointStore] = []

        def plan(
            number: int, name: str, at: int = at, bucket: Bucket = bucket, second: list = second
        ) -> None:
            if number == at and CheckpointReader("/", _files=files_of(Client(bucket))).latest() == 1:
                second.append(open_store(files_of(Client(bucket))))
                take(second[0], 2, Told())

        first = open_store(files_of(Client(bucket, plan)))
        for checkpoint_id in range(2):
            take(first, checkpoint_id, Told())
        reader = CheckpointReader("/", _files=files_of(Client(bucket)))
        try:
            take(first, 2, Told())
        except CommitConflictError:
            assert reader.latest(intact=True) == 2
            assert reader.open(2).epoch == 2
            found.add("prevented")
        else:
            if not second:
                continue  # the first had committed already
            with pytest.raises(CommitConflictError, match="two writers have committed"):
                CheckpointStore("/", _files=files_of(Client(bucket))).open_for_writing()
            found.add("found")
    assert found == {"prevented", "found"}


# ------------------------------------------------------------------------------------ S3


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    from moto.server import ThreadedMotoServer  # takes a while

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"{host}:{port}"
    server.stop()


@pytest.fixture
def uri(endpoint: str, request: pytest.FixtureRequest) -> str:
    name = "b" + "".join(c for c in request.node.name.lower() if c.isalnum())[:50]
    s3 = fs.S3FileSystem(
        access_key="key",
        secret_key="secret",
        endpoint_override=endpoint,
        scheme="http",
        region="us-east-1",
        allow_bucket_creation=True,
    )
    s3.create_dir(name)
    options = f"scheme=http&endpoint_override={quote(endpoint)}&region=us-east-1"
    return f"s3://key:secret@{name}/app/state?{options}"


def objects_at(uri: str) -> Callable[[], Iterator[str]]:
    filesystem, root = fs.FileSystem.from_uri(uri)

    def walk() -> Iterator[str]:
        for info in filesystem.get_file_info(fs.FileSelector(root, recursive=True)):
            if info.type == fs.FileType.File:
                yield info.path.removeprefix(root + "/")

    return walk


def test_the_story_on_s3(uri: str) -> None:
    told = Told()
    tell(lambda: ObjectFiles(uri), told)
    assert told == Told(6)
    check_recovery(ObjectFiles(uri), objects_at(uri), told)


def test_a_store_on_s3_is_written_and_read(uri: str) -> None:
    with pytest.raises(UsageError, match="cannot keep a second writer out") as caught:
        CheckpointStore(uri)
    assert caught.value.code == "USAGE.SINGLE_WRITER"
    store = CheckpointStore(uri, single_writer=True)
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
    assert set(objects_at(uri)()) == {
        "metadata.json",
        "checkpoints/0-1.json",
        "checkpoints/epoch-1/owner.json",
        stored.name,
    }
    with pytest.raises(UsageError, match="another query"):
        CheckpointStore(uri, single_writer=True).open_for_writing(query="other")


def test_keyed_state_on_s3_goes_on_incrementally_after_a_restart(uri: str, rng: random.Random) -> None:
    restore: object = ()
    with CheckpointStore(uri, single_writer=True, retain=1) as store:
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
    checkpoint = CheckpointReader(uri).open(8)
    checkpoint.verify()
    with create_backend("reference").create_keyed_backend(
        int, max_parallelism=32, restore=checkpoint
    ) as keyed:
        assert contents(keyed) == held


@pytest.mark.parametrize("backend", ["heap", "reference"])
def test_a_savepoint_on_s3_is_restored_and_read(uri: str, rng: random.Random, backend: str) -> None:
    base, options = uri.split("?")
    where = f"{base}/{backend}/savepoint?{options}"
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
        counts = sorted(row["value"] for row in read_state(given, "count").to_pylist())
        assert counts == sorted(row[3] for row in held if row[0] == "count")
        assert read_state(given, "offsets").to_pydict() == {"subtask": [0, 0], "value": [7, 9]}
    first = range_for(32, 2, 0)
    with (
        create_backend(backend).create_keyed_backend(int, max_parallelism=32, key_group_range=first) as again,
        pytest.raises(UsageError, match="there is a savepoint already"),
    ):
        again.savepoint(where)
    filesystem, root = fs.FileSystem.from_uri(where)
    (name,) = [name for name in objects_at(where)() if name.startswith("keyed/count/0-")]
    with filesystem.open_input_stream(f"{root}/{name}") as source:
        content = source.read()
    with filesystem.open_output_stream(f"{root}/{name}") as out:
        out.write(content[:-9] + bytes([content[-9] ^ 1]) + content[-8:])
    with pytest.raises(CorruptCheckpointError, match=name.split("/")[-1]):
        read_state(where, "count")
    filesystem.delete_file(f"{root}/{name}")
    with pytest.raises(CorruptCheckpointError, match="a file is missing"):
        other.create_keyed_backend(int, max_parallelism=32, restore=where)


def test_savepoints_in_a_store_on_s3(uri: str) -> None:
    with CheckpointStore(uri, single_writer=True) as store:
        store.open_for_writing(key_type=int, max_parallelism=32)
        with create_backend("heap").create_keyed_backend(int, max_parallelism=32) as keyed:
            with pytest.raises(UsageError, match="the store has no checkpoint"):
                keyed.savepoint(store)
            count = keyed.get_state(ValueStateDescriptor("count", int))
            count.update_many(range(100_000), range(100_000))
            store.commit(0, [keyed.snapshot(0, store).result()])
            count.update_many([0], [-1])
            savepoint = keyed.savepoint(store)
        store.restart()
    assert any(name.startswith("savepoints/0/keyed/count/") for name in objects_at(uri)())
    with create_backend("heap").create_keyed_backend(int, max_parallelism=32, restore=savepoint) as again:
        found = again.get_state(ValueStateDescriptor("count", int)).get_many(range(100_000))
        assert found.to_pylist() == [-1, *range(1, 100_000)]


def test_another_process_writes_to_s3_for_the_writer(uri: str) -> None:
    store = CheckpointStore(uri, single_writer=True).open_for_writing()
    elsewhere = pickle.loads(pickle.dumps(store.data_writer(0)))
    stored = write(elsewhere)
    elsewhere.sync()
    assert store.commit(0, [StateSnapshot(0, store.epoch, files=(stored,))]).read_file(stored) == b"content"


def test_a_second_writer_on_s3_ends_the_first(uri: str) -> None:
    first = CheckpointStore(uri, single_writer=True).open_for_writing()
    commit(first, 0)
    second = CheckpointStore(uri, single_writer=True).open_for_writing()
    with pytest.raises(CommitConflictError, match="another writer"):
        commit(first, 1)
    commit(second, 1)
    assert second.checkpoints() == [0, 1]


def test_damage_on_s3_is_found(uri: str) -> None:
    store = CheckpointStore(uri, single_writer=True, retain=3).open_for_writing()
    stored = [commit(store, checkpoint_id) for checkpoint_id in range(3)]
    filesystem, root = fs.FileSystem.from_uri(uri)
    with filesystem.open_output_stream(f"{root}/checkpoints/2-1.json") as out:
        out.write(b"{}")
    with filesystem.open_output_stream(f"{root}/{stored[1].name}") as out:
        out.write(b"of x")
    with pytest.raises(CorruptCheckpointError, match=r"checkpoints/2-1\.json"):
        store.open(2)
    with pytest.raises(CorruptCheckpointError, match=stored[1].name):
        store.open(1).verify()
    assert store.latest() == 2
    assert store.latest(intact=True) == 0


def test_an_unusable_address_says_so_without_its_secret(endpoint: str) -> None:
    store = CheckpointStore("s3://key:hunter2@nowhere/x?no_such_option=1", single_writer=True)
    with pytest.raises(UsageError, match="cannot be used") as caught:
        store.latest()
    assert "hunter2" not in str(caught.value)
    missing = f"s3://key:hunter2@nobucket/x?scheme=http&endpoint_override={quote(endpoint)}&region=us-east-1"
    with pytest.raises(StateBackendError) as failed:
        CheckpointStore(missing, single_writer=True).open_for_writing()
    assert "hunter2" not in str(failed.value)
