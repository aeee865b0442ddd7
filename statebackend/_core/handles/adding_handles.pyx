"""Handles of reducing and aggregating states whose operation has a name: `add` and `get` without a Python call.

A handle has a plan, or none if the function is the user's; a newer descriptor of the state may change that. Values
that are not native to the plan (dates, decimals, other numbers, sums that do not fit) go to the base class: it
defines the behaviour, and words every error.
"""

from libc.math cimport sqrt
from libc.stdint cimport int64_t
from libc.string cimport memcpy

from statebackend._core.tables.accumulators cimport (
    ADD_AVERAGE, ADD_BYTES, ADD_MOMENTS, ADD_NUMBER, ADD_WHOLE, AddPlan, add_fixed, keeps_old_bytes)
from statebackend._core.memory.arena cimport Blob, blob_data, blob_drop
from statebackend._core.codecs.codecs cimport (
    FORM_BYTE, FORM_DOUBLE, FORM_OBJECT, MAX_STORED, ValueCodec)
from statebackend._core.tables.cow_map cimport entry_at, value_of
from statebackend._core.handles.function_handles cimport AggregatingHandle, ReducingHandle
from statebackend._core.handles.single_handle cimport SingleHandle
from statebackend._core.memory.platform cimport unlikely
from statebackend._core.tables.reductions cimport OP_COUNT, OP_FIRST, load_integer


cdef char *old_value(SingleHandle handle) except? NULL:
    """The unexpired stored value of the current key; NULL if there is none."""
    if handle.stamp != handle.core.calls:
        handle.find_here()
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


cdef class PlannedReducingHandle(ReducingHandle):
    """A reduced value; `plan_of(descriptor)` returns the AddPlan of its reduction, or None."""

    cdef object plan_of
    cdef readonly AddPlan plan

    def __init__(self, *arguments, plan_of, **options):
        ReducingHandle.__init__(self, *arguments, **options)
        self.plan_of = plan_of
        self._redeclare(self._descriptor)

    def _redeclare(self, descriptor):
        """Apply a newer descriptor of the same state."""
        self._descriptor = descriptor
        self.plan = None if self.codec.form == FORM_OBJECT else self.plan_of(descriptor)
        if self.plan is not None:
            self.plan.fits(self.plain.value_code, self.plain.table.layout.value_width)

    def add(self, value):
        """Add a value; None clears. O(1) expected."""
        cdef char stored[MAX_STORED]
        if self.plan is None or value is None:
            self.add_one(value, False)
            return
        if self.cleanup_size:
            self.clean_some(self.cleanup_size)
        if self.stamp != self.core.calls:
            self.find_here()
        if not self.codec.store_native(self.core, value, stored) or not add_stored(self, self.plan, stored):
            self.add_by_function(value, False)


cdef class PlannedAggregatingHandle(AggregatingHandle):
    """An accumulator; `plan_of(descriptor)` returns the AddPlan of its aggregate, or None."""

    cdef object plan_of
    cdef readonly AddPlan plan

    def __init__(self, *arguments, plan_of, **options):
        AggregatingHandle.__init__(self, *arguments, **options)
        self.plan_of = plan_of
        self._redeclare(self._descriptor)

    def _redeclare(self, descriptor):
        """Apply a newer descriptor of the same state."""
        self._descriptor = descriptor
        self.plan = None if self.codec.form == FORM_OBJECT else self.plan_of(descriptor)
        if self.plan is not None:
            self.plan.fits(self.plain.value_code, self.plain.table.layout.value_width)

    def add(self, value):
        """Add a value; None clears. If the function raises, nothing changes. O(1) expected."""
        cdef char stored[MAX_STORED]
        if self.plan is None or value is None:
            self.add_one(value, False)
            return
        if self.cleanup_size:
            self.clean_some(self.cleanup_size)
        if self.stamp != self.core.calls:
            self.find_here()
        if not self.input_of(value, stored) or not add_stored(self, self.plan, stored):
            self.add_by_function(value, False)

    cdef int input_of(self, object value, char *stored) except -1:
        """Store the checked operand that the plan adds, and return 1; 0 if the base class has to look at the value."""
        cdef ValueCodec inputs = self.inputs
        cdef double real
        cdef int kind = self.plan.adding.kind
        if inputs is None or inputs.form == FORM_OBJECT or not inputs.store_native(self.core, value, stored):
            return 0
        if kind == ADD_AVERAGE or kind == ADD_MOMENTS:
            if inputs.form <= FORM_BYTE:
                # The codes of integers equal their forms.
                real = <double>load_integer(inputs.form, stored)
            elif inputs.form == FORM_DOUBLE:
                real = (<double *>stored)[0]
            else:
                real = (<float *>stored)[0]
            (<double *>stored)[0] = real
            return 1
        if kind == ADD_NUMBER and self.plan.adding.op == OP_COUNT:
            inputs.drop(self.core, stored)       # it was only examined
            (<int64_t *>stored)[0] = 1
        return 1

    def get(self):
        """The result of the accumulator; None if nothing was added. O(1) expected."""
        cdef char *fields
        cdef double n, total
        cdef int64_t count
        if self.plan is None or self.ttl:
            return AggregatingHandle.get(self)
        if self.plan.adding.kind != ADD_AVERAGE and self.plan.adding.kind != ADD_MOMENTS:
            return self.read()
        if self.stamp != self.core.calls:
            self.find_here()
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
        return sqrt(total) if self._descriptor.aggregate.name == "stddev" else total
