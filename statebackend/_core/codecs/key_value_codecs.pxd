"""From Python objects to the stored forms of tables, and back.

A ValueCodec serves one role of one state (its values, its elements, its accumulators); a KeyCodec serves one type of
keys. This code converts what is native to a layout (an exact int, float, bool, str or bytes) without a Python
call, and the other declared types by a TypeCodec. The rest goes through the serializer or encoder. That is Python and
may run the user's code, so it is called while no core structure is half-changed, and a second step, which runs nothing,
stores its bytes.
"""

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t

from statebackend._core.codecs.type_codec cimport TypeCodec
from statebackend._core.tables.cow_map cimport CoreKey
from statebackend._core.key_groups cimport HashPlan
from statebackend._core.tables.state_core cimport StateCore
from statebackend._core.tables.values cimport TYPE_BOOL, TYPE_BYTES

cdef enum ValueForm:
    # The Python form of a stored value: the code of a number, STRING or BYTES, or one of these. The layout of the
    # table follows from it.
    FORM_RAW = TYPE_BOOL + 1             # the serializer's bytes, of a fixed width, in the entry
    FORM_SERIALIZED = TYPE_BYTES + 1     # from TYPE_STRING to here: blobs
    FORM_OBJECT = TYPE_BYTES + 2         # a reference

cdef enum:
    MAX_STORED = 128                     # bytes of a fixed width that an entry holds; wider values are blobs

cdef enum KeyForm:
    KEY_NUMBER = 0                       # an int of a declared width
    KEY_STRING = 1
    KEY_BYTES = 2
    KEY_ENCODED = 3                      # any result of the encoder

cdef class ValueCodec:
    cdef readonly int form
    cdef readonly bint is_native         # `load_raw` returns what `finished` would
    cdef readonly uint32_t width         # bytes in an entry or list element
    cdef readonly object layout          # in the form that StateTable takes
    cdef readonly object serializer
    cdef readonly object copy_value      # of FORM_OBJECT: callable, or None when values are immutable
    cdef readonly str where              # for messages: "state 'sum'"
    cdef readonly TypeCodec typed        # of FORM_RAW and FORM_SERIALIZED; None: only the serializer knows the values
    cdef int store_native(self, StateCore core, object value, char *out) except -1
    cdef int store(self, StateCore core, object value, char *out) except -1
    cdef int put_blob(self, StateCore core, const char *data, uint64_t length, char *out) except -1
    cdef bytes serialized(self, object value)
    cdef int store_bytes(self, StateCore core, bytes data, char *out) except -1
    cdef int refuse_none(self) except -1
    cdef int no_memory(self, StateCore core) except -1
    cdef void drop(self, StateCore core, char *stored) noexcept
    cdef object prepared(self, object value)
    cdef int store_prepared(self, StateCore core, object value, char *out) except -1
    cdef object load(self, char *value)
    cdef object load_raw(self, char *value)
    cdef object finished(self, object raw)
    cdef object deserialized(self, char *data, uint64_t length)

cdef class KeyCodec:
    cdef readonly int form
    cdef readonly HashPlan plan
    cdef readonly object encoder
    cdef readonly TypeCodec typed        # of KEY_ENCODED; None: only the encoder knows the keys
    cdef readonly bint is_int            # canonical forms are integers
    cdef int64_t low
    cdef int64_t high
    cdef object split(self, object key, CoreKey *out)
    cdef object split_canonical(self, object canonical, CoreKey *out)
    cdef object encoded(self, object key)
    cdef object canonical(self, CoreKey *key)
    cdef object key_of(self, int64_t number, const char *data, uint64_t length)
    cdef bint has_constant_keys(self) noexcept
