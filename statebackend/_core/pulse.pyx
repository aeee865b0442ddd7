"""The pulse between the driver and a host: a sign of life of both processes that needs the GIL on neither side.

A thread of the C library at each end has the socket, and never runs Python. So a function, a sink or anything else that
holds the GIL for long is not silent. A process that is stopped, has ended or cannot be reached is.

    driver, the end that asks                      host, the end that answers
      |  --- tick: time ------------------------>  |    four times within `patience`
      |  <-- answer: that time, calls returned --  |

Each message is a `Message`, as it is in memory: a host on another platform is refused before it has a pulse.

The asking end hears silence when it has waited `patience` for an answer; the answering end when no tick has come for so
long. Both read first and judge then, and time in which a process was stopped does not count. A pulse that is over stays
over. At a host, its thread then waits `patience` once more for `stop`, and ends the process if that does not come.
"""

cimport cython
from libc.stdint cimport int64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcmp, memcpy, memmove, memset
from posix.unistd cimport close, getpid

import os

from statebackend.errors import UsageError

cdef extern from *:
    """
    #include <errno.h>
    #include <poll.h>
    #include <pthread.h>
    #include <signal.h>
    #include <sys/socket.h>
    #include <time.h>
    #include <unistd.h>

    /* Where the system does not have it, the signal stays with the thread, which blocks all. */
    #ifndef MSG_NOSIGNAL
    #define MSG_NOSIGNAL 0
    #endif

    static inline int64_t sb_now(void) {
        struct timespec now;
        clock_gettime(CLOCK_MONOTONIC, &now);
        return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
    }

    static inline void sb_sleep(int64_t nanoseconds) {
        struct timespec rest = {nanoseconds / 1000000000, nanoseconds % 1000000000};
        nanosleep(&rest, NULL);
    }

    static inline int sb_would_block(void) {
        return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR;
    }

    static inline ssize_t sb_receive(int fd, void *into, size_t size) { return recv(fd, into, size, 0); }
    static inline ssize_t sb_send(int fd, const void *data, size_t size) {
        return send(fd, data, size, MSG_NOSIGNAL);
    }

    /* Until there is something to read, or room to write into if that is wanted. */
    static inline void sb_wait(int fd, int writes, int64_t nanoseconds) {
        struct pollfd one = {fd, (short)(writes ? POLLIN | POLLOUT : POLLIN), 0};
        int64_t milliseconds = nanoseconds > 0 ? (nanoseconds + 999999) / 1000000 : 0;
        poll(&one, 1, milliseconds < 60000 ? (int)milliseconds : 60000);
    }

    static inline void sb_shut(int fd) { shutdown(fd, SHUT_RDWR); }

    static inline void sb_end_process(void) {
        static const char why[] = "statebackend: the driver has gone or has given up this host, whose function has "
                                  "not returned since; the process ends\\n";
        struct pollfd stderr_now = {2, POLLOUT, 0};
        if (poll(&stderr_now, 1, 0) > 0 && write(2, why, sizeof why - 1)) {}
        _exit(1);
    }

    /* Signals are for the threads of Python: in this one they would interrupt no system call of theirs. */
    static inline int sb_start(pthread_t *thread, void *(*work)(void *), void *argument) {
        pthread_attr_t attributes;
        sigset_t all, before;
        int failed = pthread_attr_init(&attributes);
        if (failed) return failed;
        pthread_attr_setstacksize(&attributes, 256 << 10);
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        failed = pthread_create(thread, &attributes, work, argument);
        pthread_sigmask(SIG_SETMASK, &before, NULL);
        pthread_attr_destroy(&attributes);
        return failed;
    }
    """
    ctypedef struct pthread_t:
        pass
    int pthread_join(pthread_t thread, void **result) noexcept nogil
    int64_t now "sb_now"() noexcept nogil
    void nap "sb_sleep"(int64_t nanoseconds) noexcept nogil
    bint would_block "sb_would_block"() noexcept nogil
    ssize_t receive "sb_receive"(int fd, void *into, size_t size) noexcept nogil
    ssize_t send "sb_send"(int fd, const void *data, size_t size) noexcept nogil
    void wait "sb_wait"(int fd, bint writes, int64_t nanoseconds) noexcept nogil
    void shut "sb_shut"(int fd) noexcept nogil
    void end_process "sb_end_process"() noexcept nogil
    int start_thread "sb_start"(pthread_t *thread, void *(*work)(void *) noexcept nogil, void *argument) noexcept nogil

