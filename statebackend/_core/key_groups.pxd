# Murmur3 as Spark's `hash` computes it, over canonical forms of keys.
#
# A canonical form is either an int64 (the "int" kinds) or a run of bytes. Which of Spark's hashes it takes
# depends on the declared type, which a HashProgram describes, so that hashing needs neither the GIL nor a
# Python object:
#
#   kind          canonical form                        hashed as
#   HASH_INT32    int64 that fits in 32 bits            one int: INT SHORT BYTE BOOL DATE, FLOAT by its bits
#   HASH_INT64    int64                                 one long: LONG TIMESTAMP* DECIMAL<=18, DOUBLE likewise
#   HASH_BYTES    bytes                                 bytes: STRING BYTES, DECIMAL>18 as big-endian bytes
#   HASH_STRUCT   fields one after another, each        field by field, the hash so far being the seed of
#                   presence byte 0 or 1, and if 1        the next; a null field leaves it as it is
#                   int kinds: 8 bytes little-endian
#                   bytes:     u32 little-endian, bytes
#                   struct:    its fields, likewise
#
# The functions never read outside the bytes they are given: a composite that ends early hashes
# as far as it goes.

from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memcpy


cdef enum:
    SPARK_SEED = 42
    MAX_MAX_PARALLELISM = 32768


cdef enum HashKind:
    HASH_INT32 = 1
    HASH_INT64 = 2
    HASH_BYTES = 3
    HASH_STRUCT = 4


cdef struct HashOp:
    int32_t kind    # a HashKind
    int32_t skip    # HASH_STRUCT: how many of the following ops are inside it, to jump over when it is null


cdef struct HashProgram:
    int32_t kind        # of the whole key; HASH_STRUCT means: run the ops
    int32_t n_ops       # 0 unless HASH_STRUCT
    HashOp* ops         # fields in depth-first order; owned by the HashPlan


ctypedef fused group_t:
    uint16_t
    int32_t


cdef inline uint32_t _rotl(uint32_t x, int r) noexcept nogil:
    return (x << r) | (x >> (32 - r))


cdef inline uint32_t _mix_k1(uint32_t k1) noexcept nogil:
    return _rotl(k1 * <uint32_t>0xcc9e2d51, 15) * <uint32_t>0x1b873593


cdef inline uint32_t _mix_h1(uint32_t h1, uint32_t k1) noexcept nogil:
    return _rotl(h1 ^ k1, 13) * <uint32_t>5 + <uint32_t>0xe6546b64


cdef inline uint32_t _finish(uint32_t h1, uint32_t length) noexcept nogil:
    h1 ^= length
    h1 ^= h1 >> 16
    h1 *= <uint32_t>0x85ebca6b
    h1 ^= h1 >> 13
    h1 *= <uint32_t>0xc2b2ae35
    h1 ^= h1 >> 16
    return h1


cdef inline int32_t spark_hash_int(int32_t v, int32_t seed) noexcept nogil:
    return <int32_t>_finish(_mix_h1(<uint32_t>seed, _mix_k1(<uint32_t>v)), 4)


cdef inline int32_t spark_hash_long(int64_t v, int32_t seed) noexcept nogil:
    cdef uint32_t h1 = _mix_h1(<uint32_t>seed, _mix_k1(<uint32_t>v))
    return <int32_t>_finish(_mix_h1(h1, _mix_k1(<uint32_t>(<uint64_t>v >> 32))), 8)


cdef inline int32_t spark_hash_bytes(const uint8_t* p, Py_ssize_t n, int32_t seed) noexcept nogil:
    # Spark's hashUnsafeBytes: whole little-endian words, then each byte of the tail, sign-extended, as a separate
    # # word. Standard Murmur3 treats the tail otherwise.
    cdef uint32_t h1 = <uint32_t>seed
    cdef uint32_t word = 0
    cdef Py_ssize_t i = 0
    cdef Py_ssize_t aligned = n - (n & 3)
    while i < aligned:
        memcpy(&word, p + i, 4)
        h1 = _mix_h1(h1, _mix_k1(word))
        i += 4
    while i < n:
        h1 = _mix_h1(h1, _mix_k1(<uint32_t><int32_t>(<signed char>p[i])))
        i += 1
    return <int32_t>_finish(h1, <uint32_t>n)


cdef inline int32_t pmod_group(int32_t hash, int32_t max_parallelism) noexcept nogil:
    cdef int32_t r = hash % max_parallelism
    return r + max_parallelism if r < 0 else r


cdef inline uint32_t group_of_hash(int32_t hash, uint32_t max_parallelism) noexcept nogil:
    # For a power of two, the mask is the non-negative remainder in two's complement: no division.
    if max_parallelism & (max_parallelism - 1) == 0:
        return <uint32_t>hash & (max_parallelism - 1)
    return <uint32_t>pmod_group(hash, <int32_t>max_parallelism)


cdef inline int32_t hash_canonical_int(const HashProgram* program, int64_t key) noexcept nogil:
    if program.kind == HASH_INT32:
        return spark_hash_int(<int32_t>key, SPARK_SEED)
    return spark_hash_long(key, SPARK_SEED)


cdef int32_t hash_composite(const HashProgram* program, const uint8_t* p, Py_ssize_t n) noexcept nogil


cdef inline int32_t hash_canonical_bytes(
    const HashProgram* program, const uint8_t* p, Py_ssize_t n
) noexcept nogil:
    if program.kind == HASH_BYTES:
        return spark_hash_bytes(p, n, SPARK_SEED)
    return hash_composite(program, p, n)


# Batches. `offsets` has n + 1 elements, need not start at 0, and must lie within `data`: not checked here.
# `max_parallelism` is 1 to 32768: not checked here.
cdef void key_groups_of_ints(
    const HashProgram* program, const int64_t* keys, Py_ssize_t n, int32_t max_parallelism, group_t* out
) noexcept nogil
cdef void key_groups_of_byte_runs(
    const HashProgram* program,
    const int64_t* offsets,
    const uint8_t* data,
    Py_ssize_t n,
    int32_t max_parallelism,
    group_t* out,
) noexcept nogil


cdef class HashPlan:
    cdef HashProgram program            # read by C code as &plan.program for as long as it holds the HashPlan
    cdef readonly object description    # what the plan was built from, a str or nested tuples

    cdef int _fill(self, HashOp* ops, object fields, Py_ssize_t at) except -1
