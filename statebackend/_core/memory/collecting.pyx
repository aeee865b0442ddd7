"""Python's collections, which wait while anybody has stopped them: any thread, for any backend.

The finalisers that a collection runs, on any thread, may write, roll back or close. Whoever has places in memory in
hand while Python makes objects, or while other threads have the GIL, stops collections meanwhile. One count is for all:
if two had a count each, one would let collections go on while the other one is inside, or not at all.

>>> import gc
>>> stop(), stop(), go_on(), gc.isenabled(), go_on(), gc.isenabled()
(None, None, None, False, None, True)
"""

import os

cdef extern from "Python.h":
    bint PyGC_Disable()
    bint PyGC_Enable()

cdef int stops = 0
cdef bint were_on = False


cdef void stop_collecting() noexcept:
    """Let collections wait until `go_on_collecting`. Runs no Python, as the other one."""
    global stops, were_on
    if stops == 0:
        were_on = PyGC_Disable()
    stops += 1


cdef void go_on_collecting() noexcept:
    global stops
    if stops:                            # none in a child of who had stopped them
        stops -= 1
        if stops == 0 and were_on:
            PyGC_Enable()


def stop():
    """As `stop_collecting`, for Python."""
    stop_collecting()


def go_on():
    """As `go_on_collecting`, for Python."""
    go_on_collecting()


def _forked():
    """In a child: the threads that had stopped them are gone."""
    global stops
    if stops:
        stops = 1
        go_on_collecting()


os.register_at_fork(after_in_child=_forked)
