"""Compares a sum and a count for each key with DuckDB and Polars: each batch returns the new values."""
