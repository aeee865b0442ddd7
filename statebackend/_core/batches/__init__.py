"""Batches of keys and values, without the GIL."""
