"""Spark's own stateful functions, unchanged, as functions of the library.

A ``StatefulProcessor`` runs as a `ProcessorFunction`. The folder has, from the bottom up:

* `spark_rows`: rows for functions, grouped by key and in Spark's order, and rows out;
* `state_variables`: ``ValueState``, ``ListState`` and ``MapState`` over states of the backend;
* `processor_handle`: the handle that ``init`` gets, with its variables and timers;
* `batch_clock`: the times of a batch as Spark has them, the late rows, and the rounds of timers;
* `processor_calls`: the calls of a processor in a batch; `processor_errors`: Spark's errors with a code;
* `pandas_frames`, `pandas_calls`: the same for a processor that takes and gives data frames;
* `group_frames`, `group_states`: functions for ``applyInPandasWithState``, over `spark_rows` and `batch_clock` too.

`statebackend.spark.own_functions` has the names that users call.
"""
