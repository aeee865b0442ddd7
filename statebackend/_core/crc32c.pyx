"""CRC-32C (Castagnoli): the checksum of checkpoint files and manifests.

It uses the processor's own instruction if there is one (SSE4.2 on x86-64, the CRC extension on 64-bit ARM), otherwise
tables, eight bytes per step. Loading the module decides which.
"""

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from libc.stddef cimport size_t
from libc.stdint cimport uint8_t, uint32_t

from statebackend.errors import UsageError

cdef extern from *:
    """
    #include <stddef.h>
    #include <stdint.h>
    #include <string.h>
    #if defined(__aarch64__) && defined(__linux__)
    #include <sys/auxv.h>
    #endif

    /* Bits reversed, as everywhere: 0x1EDC6F41 read from the other end. */
    #define SB_CRC32C_POLYNOMIAL 0x82F63B78u

    static uint32_t sb_crc32c_tables[8][256];

    static void sb_crc32c_fill_tables(void) {
        for (uint32_t byte = 0; byte < 256; byte++) {
            uint32_t crc = byte;
            for (int bit = 0; bit < 8; bit++)
                crc = (crc >> 1) ^ (crc & 1 ? SB_CRC32C_POLYNOMIAL : 0);
            sb_crc32c_tables[0][byte] = crc;
        }
        for (uint32_t byte = 0; byte < 256; byte++)
            for (int k = 1; k < 8; k++) {
                uint32_t crc = sb_crc32c_tables[k - 1][byte];
                sb_crc32c_tables[k][byte] = (crc >> 8) ^ sb_crc32c_tables[0][crc & 0xff];
            }
    }

    static uint32_t sb_crc32c_by_tables(uint32_t crc, const uint8_t *p, size_t n) {
        while (n >= 8) {
            /* Byte by byte, so that the order of bytes in a word does not matter. */
            uint32_t low = crc ^ ((uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16
                                  | (uint32_t)p[3] << 24);
            crc = sb_crc32c_tables[7][low & 0xff] ^ sb_crc32c_tables[6][(low >> 8) & 0xff]
                ^ sb_crc32c_tables[5][(low >> 16) & 0xff] ^ sb_crc32c_tables[4][low >> 24]
                ^ sb_crc32c_tables[3][p[4]] ^ sb_crc32c_tables[2][p[5]]
                ^ sb_crc32c_tables[1][p[6]] ^ sb_crc32c_tables[0][p[7]];
            p += 8;
            n -= 8;
        }
        while (n--)
            crc = (crc >> 8) ^ sb_crc32c_tables[0][(crc ^ *p++) & 0xff];
        return crc;
    }

    #if defined(__x86_64__)
    #define SB_CRC32C_INSTRUCTION "SSE4.2"
    __attribute__((target("sse4.2")))
    static uint32_t sb_crc32c_by_instruction(uint32_t crc, const uint8_t *p, size_t n) {
        uint64_t wide = crc;
        for (; n >= 8; p += 8, n -= 8) {
            uint64_t word;
            memcpy(&word, p, 8);
            wide = __builtin_ia32_crc32di(wide, word);
        }
        crc = (uint32_t)wide;
        for (; n; p++, n--)
            crc = __builtin_ia32_crc32qi(crc, *p);
        return crc;
    }
    static int sb_crc32c_has_instruction(void) {
        __builtin_cpu_init();
        return __builtin_cpu_supports("sse4.2") != 0;
    }
    #elif defined(__aarch64__)
    #define SB_CRC32C_INSTRUCTION "ARMv8 CRC"
    static uint32_t sb_crc32c_by_instruction(uint32_t crc, const uint8_t *p, size_t n) {
        for (; n >= 8; p += 8, n -= 8) {
            uint64_t word;
            memcpy(&word, p, 8);
            __asm__(".arch_extension crc\\n\\tcrc32cx %w0, %w0, %x1" : "+r"(crc) : "r"(word));
        }
        for (; n; p++, n--) {
            uint32_t byte = *p;
            __asm__(".arch_extension crc\\n\\tcrc32cb %w0, %w0, %w1" : "+r"(crc) : "r"(byte));
        }
        return crc;
    }
    static int sb_crc32c_has_instruction(void) {
    #if defined(__APPLE__)
        return 1;                                   /* every 64-bit Apple processor for the Mac has it */
    #elif defined(__linux__)
        return (getauxval(AT_HWCAP) & (1u << 7)) != 0;  /* HWCAP_CRC32 */
    #else
        return 0;
    #endif
    }
    #else
    #define SB_CRC32C_INSTRUCTION ""
    #define sb_crc32c_by_instruction sb_crc32c_by_tables
    static int sb_crc32c_has_instruction(void) { return 0; }
    #endif
    """
    const char* INSTRUCTION "SB_CRC32C_INSTRUCTION"
    void fill_tables "sb_crc32c_fill_tables"() noexcept nogil
    bint has_instruction "sb_crc32c_has_instruction"() noexcept nogil
    uint32_t by_tables "sb_crc32c_by_tables"(uint32_t crc, const uint8_t* p, size_t n) noexcept nogil
    uint32_t by_instruction "sb_crc32c_by_instruction"(uint32_t crc, const uint8_t* p, size_t n) noexcept nogil


cdef enum:
    KEEP_GIL_BELOW = 4096   # half a microsecond of work: releasing and retaking the GIL costs more


cdef bint _instruction = has_instruction()
fill_tables()


cdef uint32_t _update(uint32_t crc, const uint8_t* p, size_t n, bint instruction) noexcept nogil:
    if instruction:
        return by_instruction(crc, p, n)
    return by_tables(crc, p, n)


def crc32c(data, unsigned int value=0, *, bint portable=False) -> int:
    """The CRC-32C of ``data``; ``value``, if given, is the CRC of the bytes in front of it. O(n), no copy.

    ``data`` is anything with a contiguous buffer; large ones are read without the GIL. ``portable`` uses the tables
    even if the processor has an instruction.

    >>> hex(crc32c(b"123456789"))
    '0xe3069283'
    >>> crc32c(b"6789", crc32c(b"12345")) == crc32c(b"123456789", portable=True)
    True
    """
    cdef Py_buffer view
    cdef uint32_t crc = value ^ <uint32_t>0xFFFFFFFF
    cdef bint instruction = _instruction and not portable
    try:
        PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
    except (TypeError, ValueError, BufferError):
        raise UsageError(f"a {type(data).__name__} has no contiguous bytes to take a checksum of") from None
    try:
        if view.len < KEEP_GIL_BELOW:
            crc = _update(crc, <const uint8_t*>view.buf, view.len, instruction)
        else:
            with nogil:
                crc = _update(crc, <const uint8_t*>view.buf, view.len, instruction)
    finally:
        PyBuffer_Release(&view)
    return crc ^ <uint32_t>0xFFFFFFFF


def implementation() -> str:
    """The method that computes the checksums here: the name of the processor's extension, or ``"tables"``.

    >>> implementation() in ("SSE4.2", "ARMv8 CRC", "tables")
    True
    """
    return INSTRUCTION.decode("ascii") if _instruction else "tables"
