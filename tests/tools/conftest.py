"""A store in a folder of its own."""

from opened_store import root, store

__all__ = ["root", "store"]
