"""Pins: files with which readers keep the files of a checkpoint from being removed, for as long as a lease lasts.

A reader writes its pin and then looks for the manifest again. The writer of the store removes a manifest first, then
lists pins, and only then removes files. So either the reader finds the manifest gone, or the writer finds the pin.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from statebackend.checkpoint.files import StoreFiles
from statebackend.checkpoint.files.layout import PINS, is_data_file
from statebackend.checkpoint.files.store_files import storing
from statebackend.checkpoint.store.sealed import (
    FORMAT,
    CheckedRecord,
    JsonObject,
    Malformed,
    instance,
    integer,
    made,
    members_of,
    parse,
    seal,
)
from statebackend.errors import CorruptCheckpointError
from statebackend.state import Duration, milliseconds

if TYPE_CHECKING:
    from statebackend.checkpoint.store.checkpoint_reader import Checkpoint

_log = logging.getLogger(__name__)

#: A pin that cannot be read holds everything for so many seconds: it may be one that is being written.
_GRACE = 3600.0


@dataclass(frozen=True)
class PinFile(CheckedRecord):
    """The content of a pin: the checkpoint, the end of the lease in milliseconds since 1970, and its files."""

    checkpoint_id: int
    epoch: int
    until: int
    files: tuple[str, ...]

    def _check(self) -> None:
        integer(self.checkpoint_id, "the checkpoint id")
        integer(self.epoch, "the epoch", 1)
        integer(self.until, "the end of the lease")
        self._set("files", tuple(self.files))
        for name in self.files:
            if not is_data_file(instance(name, str, "a file")):
                raise Malformed("a file is not in data/<epoch>/")

    def to_json(self) -> JsonObject:
        return {
            "format": FORMAT,
            "id": self.checkpoint_id,
            "epoch": self.epoch,
            "until": self.until,
            "files": list(self.files),
        }

    @classmethod
    def _read(cls, data: object) -> PinFile:
        members = members_of(data, "the pin", {"format", "id", "epoch", "until", "files"})
        return made(
            cls,
            checkpoint_id=members["id"],
            epoch=members["epoch"],
            until=members["until"],
            files=tuple(instance(members["files"], list, "files")),
        )


class Pin:
    """A pin that a reader holds. `release` it, or leave its ``with`` block, when the files are read."""

    def __init__(self, files: StoreFiles, checkpoint: Checkpoint, lease: Duration) -> None:
        #: The checkpoint, whose files stay while the lease lasts.
        self.checkpoint = checkpoint
        self._files = files
        self._lease = milliseconds("lease", lease)
        self._name: str | None = None
        self._until = 0
        self.renew()

    def renew(self) -> None:
        """Start the lease again; a reader that needs longer calls it before the lease ends.

        `UsageError` if the lease has ended, or the pin was released, and the checkpoint has been dropped meanwhile.
        """
        manifest = self.checkpoint.manifest
        until = int(1000 * time.time()) + self._lease
        content = PinFile(manifest.checkpoint_id, manifest.epoch, until, tuple(sorted(self.checkpoint.files)))
        name = f"{PINS}/{manifest.checkpoint_id}-{secrets.token_hex(8)}.json"
        hint = "a reader that may not write to the store reads without a pin: store.open(id)"
        with storing(f"writing {name}", hint=hint):
            self._files.make_folder(PINS)
            self._files.write(name, seal(content.to_json()))
            self._files.sync_folder(PINS)
        was_held = self._name is not None and 1000 * time.time() < self._until
        before, self._name, self._until = self._name, name, until
        if before is not None:
            self._remove(before)
        if not was_held:
            try:
                self.checkpoint.check_kept()
            except BaseException:
                self.release()
                raise

    def keep(self) -> None:
        """Start the lease again once half of it has passed; costs nothing before."""
        if self._name is not None and self._until - 1000 * time.time() < self._lease / 2:
            self.renew()

    def release(self) -> None:
        """Let the files go. Idempotent; a file that cannot be removed goes when the lease ends."""
        name, self._name = self._name, None
        if name is not None:
            self._remove(name)

    def _remove(self, name: str) -> None:
        try:
            self._files.remove(name)
        except OSError as error:
            _log.warning("a pin stays until its lease ends: %s", error)

    def __enter__(self) -> Pin:
        return self

    def __exit__(self, *raised: object) -> None:
        self.release()


def held_by_pins(files: StoreFiles, now: float) -> Callable[[str], bool]:
    """Say of a file if a live pin holds it; ``now`` is in seconds since 1970. Removes pins whose lease has ended."""
    held: set[str] = set()
    holds_all = False
    for base_name in files.names(PINS):
        name = f"{PINS}/{base_name}"
        try:
            pin = parse(PinFile, files.read(name), name)
        except FileNotFoundError:
            continue
        except (CorruptCheckpointError, PermissionError):
            is_live = files.modified(name) + _GRACE > now
            holds_all = holds_all or is_live
        else:
            is_live = pin.until > 1000 * now
            if is_live:
                held.update(pin.files)
        if not is_live:
            try:
                files.remove(name)
            except PermissionError as error:  # another user's, which holds nothing any longer
                _log.warning("a pin whose lease has ended stays: %s", error)
    return lambda file: holds_all or file in held
