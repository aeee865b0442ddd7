"""The calls that a user's function makes once per record.

the key          `time_and_namespace`  the base of both backends: key, namespace and time
                 `key_context`       the current key as tables look it up
                 `look_ahead`        asks for the memory that the next keys will need
                 `key_shape`         reads keys that become bytes, also those that may come next
                 `row_loop`          sets the key of each row of a batch, calls the function, takes its rows
every handle     `state_handle`      the base of both backends: the descriptor, and the rules of expiry
                 `table_handle`      finds the current key's entry, makes room for it, removes it
                 `cleanup`           removes what has expired
                 `handle`            `Handle`: all of this together, the calls of users on any state, its keys
a state's kind   `single_handle`     one value for a key; value states
                 `adding_handle`     reducing, aggregating and folding states: the user's function, or a plan
                 `list_table_handle`  list states, and their iterator
                 `map_table_handle`  map states, and their iterator
                 `time_index`        timers: their set, and the order of firing
                 `timer_columns`     many timers at once
"""
