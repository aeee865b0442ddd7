"""What an open batch has changed, in front of the database: read before it, undone in the time of the undone changes.

RocksDB has a batch with an index for this, but makes that index again at each rollback. Here a journal has each change
since each mark: a rollback walks it backwards, O(what is undone); letting go of a mark is O(1). The drawing and
the invariants are in `overlay.pxd`.

Keys are found by their hash. Their order is made on demand: a walk, a snapshot, or writing to the
database. Then what has come since the last time is sorted, and threaded into a skip list.

A put or delete replaces what the same interval of marks has written to the key, and elements for a list are put behind
it, so a key has one change for each open mark at most.
"""

from libc.stddef cimport size_t
from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc, realloc
from libc.string cimport memcmp, memcpy, memset
from posix.unistd cimport getpid, usleep

from statebackend._core.memory.platform cimport prefetch
from statebackend._core.rocksdb.binding.write_batch cimport WRITE_DELETE, WRITE_MERGE, WRITE_PUT, Write
from statebackend._core.rocksdb.binding.buffers cimport BESIDE_ROW, Bytes, append, compare
from statebackend._core.rocksdb.overlay.key_order cimport RankedKey, put_ranked_in_order, rank

from statebackend.errors import UsageError, overlapping_call

cdef enum:
    LEAST_BUCKETS = 64
    PATIENCE = 300_000                # times that 0.1 ms are waited for a thread that is inside

#: Of a key and its value together, for RocksDB.
LONGEST = (1 << 32) - BESIDE_ROW


# ------------------------------------------------------------------------------------------------- changes

cdef Change *new_change(Write what, size_t size) noexcept nogil:
    """A change whose bytes are still to be set; NULL without memory."""
    cdef Change *made = <Change *>malloc(sizeof(Change) + size)
    if made == NULL:
        return NULL
    made.before, made.node, made.place = NULL, NULL, 0
    made.size = made.room = size
    made.what = what
    return made


cdef Change *joined(Change *newest) noexcept nogil:
    """One change that does what a node's do together; NULL without memory."""
    cdef Change *each = newest
    cdef Change *last = newest
    cdef Change *made
    cdef size_t at = 0
    while last.what == WRITE_MERGE:
        at += last.size
        if last.before == NULL:
            break
        last = last.before
    if last.what == WRITE_PUT:
        at += last.size
    made = new_change(WRITE_PUT if last.what == WRITE_DELETE and last != newest else last.what, at)
    while made != NULL and each.what != WRITE_DELETE:
        at -= each.size
        memcpy(made.data + at, each.data, each.size)
        if each == last:
            break
        each = each.before
    return made


cdef size_t appended(Change *newest) noexcept nogil:
    """The bytes of the value, or of the operand, that `joined` makes."""
    cdef size_t total = 0
    while newest != NULL and newest.what == WRITE_MERGE:
        total += newest.size
        newest = newest.before
    return total + newest.size if newest != NULL and newest.what == WRITE_PUT else total


cdef int resolve(Change *newest, const char *base, size_t size, bint has_base, Bytes *out) noexcept nogil:
    """Append the value of a key that the database has `base` for: 1; 0 if there is none; -1 without memory."""
    cdef Change *each = newest
    cdef size_t total = 0, at
    while each != NULL and each.what == WRITE_MERGE:
        total += each.size
        each = each.before
    if each != NULL:
        has_base = each.what == WRITE_PUT
        base, size = each.data, each.size
    if not has_base and newest.what == WRITE_DELETE:
        return 0
    if not append(out, base, size if has_base else 0):
        return -1
    if not total:
        return 1
    if not reserve(out, total):
        out.size -= size if has_base else 0
        return -1
    at = out.size + total
    out.size = at
    each = newest
    while each != NULL and each.what == WRITE_MERGE:
        at -= each.size
        memcpy(out.data + at, each.data, each.size)
        each = each.before
    return 1


