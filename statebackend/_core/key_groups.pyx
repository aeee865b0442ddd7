"""Key groups as Spark's ``hash`` gives them: ``pmod(hash(key), max_parallelism)``, one key or a batch.

``key_groups.pxd`` describes the canonical forms that are hashed, and the table of hash kinds. Batches go in blocks:
one loop hashes a block into a small buffer, a second reduces it to key groups. For the "int" kinds both loops are
free of branches and of integer division, so the compiler turns them into vector instructions.
"""

from cpython.mem cimport PyMem_Free, PyMem_Malloc
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t
from libc.string cimport memcpy

import numpy as np

from statebackend.errors import SerializationError, UsageError


cdef enum:
    BLOCK = 1024          # hashes per block: 4 KB, in the first-level cache next to the keys
    MAX_OPS = 4096        # fields of one composite key, nested ones included
    MAX_DEPTH = 64


cdef int32_t hash_composite(const HashProgram* program, const uint8_t* p, Py_ssize_t n) noexcept nogil:
    cdef int32_t hash = SPARK_SEED
    cdef const uint8_t* end = p + n
    cdef const HashOp* op = program.ops
    cdef const HashOp* last = program.ops + program.n_ops
    cdef int64_t integer = 0
    cdef uint32_t length = 0
    cdef uint8_t present
    while op < last and p < end:
        present = p[0]
        p += 1
        if not present:
            op += 1 + op.skip
            continue
        if op.kind == HASH_BYTES:
            if end - p < 4:
                break
            memcpy(&length, p, 4)
            p += 4
            if end - p < <Py_ssize_t>length:
                break
            hash = spark_hash_bytes(p, length, hash)
            p += length
        elif op.kind != HASH_STRUCT:
            if end - p < 8:
                break
            memcpy(&integer, p, 8)
            p += 8
            if op.kind == HASH_INT32:
                hash = spark_hash_int(<int32_t>integer, hash)
            else:
                hash = spark_hash_long(integer, hash)
        op += 1
    return hash


cdef void hash_ints(
    const HashProgram* program, const int64_t* keys, Py_ssize_t n, int32_t* out
) noexcept nogil:
    cdef Py_ssize_t i
    if program.kind == HASH_INT32:
        for i in range(n):
            out[i] = spark_hash_int(<int32_t>keys[i], SPARK_SEED)
    else:
        for i in range(n):
            out[i] = spark_hash_long(keys[i], SPARK_SEED)


cdef void hash_byte_runs(
    const HashProgram* program, const int64_t* offsets, const uint8_t* data, Py_ssize_t n, int32_t* out
) noexcept nogil:
    cdef Py_ssize_t i
    if program.kind == HASH_BYTES:
        for i in range(n):
            out[i] = spark_hash_bytes(data + offsets[i], offsets[i + 1] - offsets[i], SPARK_SEED)
    else:
        for i in range(n):
            out[i] = hash_composite(program, data + offsets[i], offsets[i + 1] - offsets[i])


cdef void _pmod_block(
    const int32_t* hashes, Py_ssize_t n, int32_t max_parallelism, group_t* out
) noexcept nogil:
    cdef Py_ssize_t i
    cdef int32_t remainder
    cdef int32_t mask = max_parallelism - 1
    if max_parallelism & mask == 0:
        # In two's complement the mask gives the non-negative remainder of negative hashes too.
        for i in range(n):
            out[i] = <group_t>(hashes[i] & mask)
    else:
        # Vector integer division does not exist. Both operands are exact as doubles and a quotient that is not
        # whole is at least 2^-15 from a whole number, far more than the rounding of one below 2^31:
        # truncation is exact.
        for i in range(n):
            remainder = hashes[i] - <int32_t>(<double>hashes[i] / <double>max_parallelism) * max_parallelism
            out[i] = <group_t>(remainder + ((remainder >> 31) & max_parallelism))


cdef void key_groups_of_ints(
    const HashProgram* program, const int64_t* keys, Py_ssize_t n, int32_t max_parallelism, group_t* out
) noexcept nogil:
    cdef int32_t hashes[BLOCK]
    cdef Py_ssize_t start = 0
    cdef Py_ssize_t size
    while start < n:
        size = min(<Py_ssize_t>BLOCK, n - start)
        hash_ints(program, keys + start, size, hashes)
        _pmod_block(hashes, size, max_parallelism, out + start)
        start += size


cdef void key_groups_of_byte_runs(
    const HashProgram* program,
    const int64_t* offsets,
    const uint8_t* data,
    Py_ssize_t n,
    int32_t max_parallelism,
    group_t* out,
) noexcept nogil:
    cdef int32_t hashes[BLOCK]
    cdef Py_ssize_t start = 0
    cdef Py_ssize_t size
    while start < n:
        size = min(<Py_ssize_t>BLOCK, n - start)
        hash_byte_runs(program, offsets + start, data, size, hashes)
        _pmod_block(hashes, size, max_parallelism, out + start)
        start += size


cdef dict _KINDS = {"int32": <int>HASH_INT32, "int64": <int>HASH_INT64, "bytes": <int>HASH_BYTES}


