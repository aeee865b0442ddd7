"""What a timer costs, beside Flink's heap timer queue: ``python -m bench.timers``."""
