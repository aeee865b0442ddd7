"""Addresses and options of stores: what is refused, what reaches the service of an object store; no secret is shown."""

from __future__ import annotations

import logging
import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

import pytest
from object_servers import Place, object_server

import statebackend as sb
from statebackend.checkpoint.files import open_files, without_secrets
from statebackend.checkpoint.files.addresses import parse_object_address
from statebackend.checkpoint.files.object_calls import ObjectCalls
from statebackend.checkpoint.files.object_store import ObjectFiles
from statebackend.checkpoint.files.store_files import NameConflictError
from statebackend.errors import StateBackendError, UsageError


@pytest.mark.parametrize(
    "address",
    ["dbfs:/x", "dbfs://x/y", "hdfs:///x", "abfss:x", "s3:/bucket/x", "S3a://b/x", "gs:x", "az://b/x", "a:b"],
)
def test_a_scheme_is_never_a_folder(address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for given in (address, Path(address)):
        with pytest.raises(sb.UsageError, match=r"\[USAGE\.ADDRESS\]"):
            sb.CheckpointStore(given, single_writer=True).open_for_writing()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "address", ["file:/data/x", "file:///data/x", "file://localhost/data/x", "FILE:///data/x"]
)
def test_a_file_address_is_a_path(address: str) -> None:
    store = sb.CheckpointStore(address)
    assert store.uri == "/data/x"
    assert store.address == store.unopened().address == address


def test_a_file_address_without_a_path_is_refused() -> None:
    for address in ("file://host/x", "file:", "file:x", "file://"):
        with pytest.raises(sb.UsageError, match=r"file:///path"):
            sb.CheckpointStore(address)


