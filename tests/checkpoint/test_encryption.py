"""An encrypted store: everything comes back, nothing lies in plain text, and what was changed or moved is refused."""

from __future__ import annotations

import io
import json
import pickle
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from all_backends import BACKENDS
from ciphers import KEY, AesGcm, Growing, Leaking, Padding, Shifting, Shortening
from keyed_stores import create
from keyed_story import Story, contents
from output_files import write_output
from store_files import commit, write

import statebackend as sb
from statebackend.checkpoint import StateSnapshot, StoredFile
from statebackend.checkpoint.keyed import chain
from statebackend.checkpoint.store.encryption import BLOCK
from statebackend.checkpoint.store.log import Entry
from statebackend.checkpoint.store.sealed import crc32c, seal, unseal
from statebackend.runtime.output import CommittedBatch

pytestmark = pytest.mark.usefixtures("no_fsync")

OVERHEAD = 28
OTHER_KEY = bytes(32)


def open_store(path: Path, key_type: Any = int, cipher: Any = None, **options: Any) -> sb.CheckpointStore:
    store = sb.CheckpointStore(path, encryption=AesGcm() if cipher is None else cipher, **options)
    return store.open_for_writing(key_type=key_type, max_parallelism=32)


def one_file(path: Path, content: bytes, **options: Any) -> tuple[sb.CheckpointStore, StoredFile]:
    with open_store(path, **options) as store:
        stored = write(store.begin_snapshot(0), content)
        store.commit(0, [StateSnapshot(0, store.epoch, files=(stored,))])
    return store, stored


def expected_size(plain: int) -> int:
    return plain + OVERHEAD * -(-plain // BLOCK)


def data_files(root: Path) -> dict[str, bytes]:
    return {p.relative_to(root).as_posix(): p.read_bytes() for p in root.glob("data/*/*") if p.is_file()}


def adjust(store: sb.CheckpointStore, names: dict[str, bytes]) -> None:
    """Let the newest manifest say that these are the contents of the files: as somebody may who can write there."""
    checkpoint = store.open_latest()
    path = Path(store.uri, checkpoint.manifest.name)
    data = json.loads(path.read_bytes())

    def walk(node: Any) -> None:
        if isinstance(node, dict):
            if node.get("name") in names:
                content = names[node["name"]]
                node["size"], node["checksum"] = len(content), f"crc32c:{crc32c(content):08x}"
            for each in node.values():
                walk(each)
        elif isinstance(node, list):
            for each in node:
                walk(each)

    walk(data)
    del data["checksum"]
    path.write_bytes(seal(data))
    assert Entry.parse(path.read_bytes(), checkpoint.manifest.name)
    for name, content in names.items():
        Path(store.uri, name).write_bytes(content)


@pytest.mark.parametrize("size", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 200_000])
def test_a_file_of_any_size_comes_back_however_written(tmp_path: Path, size: int, rng: random.Random) -> None:
    """As a whole, and in pieces of every size, told to Arrow by their place in plain text."""
    content = rng.randbytes(size)
    with open_store(tmp_path) as store:
        writer = store.begin_snapshot(0)
        stored = write(writer, content)
        for most in (1000, BLOCK, 2 * BLOCK + 1):
            with writer.create("delta") as file:
                at = 0
                while at < size:
                    step = rng.randint(1, most)
                    file.write(content[at : at + step])
                    at = min(at + step, size)
                    assert file.tell() == at
                in_pieces = file.finish()
            assert in_pieces.size == expected_size(size)
            with writer.read_back(in_pieces) as source:
                assert source.read() == content
        checkpoint = store.commit(0, [StateSnapshot(0, store.epoch, files=(stored,))])
    assert stored.size == expected_size(size) == Path(tmp_path, stored.name).stat().st_size
    assert stored.checksum == crc32c(Path(tmp_path, stored.name).read_bytes())
    checkpoint.verify()
    assert checkpoint.read_file(stored) == content
    with checkpoint.open_file(stored) as file:
        assert isinstance(file, pa.NativeFile)
        assert file.size() == size
        assert file.read() == content