cdef bint reserve(Bytes *out, size_t n) noexcept nogil:
    cdef size_t room
    cdef char *grown
    if out.size + n <= out.room:
        return True
    room = out.size + n + out.room // 2
    grown = <char *>realloc(out.data, room)
    if grown == NULL:
        return False
    out.data, out.room = grown, room
    return True


cdef bint needs_base(Change *newest) noexcept nogil:
    """Whether the value of a key builds on what the database has."""
    while newest != NULL and newest.what == WRITE_MERGE:
        newest = newest.before
    return newest == NULL


# --------------------------------------------------------------------------------------------------- nodes

cdef Node *find_node(Rows *rows, const char *key, size_t n, uint32_t hash) noexcept nogil:
    cdef Node *node
    if rows.n_buckets == 0:
        return NULL
    node = rows.buckets[hash & (rows.n_buckets - 1)]
    while node != NULL:
        if node.hash == hash and node.size == n and memcmp(key_of(node), key, n) == 0:
            return node
        node = node.same_bucket
    return NULL


cdef bint make_buckets(Rows *rows, size_t more) noexcept nogil:
    """Enough for so many more nodes, at least twice as many as before; False without memory."""
    cdef size_t wanted = 2 * rows.n_buckets if rows.n_buckets else LEAST_BUCKETS, i
    cdef Node **made
    cdef Node *node
    cdef Node *following
    if rows.n + more <= rows.n_buckets:
        return True
    while wanted < rows.n + more:
        wanted *= 2
    made = <Node **>calloc(wanted, sizeof(Node *))
    if made == NULL:
        return False
    for i in range(rows.n_buckets):
        node = rows.buckets[i]
        while node != NULL:
            following = node.same_bucket
            node.same_bucket = made[node.hash & (wanted - 1)]
            made[node.hash & (wanted - 1)] = node
            node = following
    free(rows.buckets)
    rows.buckets, rows.n_buckets = made, wanted
    return True


cdef Node *new_node(Rows *rows, const char *key, size_t n, uint32_t hash) noexcept nogil:
    """A node without a change, out of order as yet; NULL without memory."""
    cdef int height = 1
    cdef uint64_t random
    cdef Node *made
    cdef Node **grown
    if not make_buckets(rows, 1):
        return NULL
    if rows.n_fresh == rows.fresh_room:
        grown = <Node **>realloc(rows.fresh, (2 * rows.fresh_room + 16) * sizeof(Node *))
        if grown == NULL:
            return NULL
        rows.fresh, rows.fresh_room = grown, 2 * rows.fresh_room + 16
    rows.random ^= rows.random << 13
    rows.random ^= rows.random >> 7
    rows.random ^= rows.random << 17
    random = rows.random
    while height < HIGHEST and random & 3 == 0:
        height += 1
        random >>= 2
    made = <Node *>malloc(sizeof(Node) + height * sizeof(Node *) + n)
    if made == NULL:
        return NULL
    memset(made, 0, sizeof(Node))
    made.rows, made.hash, made.size, made.height = rows, hash, <uint32_t>n, <uint8_t>height
    memcpy(<char *>key_of(made), key, n)
    made.same_bucket = rows.buckets[hash & (rows.n_buckets - 1)]
    rows.buckets[hash & (rows.n_buckets - 1)] = made
    rows.fresh[rows.n_fresh] = made
    rows.n_fresh += 1
    rows.n += 1
    rows.version += 1
    rows.nbytes += n
    return made


cdef void find_before(Rows *rows, const char *key, size_t n, Node ***links) noexcept nogil:
    """The links that lead to the first node that is not below a key, of each height."""
    cdef Node **next = rows.first
    cdef int level = HIGHEST - 1
    while True:
        while next[level] != NULL and compare(key_of(next[level]), next[level].size, key, n) < 0:
            next = next[level].next
        links[level] = &next[level]
        if level == 0:
            return
        level -= 1


