"""The part of a backend's compiled state that belongs to all of its tables."""

from libc.stdint cimport int64_t, uint32_t, uint64_t

from statebackend._core.memory.arena cimport Arena
from statebackend._core.memory.interpreter cimport PyThread_get_thread_ident
from statebackend._core.tables.cow_map cimport Core, Journal, Snapshot
from statebackend._core.memory.journal cimport Log
from statebackend._core.memory.platform cimport unlikely
from statebackend._core.tables.namespaces cimport NamespaceTable
from statebackend._core.tables.objects cimport end_dead

cdef class CoreMark

cdef enum:
    NOT_UNDONE = 0xFFFFFFFFFFFFFFFF

cdef struct UndoNote:
    # Tells whoever keeps an order next to the tables how far rollbacks have gone since it last looked.
    uint64_t mark                        # number of the oldest mark that was rolled back to, or NOT_UNDONE
    UndoNote *next                       # of the core

cdef class StateCore:
    cdef Core core
    cdef readonly Arena arena
    cdef readonly NamespaceTable namespaces
    cdef list open_marks                 # Mark, oldest first
    cdef readonly uint64_t marks_opened  # so far; unlike versions, never counted again
    cdef UndoNote *undo_notes            # owned by those who look at them
    cdef readonly bint closed
    cdef readonly uint64_t calls         # how many calls have entered
    cdef readonly uint64_t rollbacks
    cdef uint32_t inside                 # parts of calls during which other calls are refused
    cdef uint32_t under_way              # calls that may run the user's code, from begin to end
    cdef unsigned long inside_thread     # the thread of both
    cdef list later                      # callables that run at the end of the outermost call
    cdef int process                     # the process that made the core
    cdef int enter(self) except -1
    cdef int enter_step(self) except -1
    cdef Py_ssize_t place_of(self, CoreMark mark) noexcept
    cdef uint64_t reclaims               # counts the calls of `reclaim`
    cdef void reclaim(self, int64_t budget) noexcept
    cdef int refuse(self) except -1
    cdef int settle(self) except -1
    cdef int occupy(self) except -1
    cdef void vacate(self) noexcept
    cdef void leave(self) noexcept
    cdef void after_close(self) noexcept
    cdef int out_of_memory(self) except -1
    cdef int undo_to(self, Journal *journal, uint32_t version) except -1
    cdef int undo_call(self, Journal *journal, Log *log) except -1
    cdef int undo_failed(self, Journal *journal, Log *log, uint64_t down_to, Log *carried) except -1
    cdef int settle_undone(self, Journal *journal, Log *carried) except -1
    cdef int give_up(self, Journal *journal, Log *carried) except -1
    cdef void end(self) noexcept
    cdef bint keep_carried(self, Journal *journal) noexcept
    cdef Snapshot *open_snapshot(self) except NULL
    cdef int require_open(self, CoreMark mark) except -1
    cdef void keep_note(self, UndoNote *note) noexcept
    cdef void forget_note(self, UndoNote *note) noexcept
    cdef uint64_t oldest_mark(self) noexcept
    cdef int bump_version(self) except -1
    cdef int renumber(self) except -1

cdef class CoreMark:
    cdef readonly StateCore owner
    cdef uint64_t number                 # of marks opened so far, this one included
    cdef uint32_t version
    cdef uint32_t before                 # the journal's version to go back to on release; 0: it cannot go back
    cdef readonly bint is_open

cdef void discard_log(Core *core, Journal *journal, Log *log) noexcept nogil

cdef inline void end_objects(StateCore core) noexcept:
    # The outermost call is over: drop the objects that it let go of.
    if unlikely(core.core.objects.n_dead != 0) and not (core.inside or core.under_way or core.core.busy):
        end_dead(&core.core.objects)

cdef inline void end_objects_of_row(StateCore core) noexcept:
    # The same between the rows of a call, each of which is its own call: a batch could let go of a great many.
    if unlikely(core.core.objects.n_dead != 0) and not (core.inside or core.core.busy):
        end_dead(&core.core.objects)

cdef inline void begin_call(StateCore core) noexcept:
    # A call begins that may run the user's code, or lets go of objects before it is done: deferred callables and dead
    # objects wait until `end_call`.
    core.under_way += 1
    core.inside_thread = PyThread_get_thread_ident()

cdef inline int end_call(StateCore core) except -1:
    core.under_way -= 1
    core.settle()
    return 0

cdef inline void begin_inside(StateCore core) noexcept:
    # Other calls are refused until `leave`.
    core.inside += 1
    core.inside_thread = PyThread_get_thread_ident()

cdef inline uint64_t go_in(StateCore core) noexcept:
    # The user's code begins to run inside a call: other calls are refused until `come_out`. No handle remembers a slot
    # meanwhile, so that each of them asks.
    begin_inside(core)
    core.calls += 1
    return core.calls

cdef inline void come_out(StateCore core, uint64_t entered) noexcept:
    if core.calls == entered:            # nothing was called: handles' memories are still valid
        core.calls = entered - 1
    core.inside -= 1
    if unlikely(core.closed):
        core.after_close()
