"""How long a row takes from its creation to its visible result, beside Spark's own ways to keep state."""
