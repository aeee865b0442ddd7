"""The list of dead objects; see `objects.pxd`."""

from cpython.mem cimport PyMem_RawFree, PyMem_RawRealloc
from cpython.object cimport PyObject
from libc.stdint cimport uint64_t

from statebackend._core.memory.arena cimport LIVE_OBJECTS, count
from statebackend._core.memory.interpreter cimport Py_DECREF

cdef enum:
    LEAST_ROOM = 64
    ROOM_KEPT = 4096                     # for the next call
    MOST_NESTED = 8                      # finalisers inside one another, as the C stack is finite


cdef bint make_room(Objects *objects) noexcept nogil:
    """Make room for more dead references. False without memory: then the object stays for good, as nothing may run."""
    cdef uint64_t room = 2 * objects.room if objects.room else LEAST_ROOM
    cdef PyObject **dead = <PyObject **>PyMem_RawRealloc(objects.dead, room * sizeof(PyObject *))
    if dead == NULL:
        return False
    objects.dead, objects.room = dead, room
    return True


cdef void end_dead(Objects *objects) noexcept:
    """Drop the dead references. Finalisers run and may call the backend, so no call may be inside.

    A call of a finaliser that is nested too deeply leaves its dead references to the loops around it.
    """
    cdef PyObject *last
    if objects.ending == MOST_NESTED:
        return
    objects.ending += 1
    while objects.n_dead:
        objects.n_dead -= 1
        objects.held -= 1
        count(objects.probe, LIVE_OBJECTS, -1)
        last = objects.dead[objects.n_dead]
        Py_DECREF(last)
    objects.ending -= 1
    if objects.room > ROOM_KEPT and objects.ending == 0:
        PyMem_RawFree(objects.dead)
        objects.dead, objects.room = NULL, 0
