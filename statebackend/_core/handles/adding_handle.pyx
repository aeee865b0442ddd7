"""The handle of reducing, aggregating and folding states: `add` by the user's function, or by a plan without one.

A handle has a plan if its operation has a name; a newer descriptor of the state may change that. Values that are not
native to the plan (dates, decimals, other numbers, sums that do not fit) go to the function: it defines the behaviour,
and words every error.
"""

from libc.math cimport sqrt
from libc.stdint cimport int64_t, uint64_t
from libc.string cimport memcpy

from statebackend._core.codecs.key_value_codecs cimport FORM_OBJECT, MAX_STORED, ValueCodec
from statebackend._core.handles.cleanup cimport begin_access, clean_up
from statebackend._core.handles.single_handle cimport SingleHandle
from statebackend._core.handles.state_handle cimport AGGREGATES, REDUCES, adding_kind, combined
from statebackend._core.handles.table_handle cimport look_up
from statebackend._core.memory.arena cimport Blob, blob_data, blob_drop
from statebackend._core.memory.interpreter cimport ROWS_IN_TURN, give_way
from statebackend._core.memory.platform cimport unlikely
from statebackend._core.tables.accumulators cimport (
    ADD_AVERAGE, ADD_BYTES, ADD_MOMENTS, ADD_NUMBER, ADD_WHOLE, AddPlan, add_fixed, keeps_old_bytes)
from statebackend._core.tables.cow_map cimport entry_at, value_of
from statebackend._core.tables.reductions cimport OP_COUNT, OP_FIRST
from statebackend._core.tables.state_core cimport begin_call, come_out, end_call, end_objects_of_row, go_in
from statebackend._core.tables.values cimport TYPE_DOUBLE, is_integer, load_integer


