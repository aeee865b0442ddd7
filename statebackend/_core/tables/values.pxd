"""Between Python values and their stored forms, where that takes no serializer: numbers and bytes.

Tables by themselves take no other values. The codecs of handles add the types that need more, and each side words its
own errors.
"""

from cpython.bytes cimport PyBytes_FromStringAndSize
from cpython.object cimport PyObject
from libc.math cimport INFINITY
from libc.stdint cimport int8_t, int16_t, int32_t, int64_t, uint64_t

from statebackend._core.memory.arena cimport Blob, BlobHeap, blob_data, blob_drop, blob_new
from statebackend._core.memory.interpreter cimport PyFloat_CheckExact, PyLong_CheckExact, Py_False, Py_True
from statebackend._core.memory.platform cimport likely, unlikely
from statebackend._core.tables.cow_map cimport VALUE_BLOB, VALUE_OBJECT, Core
from statebackend._core.tables.objects cimport drop_object

cdef extern from "Python.h":
    double PyFloat_AS_DOUBLE(object o) noexcept

cdef extern from *:
    """
    /* The value of an exact int; 0 if it does not fit. Never raises. */
    static inline int sb_long_as_int64(PyObject *number, int64_t *out) {
        int overflow;
        long long value;
    #if PY_VERSION_HEX >= 0x030C0000
        if (PyUnstable_Long_IsCompact((PyLongObject *)number)) {
            *out = PyUnstable_Long_CompactValue((PyLongObject *)number);
            return 1;
        }
    #elif PyLong_SHIFT == 30
        const digit *digits = ((PyLongObject *)number)->ob_digit;
        switch (Py_SIZE(number)) {
            case 0: *out = 0; return 1;
            case 1: *out = digits[0]; return 1;
            case -1: *out = -(int64_t)digits[0]; return 1;
            case 2: *out = (int64_t)digits[0] | ((int64_t)digits[1] << 30); return 1;
            case -2: *out = -((int64_t)digits[0] | ((int64_t)digits[1] << 30)); return 1;
        }
    #endif
        value = PyLong_AsLongLongAndOverflow(number, &overflow);
        *out = value;
        return !overflow;
    }
    static inline int sb_goes_as_tuple(PyObject *value) {
        /* A class of tuples whose values go through their items as tuples do. */
        PyTypeObject *type = Py_TYPE(value);
        return type == &PyTuple_Type || (type->tp_iter == PyTuple_Type.tp_iter
            && type->tp_as_sequence->sq_length == PyTuple_Type.tp_as_sequence->sq_length);
    }
    """
    bint long_as_int64 "sb_long_as_int64"(object number, int64_t *out) noexcept
    bint goes_as_tuple "sb_goes_as_tuple"(object value) noexcept

cdef enum:
    MAX_BYTES = 0x7FFFFFFF               # of one key or value

cdef enum TypeCode:
    # The types of `statebackend.types.layout`; a test compares the numbers.
    TYPE_DOUBLE = 1                      # from here to TYPE_BOOL: numbers that entries hold as they are
    TYPE_FLOAT = 2
    TYPE_LONG = 3                        # from here to TYPE_DECIMAL: values that represent integers
    TYPE_INT = 4
    TYPE_SHORT = 5
    TYPE_BYTE = 6
    TYPE_BOOL = 7
    TYPE_DATE = 8
    TYPE_TIMESTAMP = 9
    TYPE_TIMESTAMP_NTZ = 10
    TYPE_DECIMAL = 11                    # in 64 bits; keys of the types up to here are integers
    TYPE_LONG_DECIMAL = 12               # in 128 bits
    TYPE_STRING = 13
    TYPE_BYTES = 14
    TYPE_RECORD = 15                     # TUPLE and ROW
    TYPE_LIST = 16
    TYPE_MAP = 17
    TYPE_OTHER = 18                      # by a serializer in Python