cdef void drop_node(Rows *rows, Node *node) noexcept nogil:
    """Forget a node without changes. If it is not in order yet, it is the one that came last."""
    cdef Node **links[HIGHEST]
    cdef Node **link = &rows.buckets[node.hash & (rows.n_buckets - 1)]
    cdef int level
    while link[0] != node:
        link = &link[0].same_bucket
    link[0] = node.same_bucket
    if node.is_ordered and rows.first[0] == node:
        for level in range(node.height):   # the first one of all is the first at each of its heights
            rows.first[level] = node.next[level]
    elif node.is_ordered:
        find_before(rows, key_of(node), node.size, links)
        for level in range(node.height):
            links[level][0] = node.next[level]
    else:
        rows.n_fresh -= 1
    rows.n -= 1
    rows.version += 1
    rows.nbytes -= node.size
    free(node)


cdef void drop_all(Rows *rows) noexcept nogil:
    cdef size_t i
    cdef Node *node
    cdef Node *following
    cdef Change *change
    cdef Change *before
    for i in range(rows.n_buckets):
        node = rows.buckets[i]
        while node != NULL:
            following, change = node.same_bucket, node.newest
            while change != NULL:
                before = change.before
                free(change)
                change = before
            free(node)
            node = following
    free(rows.buckets)
    free(rows.fresh)
    rows.buckets, rows.fresh = NULL, NULL
    rows.n_buckets = rows.n = rows.n_fresh = rows.fresh_room = rows.nbytes = 0
    memset(rows.first, 0, sizeof(rows.first))
    rows.version += 1


cdef bint put_in_order(Rows *rows) noexcept nogil:
    """Thread the nodes into the skip list that have come since the last time; False without memory."""
    cdef Node **links[HIGHEST]
    cdef RankedKey *ranked
    cdef Node *node
    cdef Node **next
    cdef size_t i
    cdef int level
    if rows.n_fresh == 0:
        return True
    ranked = <RankedKey *>malloc(rows.n_fresh * sizeof(RankedKey))
    if ranked == NULL:
        return False
    for i in range(rows.n_fresh):
        rank(&ranked[i], key_of(rows.fresh[i]), rows.fresh[i].size, i)
    put_ranked_in_order(ranked, rows.n_fresh)
    find_before(rows, ranked[0].key, ranked[0].size, links)
    for i in range(rows.n_fresh):
        node = rows.fresh[ranked[i].row]
        # The last key was below this one, so each link only has to go on from where it is.
        for level in range(HIGHEST - 1, -1, -1):
            while links[level][0] != NULL and compare(key_of(links[level][0]), links[level][0].size,
                                                      key_of(node), node.size) < 0:
                next = links[level][0].next
                links[level] = &next[level]
        for level in range(node.height):
            node.next[level] = links[level][0]
            links[level][0] = node
            links[level] = &node.next[level]
        node.is_ordered = True
    free(ranked)
    rows.n_fresh = 0
    return True


# ------------------------------------------------------------------------------------------------ a family

