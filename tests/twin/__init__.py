"""The compiled core's map once more, in plain Python; see `cow_map.py`."""
