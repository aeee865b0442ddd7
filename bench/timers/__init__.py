"""Loops over timers, and their check, for the benchmarks by type and of windows."""
