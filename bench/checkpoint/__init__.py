"""What a checkpoint costs: incremental, full, restored, and what the batches notice of it."""