def test_any_part_can_be_read(tmp_path: Path, rng: random.Random) -> None:
    content = rng.randbytes(70 * BLOCK + 77)  # more than is read at once
    cipher = AesGcm()
    store, stored = one_file(tmp_path, content, cipher=cipher)
    with store.open_latest().open_file(stored) as file:
        assert file.read_at(66 * BLOCK, 2 * BLOCK - 1) == content[2 * BLOCK - 1 : 68 * BLOCK - 1]
        for _ in range(100):
            start = rng.choice([rng.randrange(len(content) + 10), BLOCK * rng.randrange(72)])
            length = rng.choice([0, 1, rng.randrange(100), BLOCK, rng.randrange(len(content))])
            expected = content[start : start + length]
            assert file.read_at(length, start) == expected
            file.seek(start)
            assert file.read_buffer(length).to_pybytes() == expected
            assert file.tell() == min(start + length, max(len(content), start))
        cipher.decrypted = 0
        file.seek(0)
        assert b"".join(iter(lambda: file.read(1000), b"")) == content
        assert cipher.decrypted == 71, "each block once"
        cipher.decrypted = 0
        file.read_at(10, 2 * BLOCK + 5)
        assert cipher.decrypted == 1, "and only the block that was asked for"
        file.seek(0)
        buffered = io.BufferedReader(file)
        assert buffered.read(3) == content[:3], "it is a file of Python too"
        file.seek(-2, io.SEEK_END)
        assert file.read() == content[-2:]


def test_a_paced_file_is_encrypted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from statebackend.checkpoint.store import data_files as module

    monkeypatch.setattr(module, "_STEP", 3 * BLOCK)
    content = b"plain" * 200_000
    with open_store(tmp_path) as store:
        writer = store.begin_snapshot()
        stored = write(writer, content)
        assert stored.size == expected_size(len(content))
        beside = write(writer.beside(), content)
        with writer.read_back(beside) as source:
            assert source.read() == content
    assert not any(b"plain" in each for each in data_files(tmp_path).values())


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_chain_with_merges_restores_at_any_parallelism(
    tmp_path: Path, backend: str, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chain, "FAN", 2)
    merged = 0
    with create(backend, str) as keyed, open_store(tmp_path, str) as store:
        story = Story(keyed, rng, str)
        story.change(1000)
        known: set[str] = set()
        for checkpoint_id in range(8):
            committed = store.commit(checkpoint_id, [keyed.snapshot(checkpoint_id, store).result()])
            files = list(committed.files)
            merged += any(name not in known for name in files[:-1]) and checkpoint_id > 0
            known.update(files)
            held = contents(keyed)
            story.change(rng.randrange(60))
            if keyed._log.rewriting is not None:
                keyed._log.rewriting.wait()
        assert merged >= 2
        assert len(held) > 100
    reader = sb.CheckpointStore(tmp_path, encryption=AesGcm())
    assert reader.latest(intact=True) == 7
    for other in BACKENDS:
        with create(other, str, restore=reader.open(7)) as again:
            assert contents(again) == held
    found: list[Any] = []
    for index in range(3):
        own = sb.key_groups.range_for(32, 3, index)
        with create(backend, str, key_group_range=own, restore=reader.open(7)) as part:
            found += contents(part)
    assert sorted(found, key=repr) == sorted(held, key=repr)


