"""Spark's run of a query: its plans, the place where it keeps them, and its end, as far as a driver can ask.

Only Spark's classic API lets a driver ask. Spark Connect has no such object.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import stat
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from statebackend.checkpoint.files import PosixCalls, scheme_of, without_secrets
from statebackend.checkpoint.files.interface import storing
from statebackend.runtime.origin import Identity, plan_identity
from statebackend.runtime.progress import Json

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_log = logging.getLogger("statebackend.spark")

#: The content of a checkpointLocation.
SPARKS_FOLDERS = ("offsets", "commits", "sources", "state", "metadata")
#: The folders of a checkpointLocation that determine the rows of a batch. Their consequences are not needed: if
#: Spark has lost the commit of a batch, it runs the batch again, and so do we.
_FOLDERS = ("offsets", "sources")


class QueryRun:
    """Spark's object of a running query."""

    def __init__(self, java: Any, jvm: Any) -> None:
        self._java = java
        self._jvm = jvm
        self.run_id: str = java.runId().toString()

    @classmethod
    def of(cls, session: SparkSession, query_id: str | None) -> QueryRun | None:
        """The run of an active query in this session's application; None if it is out of reach."""
        if query_id is None:
            return None
        try:
            jvm = session.sparkContext._jvm
            assert jvm is not None
            active = session._jsparkSession.sharedState().activeStreamingQueries()
            found = active.get(jvm.java.util.UUID.fromString(query_id))
            return None if found is None else cls(found, jvm)
        except Exception:  # noqa: BLE001 - internals of Spark: whatever it is, do without
            _log.info("Spark's run of the query cannot be asked", exc_info=True)
            return None

    def is_active(self) -> bool:
        """True if the run has not ended."""
        try:
            return bool(self._java.isActive())
        except Exception:  # noqa: BLE001 - Spark is gone
            return False

    def location(self) -> str | None:
        """The checkpointLocation, as Spark has resolved it; None if it is out of reach."""
        try:
            return str(self._java.resolvedCheckpointRoot())
        except Exception:  # noqa: BLE001 - internals of Spark
            return None

    def planned(self, batch_id: int) -> Identity | None:
        """The identity of a batch from its entry in Spark's offset log; None if there is no entry."""
        try:
            log = self._java.offsetLog()
            found = log.get(batch_id)
            if not found.isDefined():
                return None
            written = self._jvm.java.io.ByteArrayOutputStream()
            log.serialize(found.get(), written)
            text = str(written.toString("UTF-8"))
        except Exception:  # noqa: BLE001 - internals of Spark: then the rows themselves are compared
            _log.info("Spark's offset log cannot be read", exc_info=True)
            return None
        return parsed_plan(text)


def parsed_plan(text: str) -> Identity | None:
    """The identity in an entry of Spark's offset log: its time, and the end of each source.

    Leaves out the settings of the session in it: they do not determine the rows.

    >>> parsed_plan('v1\\n{"batchWatermarkMs":0,"batchTimestampMs":1000,"conf":{}}\\n{"logOffset":3}\\n-')
    {'kind': 'plan', 'time': 1000, 'offsets': [{'logOffset': 3}, None]}
    """
    lines = text.splitlines()
    try:
        time = json.loads(lines[1])["batchTimestampMs"]
    except (IndexError, KeyError, TypeError, ValueError):
        return None  # an entry of a version that we do not know
    return plan_identity(time, [_parsed_offset(line) for line in lines[2:]])


def _parsed_offset(line: str) -> Json:
    if line == "-":
        return None
    try:
        offset: Json = json.loads(line)
    except ValueError:
        return line
    return offset


class SparkLog:
    """Spark's logs of the content of each batch, if they lie in a folder that this process can reach.

    Spark does not sync them on a local path. If a batch were durable and its plan were not, Spark would plan it anew
    after a power failure, with other rows. So the plan is made durable before the batch is committed.
    """

    def __init__(self, folder: str, calls: PosixCalls | None = None) -> None:
        self.folder = folder
        self._calls = PosixCalls() if calls is None else calls
        #: The names in each folder at the last call.
        self._synced: dict[str, frozenset[str]] = {}
        self._knows_outer = False

    @classmethod
    def at(cls, location: str | None) -> SparkLog | None:
        """The logs at a checkpointLocation; None if it is no folder here."""
        folder = local_folder(location)
        return None if folder is None else cls(folder)

    def sync(self) -> None:
        """Make durable what was written since the last call; O(names there), and an fsync for each new name."""
        with storing(f"making Spark's notes in {self.folder} durable"):
            for name in _FOLDERS:
                self._sync_tree(f"{self.folder}/{name}")
            if not self._knows_outer:
                # The id of the query, and the names of the folders themselves.
                self._sync_file(f"{self.folder}/metadata")
                self._sync_outwards()
                self._knows_outer = True

    def _sync_tree(self, folder: str) -> None:
        try:
            entries = {entry.name: entry for entry in os.scandir(folder)}
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            return
        synced = self._synced.get(folder)
        fresh = entries.keys() - (synced or ())
        for name, entry in entries.items():
            if entry.is_dir(follow_symlinks=False):
                self._sync_tree(entry.path)
            elif name in fresh:  # Spark never writes a file of a log twice
                self._sync_file(entry.path)
        if fresh or synced is None:
            self._calls.sync_folder(folder)
        self._synced[folder] = frozenset(entries)

    def _sync_file(self, path: str) -> None:
        try:
            self._sync_content(path)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EPERM):
                _log.warning("not ours to make durable: %s", path)
            elif error.errno not in (errno.ENOENT, errno.ENOTDIR):  # Spark has deleted it meanwhile
                raise

    def _sync_content(self, path: str) -> None:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if stat.S_ISREG(os.fstat(descriptor).st_mode):
                self._calls.sync(descriptor)
        finally:
            os.close(descriptor)

    def _sync_outwards(self) -> None:
        """Make the names of the folder and of its parents durable, as far as they belong to us."""
        folder = self.folder
        while True:
            try:
                self._calls.sync_folder(folder)
            except OSError as error:
                if error.errno not in (errno.EACCES, errno.EPERM, errno.EINVAL):
                    raise
                return
            outer = os.path.dirname(folder)
            if outer == folder or os.stat(outer).st_dev != os.stat(folder).st_dev:
                return
            folder = outer


def local_folder(location: str | None) -> str | None:
    """The local folder for an address from Spark; None if the address is not on this machine.

    >>> local_folder("file:/"), local_folder("s3a://bucket/app"), local_folder(None)
    ('/', None, None)
    """
    if location is None or scheme_of(location) not in (None, "file"):
        return None
    path = location if scheme_of(location) is None else "/" + location.partition(":")[2].lstrip("/")
    for each in (path, unquote(path)):
        if os.path.isdir(each):
            return os.path.abspath(each)
    return None


def shown_location(location: str | None) -> str | None:
    """A checkpointLocation in the form that manifests may hold.

    >>> shown_location("s3a://KEY:SECRET@bucket/app")
    's3a://bucket/app'
    """
    return None if location is None else without_secrets(location)
