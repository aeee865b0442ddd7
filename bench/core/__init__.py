"""What the compiled core costs, at the level of the map: the figures of `python -m bench.core`."""