@pytest.mark.parametrize("is_encrypted", [True, False], ids=["encrypted", "plain"])
def test_nothing_is_stored_in_plain_text(tmp_path: Path, is_encrypted: bool) -> None:
    """Nor does a name of a column; without encryption this would find all of it."""
    words = ["Casablanca", "Yokohama", "Montevideo"]
    numbers = [0x1122334455667788, 0x0102030405060708]
    store = sb.CheckpointStore(tmp_path, compression=None, encryption=AesGcm() if is_encrypted else None)
    with store.open_for_writing(key_type=int, max_parallelism=32) as opened, create("heap") as keyed:
        keyed.get_state(sb.ValueStateDescriptor("city", str)).update_many([numbers[0]] * 1, words[:1])
        keyed.get_state(sb.ListStateDescriptor("cities", str)).add_many([numbers[0]], words[1:2])
        keyed.get_state(sb.MapStateDescriptor("by_name", str, int)).put_many([1], words[2:], numbers[1:])
        opened.commit(0, [keyed.snapshot(0, opened).result()])
    written = b"".join(data_files(tmp_path).values())
    looked_for = [word.encode() for word in words] + [struct.pack("<q", number) for number in numbers]
    looked_for += [b"ARROW1", b"map_key"]
    assert [each in written for each in looked_for] == [not is_encrypted] * len(looked_for)


def test_tools_work_on_the_object(tmp_path: Path) -> None:
    count = sb.ValueStateDescriptor("count", int)
    names, waiting = sb.MapStateDescriptor("names", str, int), sb.ListStateDescriptor("waiting", str)
    with open_store(tmp_path / "store") as store, create("heap") as keyed:
        keyed.get_state(count).update_many(range(100), range(100))
        keyed.get_state(sb.ValueStateDescriptor("more", str)).update_many([1], ["x"])
        keyed.get_state(sb.ValueStateDescriptor("names", dict[str, int])).update_many([7], [{"ann": 1}])
        operator = sb.OperatorStateBackend()
        operator.get_list_state(waiting).add_all(["v", "w"])
        store.commit(0, [each.snapshot(0, store).result() for each in (keyed, operator)])
        keyed.get_state(count).update_many([3], [33])
        output = write(store.begin_snapshot(1), b"of the batch" * 10_000, "output")
        snapshots = [each.snapshot(1, store).result() for each in (keyed, operator)]
        checkpoint = store.commit(1, snapshots, files=[output])
        again = sb.OperatorStateBackend(restore=checkpoint)
        assert again.get_list_state(waiting).get() == ["v", "w"]
        with pytest.raises(sb.UsageError, match=r"plain text.*\[USAGE\.ENCRYPTION\]"):
            keyed.savepoint(store)
        keyed.savepoint(tmp_path / "direct")
    store = sb.CheckpointStore(tmp_path / "store", encryption=AesGcm())
    report = sb.tools.verify(store)
    assert report.ok
    assert (report.newest_intact, report.left_over) == (1, [])
    table = sb.tools.state(store, "count").to_table().sort_by("key")
    assert table["value"].to_pylist() == [0, 1, 2, 33, *range(4, 100)]
    assert (
        sb.tools.state(store.open_readonly(), "count", id=0).to_table().sort_by("key")["value"][3].as_py()
        == 3
    )
    made = sb.tools.savepoint(store, tmp_path / "savepoint")
    for savepoint in (made, tmp_path / "direct"):
        assert sb.tools.state(savepoint, "count").to_table().num_rows == 100
        with create("reference", restore=savepoint) as again:
            assert again.get_state(count).get_many([3]).to_pylist() == [33]
    mapped = sb.tools.split_maps(made, "names", target=tmp_path / "mapped", descriptor=names)
    with create("reference", restore=mapped) as again:
        assert again.get_state(names).get_many([7], ["ann"]).to_pylist() == [1]
    assert "'count': kept" in repr(sb.tools.plan(store, [count]))

    copies = {"rescaled": 64, "dropped": 32}
    sb.tools.rescale(store, tmp_path / "rescaled", max_parallelism=64)
    sb.tools.drop_state(store, "more", target=tmp_path / "dropped")
    for name, groups in copies.items():
        assert not any(b"ARROW1" in each for each in data_files(tmp_path / name).values())
        copy = sb.CheckpointStore(tmp_path / name, encryption=AesGcm())
        assert copy.metadata().max_parallelism == groups
        assert sb.tools.verify(copy).ok
        assert sb.tools.state(copy, "count").to_table().num_rows == 100
        assert sb.tools.state(copy, "waiting").to_table()["value"].to_pylist() == ["v", "w"]
        (copied,) = copy.open_latest().manifest.files
        assert copy.open_latest().read_file(copied) == b"of the batch" * 10_000
    # With a store as its target a copy changes from the one to the other.
    plain = sb.CheckpointStore(tmp_path / "plain")
    sb.tools.rescale(store, plain, max_parallelism=32)
    assert sb.tools.state(tmp_path / "plain", "count").to_table().num_rows == 100
    sb.tools.rescale(
        plain, sb.CheckpointStore(tmp_path / "anew", encryption=AesGcm(OTHER_KEY)), max_parallelism=32
    )
    anew = sb.CheckpointStore(tmp_path / "anew", encryption=AesGcm(OTHER_KEY))
    assert sb.tools.state(anew, "count").to_table().num_rows == 100

    assert sb.tools.rewind(store, to=0, checkpoint_location=None).to == 0
    assert sb.tools.set_time(store, now=5000).now == 5000

    assert sb.tools.drop_state(store, "more").name == "more"
    with store.open_for_writing() as opened, create("heap", restore=store.open(0)) as keyed:
        assert keyed.undeclared_states() == ["count", "names"]
        opened.commit(1, [keyed.snapshot(1, opened).result()])
    assert sb.tools.verify(store).ok
    newest = store.open(1).manifest.name
    Path(store.uri, newest).write_bytes(b"damaged")
    assert sb.tools.repair(store) == sb.tools.Repaired(0, [newest])
    assert sb.tools.verify(store).ok
    with create("heap", restore=store.open_latest()) as keyed:
        assert keyed.undeclared_states() == ["count", "names"], "it stays dropped"
        assert keyed.get_state(count).get_many([3]).to_pylist() == [3]