cdef class AddingHandle(SingleHandle):
    """One value or accumulator, into which every added value goes.

    `inputs` is the codec of added values, None if they may be anything. `plan_of(descriptor)` returns the AddPlan of an
    operation, or None.
    """

    cdef readonly ValueCodec inputs
    cdef readonly AddPlan plan
    cdef object plan_of
    cdef int kind

    def __init__(self, *arguments, ValueCodec inputs=None, plan_of=None, **options):
        self.inputs, self.plan_of = inputs, plan_of
        SingleHandle.__init__(self, *arguments, **options)
        self.keeps_latest = self.in_event_time

    cdef int declared(self) except -1:
        self.kind = adding_kind(self.descriptor)
        if self.kind == REDUCES:
            self.inputs = self.codec
        if self.plan_of is not None and self.codec.form != FORM_OBJECT:
            self.plan = self.plan_of(self.descriptor)
        if self.plan is not None:
            self.plan.fits(self.plain.value_code, self.plain.table.layout.value_width)
        return 0

    def add(self, value):
        """Add a value; None clears. If the function raises, nothing has changed. O(1) expected."""
        cdef char stored[MAX_STORED]
        cdef bint is_native
        if self.plan is None or value is None:
            self.add_one(value, False)
            return
        begin_access(self)
        if self.kind == REDUCES:
            is_native = self.codec.store_native(self.core, value, stored)
        else:
            is_native = self.input_of(value, stored)
        if not is_native or not add_stored(self, self.plan, stored):
            self.add_by_function(value, False)

    def _add_in_turn(self, list keys not None, list namespaces, list times, list values not None, bint are_copies):
        """`add` each value, with its key current, its namespace and its time, if these are given.

        If values `are_copies` of the declared type, which have no other owner, the function gets them as they are.
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

    # --- by the user's function ---

    cdef int add_one(self, object value, bint is_copy) except -1:
        clean_up(self)
        if value is None:
            self.clear_here()
            return 0
        return self.add_by_function(value, is_copy)

    cdef int add_by_function(self, object value, bint is_copy) except -1:
        """Add a value that is not None; expired entries were cleaned up."""
        cdef object old, result
        cdef uint64_t entered
        begin_call(self.core)
        try:
            if not is_copy and self.inputs is not None:
                value = self.stored_copy(self.inputs, value)
            old = self.unexpired()
            entered = go_in(self.core)
            try:
                result = combined(self.kind, self.descriptor, old, value)
            finally:
                come_out(self.core, entered)
            return self.write(result)
        finally:
            end_call(self.core)

    cdef object merged(self, object a, object b):
        return self.descriptor.reduce(a, b) if self.kind == REDUCES else self.descriptor.aggregate.merge(a, b)

    # --- by the plan ---

    cdef int input_of(self, object value, char *stored) except -1:
        """Store the checked operand that the plan adds, and return 1; 0 if the function has to look at the value."""
        cdef ValueCodec inputs = self.inputs
        cdef double real
        cdef int kind = self.plan.adding.kind
        if inputs is None or inputs.form == FORM_OBJECT or not inputs.store_native(self.core, value, stored):
            return 0
        if kind == ADD_AVERAGE or kind == ADD_MOMENTS:
            if is_integer(inputs.form):
                real = <double>load_integer(inputs.form, stored)
            elif inputs.form == TYPE_DOUBLE:
                real = (<double *>stored)[0]
            else:
                real = (<float *>stored)[0]
            (<double *>stored)[0] = real
            return 1
        if kind == ADD_NUMBER and self.plan.adding.op == OP_COUNT:
            inputs.drop(self.core, stored)       # it was only examined
            (<int64_t *>stored)[0] = 1
        return 1

    # --- the result ---

    def get(self):
        """The result of the added values; None if none was added. O(1) expected, and the function."""
        cdef object accumulator
        cdef uint64_t entered
        if self.kind != AGGREGATES:
            return self.read()
        if self.plan is not None and not self.ttl:
            return self.planned_result()
        accumulator = self.read()
        if accumulator is None:
            return None
        entered = go_in(self.core)
        try:
            return self.descriptor.aggregate.get_result(accumulator)
        finally:
            come_out(self.core, entered)
            self.core.settle()

    cdef object planned_result(self):
        """The result of the accumulator of a plan, which does not expire."""
        cdef char *fields
        cdef double n, total
        cdef int64_t count
        if self.plan.adding.kind != ADD_AVERAGE and self.plan.adding.kind != ADD_MOMENTS:
            return self.read()
        look_up(self)
        if self.slot == 0:
            return None
        fields = value_of(self.table, entry_at(self.table.core, self.slot))
        if self.plan.adding.kind == ADD_AVERAGE:
            memcpy(&total, fields + 1, 8)
            memcpy(&count, fields + 9, 8)
            return total / <double>count
        memcpy(&n, fields + 1, 8)
        if n < 2.0:
            return None
        memcpy(&total, fields + 17, 8)
        total = total / (n - 1.0)
        return sqrt(total) if self.descriptor.aggregate.name == "stddev" else total


cdef char *old_value(SingleHandle handle) except? NULL:
    """The unexpired stored value of the current key; NULL if there is none."""
    look_up(handle)
    if unlikely(handle.map == NULL):
        handle.make_room()
    if handle.slot == 0 or (handle.ttl and handle.expired_here()):
        return NULL
    return value_of(handle.table, entry_at(handle.table.core, handle.slot))


cdef int add_stored(SingleHandle handle, AddPlan plan, char *stored) except -1:
    """Add a value in stored form and consume it; 0, with nothing changed, if the result does not fit."""
    cdef char computed[MAX_STORED]
    cdef char *old
    cdef Blob *blob
    try:
        old = old_value(handle)
    except BaseException:
        if plan.adding.kind == ADD_BYTES:
            blob_drop(handle.core.arena.blobs, (<Blob **>stored)[0])
        raise
    if plan.adding.kind == ADD_BYTES:
        blob = (<Blob **>stored)[0]
        if old != NULL and keeps_old_bytes(plan.adding.op, (<Blob **>old)[0], blob_data(blob), blob.length):
            (<Blob **>stored)[0] = (<Blob **>old)[0]
            (<Blob **>stored)[0].refs += 1
            blob_drop(handle.core.arena.blobs, blob)
        handle.write_stored(stored)
        return 1
    if plan.adding.kind == ADD_WHOLE:
        if old != NULL and plan.adding.op == OP_FIRST:
            memcpy(stored, old, plan.adding.width)
        handle.write_stored(stored)
        return 1
    if unlikely(not add_fixed(&plan.adding, old, stored, computed)):
        return 0
    handle.write_stored(computed)
    return 1
