"""Memory from the system, without Python: an operation may need an extent halfway, when no other code may run.

The first touch of an extent costs 0.1 ms, and milliseconds if the memory is new to the machine: too much for the
operation that happens to need it. So once a state grows, a thread makes the next extents ahead of time:

    arena --- Spares ---> waiting ---> Spares of another arena ---> ...
                 ^           |
                 +- extents -+  the thread maps and touches one at a time, for the first that waits

What arenas leave behind when they end serves the next one, which then avoids first touches: 16 extents are kept.

The thread belongs to the C library and never asks for the GIL. It starts when it is first needed. A forked child has
none until it needs one itself; the extent in the thread's hands at the fork, 2 MB at most, stays mapped in the child.
"""

from libc.stdint cimport uint32_t, uint64_t, uintptr_t

cdef extern from *:
    """
    #include <pthread.h>
    #include <signal.h>
    #include <string.h>
    #include <sys/mman.h>

    #ifndef MAP_ANONYMOUS
    #define MAP_ANONYMOUS MAP_ANON
    #endif

    static inline char *sb_map(size_t size) {
        void *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        return memory == MAP_FAILED ? NULL : (char *)memory;
    }

    /* A kernel without huge pages refuses: ordinary pages then. */
    static inline void sb_want_huge_page(char *memory, size_t size) {
    #ifdef MADV_HUGEPAGE
        (void)madvise(memory, size, MADV_HUGEPAGE);
    #endif
    }

    /* In the checked build nothing is zero by chance, and memory that an arena has returned is overwritten. */
    static inline void sb_poison(char *memory, size_t size) {
    #ifdef STATEBACKEND_DEBUG
        memset(memory, 0xDB, size);
    #endif
    }

    /* Signals are for the threads of Python: in this one they would interrupt no system call of theirs. */
    static inline int sb_start_thread(void *(*work)(void *)) {
        pthread_t thread;
        pthread_attr_t attributes;
        sigset_t all, before;
        int failed;
        if (pthread_attr_init(&attributes)) return 0;
        pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        failed = pthread_create(&thread, &attributes, work, NULL);
        pthread_sigmask(SIG_SETMASK, &before, NULL);
        pthread_attr_destroy(&attributes);
        return !failed;
    }
    """
    ctypedef struct pthread_mutex_t:
        pass
    ctypedef struct pthread_cond_t:
        pass
    int pthread_mutex_init(pthread_mutex_t *mutex, void *attributes) noexcept nogil
    int pthread_mutex_lock(pthread_mutex_t *mutex) noexcept nogil
    int pthread_mutex_unlock(pthread_mutex_t *mutex) noexcept nogil
    int pthread_cond_init(pthread_cond_t *condition, void *attributes) noexcept nogil
    int pthread_cond_wait(pthread_cond_t *condition, pthread_mutex_t *mutex) noexcept nogil
    int pthread_cond_signal(pthread_cond_t *condition) noexcept nogil
    int pthread_atfork(void (*before)() noexcept nogil, void (*parent)() noexcept nogil,
                       void (*child)() noexcept nogil) noexcept nogil
    char *sb_map(uint64_t size) noexcept nogil
    void sb_want_huge_page(char *memory, uint64_t size) noexcept nogil
    void sb_poison(char *memory, uint64_t size) noexcept nogil
    int munmap(void *memory, uint64_t size) noexcept nogil
    bint sb_start_thread(void *(*work)(void *) noexcept nogil) noexcept nogil

cdef pthread_mutex_t lock                # guards the names below and all Spares; held for a few instructions
cdef pthread_cond_t more_wanted
cdef Spares *waiting = NULL
cdef Spares *served = NULL               # the thread makes an extent for these; NULL also if they are gone
cdef bint has_thread = False
cdef char *kept[16]                      # of arenas that ended
cdef uint32_t n_kept = 0


cdef char *extent_take() noexcept nogil:
    """An extent that was kept, else a new one; NULL without memory. Its contents are undefined."""
    global n_kept
    cdef char *extent = NULL
    pthread_mutex_lock(&lock)
    if n_kept:
        n_kept -= 1
        extent = kept[n_kept]
    pthread_mutex_unlock(&lock)
    if extent == NULL:
        extent = extent_map()
    if extent != NULL:
        sb_poison(extent, EXTENT_BYTES)
    return extent


cdef void extent_keep(char *extent) noexcept nogil:
    """Keep an extent for the next arena, or give it back if enough are kept."""
    global n_kept
    sb_poison(extent, EXTENT_BYTES)
    pthread_mutex_lock(&lock)
    if n_kept < MAX_KEPT:
        kept[n_kept] = extent
        n_kept += 1
        extent = NULL
    pthread_mutex_unlock(&lock)
    if extent != NULL:
        extent_unmap(extent)


cdef uint32_t kept_extents() noexcept nogil:
    return n_kept


