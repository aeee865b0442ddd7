"""Benchmarks of the RocksDB backend beside heap."""
