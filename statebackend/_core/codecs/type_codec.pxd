"""The compiled form of a declared type: from Python objects to the bytes of its serializer, or of its keys, and back.

A tree of codecs mirrors the type. Each knows the values that people usually have: exact ints, strs, lists and dicts,
any kind of tuple, dataclasses, datetimes. It answers 0, or DAMAGED, for all others. Then the Python serializer or
encoder takes over, from the beginning: its bytes and values are the same, and it words every error.
"""

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t

cdef enum:
    ROOM = 512                           # bytes that need no separate memory

cdef struct Room:
    # Bytes that grow while a value is written.
    char *data                           # `first`, or memory to be freed
    uint64_t used
    uint64_t capacity
    char first[ROOM]

cdef inline void open_room(Room *room) noexcept:
    room.data = room.first
    room.used = 0
    room.capacity = ROOM

cdef void close_room(Room *room) noexcept
cdef char *take_room(Room *room, uint64_t n) except NULL

cdef object DAMAGED                      # what reading returns for bytes that are none of the type's

cdef class TypeCodec:
    cdef readonly int kind               # a TypeCode
    cdef readonly uint32_t width         # of a value's bytes; 0: they vary, or are none
    cdef bint is_fixed                   # all values have `width`
    cdef readonly tuple parts            # of a LIST: its element; of a MAP: key and value
    cdef tuple names                     # of a ROW's fields
    cdef object record_class             # of a ROW: a tuple class or a dataclass
    cdef bint is_made                    # a dataclass without a base in C, as the first record showed
    cdef bint is_tuple                   # records come back as tuples, or as a class of them
    cdef object reader                   # of a ROW: whether an object is such a record, as the serializer tells it
    cdef object taken                    # the class of dataclasses that `reader` took last
    cdef object serializer               # of TYPE_OTHER
    cdef bint is_key                     # one zero, one NaN
    cdef list texts                      # of a MAP with keys of text: some short ones that came before, or None
    cdef bint may_repeat                 # of a MAP: a dict may have two keys that are one here, as two NaNs are
    cdef int precision                   # of a DECIMAL
    cdef int scale
    cdef int64_t low                     # of an integer
    cdef int64_t high

    # Writing. 1: done; 0: not for a value like this. Where `runs_python` is false nothing runs but C.
    cdef int write(self, object value, Room *room, bint runs_python) except -1
    cdef int write_slot(self, object value, Room *room, bint runs_python) except -1
    cdef int write_null(self, Room *room) except -1
    cdef int write_number(self, object value, Room *room, bint runs_python) except -1
    cdef int write_record(self, object value, Room *room, bint runs_python) except -1
    cdef int write_list(self, object value, Room *room, bint runs_python) except -1
    cdef int write_map(self, object value, Room *room, bint runs_python) except -1
    cdef int write_key(self, object value, Room *room) except -1
    cdef int integer_of(self, object value, int64_t *number, bint runs_python) except -1
    cdef int real_of(self, object value, double *number) noexcept
    cdef int key_number(self, object value, int64_t *number) except -1
    cdef object field_of(self, object value, Py_ssize_t i, bint runs_python)
    cdef int takes(self, object value, bint runs_python) except -1

    # Reading.
    cdef object read(self, const char *data, uint64_t length)
    cdef object read_slot(self, const char *data, uint64_t length, uint64_t *at, bint is_null)
    cdef object read_record(self, const char *data, uint64_t length)
    cdef object read_list(self, const char *data, uint64_t length)
    cdef object read_map(self, const char *data, uint64_t length)
    cdef object read_text(self, const char *data, uint64_t length, uint64_t *at)
    cdef object key_of(self, const char *data, uint64_t length)
    cdef object read_key_run(self, const char *data, uint64_t length)
    cdef object read_key(self, const char *data, uint64_t length, uint64_t *at)
    cdef object from_integer(self, int64_t number)
    cdef object from_key_number(self, int64_t number)
    cdef object record_of(self, object fields)