cdef void kept_drop() noexcept nogil:
    """Give all that is kept back to the system."""
    global n_kept
    cdef char *extents[16]
    cdef uint32_t i, n
    pthread_mutex_lock(&lock)
    n = n_kept
    for i in range(n):
        extents[i] = kept[i]
    n_kept = 0
    pthread_mutex_unlock(&lock)
    for i in range(n):
        extent_unmap(extents[i])


cdef char *extent_map() noexcept nogil:
    """2 MB of private zeroed memory, aligned to 2 MB, on a huge page if the system has one; NULL without memory."""
    cdef char *memory = sb_map(EXTENT_BYTES)
    cdef uint64_t before
    if memory != NULL and <uintptr_t>memory & (EXTENT_BYTES - 1):
        # A mapping of twice the size holds an aligned extent; the rest goes back.
        munmap(memory, EXTENT_BYTES)
        memory = sb_map(2 * EXTENT_BYTES)
        if memory != NULL:
            before = -<uintptr_t>memory & (EXTENT_BYTES - 1)
            if before:
                munmap(memory, before)
            munmap(memory + before + EXTENT_BYTES, EXTENT_BYTES - before)
            memory += before
    if memory != NULL:
        sb_want_huge_page(memory, EXTENT_BYTES)
    return memory


cdef void extent_unmap(char *extent) noexcept nogil:
    munmap(extent, EXTENT_BYTES)


cdef void touch(char *extent) noexcept nogil:
    cdef uint64_t at = 0
    while at < EXTENT_BYTES:
        (<volatile char *>extent)[at] = extent[at]
        at += 4096


cdef char *spare_take(Spares *spares, uint32_t wanted) noexcept nogil:
    """An extent made ahead, or NULL. If less than half of `wanted` is left, the thread makes more."""
    global waiting, has_thread
    cdef char *extent = NULL
    pthread_mutex_lock(&lock)
    if spares.n:
        spares.n -= 1
        extent = spares.extents[spares.n]
    spares.wanted = wanted if wanted < MAX_SPARES else MAX_SPARES
    if 2 * spares.n < spares.wanted and not spares.is_waiting:
        if not has_thread:
            has_thread = sb_start_thread(make_spares)
        if has_thread:                   # without a thread, extents are touched when they are needed
            spares.is_waiting = True
            spares.next = waiting
            waiting = spares
            pthread_cond_signal(&more_wanted)
    pthread_mutex_unlock(&lock)
    return extent


cdef void spares_drop(Spares *spares, bint are_kept) noexcept nogil:
    """Give back the extents made ahead, or keep them. Afterwards the thread does not know these Spares."""
    global served
    cdef Spares **link = &waiting
    cdef char *extents[16]
    cdef uint32_t i, n
    pthread_mutex_lock(&lock)
    if spares.is_waiting:
        while link[0] != spares:
            link = &link[0].next
        link[0] = spares.next
        spares.is_waiting = False
    if served == spares:
        served = NULL
    n = spares.n
    for i in range(n):
        extents[i] = spares.extents[i]
    spares.n = 0
    pthread_mutex_unlock(&lock)
    for i in range(n):
        if are_kept:
            extent_keep(extents[i])
        else:
            extent_unmap(extents[i])


cdef void *make_spares(void *_nothing) noexcept nogil:
    """The main function of the thread, which runs as long as the process lives."""
    global waiting, served
    cdef Spares *spares
    cdef char *extent
    pthread_mutex_lock(&lock)
    while True:
        while waiting == NULL:
            pthread_cond_wait(&more_wanted, &lock)
        spares = waiting
        if spares.n >= spares.wanted:
            waiting = spares.next
            spares.is_waiting = False
            continue
        served = spares
        pthread_mutex_unlock(&lock)
        extent = extent_take()
        if extent != NULL:
            touch(extent)
        pthread_mutex_lock(&lock)
        if served == spares:
            if extent == NULL:           # the arena tries for itself when it needs one
                spares.wanted = 0
            else:
                spares.extents[spares.n] = extent
                spares.n += 1
        elif extent != NULL:
            extent_unmap(extent)
        served = NULL
    return NULL


# The forking thread holds the lock meanwhile, so that the child finds a consistent state.

cdef void before_fork() noexcept nogil:
    pthread_mutex_lock(&lock)


cdef void after_fork_in_parent() noexcept nogil:
    pthread_mutex_unlock(&lock)


cdef void after_fork_in_child() noexcept nogil:
    global waiting, served, has_thread
    while waiting != NULL:
        waiting.is_waiting = False
        waiting = waiting.next
    served = NULL
    has_thread = False
    pthread_mutex_init(&lock, NULL)
    pthread_cond_init(&more_wanted, NULL)


pthread_mutex_init(&lock, NULL)
pthread_cond_init(&more_wanted, NULL)
pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child)
