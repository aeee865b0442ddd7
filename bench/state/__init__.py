"""What one record costs through the state API, beside Flink and a dict: ``python -m bench.state``."""
