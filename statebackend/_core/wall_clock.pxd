"""The machine's clock in milliseconds, read again only when it may have advanced.

A record whose state expires asks for the time. Asking the system takes a third of such a record's time, because it
waits for everything that the processor has under way. If the processor's counter runs at a steady rate, it can prove
that the millisecond is not over. It makes at least one step in four nanoseconds, and usually many more, so a quarter
of the millisecond's rest in nanoseconds, counted in steps, is no longer than that rest. The result is what the system
would have answered; a clock that is set meanwhile shows after that quarter.
"""

from libc.stdint cimport int64_t, uint64_t

cdef extern from *:
    """
    #include <stdint.h>
    #include <time.h>

    #if defined(__x86_64__)
    #include <cpuid.h>
    #include <x86intrin.h>
    static inline uint64_t sb_steps(void) { return __rdtsc(); }
    /* Whether the counter goes on at one rate whatever the processor does: it says so of itself. */
    static inline int sb_steps_are_steady(void) {
        unsigned int a, b, c, d;
        return __get_cpuid(0x80000007, &a, &b, &c, &d) && (d >> 8 & 1);
    }
    #else
    static inline uint64_t sb_steps(void) { return 0; }
    static inline int sb_steps_are_steady(void) { return 0; }
    #endif

    typedef struct {
        int64_t now;        /* milliseconds, as they were read */
        uint64_t read_at;   /* the counter, before that */
        uint64_t valid_for; /* steps of the counter; 0: ask each time */
        int is_steady;
    } sb_wall_clock;

    static inline void sb_wall_clock_init(sb_wall_clock *clock) {
        clock->now = 0;
        clock->read_at = clock->valid_for = 0;
        clock->is_steady = sb_steps_are_steady();
    }

    static inline int64_t sb_wall_clock_ms(sb_wall_clock *clock) {
        struct timespec now;
        uint64_t steps = sb_steps();
        if (__builtin_expect(steps - clock->read_at < clock->valid_for, 1)) return clock->now;
        clock_gettime(CLOCK_REALTIME, &now);
        clock->now = (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
        clock->read_at = steps;
        clock->valid_for = clock->is_steady ? (1000000 - now.tv_nsec % 1000000) / 4 : 0;
        return clock->now;
    }
    """
    ctypedef struct WallClock "sb_wall_clock":
        pass
    void wall_clock_init "sb_wall_clock_init"(WallClock *clock) noexcept nogil
    int64_t wall_clock_ms "sb_wall_clock_ms"(WallClock *clock) noexcept nogil
