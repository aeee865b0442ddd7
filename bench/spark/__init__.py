"""A running sum and count per key under Structured Streaming: ours beside Spark's own ways to keep state."""
