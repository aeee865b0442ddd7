"""Addresses: what is no place for a store is refused, never taken for a folder, and no secret is ever shown."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

import statebackend as sb
from statebackend.checkpoint.files import without_secrets


@pytest.mark.parametrize(
    "address",
    ["dbfs:/x", "dbfs://x/y", "hdfs:///x", "abfss:x", "s3:/bucket/x", "S3a://b/x", "gs:x", "az://b/x", "a:b"],
)
def test_an_unknown_scheme_is_never_a_folder(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for given in (address, Path(address)):
        with pytest.raises(sb.UsageError) as caught:
            sb.CheckpointStore(given, single_writer=True).open_for_writing()
        assert caught.value.code == "USAGE.ADDRESS"
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
    count = sb.map_with_state(lambda row, n: (None, (n or 0) + 1), int)
    job = sb.spark.stateful(
        count, key="user", schema=None, checkpoint=address, single_writer=True, restore_from=address
    )
    shown = [repr(store), store.uri, repr(job), repr(store.open_readonly()), without_secrets(address)]
    with pytest.raises(sb.StateBackendError) as caught:
        sb.CheckpointStore(address.replace("s3:", "s4:"))
    shown += [str(caught.value), repr(caught.value), caplog.text]
    assert not [text for text in shown if SECRET in text or "KEY" in text]
