"""A store in a new folder, opened for writing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from statebackend.checkpoint import CheckpointStore


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def store(root: Path) -> Iterator[CheckpointStore]:
    with CheckpointStore(root, retain=2) as made:
        yield made.open_for_writing(query="q", key_type=int, max_parallelism=128)
