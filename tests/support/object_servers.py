"""Object stores on the loopback interface: S3, Azure and GCS, each as a context manager giving an address and options.

S3 is moto's server, Azure is Microsoft's Azurite, which npm installs below ``build/``. The emulators of GCS that can be
had from PyPI or npm have no XML API beyond GET and PUT, which is all that obstore speaks; but it is S3's but for a few
headers, so GCS is moto behind a layer that translates these.
"""

from __future__ import annotations

import base64
import contextlib
import datetime
import fcntl
import hashlib
import hmac
import json
import os
import re
import shutil
import subprocess
import threading
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from email.utils import format_datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

#: The address of a store, and its options.
Place = tuple[str, dict[str, str]]

AZURITE = "3.37.0"
_FOLDER = Path(__file__).parents[2] / "build" / "azurite"
_LAUNCH_SECONDS = 120
_LISTENS = re.compile(r"listens on http://127\.0\.0\.1:([0-9]+)")


# ------------------------------------------------------------------------------------ moto


class OneWriteAtATime:
    """moto looks if an object is there, and then puts it: here, nothing comes between."""

    def __init__(self, application: Callable[..., Iterable[bytes]]) -> None:
        self._application = application
        self._lock = threading.Lock()

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        if environ["REQUEST_METHOD"] != "PUT":
            return self._application(environ, start_response)
        with self._lock:
            return list(self._application(environ, start_response))


#: Enough for moto to know the service: it verifies no signature.
_SIGNED = (
    "AWS4-HMAC-SHA256 Credential=key/20200101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0"
)


class SpeaksGcs:
    """GCS's names for the headers of S3. Of preconditions there is only the one that a store needs."""

    def __init__(self, application: Callable[..., Iterable[bytes]]) -> None:
        self._application = application

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        environ["HTTP_AUTHORIZATION"] = _SIGNED
        # obstore encodes each special character here, also slashes and those in the bucket's name.
        path = quote(environ["PATH_INFO"].encode("latin-1"))
        environ["RAW_URI"] = environ["REQUEST_URI"] = (
            path + "?" * bool(query := environ["QUERY_STRING"]) + query
        )
        source = environ.pop("HTTP_X_GOOG_COPY_SOURCE", None)
        if source is not None:
            environ["HTTP_X_AMZ_COPY_SOURCE"] = source
        generation = environ.pop("HTTP_X_GOOG_IF_GENERATION_MATCH", None)
        if generation is not None:
            assert generation == "0", "only creating is translated"
            environ["HTTP_IF_NONE_MATCH"] = "*"

        def start(status: str, headers: list[tuple[str, str]], *rest: object) -> object:
            return start_response(status, [*headers, ("x-goog-generation", "1")], *rest)

        return self._application(environ, start)


