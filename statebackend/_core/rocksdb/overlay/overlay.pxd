"""What an open batch has changed, in front of the database; see `overlay.pyx`.

    Overlay   journal   [Change*] in the order of writing; NULL where a later change has taken the place of one
       |      marks     [number, place in the journal]
       |
    Layer     of a column family
       |      buckets   Node* by hash                         a scalar read or write looks here
       |      fresh     nodes that are not in order yet       sorted in when the order is needed
       |      first     Node --> Node --> ...                 a skip list: walks, and writing to the database
       |
    Node      a key --> Change --> Change --> ...             newest first; the last builds on the database

Invariants. Of a node, each change is in its own interval between marks, except for those that a released mark has
left: the next write joins them. The journal holds every change once, at `place`. A node without a change is gone.
"""

from libc.stddef cimport size_t
from libc.stdint cimport uint8_t, uint32_t, uint64_t

from statebackend._core.memory.interpreter cimport PyThread_get_thread_ident
from statebackend._core.memory.platform cimport hash_bytes
from statebackend._core.rocksdb.binding.write_batch cimport Write
from statebackend._core.rocksdb.binding.buffers cimport Bytes


cdef enum:
    HIGHEST = 16                      # of a node in the skip list
    SEED = 0x5BD1

cdef enum Written:
    DONE
    NO_MEMORY
    TOO_LONG                          # key and value, or the elements appended to a list in the open batch

cdef struct Change:
    Change *before                    # the key's old value; NULL: the database's
    Node *node
    uint64_t place                    # in the journal
    size_t size
    size_t room
    Write what
    char data[1]

cdef struct Node:
    Change *newest
    Node *same_bucket
    Rows *rows
    uint32_t hash
    uint32_t size                     # of the key
    uint8_t height
    uint8_t is_ordered                # in the skip list
    Node *next[1]                     # as many as it is high; the key lies behind them

cdef struct Rows:
    Node **buckets
    size_t n_buckets                  # a power of two, or 0
    size_t n                          # nodes
    Node **fresh
    size_t n_fresh
    size_t fresh_room
    Node *first[HIGHEST]
    uint64_t random
    uint64_t version                  # counts nodes that come or go: walks look at it
    uint64_t written                  # counts nodes that went into the database: a walk begins again behind them
    size_t nbytes

cdef struct MarkPlace:
    uint64_t number
    uint64_t place

cdef inline const char *key_of(Node *node) noexcept nogil:
    return <const char *>&node.next[node.height]

cdef inline uint32_t hash_of(const char *key, size_t n) noexcept nogil:
    return hash_bytes(<const unsigned char *>key, n, SEED)


cdef class Layer:
    cdef Rows rows

    cdef Node *find(self, const char *key, size_t n) noexcept nogil
    cdef Node *find_hashed(self, const char *key, size_t n, uint32_t hash) noexcept nogil
    cdef void look_ahead(self, uint32_t hash) noexcept nogil
    cdef void look_closer(self, uint32_t hash) noexcept nogil
    cdef Node *at_or_after(self, const char *key, size_t n) except? NULL
    cdef Node *from_here(self, const char *key, size_t n) noexcept nogil


cdef class Overlay:
    cdef list layers
    cdef Change **journal
    cdef uint64_t n_journal
    cdef uint64_t journal_room
    cdef MarkPlace *marks
    cdef size_t n_marks
    cdef size_t marks_room
    cdef uint64_t next_number
    cdef bint is_busy                 # a thread reads or writes it without the GIL
    cdef uint32_t inside              # parts of calls that run the user's code; other calls are refused meanwhile
    cdef uint32_t under_way           # calls that may run the user's code, from begin to end
    cdef unsigned long inside_thread  # the thread of these, and of who is busy
    cdef int process                  # the process that made the overlay
    cdef public uint64_t longest      # a key and value of more bytes are refused; tests set less

    cdef int come_in(self) except -1
    cdef int begin(self) except -1
    cdef int come_after(self) except -1
    cdef bint others_leave(self)
    cdef void go_in(self) noexcept
    cdef void go_out(self) noexcept
    cdef Written write(self, Layer layer, Write what, const char *key, size_t n, uint32_t hash, const char *value,
                       size_t size) noexcept nogil
    cdef Change *rewritten(self, Change *change, Write what, const char *value, size_t size) noexcept nogil
    cdef bint are_together(self, uint64_t first, uint64_t second) noexcept nogil
    cdef void join_released(self, Node *node) noexcept nogil
    cdef void drop_change(self, Change *change) noexcept nogil
    cdef void remove_first(self, Rows *rows) noexcept nogil
    cdef size_t find_mark(self, uint64_t number) except? 0


cdef inline void go_inside(Overlay overlay) noexcept:
    # The user's code begins to run inside a call: other calls are refused until `come_out`.
    overlay.inside += 1
    overlay.inside_thread = PyThread_get_thread_ident()

cdef inline void come_out(Overlay overlay) noexcept:
    overlay.inside -= 1

cdef int resolve(Change *newest, const char *base, size_t size, bint has_base, Bytes *out) noexcept nogil
cdef bint needs_base(Change *newest) noexcept nogil
cdef bint put_in_order(Rows *rows) noexcept nogil
cdef bint make_buckets(Rows *rows, size_t more) noexcept nogil
cdef Change *joined(Change *newest) noexcept nogil
