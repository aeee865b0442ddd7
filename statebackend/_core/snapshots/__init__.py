"""What a snapshot reads: entries of one moment as rows, and what has changed since."""