def test_store_pickled_for_another_process_encrypts(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        writer = pickle.loads(pickle.dumps(store.data_writer(0)))
        stored = write(writer, b"elsewhere" * 20_000)
        writer.sync()
        checkpoint = store.commit(0, [StateSnapshot(0, store.epoch, files=(stored,))])
        assert checkpoint.read_file(stored) == b"elsewhere" * 20_000
        assert b"elsewhere" not in Path(store.uri, stored.name).read_bytes()
        for each in (store, store.open_readonly(), checkpoint):
            again = pickle.loads(pickle.dumps(each))
            assert again.encryption.key == KEY
        assert pickle.loads(pickle.dumps(checkpoint)).read_file(stored) == checkpoint.read_file(stored)


def test_a_flipped_bit_is_found_without_a_key_and_by_the_cipher(tmp_path: Path, rng: random.Random) -> None:
    store, stored = one_file(tmp_path, b"plain" * 30_000)
    path = Path(tmp_path, stored.name)
    whole = path.read_bytes()
    for _ in range(20):
        at = rng.randrange(8 * len(whole))
        flipped = bytearray(whole)
        flipped[at // 8] ^= 1 << at % 8
        path.write_bytes(flipped)
        assert not sb.tools.verify(store).ok
        assert store.latest(intact=True) is None
        checkpoint = store.open_latest()
        with pytest.raises(sb.CorruptCheckpointError, match="does not match its checksum"):
            checkpoint.read_file(stored)
        with (
            checkpoint.open_file(stored) as file,
            pytest.raises(sb.CorruptCheckpointError, match="cannot be decrypted") as caught,
        ):
            file.read()
        offset = at // 8 // (BLOCK + OVERHEAD) * BLOCK
        assert f"{stored.name}, offset {offset} of its plain text" in str(caught.value)
        assert "plain" not in str(caught.value).replace("plain text", "")


def test_blocks_cannot_change_their_places(tmp_path: Path) -> None:
    """Even by somebody who adjusts manifests: two blocks of a file, two files, or a file that is cut at a block."""
    with open_store(tmp_path) as store:
        writer = store.begin_snapshot(0)
        files = [write(writer, bytes([n]) * 3 * BLOCK) for n in (1, 2)]
        store.commit(0, [StateSnapshot(0, store.epoch, files=tuple(files))])
    before = data_files(tmp_path)
    first, second = (before[each.name] for each in files)
    step = BLOCK + OVERHEAD
    cases: list[tuple[dict[str, bytes], int]] = [
        ({files[0].name: first[step : 2 * step] + first[:step] + first[2 * step :]}, 0),
        ({files[0].name: first[:step] + second[step : 2 * step] + first[2 * step :]}, BLOCK),
        ({files[0].name: second, files[1].name: first}, 0),
    ]
    for changed, offset in cases:
        adjust(store, {**before, **changed})
        checkpoint = store.open_latest()
        checkpoint.verify()
        (file, *_) = checkpoint.snapshots[0].files
        with pytest.raises(sb.CorruptCheckpointError, match=f"offset {offset} of its plain text"):
            checkpoint.read_file(file)
    adjust(store, {**before, files[0].name: first[: step + 20]})
    with pytest.raises(sb.CorruptCheckpointError, match="does not end with a block"):
        store.open_latest().open_file(store.open_latest().snapshots[0].files[0])


def test_state_that_is_cut_at_a_block_is_found(tmp_path: Path) -> None:
    """A whole number of blocks decrypts; what a data file ends with tells that more was there."""
    with open_store(tmp_path, compression=None) as store, create("heap") as keyed:
        keyed.get_state(sb.ValueStateDescriptor("n", int)).update_many(range(50_000), range(50_000))
        store.commit(0, [keyed.snapshot(0, store).result()])
    ((name, content),) = data_files(tmp_path).items()
    assert len(content) > 4 * BLOCK
    adjust(store, {name: content[: 2 * (BLOCK + OVERHEAD)]})
    with pytest.raises(sb.CorruptCheckpointError, match="cut short or damaged at its end"):
        create("heap", restore=store.open_latest())


def test_another_key_is_refused_and_named_as_a_possible_cause(tmp_path: Path) -> None:
    with open_store(tmp_path) as store, create("heap") as keyed:
        keyed.get_state(sb.ValueStateDescriptor("n", int)).update_many([1], [1])
        store.commit(0, [keyed.snapshot(0, store).result()])
    other = sb.CheckpointStore(tmp_path, encryption=AesGcm(OTHER_KEY))
    calls: list[Callable[[], object]] = [
        lambda: create("heap", restore=other.open_latest()),
        lambda: create("reference", restore=other.open_latest()),
        lambda: sb.tools.state(other, "n").to_table(),
        lambda: sb.tools.savepoint(other, tmp_path / "savepoint"),
        lambda: sb.tools.rescale(other, tmp_path / "rescaled", max_parallelism=64),
    ]
    for call in calls:
        with pytest.raises(sb.CorruptCheckpointError, match=r"another key.*CORRUPT_CHECKPOINT") as caught:
            call()
        assert "InvalidTag" in caught.value.detail
    (problem,) = sb.tools.verify(other).problems
    assert "cannot be decrypted" in problem.message
    assert other.latest(intact=True) == 0, "the files are as they were written"
    assert not list((tmp_path / "savepoint").glob("**/*.parquet"))


def test_output_is_read_by_its_own_checks(tmp_path: Path) -> None:
    """Arrow calls the cipher while it reads Parquet, and hands its errors on as they are."""
    table = pa.table({"user": ["ann"] * 200_000, "total": range(200_000)})
    with open_store(tmp_path) as store:
        stored = write_output(store.begin_snapshot(0), table)
        checkpoint = store.commit(0, files=[stored])
    committed = CommittedBatch(checkpoint, {}, False, "")
    committed.verify_output()
    assert committed.read_output(stored).equals(table)
    assert sb.tools.verify(store).ok
    other = sb.CheckpointStore(tmp_path, encryption=AesGcm(OTHER_KEY)).open_latest()
    with pytest.raises(sb.CorruptCheckpointError, match="another key"):
        committed._replace(checkpoint=other).read_output(stored)
    path = tmp_path / stored.name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(sb.CorruptCheckpointError, match="cannot be decrypted"):
        committed.read_output(stored)


def test_a_store_stays_what_it_was_made_as(tmp_path: Path) -> None:
    one_file(tmp_path / "encrypted", b"x")
    with sb.CheckpointStore(tmp_path / "plain").open_for_writing() as plain:
        commit(plain, 0)
    assert sb.CheckpointStore(tmp_path / "encrypted").metadata().encryption == {
        "block": BLOCK,
        "overhead": OVERHEAD,
    }
    assert unseal((tmp_path / "plain/metadata.json").read_bytes(), "metadata.json")["encryption"] is None
    cases = [
        (sb.CheckpointStore(tmp_path / "encrypted"), "is encrypted.*encryption=cipher"),
        (
            sb.CheckpointStore(tmp_path / "plain", encryption=AesGcm()),
            "without encryption.*cannot be encrypted in place",
        ),
    ]
    for store, message in cases:
        writers = Path(store.uri, "checkpoints")
        epochs = sorted(writers.iterdir())
        calls: list[Callable[[sb.CheckpointStore], object]] = [
            lambda store: store.open_for_writing(),
            lambda store: store.open_latest(),
            lambda store: store.open(0),
            lambda store: store.latest(intact=True),
            lambda store: store.open_readonly().open_latest(),
            lambda store: store.pin(),
            lambda store: sb.tools.verify(store),
            lambda store: sb.tools.state(store, "n").to_table(),
            lambda store: sb.tools.rewind(store, to=None, checkpoint_location=None),
        ]
        for call in calls:
            with pytest.raises(sb.UsageError, match=message) as caught:
                call(store)
            assert caught.value.code == "USAGE.ENCRYPTION"
        assert sorted(writers.iterdir()) == epochs, "and nobody was disturbed"
        assert store.checkpoints() == [0]


def test_a_cipher_with_another_overhead_is_refused(tmp_path: Path) -> None:
    one_file(tmp_path, b"x")
    with pytest.raises(sb.UsageError, match="28 bytes longer as stored there, 0 here") as caught:
        open_store(tmp_path, cipher=Shifting())
    assert caught.value.code == "USAGE.ENCRYPTION"
    checkpoint = sb.CheckpointStore(tmp_path, encryption=Shifting()).open_latest()
    (file,) = checkpoint.files.values()
    with pytest.raises(sb.CorruptCheckpointError, match="of another length"):
        checkpoint.read_file(file)


def test_an_overhead_that_changes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(sb.UsageError, match="by another number of bytes than others.*AES-GCM"):
        open_store(tmp_path / "padding", cipher=Padding())
    assert not (tmp_path / "padding").exists()
    with open_store(tmp_path / "growing", cipher=Growing()) as store:
        with pytest.raises(sb.UsageError, match=rf"offset {BLOCK}\b.*USAGE.ENCRYPTION"):
            write(store.begin_snapshot(0), bytes(BLOCK + 1))
        assert data_files(tmp_path / "growing") == {}, "the file is given up"
        stored = write(store.begin_snapshot(0), bytes(BLOCK))
        assert stored.size == BLOCK + OVERHEAD


def test_objects_that_are_not_ciphers_are_refused(tmp_path: Path) -> None:
    class Texts(AesGcm):
        def encrypt(self, name: str, offset: int, block: bytes) -> Any:
            return "text"

    for cipher in (KEY, "aes", object()):
        with pytest.raises(sb.UsageError, match="methods encrypt") as caught:
            sb.CheckpointStore(tmp_path, encryption=cipher)
        assert str(KEY) not in str(caught.value)
    with pytest.raises(sb.UsageError, match="encrypts a block to a str"):
        open_store(tmp_path, cipher=Texts())


def test_a_cipher_without_overhead_works(tmp_path: Path) -> None:
    store, stored = one_file(tmp_path, b"plain" * 30_000, cipher=Shifting())
    assert stored.size == 150_000
    assert store.open_latest().read_file(stored) == b"plain" * 30_000


def test_a_cipher_that_decrypts_to_something_else_is_found(tmp_path: Path) -> None:
    store, stored = one_file(tmp_path, b"x" * 100, cipher=Shortening())
    with pytest.raises(sb.CorruptCheckpointError, match="of another length"):
        store.open_latest().read_file(stored)


def test_no_text_shows_the_cipher(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cipher = Leaking()
    store, stored = one_file(tmp_path, b"content", cipher=cipher)
    checkpoint = store.open_latest()
    shown = [repr(each) for each in (store, checkpoint, store.open_readonly(), checkpoint._encryption)]
    with pytest.raises(sb.CorruptCheckpointError) as caught:
        checkpoint.read_file(stored)
    shown += [str(caught.value), repr(caught.value), caplog.text]
    assert "KeyError" in caught.value.detail
    assert not any("secret" in each or KEY.hex() in each or "content" in each for each in shown)


def test_an_encryption_that_fails_leaves_no_file(tmp_path: Path) -> None:
    """A service that manages keys may be away: the snapshot fails, the store goes on."""

    class Away(AesGcm):
        is_away = False

        def encrypt(self, name: str, offset: int, block: bytes) -> bytes:
            if Away.is_away:
                raise ConnectionError("no answer")
            return super().encrypt(name, offset, block)

    with open_store(tmp_path, cipher=Away()) as store, create("heap") as keyed:
        count = keyed.get_state(sb.ValueStateDescriptor("n", int))
        count.update_many([1], [1])
        Away.is_away = True
        with pytest.raises(sb.StoreError, match="no answer"):
            keyed.snapshot(0, store).result()
        store.abort(0)
        assert data_files(tmp_path) == {}
        Away.is_away = False
        store.commit(0, [keyed.snapshot(0, store).result()])
    with create("heap", restore=store.open_latest()) as again:
        assert again.get_state(sb.ValueStateDescriptor("n", int)).get_many([1]).to_pylist() == [1]


def test_a_query_begins_with_an_encrypted_store(tmp_path: Path) -> None:
    from statebackend.runtime.start_checks import source_of

    one_file(tmp_path, b"x")
    store = sb.CheckpointStore(tmp_path, encryption=AesGcm())
    found = source_of(store)
    assert isinstance(found, sb.Checkpoint)
    assert found.id == 0
    assert source_of(store.open(0)).id == 0  # type: ignore[union-attr]
    with pytest.raises(sb.UsageError, match="no cipher was given"):
        source_of(tmp_path)


def test_damaged_sizes_of_blocks_are_damage(tmp_path: Path) -> None:
    store, _ = one_file(tmp_path, b"x")
    path = tmp_path / "metadata.json"
    data = unseal(path.read_bytes(), "metadata.json")
    for sizes in ({}, {"block": 0, "overhead": 1}, {"block": "a", "overhead": 1}, [1], {"block": 1}):
        path.write_bytes(seal({**data, "encryption": sizes}))
        with pytest.raises(sb.CorruptCheckpointError, match="metadata"):
            store.open_latest()
    path.write_bytes(seal({**data, "encryption": {"block": 10**17, "overhead": 28}}))
    checkpoint = store.open_latest()
    (file,) = checkpoint.files.values()
    with pytest.raises(sb.CorruptCheckpointError):  # and no room is taken for such a block
        checkpoint.read_file(StoredFile(file.name, file.kind, file.size, file.checksum ^ 1))
    assert checkpoint.read_file(file) == b"x"


def test_verify_goes_on_without_metadata(tmp_path: Path) -> None:
    with open_store(tmp_path) as store, create("heap") as keyed:
        keyed.get_state(sb.ValueStateDescriptor("n", int)).update_many([1], [1])
        store.commit(0, [keyed.snapshot(0, store).result()])
    (tmp_path / "metadata.json").unlink()
    report = sb.tools.verify(sb.CheckpointStore(tmp_path, encryption=AesGcm()))
    assert [problem.file for problem in report.problems] == ["metadata.json"]
