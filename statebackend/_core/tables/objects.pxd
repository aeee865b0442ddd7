"""Numbers out of Python objects, as fast as their layout allows."""

from libc.stdint cimport int64_t

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