cdef Py_ssize_t _count_ops(object fields, int depth) except -1:
    cdef Py_ssize_t total = 0
    if depth > MAX_DEPTH:
        raise UsageError(
            "a composite key type is nested too deeply", detail=f"at most {<int>MAX_DEPTH} levels"
        )
    for field in fields:
        total += 1
        if isinstance(field, tuple):
            total += _count_ops(field[1], depth + 1)
    return total


cdef class HashPlan:
    """The hash of keys of one type, built from ``KeyEncoder.hash_plan``.

    The description is ``"int32"``, ``"int64"``, ``"bytes"`` or ``("struct", (description, ...))``.
    """

    def __cinit__(self, description not None):
        cdef Py_ssize_t count
        self.program.ops = NULL
        self.program.n_ops = 0
        self.description = description
        if not isinstance(description, tuple):
            self.program.kind = _kind_of(description)
            return
        fields = _fields_of(description)
        count = _count_ops(fields, 1)
        if count > MAX_OPS:
            raise UsageError(
                "a composite key type has too many fields", detail=f"{count}, at most {<int>MAX_OPS}"
            )
        self.program.kind = HASH_STRUCT
        self.program.ops = <HashOp*>PyMem_Malloc(count * sizeof(HashOp))
        if self.program.ops == NULL:
            raise MemoryError(f"cannot allocate {count * sizeof(HashOp)} bytes for a hash plan")
        self._fill(self.program.ops, fields, 0)
        self.program.n_ops = <int32_t>count

    def __dealloc__(self):
        PyMem_Free(self.program.ops)

    def __reduce__(self):
        return HashPlan, (self.description,)

    cdef int _fill(self, HashOp* ops, object fields, Py_ssize_t at) except -1:
        cdef Py_ssize_t inner
        for field in fields:
            if isinstance(field, tuple):
                nested = _fields_of(field)
                inner = _count_ops(nested, 1)
                ops[at].kind = HASH_STRUCT
                ops[at].skip = <int32_t>inner
                self._fill(ops, nested, at + 1)
                at += 1 + inner
            else:
                ops[at].kind = _kind_of(field)
                ops[at].skip = 0
                at += 1
        return 0

    @property
    def is_int(self) -> bool:
        """True if canonical forms are integers, False if they are bytes."""
        return self.program.kind == HASH_INT32 or self.program.kind == HASH_INT64

    def key_groups(self, canonical not None, int32_t max_parallelism):
        """Key groups, as a uint16 array, of keys as `KeyEncoder.encode_many` returns them; O(n), without the GIL."""
        cdef const int64_t[::1] numbers
        cdef const uint8_t[::1] data
        cdef const uint8_t* start = NULL
        cdef Py_ssize_t n
        cdef uint16_t[::1] out
        if isinstance(canonical, tuple) == self.is_int:
            raise UsageError(
                "this hash plan takes " + ("integers, not bytes" if self.is_int else "bytes, not integers"),
                hint="see KeyEncoder.kind",
            )
        if max_parallelism < 1 or max_parallelism > MAX_MAX_PARALLELISM:
            raise UsageError(
                "max_parallelism is out of range", detail=f"{max_parallelism}, allowed are 1 to 32768"
            )
        if self.is_int:
            numbers = canonical
            n = numbers.shape[0]
        else:
            numbers, data = canonical
            n = _check_offsets(numbers, data)
            if data.shape[0]:
                start = &data[0]
        out = result = np.empty(n, dtype=np.uint16)
        if n == 0:
            return result
        with nogil:
            if self.program.kind == HASH_INT32 or self.program.kind == HASH_INT64:
                key_groups_of_ints(&self.program, &numbers[0], n, max_parallelism, &out[0])
            else:
                key_groups_of_byte_runs(&self.program, &numbers[0], start, n, max_parallelism, &out[0])
        return result


cdef int _kind_of(object description) except -1:
    kind = _KINDS.get(description) if isinstance(description, str) else None
    if kind is None:
        raise UsageError(
            "unknown hash description",
            hint="use KeyEncoder.hash_plan: 'int32', 'int64', 'bytes' or ('struct', (description, ...))",
        )
    return kind


cdef object _fields_of(tuple description):
    is_struct = len(description) == 2 and description[0] == "struct"
    if not is_struct or not isinstance(description[1], tuple) or not description[1]:
        raise UsageError("unknown hash description", hint="a composite is ('struct', (description, ...))")
    return description[1]


cdef Py_ssize_t _check_offsets(const int64_t[::1] offsets, const uint8_t[::1] data) except -1:
    cdef Py_ssize_t n = offsets.shape[0] - 1
    cdef Py_ssize_t i
    cdef bint ordered = True
    if n < 0:
        raise SerializationError("offsets are empty", hint="n byte strings have n + 1 offsets")
    for i in range(n):
        ordered = ordered and offsets[i] <= offsets[i + 1]
    if not ordered or offsets[0] < 0 or offsets[n] > data.shape[0]:
        raise SerializationError("offsets do not ascend within the data", detail=f"{n} byte strings")
    return n