cdef class Layer:
    """The changes of a column family."""

    def __cinit__(self):
        memset(&self.rows, 0, sizeof(Rows))
        self.rows.random = <uint64_t>0x9E3779B97F4A7C15

    def __dealloc__(self):
        drop_all(&self.rows)

    def __len__(self):
        return self.rows.n

    cdef Node *find(self, const char *key, size_t n) noexcept nogil:
        return NULL if self.rows.n == 0 else find_node(&self.rows, key, n, hash_of(key, n))

    cdef Node *find_hashed(self, const char *key, size_t n, uint32_t hash) noexcept nogil:
        return NULL if self.rows.n == 0 else find_node(&self.rows, key, n, hash)

    cdef void look_ahead(self, uint32_t hash) noexcept nogil:
        """Let the processor fetch where a key is looked for."""
        if self.rows.n_buckets:
            prefetch(&self.rows.buckets[hash & (self.rows.n_buckets - 1)])

    cdef void look_closer(self, uint32_t hash) noexcept nogil:
        """Let it fetch the first node there, once `look_ahead` has come to something."""
        if self.rows.n_buckets:
            prefetch(self.rows.buckets[hash & (self.rows.n_buckets - 1)])

    cdef Node *at_or_after(self, const char *key, size_t n) except? NULL:
        """The first node that is not below a key, or NULL. O(log n), and the sort of new nodes."""
        if not put_in_order(&self.rows):
            raise MemoryError
        return self.from_here(key, n)

    cdef Node *from_here(self, const char *key, size_t n) noexcept nogil:
        """The same once all is in order."""
        cdef Node **links[HIGHEST]
        find_before(&self.rows, key, n, links)
        return links[0][0]

    def frozen(self):
        """Return a copy, which later changes leave alone: each key with one change. O(n)."""
        cdef Layer made = Layer()
        cdef Node *node
        cdef Node *copied
        cdef bint is_done
        with nogil:
            is_done = put_in_order(&self.rows)
            node = self.rows.first[0]
            while is_done and node != NULL:
                copied = new_node(&made.rows, key_of(node), node.size, node.hash)
                is_done = copied != NULL
                if is_done:
                    copied.newest = joined(node.newest)
                    is_done = copied.newest != NULL
                node = node.next[0]
            is_done = is_done and put_in_order(&made.rows)
        if not is_done:
            raise MemoryError
        return made


# ------------------------------------------------------------------------------------------------ the whole