@contextlib.contextmanager
def _moto(wrap: Callable[[Any], Any], bucket: str) -> Iterator[str]:
    """A server with one bucket; gives its base address. All servers of a process have the same buckets."""
    from moto.moto_server.werkzeug_app import (  # takes a while
        DomainDispatcherApplication,
        MotoRequestHandler,
        create_backend_app,
    )
    from werkzeug.serving import make_server

    application = wrap(OneWriteAtATime(DomainDispatcherApplication(create_backend_app)))
    server = make_server("127.0.0.1", 0, application, threaded=True, request_handler=MotoRequestHandler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        base = f"http://127.0.0.1:{server.server_port}"
        headers = {"Authorization": _SIGNED}
        urllib.request.urlopen(urllib.request.Request(f"{base}/{bucket}", method="PUT", headers=headers))
        yield base
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextlib.contextmanager
def s3_server() -> Iterator[Place]:
    """A bucket of moto's S3."""
    with _moto(lambda application: application, "bucket") as base:
        yield (
            "s3://bucket",
            {
                "endpoint": base,
                "allow_http": "true",
                "region": "us-east-1",
                "access_key_id": "key",
                "secret_access_key": "hunter2",
            },
        )


@contextlib.contextmanager
def gcs_server() -> Iterator[Place]:
    """A bucket of moto that speaks GCS."""
    with _moto(SpeaksGcs, "gcs-bucket") as base:
        key = {"gcs_base_url": base, "disable_oauth": True, "client_email": "", "private_key": "hunter2"}
        yield (
            "gs://gcs-bucket",
            {"service_account_key": json.dumps(key | {"private_key_id": ""}), "allow_http": "true"},
        )


# ------------------------------------------------------------------------------------ Azurite

_ACCOUNT = "account"
_KEY = base64.b64encode(b"hunter2 hunter2 hunter2 hunter2 ").decode()


def _installed() -> Path:
    """Azurite's program; it is installed once, by whichever process comes first."""
    program = _FOLDER / "node_modules" / "azurite" / "dist" / "src" / "blob" / "main.js"
    _FOLDER.mkdir(parents=True, exist_ok=True)
    with open(_FOLDER / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        found = _FOLDER / "version"
        if not program.exists() or not found.exists() or found.read_text() != AZURITE:
            subprocess.run(
                ["npm", "install", "--no-audit", "--no-fund", "--prefix", str(_FOLDER), f"azurite@{AZURITE}"],
                check=True,
                capture_output=True,
            )
            found.write_text(AZURITE)
    return program


def _make_container(base: str, name: str) -> None:
    """One request, signed as Azure wants it."""
    date = format_datetime(datetime.datetime.now(datetime.timezone.utc), usegmt=True)
    headers = {"x-ms-date": date, "x-ms-version": "2023-11-03"}
    named = "".join(f"{key}:{value}\n" for key, value in headers.items())
    resource = f"/{_ACCOUNT}/{_ACCOUNT}/{name}\nrestype:container"
    text = "PUT" + "\n" * 12 + named + resource
    signature = base64.b64encode(hmac.digest(base64.b64decode(_KEY), text.encode(), hashlib.sha256)).decode()
    headers |= {"Authorization": f"SharedKey {_ACCOUNT}:{signature}", "Content-Length": "0"}
    address = f"{base}/{name}?restype=container"
    urllib.request.urlopen(urllib.request.Request(address, method="PUT", headers=headers))


@contextlib.contextmanager
def azure_server() -> Iterator[Place]:
    """A container of Azurite; skipped without Node."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("Azurite needs node and npm")
    process = subprocess.Popen(
        [
            "node",
            str(_installed()),
            "--blobHost=127.0.0.1",
            "--blobPort=0",
            "--inMemoryPersistence",
            "--silent",
            "--skipApiVersionCheck",
            "--disableTelemetry",
        ],
        env=os.environ | {"AZURITE_ACCOUNTS": f"{_ACCOUNT}:{_KEY}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=_FOLDER,
    )
    said: list[str] = []
    listening = threading.Event()

    def listen() -> None:
        for line in process.stdout:
            said.append(line)
            if _LISTENS.search(line):
                listening.set()
        listening.set()

    thread = threading.Thread(target=listen, daemon=True)
    thread.start()
    try:
        listening.wait(_LAUNCH_SECONDS)
        found = _LISTENS.search("".join(said))
        assert found is not None, said
        base = f"http://127.0.0.1:{found[1]}/{_ACCOUNT}"
        _make_container(base, "container")
        yield (
            f"abfss://container@{_ACCOUNT}.dfs.core.windows.net",
            {"endpoint": base, "allow_http": "true", "account_key": _KEY},
        )
    finally:
        process.terminate()
        process.wait()
        thread.join()


# ------------------------------------------------------------------------------------ all of them

SERVERS: dict[str, Callable[[], contextlib.AbstractContextManager[Place]]] = {
    "S3": s3_server,
    "Azure": azure_server,
    "GCS": gcs_server,
}


@pytest.fixture(scope="session")
def object_server() -> Iterator[Callable[[str], Place]]:
    """Give the place of a server by its name; each is started when it is first asked for."""
    started: dict[str, Place] = {}
    with contextlib.ExitStack() as stack:

        def start(name: str) -> Place:
            if name not in started:
                started[name] = stack.enter_context(SERVERS[name]())
            return started[name]

        yield start