def test_a_path_may_have_colons(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for given in (tmp_path / "a:b", "./c:d"):
        with sb.CheckpointStore(given).open_for_writing():
            pass
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a:b", "c:d"]


SECRET = "wJalrXUtnFEMI"


@pytest.mark.parametrize(
    "address",
    [
        f"s3://KEY:{SECRET}@bucket/state",
        f"s3://KEY:{SECRET}/x@bucket/state?region=eu",
        f"s3://bucket/state?access_key=KEY&secret_key={SECRET}",
        f"s3://KEY:{SECRET}?x@bucket/state",
        f"s3://KEY:{SECRET}%2Fx@bucket/state?scheme=http&endpoint_override=localhost:1",
    ],
)
def test_secrets_never_show(address: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    store = sb.CheckpointStore(address, single_writer=True)
    start = sb.spark.StartFrom(address.replace("/state", "/old"))
    count = sb.map_with_state(lambda row, n: (None, (n or 0) + 1), int)
    job = sb.spark.stateful(count, key="user", schema=None, state=store, start=start)
    shown = [
        repr(store),
        store.uri,
        repr(job),
        repr(start),
        repr(store.open_readonly()),
        without_secrets(address),
    ]
    with pytest.raises(sb.StateBackendError) as caught:
        sb.CheckpointStore(address.replace("s3:", "s4:"))
    shown += [str(caught.value), repr(caught.value), caplog.text]
    assert not [text for text in shown if SECRET in text or "KEY" in text]


__all__ = ["object_server"]


@pytest.mark.parametrize(
    ("address", "bucket", "root", "options"),
    [
        ("s3://b", "s3://b", "", {}),
        ("s3://b/", "s3://b", "", {}),
        ("S3://b//app/state/", "s3://b", "app/state", {}),
        ("s3://b/a%20b/100%25#1", "s3://b", "a b/100%#1", {}),
        ("s3://b/x?region=eu-west-1", "s3://b", "x", {"region": "eu-west-1"}),
        (
            "s3://k:s%2Fs@b/x?scheme=http&endpoint_override=127.0.0.1%3A99&region=r",
            "s3://b",
            "x",
            {
                "access_key_id": "k",
                "secret_access_key": "s/s",
                "region": "r",
                "endpoint": "http://127.0.0.1:99",
                "allow_http": "true",
            },
        ),
        ("s3://b?endpoint_override=host", "s3://b", "", {"endpoint": "https://host"}),
        ("gs://b-1.x/y", "gs://b-1.x", "y", {}),
        ("abfss://c@account.dfs.core.windows.net/app", "abfss://c@account.dfs.core.windows.net", "app", {}),
    ],
)
def test_parts(address: str, bucket: str, root: str, options: dict[str, str]) -> None:
    assert parse_object_address(address) == (bucket, root, options)


@pytest.mark.parametrize(
    "address",
    [
        "s3://",
        "s3:///x",
        "s3://key@bucket",
        "s3://KEY:hunter2/x@bucket/state",
        "s3://KEY:hunter2?x@bucket",
        "s3://[x/y",
        "gs://KEY:hunter2@bucket",
        "gs://KEY@bucket",
        "abfss://KEY:hunter2@account.dfs.core.windows.net",
    ],
)
def test_unusable_address_is_refused_on_use_and_shows_no_secret(address: str) -> None:
    files = open_files(address)
    with pytest.raises(UsageError, match="cannot be used") as caught:
        files.names("checkpoints")
    assert caught.value.code == "USAGE.ADDRESS"
    assert "hunter2" not in str(caught.value) + repr(files) + files.uri
    assert caught.value.__cause__ is None


def test_all_object_stores_are_opened_alike() -> None:
    for address in ("s3://b/x", "gs://b/x", "abfss://c@a.dfs.core.windows.net/x"):
        files = open_files(address, options={"endpoint": "http://localhost:1"})
        assert isinstance(files, ObjectFiles)
        assert files.uri == address
    with pytest.raises(UsageError, match="only an object store takes options"):
        open_files("/data", options={"region": "here"})


def test_an_option_that_obstore_does_not_know() -> None:
    for files in (
        open_files("s3://KEY:hunter2@b/x?no_such_option=hunter2"),
        open_files("s3://b/x", options={"secret_access_key": "hunter2", "no_such_option": "hunter2"}),
        open_files("abfss://c@a.example.com/x", options={"account_key": "hunter2"}),
        open_files("s3://b/x", options={"max_retries": "hunter2"}),
        open_files("gs://b/x", options={"bucket": "hunter2"}),
        open_files("s3://b/x", options={"AWS_TIMEOUT": "hunter2"}),
    ):
        with pytest.raises(UsageError, match="cannot be used") as caught:
            files.read("a")
        assert "hunter2" not in str(caught.value)
        assert caught.value.__cause__ is None


def test_without_obstore_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("obstore", "obstore.exceptions", "obstore.store"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UsageError, match="pip install obstore"):
        open_files("s3://b/x").read("a")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_forked_process_is_refused_instead_of_waiting() -> None:
    files = open_files("s3://b/x", options={"endpoint": "http://127.0.0.1:1", "max_retries": "0"})
    with pytest.raises(OSError, match="failed to read"):
        files.read("a")
    child = os.fork()
    if not child:
        try:
            files.read("a")
        except UsageError as error:
            os._exit(7 if "forked" in str(error) else 1)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_address_without_an_answer_is_reported() -> None:
    options = {
        "endpoint": "http://127.0.0.1:1",
        "allow_http": "true",
        "access_key_id": "KEY",
        "secret_access_key": "hunter2",
        "max_retries": "0",
    }
    files = open_files("s3://b/x", options=options)
    with pytest.raises(OSError, match="failed to read x/a: no connection"):
        files.read("a")
    with pytest.raises(OSError, match="failed to create") as caught:
        files.publish("checkpoints/1.json", b"mine", 1)
    assert caught.value.unknown


def test_arrows_names_in_an_address_reach_the_server(
    object_server: Callable[[str], Place], request: pytest.FixtureRequest
) -> None:
    _, options = object_server("S3")
    endpoint = options["endpoint"].removeprefix("http://")
    query = f"scheme=http&endpoint_override={quote(endpoint)}&region=us-east-1"
    files = open_files(f"s3://key:hunter2@bucket/{request.node.name}?{query}")
    files.publish("a", b"abc", 1)
    assert pickle.loads(pickle.dumps(files)).read("a") == b"abc"
    assert "hunter2" not in files.uri + repr(files) + repr(ObjectCalls(files._uri))
    assert isinstance(files, ObjectFiles)
    missing = open_files(f"s3://key:hunter2@nobucket/x?{query}")
    with pytest.raises(OSError, match="NoSuchBucket") as caught:
        missing.names("checkpoints")
    assert not isinstance(caught.value, (FileNotFoundError, StateBackendError))


def test_options_are_taken_from_the_environment(
    object_server: Callable[[str], Place], request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri, options = object_server("S3")
    for name, value in options.items():
        monkeypatch.setenv(f"AWS_{name.upper()}", value)
    files = open_files(f"{uri}/{request.node.name}")
    files.publish("a", b"abc", 1)
    assert files.read("a") == b"abc"
    other = open_files(
        f"{uri}/{request.node.name}", options={"AWS_ENDPOINT": "http://127.0.0.1:1", "max_retries": "0"}
    )
    with pytest.raises(OSError, match="no connection"):
        other.read("a")


def test_conditions_that_are_switched_off_are_missed(
    object_server: Callable[[str], Place], request: pytest.FixtureRequest
) -> None:
    uri, options = object_server("S3")
    options = options | {"conditional_put": "disabled"}
    place = f"{uri}/{request.node.name}"
    with pytest.raises(UsageError, match=r"cannot keep a second writer out.*\[USAGE\.SINGLE_WRITER\]"):
        open_files(place, options=options).take_epoch(refuse_live=False)
    files = open_files(place, single_writer=True, options=options)
    assert files.take_epoch(refuse_live=False) == 1
    files.publish("checkpoints/1.json", b"mine", 1)
    with pytest.raises(NameConflictError):
        files.publish("checkpoints/1.json", b"again", 1)
    assert files.names("checkpoints") == ["1.json"]
