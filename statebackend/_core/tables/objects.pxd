"""The references that a backend holds to objects of users: taken, shared and dropped here, and nowhere else.

A column keeps an object as a pointer, eight bytes like a number. `drop_object` only notes that a reference is dead;
`end_dead` drops the dead ones between calls. So no finaliser of a value runs inside a call.

Invariants, verified by `StateCore._check`:

 1. `held` = references in slots, in records of journals and in chunks of lists + `n_dead`.
 2. Between calls `n_dead` is 0, unless `end_dead` is at work.
"""

from cpython.object cimport PyObject
from libc.stdint cimport int64_t, uint32_t, uint64_t

from statebackend._core.memory.arena cimport LIVE_OBJECTS, Probe, count
from statebackend._core.memory.interpreter cimport Py_INCREF
from statebackend._core.memory.platform cimport likely

cdef extern from "Python.h":
    bint PyGILState_Check() noexcept nogil

cdef extern from "assert.h":
    void assert_here "assert"(bint holds) noexcept nogil

cdef struct Objects:
    # Of a core. Only a thread with the GIL changes it.
    int64_t held                         # references, the dead ones included
    PyObject **dead                      # oldest first
    uint64_t n_dead
    uint64_t room                        # of `dead`
    uint32_t ending                      # calls of `end_dead` at work, as finalisers may call the backend
    Probe *probe

cdef inline object object_at(const char *place):
    """The object that a column keeps."""
    return <object>(<PyObject *const *>place)[0]

cdef inline void share_object(Objects *objects, const char *place) noexcept nogil:
    """Take one more reference, for a copy of a stored form. Lanes of a batch call this too: growing maps clone."""
    with gil:
        Py_INCREF((<PyObject *const *>place)[0])
        objects.held += 1
        count(objects.probe, LIVE_OBJECTS, 1)

cdef inline void take_object(Objects *objects, object value, char *place) noexcept:
    """Keep an object in a column, with its own reference."""
    (<PyObject **>place)[0] = <PyObject *>value
    Py_INCREF(<PyObject *>value)
    objects.held += 1
    count(objects.probe, LIVE_OBJECTS, 1)

cdef inline void drop_object(Objects *objects, const char *place) noexcept nogil:
    """Note that a column has let go of an object. O(1) amortised. Lanes of a batch do not come here."""
    assert_here(PyGILState_Check() and (<PyObject *const *>place)[0] != NULL)
    if likely(objects.n_dead < objects.room or make_room(objects)):
        objects.dead[objects.n_dead] = (<PyObject *const *>place)[0]
        objects.n_dead += 1

cdef bint make_room(Objects *objects) noexcept nogil
cdef void end_dead(Objects *objects) noexcept
