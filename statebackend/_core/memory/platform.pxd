"""The compiler features that the compiled core uses: prefetch, atomics, a folded multiply."""

from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t

cdef extern from *:
    """
    #include <sched.h>
    #include <stdint.h>
    #include <string.h>

    #define sb_likely(x) __builtin_expect(!!(x), 1)
    #define sb_unlikely(x) __builtin_expect(!!(x), 0)
    /* The empty statement counts as an effect: GCC drops calls of functions that do nothing but prefetch. */
    #define sb_prefetch(p) do { __builtin_prefetch((const void *)(p), 0, 3); __asm__ volatile (""); } while (0)
    #define sb_prefetch_write(p) do { __builtin_prefetch((const void *)(p), 1, 3); __asm__ volatile (""); } while (0)
    #define sb_ctz(x) __builtin_ctz(x)
    #define sb_clz64(x) __builtin_clzll(x)
    #define sb_load_u32(p) __atomic_load_n((p), __ATOMIC_ACQUIRE)
    #define sb_store_u32(p, v) __atomic_store_n((p), (v), __ATOMIC_RELEASE)
    static inline void *sb_load_ptr(void *p) { return __atomic_load_n((void **)p, __ATOMIC_ACQUIRE); }
    #define sb_add_i64(p, v) __atomic_add_fetch((p), (v), __ATOMIC_RELAXED)

    static inline void sb_store_ptr(void *p, void *v) {
        __atomic_store_n((void **)p, v, __ATOMIC_RELEASE);
    }

    /* A spin lock for sections of a few dozen instructions; never held across
       a call that can block or that needs the GIL. Who waits for longer than
       such a section takes waits for a thread that has lost its processor. */
    static inline void sb_lock(uint32_t *l) {
        int waited = 0;
        while (__atomic_exchange_n(l, 1, __ATOMIC_ACQUIRE)) {
            while (__atomic_load_n(l, __ATOMIC_RELAXED)) {
                if (++waited > 10000) sched_yield();
            }
        }
    }
    static inline int sb_try_lock(uint32_t *l) { return !__atomic_exchange_n(l, 1, __ATOMIC_ACQUIRE); }
    static inline void sb_unlock(uint32_t *l) { __atomic_store_n(l, 0, __ATOMIC_RELEASE); }

    /* Whether this caller is the one to do round `n`: a word goes through each round once. */
    static inline int sb_claim(uint32_t *word, uint32_t n) {
        uint32_t seen = __atomic_load_n(word, __ATOMIC_ACQUIRE);
        return seen < n && __atomic_compare_exchange_n(word, &seen, n, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
    }

    static inline uint64_t sb_fold(uint64_t a, uint64_t b) {
        __uint128_t m = (__uint128_t)a * b;
        return (uint64_t)m ^ (uint64_t)(m >> 64);
    }

    static inline uint64_t sb_load_8(const unsigned char *p) { uint64_t w; memcpy(&w, p, 8); return w; }
    static inline uint32_t sb_load_4(const unsigned char *p) { uint32_t w; memcpy(&w, p, 4); return w; }

    /* The last `left` of `n` bytes, 1 to 7, as a little-endian word. A load of eight bytes right after a store of fewer
       would wait for the store, so the bytes do not go through memory. */
    static inline uint64_t sb_load_tail(const unsigned char *p, uint64_t left, uint64_t n) {
        if (n >= 8) return sb_load_8(p + left - 8) >> (8 * (8 - left));
        if (left >= 4) return sb_load_4(p) | (uint64_t)sb_load_4(p + left - 4) << (8 * (left - 4));
        return p[0] | (uint64_t)p[left / 2] << (8 * (left / 2)) | (uint64_t)p[left - 1] << (8 * (left - 1));
    }

    /* Whether `n` bytes are the same: keys are short, and a call of memcmp costs more than to compare them. */
    static inline int sb_same_bytes(const void *one, const void *other, uint64_t n) {
        const unsigned char *a = (const unsigned char *)one, *b = (const unsigned char *)other;
        uint64_t at;
        if (n > 64) return memcmp(a, b, n) == 0;
        if (n >= 8) {
            for (at = 0; at + 8 < n; at += 8)
                if (sb_load_8(a + at) != sb_load_8(b + at)) return 0;
            return sb_load_8(a + n - 8) == sb_load_8(b + n - 8);
        }
        return n == 0 || sb_load_tail(a, n, n) == sb_load_tail(b, n, n);
    }

    /* Copy `n` bytes: values are short too. */
    static inline void sb_copy_bytes(char *to, const char *from, uint64_t n) {
        uint64_t at;
        if (n > 64 || n < 8) {
            memcpy(to, from, n);
            return;
        }
        for (at = 0; at + 8 < n; at += 8)
            memcpy(to + at, from + at, 8);
        memcpy(to + n - 8, from + n - 8, 8);
    }

    /* Bucket hash of bytes: eight at a time, folded multiplies, length mixed in at the end. */
    static inline uint32_t sb_hash_bytes(const unsigned char *p, uint64_t n, uint64_t seed) {
        uint64_t h = seed, w = 0, left = n;
        while (left >= 8) {
            memcpy(&w, p, 8);
            h = sb_fold(h ^ w, 0x9E3779B97F4A7C15ull);
            p += 8;
            left -= 8;
        }
        if (left) {
            w = sb_load_tail(p, left, n);
            h = sb_fold(h ^ w, 0xC2B2AE3D27D4EB4Full);
        }
        h = sb_fold(h ^ n, 0xD6E8FEB86659FD93ull);
        return (uint32_t)(h ^ (h >> 32));
    }

    static inline uint32_t sb_hash_int(int64_t key, uint32_t ns, uint64_t seed) {
        uint64_t h = sb_fold((uint64_t)key ^ seed, 0x9E3779B97F4A7C15ull + 2 * (uint64_t)ns);
        return (uint32_t)(h ^ (h >> 32));
    }
    """
    bint likely "sb_likely"(bint x) noexcept nogil
    bint unlikely "sb_unlikely"(bint x) noexcept nogil
    void prefetch "sb_prefetch"(const void *p) noexcept nogil
    void prefetch_write "sb_prefetch_write"(const void *p) noexcept nogil
    int ctz "sb_ctz"(uint32_t x) noexcept nogil
    int clz64 "sb_clz64"(uint64_t x) noexcept nogil
    uint32_t load_u32 "sb_load_u32"(uint32_t *p) noexcept nogil
    void store_u32 "sb_store_u32"(uint32_t *p, uint32_t v) noexcept nogil
    void *load_ptr "sb_load_ptr"(void *p) noexcept nogil
    void store_ptr "sb_store_ptr"(void *p, void *v) noexcept nogil
    int64_t add_i64 "sb_add_i64"(int64_t *p, int64_t v) noexcept nogil
    void spin_lock "sb_lock"(uint32_t *l) noexcept nogil
    bint try_lock "sb_try_lock"(uint32_t *l) noexcept nogil
    void spin_unlock "sb_unlock"(uint32_t *l) noexcept nogil
    bint claim "sb_claim"(uint32_t *word, uint32_t n) noexcept nogil
    uint64_t fold "sb_fold"(uint64_t a, uint64_t b) noexcept nogil
    bint same_bytes "sb_same_bytes"(const void *one, const void *other, uint64_t n) noexcept nogil
    void copy_bytes "sb_copy_bytes"(char *to, const char *source, uint64_t n) noexcept nogil
    uint32_t hash_bytes "sb_hash_bytes"(const unsigned char *p, uint64_t n, uint64_t seed) noexcept nogil
    uint32_t hash_int "sb_hash_int"(int64_t key, uint32_t ns, uint64_t seed) noexcept nogil
