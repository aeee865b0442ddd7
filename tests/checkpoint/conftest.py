"""A store in a folder of its own, and, for tests with many files, a disk that nobody waits for."""

import pytest
from contract.conftest import no_fsync
from opened_store import root, store

from statebackend.checkpoint.format import data_file_writer

__all__ = ["no_fsync", "root", "store"]


@pytest.fixture
def encoded_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let another thread encode small batches, too."""
    monkeypatch.setattr(data_file_writer, "BEHIND_FROM", 0)