cdef enum:
    LIVES, CLOSED, SILENT, GARBLED       # what a pulse is; see OVER

cdef enum:
    NOT_RUNNING = -1                     # in place of `calls_returned`
    MESSAGES = 32                        # read at once
    SHORTEST = 1_000_000                 # nanoseconds between two ticks
    NAP = 20_000_000                     # and between two looks for `stop`, which no socket tells

cdef struct Message:
    char kind[8]
    int64_t time                         # of the driver's clock, when it sent the tick
    int64_t progress                     # in an answer

cdef struct End:
    int fd
    int process                          # that has the thread: a forked child has none
    bint asks
    bint ends_process
    int64_t patience                     # nanoseconds, as all times here
    pthread_t thread
    # One of both threads writes these, the other reads them.
    int64_t is_stopped
    int64_t over
    int64_t runs                         # at a host: true while the function runs
    int64_t progress                     # at the driver: the last answer, and the time of its last news
    int64_t moved_at

cdef const char *TICK = b"SB tick\x01"
cdef const char *ANSWER = b"SB life\x01"

OVER = (None, "closed", "silent", "garbled")


cdef void *live(void *argument) noexcept nogil:
    """The main function of the thread."""
    cdef End *end = <End *>argument
    cdef int64_t until
    store(&end.over, talk(end))
    shut(end.fd)                         # so that the peer need not wait for the silence
    if end.ends_process:
        until = now() + end.patience
        while not load(&end.is_stopped):
            if now() >= until:
                end_process()
            nap(NAP)
    return NULL


