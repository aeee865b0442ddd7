"""Benchmarks run with ``make bench``; the figures of the core beside Flink with ``python -m bench.core``."""
