"""Of which parts keys consist that become bytes; see `key_shape.pyx`."""

from cpython.object cimport PyObject
from libc.stdint cimport int64_t, uint32_t
from libc.string cimport memcpy

from statebackend._core.codecs.key_value_codecs cimport KeyCodec
from statebackend._core.codecs.row_maker cimport RowMaker

cdef enum:
    MOST_PARTS = 8                       # of a composite key; those with more take the general way

cdef enum ShapeForm:
    SHAPE_NONE = 0                       # numbers, and types that only their codec knows
    SHAPE_TEXT = 1
    SHAPE_BYTES = 2
    SHAPE_TUPLE = 3

cdef enum PartForm:
    PART_INTEGER = 0
    PART_TRUTH = 1
    PART_TEXT = 2
    PART_BYTES = 3

cdef struct PartShape:
    int form
    int64_t low                          # of an integer
    int64_t high

cdef struct KeyShape:
    int form
    Py_ssize_t n
    PartShape parts[MOST_PARTS]

cdef struct Writer:
    # The end of a canonical form, and of the memory for it. The functions below append a field to it, or do not.
    char *at
    char *end

cdef inline bint put_number(Writer *writer, int64_t number) noexcept:
    if writer.end - writer.at < 9:
        return False
    writer.at[0] = 1
    memcpy(writer.at + 1, &number, 8)
    writer.at += 9
    return True

cdef inline bint put_run(Writer *writer, const char *data, Py_ssize_t length) noexcept:
    cdef uint32_t written = <uint32_t>length
    if length > writer.end - writer.at - 5:
        return False
    writer.at[0] = 1
    memcpy(writer.at + 1, &written, 4)
    memcpy(writer.at + 5, data, length)
    writer.at += 5 + length
    return True

cdef inline bint put_none(Writer *writer) noexcept:
    if writer.end == writer.at:
        return False
    writer.at[0] = 0
    writer.at += 1
    return True

cdef void shape_of(KeyCodec codec, KeyShape *shape)
cdef int64_t bytes_of_tuple(const KeyShape *shape, PyObject *key, char *out) noexcept
cdef int64_t bytes_of_key(const KeyShape *shape, PyObject *key, char *out) noexcept
cdef int64_t bytes_in_row(RowMaker rows, const KeyShape *shape, const Py_ssize_t *columns, int64_t at,
                          char *out) noexcept

cdef extern from *:
    """
    /* How many hold an object; more than there can be where the count does not tell. */
    static inline Py_ssize_t sb_holders(PyObject *object) {
    #ifdef Py_GIL_DISABLED
        (void)object;
        return PY_SSIZE_T_MAX;
    #else
        return Py_REFCNT(object);
    #endif
    }
    """
    Py_ssize_t holders "sb_holders"(PyObject *object) noexcept
