"""The files of a store in an object store: the same behaviour in a simulated one and in S3, Azure and GCS on loopback.

The last tests are of objects that are read by ranges: the content of the whole, at few requests.
"""

from __future__ import annotations

import errno
import io
import pickle
import random
import sys
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pyarrow as pa
import pytest
from object_servers import Place, object_server
from simulated_disk import Dead
from simulated_objects import Bucket, SimulatedObjectCalls

from statebackend.checkpoint.files.object_calls import PART_SIZE
from statebackend.checkpoint.files.object_store import ObjectFiles, RangedFile
from statebackend.checkpoint.files.store_files import FileSink, NameConflictError
from statebackend.errors import UsageError

__all__ = ["object_server"]


ENTRY = "checkpoints/1.json"


def write(files: ObjectFiles, name: str, content: bytes) -> None:
    sink = files.create(name)
    sink.write(content)
    sink.finish()


def write_parts(sink: FileSink) -> None:
    for _ in range(2):
        sink.write(bytes(15))
    sink.finish()


@pytest.mark.parametrize("service", ["simulated", "S3", "Azure", "GCS"])
class TestEveryService:
    @pytest.fixture
    def place(
        self, service: str, object_server: Callable[[str], Place], request: pytest.FixtureRequest
    ) -> Place:
        uri, options = ("s3://bucket", {}) if service == "simulated" else object_server(service)
        return f"{uri}/{request.node.originalname}/a%20store", options

    @pytest.fixture
    def files(self, service: str, place: Place) -> ObjectFiles:
        uri, options = place
        calls = SimulatedObjectCalls(Bucket()) if service == "simulated" else None
        return ObjectFiles(uri, calls, options=options)

    def test_an_entry_is_published_once(self, files: ObjectFiles) -> None:
        files.publish(ENTRY, b"mine", 1)
        assert files.read(ENTRY) == b"mine"
        with pytest.raises(NameConflictError):
            files.publish(ENTRY, b"of another", 1)
        assert files.read(ENTRY) == b"mine"
        files.publish(ENTRY, b"mine", 1)  # the same request, come again

    @pytest.fixture
    def hurry(self) -> Iterator[None]:
        """Threads, also those of the servers in this process, take turns more often."""
        before = sys.getswitchinterval()
        sys.setswitchinterval(1e-5)
        yield
        sys.setswitchinterval(before)

    @pytest.mark.usefixtures("hurry")
    def test_one_of_two_that_race_has_won(self, files: ObjectFiles) -> None:
        rounds = 50
        start = threading.Barrier(2, timeout=60)
        won: list[list[int]] = [[], []]

        def run(which: int) -> None:
            own = pickle.loads(pickle.dumps(files))
            for sequence in range(1, rounds + 1):
                start.wait()
                try:
                    own.publish(f"checkpoints/{sequence}.json", b"writer %d" % which, sequence)
                except NameConflictError:
                    continue
                won[which].append(sequence)

        threads = [threading.Thread(target=run, args=(which,)) for which in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(won[0] + won[1]) == list(range(1, rounds + 1))
        for which in range(2):
            for sequence in won[which]:
                assert files.read(f"checkpoints/{sequence}.json") == b"writer %d" % which

    def test_a_new_writer_takes_the_number_after_the_newest_entry(self, files: ObjectFiles) -> None:
        assert files.take_epoch(refuse_live=False) == 1
        assert files.holds(1, 1)
        for sequence in range(1, 12):
            files.publish(f"checkpoints/{sequence}.json", b"entry %d" % sequence, 1)
        assert files.take_epoch(refuse_live=False) == 12
        assert files.holds(1, 12)
        assert not files.holds(1, 11)
        assert files.names("probes") == []

    def test_a_file_of_many_parts_comes_back(self, files: ObjectFiles, np_rng: np.random.Generator) -> None:
        content = np_rng.bytes(20_000_003)
        sink = files.create("data/1/large.arrow")
        for start in range(0, len(content), 1_234_567):
            sink.write(content[start : start + 1_234_567])
            sink.sync_written()
        assert files.size("data/1/large.arrow") is None  # nothing shows before the end
        sink.finish()
        assert files.size("data/1/large.arrow") == len(content)
        assert files.read("data/1/large.arrow") == content
        for size in (None, len(content)):
            with files.open_input("data/1/large.arrow", size) as source:
                assert source.size() == len(content)
                for _ in range(30):
                    at, wanted = np_rng.integers(len(content)), np_rng.integers(3_000_000)
                    source.seek(at)
                    assert source.read(wanted) == content[at : at + wanted]
                source.seek(0)
                assert source.read() == content
                assert source.read(10) == b""
        with files.open_input("data/1/large.arrow", len(content) + 10) as source:
            source.seek(len(content) - 5)
            assert source.read(20) == content[-5:]  # shorter than it should be
            source.seek(len(content) + 2)
            assert source.read(5) == b""

    def test_small_and_empty_files(self, files: ObjectFiles) -> None:
        for name, content in (("data/1/small", b"abc"), ("data/1/empty", b"")):
            write(files, name, content)
            assert files.read(name) == content
            assert files.size(name) == len(content)
            with files.open_input(name) as source:
                assert source.read() == content

    def test_an_abandoned_file_never_appears(self, files: ObjectFiles) -> None:
        for size in (10, PART_SIZE + 10):
            sink = files.create("data/1/a")
            sink.write(bytes(size))
            sink.abandon()
            sink.abandon()
            del sink
            assert files.size("data/1/a") is None
        sink = files.create("data/1/a")
        sink.write(b"abc")
        sink.finish()
        sink.abandon()
        assert files.size("data/1/a") is None
        assert files.names("data") == []

    def test_names_are_those_directly_in_a_folder(self, files: ObjectFiles) -> None:
        for name in ("checkpoints/2.json", "checkpoints/10.json", "checkpoints/epoch-1/owner.json", "check"):
            files.publish(name, b"{}", 1)
        assert files.names("checkpoints") == ["10.json", "2.json", "epoch-1"]
        assert files.names("") == ["check", "checkpoints"]
        assert files.names("check") == []
        assert files.names("nowhere") == []
        inner = files.below("checkpoints")
        assert inner.names("") == ["10.json", "2.json", "epoch-1"]
        assert inner.read("epoch-1/owner.json") == b"{}"
        assert pickle.loads(pickle.dumps(inner)).names("epoch-1") == ["owner.json"]
        assert inner.address("2.json") == files.address("checkpoints/2.json")

    def test_special_characters_in_names(self, files: ObjectFiles) -> None:
        names = [f"savepoints/0/keyed/{base}" for base in ("a=b c.parquet", "ü%20+~.parquet", "x@y,z#1")]
        for name in names:
            write(files, name, name.encode())
        assert files.names("savepoints/0/keyed") == sorted(name.split("/")[-1] for name in names)
        for name in names:
            assert files.read(name) == name.encode()
            files.remove(name)
        assert files.names("savepoints") == []

    def test_missing_objects_are_told(self, files: ObjectFiles) -> None:
        files.remove("data/1/gone")
        files.retire(["data/1/gone", ENTRY], 1)
        assert files.size("metadata.json") is None
        assert files.modified("metadata.json") == 0
        with pytest.raises(FileNotFoundError, match="no such object"):
            files.read("metadata.json")
        with pytest.raises(FileNotFoundError, match="no such object"):
            files.open_input("metadata.json")
        with files.open_input("metadata.json", 3) as source, pytest.raises(FileNotFoundError):
            source.read()

    def test_when_a_file_was_written(self, files: ObjectFiles) -> None:
        files.publish("a", b"", 1)
        files.publish("b", b"", 1)
        assert 1_600_000_000 < files.modified("a") <= files.modified("b")

    def test_files_without_a_checkpoint_are_removed(self, files: ObjectFiles) -> None:
        names = [
            "data/1/kept",
            "data/1/left",
            "data/3/left",
            "data/4/new",
            "data/notes/left",
            "data/1/no;file",
        ]
        for name in names:
            write(files, name, b"x")
        assert files.remove_leftovers(lambda name: name.endswith("kept"), 4) == 2
        assert [name for name in names if files.size(name) is None] == ["data/1/left", "data/3/left"]

    def test_no_secret_shows(self, files: ObjectFiles, place: Place, service: str) -> None:
        secrets = ["hunter2"] + [value for name, value in place[1].items() if "key" in name]
        if service == "Azure":  # the only one that looks at signatures
            wrong = place[1] | {"account_key": "aHVudGVyMg=="}
            secrets.append(wrong["account_key"])
        else:
            wrong = place[1]
            place = (place[0].replace("bucket", "nowhere", 1), wrong)
        shown = [repr(files), files.uri, files.address("a"), repr(files._calls)]
        if service != "simulated":
            refused = ObjectFiles(place[0], options=wrong)
            for request in (
                lambda: refused.names("checkpoints"),
                lambda: refused.publish("a", b"", 1),
                lambda: refused.take_epoch(refuse_live=False),
                lambda: write(refused, "data/1/a", bytes(PART_SIZE + 1)),
            ):
                with pytest.raises(OSError, match="the object store failed") as caught:
                    request()
                shown += [str(caught.value), repr(caught.value)]
                assert caught.value.__cause__ is None
                assert caught.value.__suppress_context__
        assert not [text for text in shown for secret in secrets if secret in text]


def in_bucket(bucket: Bucket, *plan: tuple[str, object], **options: object) -> ObjectFiles:
    """One client's files; for each pair, the next request of that name gets this answer."""
    waiting = list(plan)

    def answer(number: int, name: str) -> object:
        if waiting and waiting[0][0] == name:
            return waiting.pop(0)[1]
        return None

    single_writer = bool(options.pop("single_writer", False))
    calls = SimulatedObjectCalls(bucket, answer, **options)  # type: ignore[arg-type]
    return ObjectFiles("s3://bucket/store", calls, single_writer=single_writer)


def made(files: ObjectFiles) -> list[str]:
    """The requests since the last time."""
    assert isinstance(files._calls, SimulatedObjectCalls)
    found, files._calls.made = files._calls.made, []
    return found


@pytest.fixture
def bucket() -> Bucket:
    return Bucket()


class TestPublishing:
    def test_another_was_first(self, bucket: Bucket) -> None:
        in_bucket(bucket).publish(ENTRY, b"other", 1)
        files = in_bucket(bucket)
        with pytest.raises(NameConflictError):
            files.publish(ENTRY, b"mine", 1)
        assert made(files) == ["create", "get"]
        assert files.read(ENTRY) == b"other"

    def test_it_is_done_but_the_answer_is_lost(self, bucket: Bucket) -> None:
        files = in_bucket(bucket, ("create", "lie"))
        files.publish(ENTRY, b"mine", 1)
        assert made(files) == ["create", "get"]
        assert files.read(ENTRY) == b"mine"

    def test_a_repetition_on_the_way_is_refused(self, bucket: Bucket) -> None:
        """The first answer was lost below us: what we hear is the refusal of the second request."""
        files = in_bucket(bucket, ("create", errno.EEXIST))
        bucket.write("store/" + ENTRY, b"mine")
        files.publish(ENTRY, b"mine", 1)

    def test_a_refusal_with_nothing_there_is_unknown(self, bucket: Bucket) -> None:
        files = in_bucket(bucket, ("create", errno.EEXIST))
        with pytest.raises(OSError, match="refuses to create") as caught:
            files.publish(ENTRY, b"mine", 1)
        assert not isinstance(caught.value, FileExistsError)
        assert caught.value.unknown

    def test_a_time_out_with_nothing_there_is_unknown(self, bucket: Bucket) -> None:
        files = in_bucket(bucket, ("create", "fail"))
        with pytest.raises(OSError, match="unavailable") as caught:
            files.publish(ENTRY, b"mine", 1)
        assert caught.value.unknown
        assert files.size(ENTRY) is None

    def test_an_error_and_another_there_is_a_loss(self, bucket: Bucket) -> None:
        in_bucket(bucket).publish(ENTRY, b"other", 1)
        with pytest.raises(NameConflictError):
            in_bucket(bucket, ("create", "fail")).publish(ENTRY, b"mine", 1)

    def test_outcome_is_unknown_if_the_object_cannot_be_read_back(self, bucket: Bucket) -> None:
        for first in ("lie", "fail"):
            files = in_bucket(bucket, ("create", first), ("get", "fail"))
            with pytest.raises(OSError, match="lost|unavailable") as caught:
                files.publish(ENTRY, b"mine", 1)
            assert caught.value.unknown
            assert "get" in made(files)
            bucket.objects.clear()

    def test_it_arrives_late_before_the_next_writer_creates(self, bucket: Bucket) -> None:
        files = in_bucket(bucket, ("create", "late"))
        with pytest.raises(OSError, match="timed out") as caught:
            files.publish(ENTRY, b"mine", 1)
        assert caught.value.unknown
        second = in_bucket(bucket)
        # Trying out the service is a request: by the time of looking for entries, the late one is there.
        assert second.take_epoch(refuse_live=False) == 2
        assert second.read(ENTRY) == b"mine"
        second.publish("checkpoints/2.json", b"second", 2)

    def test_it_arrives_late_between_looking_and_creating(self, bucket: Bucket) -> None:
        second = in_bucket(bucket)
        assert second.take_epoch(refuse_live=False) == 1
        with pytest.raises(OSError, match="timed out"):
            in_bucket(bucket, ("create", "late")).publish(ENTRY, b"mine", 1)
        bucket.arrive()
        with pytest.raises(NameConflictError):
            second.publish(ENTRY, b"second", 1)

    def test_it_arrives_too_late(self, bucket: Bucket) -> None:
        with pytest.raises(OSError, match="timed out"):
            in_bucket(bucket, ("create", "late")).publish(ENTRY, b"mine", 1)
        second = in_bucket(bucket)
        second.publish(ENTRY, b"second", 1)  # its create is carried out first
        assert bucket.late == []
        assert second.read(ENTRY) == b"second"

    def test_a_killed_writer_has_published_nothing(self, bucket: Bucket) -> None:
        files = in_bucket(bucket, ("create", "die"))
        with pytest.raises(Dead):
            files.publish(ENTRY, b"mine", 1)
        assert bucket.objects == {}
        with pytest.raises(Dead):
            files.read(ENTRY)


class TestWithoutConditions:
    """A service that ignores the condition of a create, or does not know it."""

    def test_one_that_ignores_it_is_refused(self, bucket: Bucket) -> None:
        files = in_bucket(bucket, conditional=False)
        with pytest.raises(UsageError, match="cannot keep a second writer out.*single_writer=True") as caught:
            files.take_epoch(refuse_live=False)
        assert caught.value.code == "USAGE.SINGLE_WRITER"
        assert bucket.objects == {}
        assert made(files) == ["create", "create", "delete"]

    def test_one_that_does_not_know_it_is_refused(self, bucket: Bucket) -> None:
        files = in_bucket(bucket, ("create", errno.ENOTSUP), ("create", errno.ENOTSUP))
        with pytest.raises(UsageError, match="cannot keep a second writer out"):
            files.take_epoch(refuse_live=False)
        with pytest.raises(UsageError, match=r"lacks conditional writes.*\[USAGE\.SINGLE_WRITER\]"):
            files.publish(ENTRY, b"mine", 1)
        assert bucket.objects == {}

    @pytest.mark.parametrize("answer", [None, errno.ENOTSUP])
    def test_a_single_writer_may_use_it(self, bucket: Bucket, answer: object) -> None:
        files = in_bucket(bucket, ("create", answer), conditional=False, single_writer=True)
        assert files.take_epoch(refuse_live=False) == 1
        assert made(files) == ["list"]
        files.publish(ENTRY, b"mine", 1)
        assert made(files) == ["head", "create"] + ["put"] * (answer is not None)
        with pytest.raises(NameConflictError):
            files.publish(ENTRY, b"again", 1)
        assert files.read(ENTRY) == b"mine"

    def test_an_error_while_trying_out_leaves_nothing(self, bucket: Bucket) -> None:
        for answer in ("fail", "lie"):
            files = in_bucket(bucket, ("create", answer))
            with pytest.raises(OSError, match="unavailable|lost"):
                files.take_epoch(refuse_live=False)
            assert bucket.objects == {}
            assert files.take_epoch(refuse_live=False) == 1

    def test_request_repeated_on_the_way_is_not_a_conflict(self, bucket: Bucket) -> None:
        files = in_bucket(bucket, ("create", errno.EEXIST))
        assert files.take_epoch(refuse_live=False) == 1


class TestNumbers:
    def test_the_service_is_tried_out_once(self, bucket: Bucket) -> None:
        files = in_bucket(bucket)
        files.take_epoch(refuse_live=False)
        assert made(files) == ["create", "create", "delete", "list"]
        files.take_epoch(refuse_live=True)
        assert made(files) == ["list"]

    def test_requests(self, bucket: Bucket) -> None:
        files = in_bucket(bucket, part_size=100)
        for call, requests in (
            (lambda: files.holds(1, 2), ["head"]),
            (lambda: files.publish("metadata.json", b"abc", 1), ["create"]),
            (lambda: files.read("metadata.json"), ["get"]),
            (lambda: files.size("metadata.json"), ["head"]),
            (lambda: files.modified("metadata.json"), ["head"]),
            (lambda: files.names("data"), ["list"]),
            (lambda: write(files, "data/1/a", bytes(100)), ["put"]),
            (lambda: write(files, "data/2/a", bytes(201)), ["part", "part", "complete"]),
            (lambda: files.remove_leftovers(lambda name: False, 2), ["list_all", "delete"]),
            (lambda: files.retire(["data/2/a", "b"], 2), ["delete", "delete"]),
            (lambda: files.open_input("metadata.json", 3), []),
            (lambda: files.open_input("metadata.json").read(), ["head", "range"]),
            (lambda: files.release(1), []),
        ):
            call()
            assert made(files) == requests

    def test_an_upload_that_fails_leaves_nothing(self, bucket: Bucket) -> None:
        for plan in (
            [("part", "fail")],
            [("complete", "fail")],
            [("complete", "lie")],
            [("complete", "late")],
        ):
            files = in_bucket(bucket, *plan, part_size=10)  # type: ignore[arg-type]
            sink = files.create("data/1/a")
            with pytest.raises(OSError, match="unavailable|lost|timed out"):
                write_parts(sink)
            sink.abandon()
            assert bucket.objects == {}
        bucket.arrive()  # an upload that was completed late is a file that no entry names
        assert in_bucket(bucket).remove_leftovers(lambda name: False, 2) == 1


def test_random_reads_equal_the_content(rng: random.Random) -> None:
    content = rng.randbytes(5_000_000)
    file = RangedFile(lambda start, end: content[start:end], len(content))
    for _ in range(300):
        if rng.random() < 0.6:
            file.seek(rng.randrange(len(content) + 10))
        at, wanted = file.tell(), rng.choice([0, 1, 10, 70_000, 2_000_000, -1])
        expected = content[at:] if wanted < 0 else content[at : at + wanted]
        assert bytes(file.read(wanted)) == expected
        assert file.tell() == max(at, min(at + len(expected), len(content)))
    target = bytearray(10)
    file.seek(-4, io.SEEK_END)
    assert file.readinto(target) == 4
    assert file.readall() == b""
    with pytest.raises(ValueError, match="before the start"):
        file.seek(-1)


def test_a_file_that_arrow_reads_in_order_takes_few_requests() -> None:
    table = pa.table({"value": np.arange(1_000_000)})
    stream = io.BytesIO()
    with pa.ipc.new_file(stream, table.schema) as out:
        out.write_table(table, 10_000)  # 100 batches, 8 MB
    content, asked = stream.getvalue(), []

    def fetch(start: int, end: int) -> bytes:
        assert 0 <= start < end <= len(content)
        asked.append((start, end))
        return content[start:end]

    with pa.PythonFile(RangedFile(fetch, len(content)), mode="r") as source:
        reader = pa.ipc.open_file(source)
        batches = [reader.get_batch(index) for index in range(reader.num_record_batches)]
    assert pa.Table.from_batches(batches) == table
    assert len(asked) <= 5
    assert sum(end - start for start, end in asked) <= len(content) + (1 << 20)
    assert all(end - start >= 1 << 20 or end == len(content) for start, end in asked)
