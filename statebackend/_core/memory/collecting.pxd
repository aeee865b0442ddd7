"""Python's collections, which wait while anybody has stopped them; see `collecting.pyx`."""

cdef void stop_collecting() noexcept
cdef void go_on_collecting() noexcept