cdef class Overlay:
    """The changes of all column families since the first open mark, and the marks."""

    def __init__(self):
        self.layers = []
        self.longest = LONGEST
        self.process = getpid()

    cdef int come_in(self) except -1:
        """Refuse a step while another thread, or the caller of a finaliser, is amid one."""
        if self.is_busy:
            raise overlapping_call()
        return 0

    cdef int begin(self) except -1:
        """Refuse a call while another one is inside."""
        if self.is_busy or self.inside:
            raise overlapping_call()
        return 0

    cdef int come_after(self) except -1:
        """Wait until no other thread is inside: a mark belongs to more than this, and is not refused half-way."""
        self.others_leave()
        return self.come_in()

    cdef bint others_leave(self):
        """Give a thread that is inside a moment to leave; return whether none is. A child has none of its parent's."""
        cdef int waited = 0
        while self.is_busy and waited < PATIENCE and self.process == getpid() \
                and self.inside_thread != PyThread_get_thread_ident():
            with nogil:
                usleep(100)
            waited += 1
        return not self.is_busy

    cdef void go_in(self) noexcept:
        """Keep other threads, and the finalisers that a collection runs, out until `go_out`."""
        self.is_busy = True
        self.inside_thread = PyThread_get_thread_ident()

    cdef void go_out(self) noexcept:
        self.is_busy = False

    def __dealloc__(self):
        free(self.journal)
        free(self.marks)

    def add_layer(self):
        """Return the layer of a new column family."""
        made = Layer()
        self.layers.append(made)
        return made

    def __len__(self):
        return sum(map(len, self.layers))

    @property
    def nbytes(self):
        """The bytes of keys and values; the index takes about 150 more for each key."""
        return sum([(<Layer>each).rows.nbytes for each in self.layers])

    # --- writing ---

    cdef Written write(self, Layer layer, Write what, const char *key, size_t n, uint32_t hash, const char *value,
                       size_t size) noexcept nogil:
        """Put, delete, or append to the list of a key, which has this hash; nothing has changed if it is not DONE."""
        cdef Rows *rows = &layer.rows
        cdef uint64_t since = self.marks[self.n_marks - 1].place if self.n_marks else 0
        cdef Node *node = find_node(rows, key, n, hash)
        cdef Change *change
        cdef Change **grown
        cdef bint is_new = node == NULL
        # What is written to the database is the whole of a list.
        cdef size_t whole = n + size + (0 if is_new or what != WRITE_MERGE else appended(node.newest))
        if whole > self.longest:
            return TOO_LONG
        if self.n_journal == self.journal_room:
            grown = <Change **>realloc(self.journal, (2 * self.journal_room + 64) * sizeof(Change *))
            if grown == NULL:
                return NO_MEMORY
            self.journal, self.journal_room = grown, 2 * self.journal_room + 64
        if is_new:
            node = new_node(rows, key, n, hash)
            if node == NULL:
                return NO_MEMORY
        else:
            self.join_released(node)
            if node.newest.place >= since:
                change = self.rewritten(node.newest, what, value, size)
                if change == NULL:
                    return NO_MEMORY
                node.newest = change
                return DONE
        change = new_change(what, size)
        if change == NULL:
            if is_new:
                drop_node(rows, node)
            return NO_MEMORY
        if size:
            memcpy(change.data, value, size)
        change.node, change.before, change.place = node, node.newest, self.n_journal
        node.newest = change
        self.journal[self.n_journal] = change
        self.n_journal = self.n_journal + 1
        rows.nbytes += size
        return DONE

    cdef Change *rewritten(self, Change *change, Write what, const char *value, size_t size) noexcept nogil:
        """Let a change do what one right after it would do too; returns where it is now, or NULL without memory."""
        cdef size_t kept = change.size if what == WRITE_MERGE and change.what != WRITE_DELETE else 0
        cdef Change *grown
        cdef Rows *rows = change.node.rows
        if kept + size > change.room:
            grown = new_change(change.what, kept + size + (kept + size) // 2 if kept else size)
            if grown == NULL:
                return NULL
            memcpy(grown.data, change.data, kept)
            grown.before, grown.node, grown.place, grown.size = change.before, change.node, change.place, change.size
            self.journal[change.place] = grown
            free(change)
            change = grown
        if size:
            memcpy(change.data + kept, value, size)
        rows.nbytes += kept + size
        rows.nbytes -= change.size
        change.size = kept + size
        if what != WRITE_MERGE:
            change.what = what
        elif change.what == WRITE_DELETE:
            change.what = WRITE_PUT
        return change

    cdef bint are_together(self, uint64_t first, uint64_t second) noexcept nogil:
        """Whether no mark lies between two places of the journal."""
        cdef size_t low = 0, high = self.n_marks, middle
        while low < high:
            middle = (low + high) // 2
            if self.marks[middle].place <= second:
                low = middle + 1
            else:
                high = middle
        return low == 0 or self.marks[low - 1].place <= first

    cdef void join_released(self, Node *node) noexcept nogil:
        """Make one of changes of a key between which no mark is open; without memory, leave them."""
        cdef Change *change = node.newest
        cdef Change *before = change.before
        while before != NULL and self.are_together(before.place, change.place):
            if change.what == WRITE_MERGE:
                before = self.rewritten(before, WRITE_MERGE, change.data, change.size)
                if before == NULL:
                    return
                node.newest = before
                self.drop_change(change)
                change = before
            else:
                self.journal[change.place] = NULL
                change.place, change.before = before.place, before.before
                self.drop_change(before)
                self.journal[change.place] = change
            before = change.before
        while self.n_journal and self.journal[self.n_journal - 1] == NULL and (
                self.n_marks == 0 or self.n_journal > self.marks[self.n_marks - 1].place):
            self.n_journal = self.n_journal - 1

    cdef void drop_change(self, Change *change) noexcept nogil:
        change.node.rows.nbytes -= change.size
        self.journal[change.place] = NULL
        free(change)

    cdef void remove_first(self, Rows *rows) noexcept nogil:
        """Forget the first node of a layer in order, with its changes: the database has them now."""
        cdef Node *node = rows.first[0]
        cdef Change *change = node.newest
        cdef Change *before
        while change != NULL:
            before = change.before
            self.drop_change(change)
            change = before
        drop_node(rows, node)
        rows.written += 1

    # --- marks ---

    def mark(self):
        """Remember this moment; returns its number. O(1)."""
        cdef MarkPlace *grown
        self.come_after()
        if self.n_marks == self.marks_room:
            grown = <MarkPlace *>realloc(self.marks, (2 * self.marks_room + 8) * sizeof(MarkPlace))
            if grown == NULL:
                raise MemoryError
            self.marks, self.marks_room = grown, 2 * self.marks_room + 8
        self.next_number += 1
        self.marks[self.n_marks].number, self.marks[self.n_marks].place = self.next_number, self.n_journal
        self.n_marks += 1
        return self.next_number

    def numbers(self):
        """List the numbers of the open marks, oldest first."""
        return [self.marks[i].number for i in range(self.n_marks)]

    cdef size_t find_mark(self, uint64_t number) except? 0:
        cdef size_t low = 0, high = self.n_marks, middle
        while low < high:
            middle = (low + high) // 2
            if self.marks[middle].number < number:
                low = middle + 1
            else:
                high = middle
        if low == self.n_marks or self.marks[low].number != number:
            raise UsageError("the batch has no such mark", code="USAGE.STALE_MARK", detail=f"mark {number}",
                             hint="it was released, rolled back over, or the batch was written or cleared")
        return low

    def roll_back(self, uint64_t number):
        """Take back what was written since a mark, and forget the marks after it. O(what is undone)."""
        cdef size_t at
        cdef Change *change
        cdef Node *node
        self.come_after()
        at = self.find_mark(number)
        self.go_in()
        self.n_marks = at + 1
        with nogil:
            while self.n_journal > self.marks[at].place:
                self.n_journal = self.n_journal - 1
                change = self.journal[self.n_journal]
                if change == NULL:
                    continue
                node = change.node
                node.newest = change.before
                node.rows.nbytes -= change.size
                free(change)
                if node.newest == NULL:
                    drop_node(node.rows, node)
        self.go_out()

    def release(self, uint64_t number):
        """Forget a mark, and keep what was written since. O(marks after it)."""
        cdef size_t at, i
        self.come_after()
        at = self.find_mark(number)
        for i in range(at, self.n_marks - 1):
            self.marks[i] = self.marks[i + 1]
        self.n_marks -= 1

    def clear(self):
        self.n_marks = self.n_journal = 0
        for layer in self.layers:
            drop_all(&(<Layer>layer).rows)

    def _check(self):
        cdef Rows *rows
        cdef Node *node
        cdef Change *change
        cdef Layer layer
        cdef size_t i, n, in_order
        cdef uint64_t held = 0
        for layer in self.layers:
            rows = &layer.rows
            n = in_order = 0
            for i in range(rows.n_buckets):
                node = rows.buckets[i]
                while node != NULL:
                    n += 1
                    in_order += node.is_ordered
                    assert node.newest != NULL and node.rows == rows and node.hash & (rows.n_buckets - 1) == i
                    assert hash_of(key_of(node), node.size) == node.hash
                    change = node.newest
                    while change != NULL:
                        assert change.node == node and change.size <= change.room
                        assert change.before == NULL or change.before.place < change.place
                        assert self.journal[change.place] == change and change.place < self.n_journal
                        held += 1
                        change = change.before
                    node = node.same_bucket
            assert n == rows.n and n == in_order + rows.n_fresh, (n, rows.n, in_order, rows.n_fresh)
            node = rows.first[0]
            while node != NULL:
                in_order -= 1
                assert node.next[0] == NULL or compare(
                    key_of(node), node.size, key_of(node.next[0]), node.next[0].size) < 0
                node = node.next[0]
            assert in_order == 0
        for i in range(self.n_journal):
            held -= self.journal[i] != NULL
        assert held == 0
