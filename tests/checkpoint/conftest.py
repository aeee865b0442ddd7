"""A store in a folder of its own, and, for tests with many files, a disk that nobody waits for."""

from contract.conftest import no_fsync
from opened_store import root, store

__all__ = ["no_fsync", "root", "store"]
