"""Handles of reducing, aggregating and folding states, which call the user's function for each value that is added."""

from libc.stdint cimport uint64_t

from statebackend._core.codecs.codecs cimport ValueCodec
from statebackend._core.handles.single_handle cimport SingleHandle
from statebackend._core.memory.interpreter cimport ROWS_IN_TURN, give_way
from statebackend._core.tables.state_core cimport begin_call, come_out, end_call, end_objects_of_row, go_in


cdef class AddingHandle(SingleHandle):
    """The shared part of reducing, aggregating and folding states: user functions, which may not call the backend."""

    def __init__(self, *arguments, **options):
        SingleHandle.__init__(self, *arguments, **options)
        self.keeps_latest = self.in_event_time

    cdef object copied(self, object value):
        """The value as the function gets it: a copy, of the declared type, if values have one."""
        return value

    cdef object combined(self, object old, object value):
        """Combine the stored value, which may be None, with `value`. Runs the user's function, inside the call."""
        raise NotImplementedError

    def add(self, value):
        """Add a value; None clears. If the function raises, nothing has changed. O(1) expected."""
        self.add_one(value, False)

    def _add_in_turn(self, list keys not None, list namespaces, list times, list values not None, bint are_copies):
        """`add` each value, with its key current, its namespace and its time, if these are given.

        If values `are_copies` of the declared type, which nobody else has, the function gets them as they are.
        """
        cdef Py_ssize_t row
        cdef uint64_t entered
        begin_call(self.core)
        try:
            for row in range(len(keys)):
                end_objects_of_row(self.core)
                if row % ROWS_IN_TURN == 0:
                    entered = go_in(self.core)
                    try:
                        give_way()
                    finally:
                        come_out(self.core, entered)
                if times is not None:
                    self.context._event_now = times[row]
                self.context.set_current_key(keys[row])
                if namespaces is not None:
                    self.context._namespace = namespaces[row]
                self.add_one(values[row], are_copies)
        finally:
            end_call(self.core)

    cdef int add_one(self, object value, bint is_copy) except -1:
        if self.cleanup_size:
            self.clean_some(self.cleanup_size)
        if value is None:
            self.clear_here()
            return 0
        return self.add_by_function(value, is_copy)

    cdef int add_by_function(self, object value, bint is_copy) except -1:
        """Add a value that is not None; what may be cleaned up was."""
        cdef object old, result
        cdef uint64_t entered
        begin_call(self.core)
        try:
            if not is_copy:
                value = self.copied(value)
            old = self.unexpired()
            entered = go_in(self.core)
            try:
                result = self.combined(old, value)
            finally:
                come_out(self.core, entered)
            return self.write(result)
        finally:
            end_call(self.core)

    def get(self):
        """The result of the added values; None if none was added. O(1) expected."""
        return self.read()


cdef class ReducingHandle(AddingHandle):
    """One value, into which every added value is reduced."""

    cdef object copied(self, object value):
        return self.stored_copy(self.codec, value)

    cdef object combined(self, object old, object value):
        return value if old is None else self._descriptor.reduce(old, value)

    cdef object merged(self, object a, object b):
        return self._descriptor.reduce(a, b)


cdef class AggregatingHandle(AddingHandle):
    """One accumulator, into which every added value goes; `inputs` is the codec of values, or None."""

    def __init__(self, *arguments, ValueCodec inputs=None, **options):
        AddingHandle.__init__(self, *arguments, **options)
        self.inputs = inputs

    def get(self):
        """The result of the accumulator; None where nothing was added. O(1) expected, and the function."""
        cdef object accumulator = self.read()
        cdef uint64_t entered
        if accumulator is None:
            return None
        entered = go_in(self.core)
        try:
            return self._descriptor.aggregate.get_result(accumulator)
        finally:
            come_out(self.core, entered)
            self.core.settle()

    cdef object copied(self, object value):
        return value if self.inputs is None else self.stored_copy(self.inputs, value)

    cdef object combined(self, object old, object value):
        cdef object function = self._descriptor.aggregate
        return function.add(value, function.create_accumulator() if old is None else old)

    cdef object merged(self, object a, object b):
        return self._descriptor.aggregate.merge(a, b)


cdef class FoldingHandle(AddingHandle):
    """One accumulator, moved on by every added value."""

    cdef object combined(self, object old, object value):
        return self._descriptor.fold(self._descriptor.initial_copy() if old is None else old, value)
