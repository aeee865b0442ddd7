"""The calls that a user's function makes once per record.

`key_context` holds the current key, namespace and time; `look_ahead` asks for the memory that the next keys will need.
`handles` has the base class and the states with one value for a key, `adding_handles` those whose operation has a
name, `list_handle` and `map_handle` the collections. `time_index` holds timers: their set, and the order of firing.
"""
