"""Extents, pages, bytes and undo logs: where everything compiled keeps what it stores."""