cdef int talk(End *end) noexcept nogil:
    """Exchange messages until the pulse is over; return why."""
    cdef Message incoming[MESSAGES]
    cdef Message outgoing
    cdef size_t size = 0, left = 0, count, i
    cdef ssize_t n
    cdef int64_t at, until, next_tick = now()
    cdef int64_t since = next_tick       # when the peer was last heard, or was first asked after that
    cdef int64_t wakes = next_tick       # when the thread goes on at the latest, unless the process is stopped
    cdef int64_t heard = 0, said = 0     # the times in the newest messages that came and went
    memset(&outgoing, 0, sizeof(Message))
    while not load(&end.is_stopped):
        at = now()
        if at - wakes > end.patience // 4:
            since = at                   # this process was stopped, and the peer perhaps with it: it has its time again
        n = receive(end.fd, <char *>incoming + size, sizeof(incoming) - size)
        if n == 0 or (n < 0 and not would_block()):
            return CLOSED
        if n > 0:
            size += n
            count = size // sizeof(Message)
            for i in range(count):
                if not is_sound(end, &incoming[i], heard, said):
                    return GARBLED
                heard, since = incoming[i].time, at
                if end.asks and incoming[i].progress != end.progress:
                    store(&end.moved_at, at)     # first: it is read after the other
                    store(&end.progress, incoming[i].progress)
            size -= count * sizeof(Message)
            memmove(incoming, &incoming[count], size)
        elif (not end.asks or heard < said) and at - since > end.patience:
            return SILENT
        if left == 0:
            if end.asks and next_tick <= at:
                if heard == said:
                    since = at
                said, next_tick = at, at + max(end.patience // 4, <int64_t>SHORTEST)
                memcpy(outgoing.kind, TICK, sizeof(outgoing.kind))
                left = sizeof(Message)
            elif not end.asks and said < heard:
                said = heard
                memcpy(outgoing.kind, ANSWER, sizeof(outgoing.kind))
                outgoing.progress = load(&calls_returned) if load(&end.runs) else NOT_RUNNING
                left = sizeof(Message)
            outgoing.time = said
        if left:
            n = send(end.fd, <char *>&outgoing + sizeof(Message) - left, left)
            if n < 0 and not would_block():
                return CLOSED
            left -= max(n, 0)
            if left == 0 and not end.asks and said < heard:
                wakes = at
                continue                 # another tick has come since this answer was begun
        until = since + end.patience if not end.asks or heard < said else next_tick
        if end.asks and left == 0:
            until = min(until, next_tick)
        wakes = max(until, at)
        wait(end.fd, left > 0, until - at)
    return CLOSED


cdef bint is_sound(const End *end, const Message *message, int64_t heard, int64_t said) noexcept nogil:
    """Whether a message is what the peer sends: an answer to a tick that has none yet, or the next tick."""
    if end.asks:
        return memcmp(message.kind, ANSWER, sizeof(message.kind)) == 0 and heard < message.time <= said
    return memcmp(message.kind, TICK, sizeof(message.kind)) == 0 and heard < message.time


@cython.final
cdef class Pulse:
    """One end of a pulse, over a connected socket that it has from now on, and closes.

    The end that ``asks`` is the driver's. The peer is silent after ``patience`` seconds. With ``ends_process``, this
    process ends when the pulse has been over for so long and was not stopped.
    """
    cdef End *end
    cdef int64_t ended                   # why it is over, once `end` is NULL

    def __cinit__(self, int fd, *, double patience, bint asks, bint ends_process=False):
        cdef int failed
        os.set_blocking(fd, False)
        self.ended = CLOSED
        self.end = <End *>calloc(1, sizeof(End))
        if self.end == NULL:
            close(fd)
            raise MemoryError
        self.end.fd, self.end.process = fd, getpid()
        self.end.asks, self.end.ends_process = asks, ends_process
        self.end.patience = <int64_t>(patience * 1e9)
        self.end.progress = NOT_RUNNING
        failed = start_thread(&self.end.thread, live, self.end)
        if failed:
            free(self.end)
            self.end = NULL
            close(fd)
            raise OSError(failed, os.strerror(failed))

    def __dealloc__(self):
        self._stop()

    @property
    def over(self):
        """Why the pulse is over, ``closed``, ``silent`` or ``garbled``; None while there is one."""
        return OVER[self.ended if self.end == NULL else load(&self.end.over)]

    @property
    def stands_for(self):
        """The seconds for which the function has run at the peer, and none of its calls has returned; 0.0 if it does
        not run.
        """
        if self.end == NULL or load(&self.end.progress) == NOT_RUNNING:
            return 0.0
        return (now() - load(&self.end.moved_at)) / 1e9

    @property
    def function_runs(self):
        """True while the function runs here, which the peer is told."""
        return self.end != NULL and load(&self.end.runs) != 0

    @function_runs.setter
    def function_runs(self, bint runs):
        if self.end == NULL:
            raise UsageError("the pulse was stopped")
        store(&self.end.runs, runs)

    def cut(self):
        """Let it be over, for both ends; the time begins after which the process is ended. Idempotent."""
        if self.end != NULL and self.end.process == getpid():
            shut(self.end.fd)

    def stop(self):
        """End the thread, close the socket, and let the process be. Idempotent, from any thread."""
        self._stop()

    cdef void _stop(self) noexcept:
        # Nobody else sees what is ended here: the GIL is not released in between.
        cdef End *end = self.end
        if end == NULL:
            return
        self.end = NULL
        if end.process == getpid():
            with nogil:
                store(&end.is_stopped, True)
                shut(end.fd)
                pthread_join(end.thread, NULL)
            self.ended = end.over or CLOSED
        # In a forked child, the connection still belongs to the parent.
        close(end.fd)
        free(end)