cdef enum ValueCode:
    # The Python form of a table's values: the code of a number, or one of these. The layout knows their ValueKind only.
    CODE_RAW = 0
    CODE_BLOB = TYPE_BOOL + 1
    CODE_OBJECT = TYPE_BOOL + 2
    CODE_LIST = TYPE_BOOL + 3
    CODE_ANCHOR = TYPE_BOOL + 4

cdef inline bint is_integer(int code) noexcept nogil:
    return TYPE_LONG <= code <= TYPE_BYTE

cdef inline bint stands_for_integer(int code) noexcept nogil:
    return TYPE_LONG <= code <= TYPE_DECIMAL

cdef inline int64_t load_integer(int code, const char *value) noexcept nogil:
    if code == TYPE_LONG:
        return (<const int64_t *>value)[0]
    if code == TYPE_INT:
        return (<const int32_t *>value)[0]
    if code == TYPE_SHORT:
        return (<const int16_t *>value)[0]
    if code == TYPE_BYTE:
        return (<const int8_t *>value)[0]
    return value[0] != 0

cdef inline bint store_integer(int code, int64_t number, char *out) noexcept nogil:
    """Store an integer; False if it does not fit the type."""
    if likely(code == TYPE_LONG):
        (<int64_t *>out)[0] = number
        return True
    if code == TYPE_INT:
        (<int32_t *>out)[0] = <int32_t>number
        return number == <int32_t>number
    if code == TYPE_SHORT:
        (<int16_t *>out)[0] = <int16_t>number
        return number == <int16_t>number
    out[0] = <char>number
    return code == TYPE_BOOL or number == <int8_t>number

cdef inline bint store_number(int code, object value, char *out) noexcept:
    """Write the stored form of an exact int, float or bool, whichever the code wants; False if it does not fit."""
    cdef int64_t number
    cdef double real
    if is_integer(code):
        if not PyLong_CheckExact(value) or not long_as_int64(value, &number):
            return False
        return store_integer(code, number, out)
    if code == TYPE_BOOL:
        out[0] = <PyObject *>value == Py_True
        return <PyObject *>value == Py_True or <PyObject *>value == Py_False
    if not PyFloat_CheckExact(value):
        return False
    real = PyFloat_AS_DOUBLE(value)
    if code == TYPE_DOUBLE:
        (<double *>out)[0] = real
        return True
    (<float *>out)[0] = <float>real
    # A number that rounds to infinity is out of range.
    return (<float *>out)[0] - (<float *>out)[0] == 0 or real != real or real == INFINITY or real == -INFINITY

cdef inline object load_number(int code, const char *value):
    """The Python number of a stored one."""
    if code == TYPE_LONG:
        return (<const int64_t *>value)[0]
    if code == TYPE_DOUBLE:
        return (<const double *>value)[0]
    if code == TYPE_INT:
        return (<const int32_t *>value)[0]
    if code == TYPE_BOOL:
        return value[0] != 0
    if code == TYPE_SHORT:
        return (<const int16_t *>value)[0]
    if code == TYPE_BYTE:
        return (<const int8_t *>value)[0]
    return <double>(<const float *>value)[0]

cdef inline Blob *blob_of_value(BlobHeap *heap, const char *data, uint64_t length) except? NULL:
    """Make a blob of the bytes of a value; NULL without memory, OverflowError if they are too many."""
    if unlikely(length > MAX_BYTES):
        raise OverflowError("a value is larger than 2 GB")
    return blob_new(heap, data, length)

cdef inline bytes load_blob(const char *value):
    """The bytes of a stored blob."""
    cdef Blob *blob = (<Blob *const *>value)[0]
    return PyBytes_FromStringAndSize(blob_data(blob), blob.length)

cdef inline void drop_value(Core *core, int kind, char *value) noexcept nogil:
    """Drop what a stored form of a ValueKind refers to, if it is not a list and no anchor."""
    if kind == VALUE_BLOB:
        if (<Blob **>value)[0] != NULL:
            blob_drop(core.blobs, (<Blob **>value)[0])
    elif kind == VALUE_OBJECT:
        drop_object(&core.objects, value)
