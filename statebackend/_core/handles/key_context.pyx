"""The current key of a keyed backend, in the form in which tables take it.

Setting a key converts and hashes it once, for all states: the key group by Spark's hash, and the bucket hash, which is
the same for all tables of a core. It increments `StateCore.calls`, so handles forget the slots that they remember. And
it asks for the memory that handles will need for this key and, in a run of known keys, for the next ones: see
`look_ahead.pxd`.

Time: see `time_and_namespace`. In a job with event time, states in event time use `event_now`, which the loop over
the rows sets.
"""

cimport cython
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from cpython.object cimport PyObject
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t, uintptr_t
from libc.string cimport memcpy, memset

from statebackend._core.codecs.key_value_codecs cimport KEY_NUMBER, KEY_STRING
from statebackend._core.memory.interpreter cimport PyLong_CheckExact, PyUnicode_CheckExact
from statebackend._core.tables.values cimport long_as_int64
from statebackend._core.tables.cow_map cimport CoreKey
from statebackend._core.key_groups cimport group_of_hash, hash_canonical_bytes, hash_canonical_int
from statebackend._core.handles.look_ahead cimport (
    BUCKETS_AHEAD, COMING, COMING_BYTES, ENTRIES_AHEAD, Coming, ask_for_bucket, ask_for_entry, coming_in,
    follow_values)
from statebackend._core.handles.key_shape cimport (
    SHAPE_NONE, SHAPE_TUPLE, bytes_of_key, bytes_of_tuple, holders, shape_of)
from statebackend._core.handles.time_and_namespace cimport TimeAndNamespace, begin_time
from statebackend._core.memory.platform cimport hash_bytes, hash_int, prefetch, same_bytes, unlikely
from statebackend._core.tables.state_core cimport PyThread_get_thread_ident, come_out, go_in

from statebackend.errors import ClosedError

cdef enum:
    MOST_PASSED = 256                    # keys of a run that were current, and are still held


cdef inline uint32_t near_set(object namespace) noexcept:
    """The first place of the set in which a namespace is looked for."""
    cdef uint64_t mixed = <uint64_t><uintptr_t><PyObject *>namespace * <uint64_t>0x9E3779B97F4A7C15
    return <uint32_t>(mixed >> NEAR_SHIFT) * NEAR_WAYS


@cython.no_gc_clear                      # a C pointer into `core` must not outlive it
cdef class KeyContext(TimeAndNamespace):
    """The compiled half of a keyed backend's context: core, current key, namespace and time."""

    cdef int opened(self, object store) except -1:
        self.core = store
        memset(&self.ahead, 0, sizeof(self.ahead))
        shape_of(self.codec, &self.shape)
        self.near_objects = [None] * (NEAR_SETS * NEAR_WAYS)
        self.near_names = [None] * (NEAR_SETS * NEAR_WAYS)
        return 0

    cdef int check(self) except -1:
        if unlikely(self.core.closed or self.core.inside):
            self.core._check_call()
        return 0

    cdef bint is_shut(self) noexcept:
        return self.core.closed

    cdef bint is_inside(self) noexcept:
        return self.core.inside != 0

    # --- the key ---

    def set_current_key(self, key):
        cdef int64_t number
        if unlikely(self.core.closed or self.core.inside):
            self.core._check_call()
        if unlikely(self.codec.form != KEY_NUMBER or not PyLong_CheckExact(key) or not long_as_int64(key, &number)
                    or number < self.codec.low or number > self.codec.high):
            self.set_other_key(key)
            return
        self.set_number(number)
        self.ahead.in_run = False
        if self.ahead.is_wide:
            self.ask_for_buckets()
        if unlikely(self.on_record is not None):
            self.clean_on_record()

    def _each(self, keys):
        """Iterate over `keys`, each of them current in its turn, and ask for the memory that the next ones need."""
        cdef Each run = Each.__new__(Each)
        run.context = self
        run.keys, run.source = (keys, None) if type(keys) is list else ([], iter(keys))
        return run

    cdef int set_key_of_run(self, object key, int64_t number, const int64_t *later) except -1:
        """As `set_current_key(key)`, for an exact int of this number, in a run of keys whose numbers are known.

        `later` is the number of the key that comes BUCKETS_AHEAD keys later; NULL: none does, or it is not known.
        """
        cdef Coming *coming = self.begin_turn()
        if unlikely(self.core.closed or self.core.inside or number < self.codec.low or number > self.codec.high):
            self.set_current_key(key)
            return 0
        self.set_number(number)
        self.key_object, self.key_turn = key, self.turn
        if self.ahead.is_wide:
            if later != NULL:
                coming.number = later[0]
                coming.group = group_of_hash(
                    hash_canonical_int(&self.codec.plan.program, coming.number), self.max_parallelism)
                coming.hash = hash_int(coming.number, self.key.namespace, self.core.core.seed)
                self.expect(coming)
            self.look_ahead()
        if unlikely(self.on_record is not None):
            self.clean_on_record()
        return 0

    cdef Coming *begin_turn(self) noexcept:
        """Begin the turn of the next key of a run; returns where the key goes that comes BUCKETS_AHEAD later."""
        cdef Coming *coming
        self.ahead.in_run = True
        self.ahead.turn += 1
        coming = &self.ahead.coming[(self.ahead.turn + BUCKETS_AHEAD) & (COMING - 1)]
        coming.turn = 0
        return coming

    cdef int set_number(self, int64_t number) except -1:
        """Make the key with this canonical form current."""
        cdef uint32_t group
        group = group_of_hash(hash_canonical_int(&self.codec.plan.program, number), self.max_parallelism)
        if unlikely(group - self.first_group >= self.n_groups):
            self.group_outside(group)
        begin_time(self)
        if unlikely(self.core.closed):           # a clock may run anything
            raise ClosedError("the backend is closed", hint="create another one")
        self.key.number = number
        self.key.group = group
        self.key.hash = hash_int(number, self.key.namespace, self.core.core.seed)
        self.has_key = True
        self.turn += 1
        self.core.calls += 1
        self.ahead.is_complete = True
        return 0

    cdef int clean_on_record(self) except -1:
        for state in self.on_record:
            state._clean_some()
        return 0

    def _clean_on_record(self, state):
        """Let a state clean up whenever a key is set."""
        if self.on_record is None:
            self.on_record = []
        self.on_record.append(state)

    cdef void expect(self, Coming *coming) noexcept:
        """Expect a key that is hashed, BUCKETS_AHEAD keys later, and ask for its buckets."""
        cdef uint32_t i
        if unlikely(coming.group - self.first_group >= self.n_groups):
            return                       # an error when it is set
        coming.turn = self.ahead.turn + BUCKETS_AHEAD
        for i in range(self.ahead.n_visits):
            ask_for_bucket(self.ahead.visits[i].table, coming.group, coming.hash)

    cdef void look_ahead(self) noexcept:
        """Prefetch for the next keys of the run."""
        cdef LookAhead *ahead = &self.ahead
        cdef Coming *coming = coming_in(ahead, ENTRIES_AHEAD)
        cdef uint32_t i
        cdef bint is_deep = not self.codec.is_int
        for i in range(ahead.n_visits):
            is_deep |= ahead.visits[i].reach != 0
            if coming != NULL:
                ask_for_entry(ahead.visits[i].table, coming.group, coming.hash)
        if is_deep:
            follow_values(ahead, self.key.namespace)

    cdef void ask_for_buckets(self) noexcept:
        """Ask for the buckets that the handles will look at for the current key."""
        cdef uint32_t i
        for i in range(self.ahead.n_visits):
            ask_for_bucket(self.ahead.visits[i].table, self.key.group, self.key.hash)

    cdef int set_other_key(self, object key) except -1:
        """`set_current_key` for all other keys."""
        self.ahead.in_run = False
        self.take_key(key, NULL)
        self.ask_for_buckets()
        if unlikely(self.on_record is not None):
            self.clean_on_record()
        return 0

    cdef int set_bytes_of_run(self, object key, const char *later, int64_t length) except -1:
        """`set_other_key` in a run of keys that become bytes, where the bytes of the key BUCKETS_AHEAD later are known.

        They are at `later`; a length of 0: there are none, or they are not known.
        """
        cdef Coming *coming = self.begin_turn()
        if not self.take_key(key, coming_in(&self.ahead, 0)):
            self.ask_for_buckets()
        if length:
            coming.number, coming.namespace = length, self.key.namespace
            memcpy(self.ahead.bytes[(self.ahead.turn + BUCKETS_AHEAD) & (COMING - 1)], later, length)
            coming.group = group_of_hash(
                hash_canonical_bytes(&self.codec.plan.program, <const uint8_t *>later, length), self.max_parallelism)
            coming.hash = hash_bytes(<const unsigned char *>later, length, self.core.core.seed + coming.namespace)
            self.expect(coming)
        self.look_ahead()
        if unlikely(self.on_record is not None):
            self.clean_on_record()
        return 0

    cdef int take_key(self, object key, Coming *expected) except -1:
        """Make a key current; return whether it is the one that was expected, if one was, so that its hash is known."""
        cdef CoreKey new
        cdef char written[COMING_BYTES]
        cdef object owner = None
        cdef object _old_owner           # ends with this call, when all is set
        cdef uint32_t hash_made = 0, namespace_of_hash = 0
        cdef bint is_expected = False
        memset(&new, 0, sizeof(CoreKey))
        if self.shape.form == SHAPE_TUPLE:
            new.data = written
            new.length = bytes_of_tuple(&self.shape, <PyObject *>key, written)
        if new.length == 0:
            owner = self.codec.split(key, &new)
        if not self.codec.is_int and expected != NULL and expected.number == <int64_t>new.length and same_bytes(
                self.ahead.bytes[expected.turn & (COMING - 1)], new.data, new.length):
            new.group, is_expected = expected.group, True    # one that this backend serves: `expect` took it
            hash_made, namespace_of_hash = expected.hash, expected.namespace
        else:
            self.find_group(&new)
        begin_time(self)
        if unlikely(self.core.closed or self.core.inside):   # encoders and clocks may run anything
            self.core._check_call()
        if new.data == written:
            owner = self.room_for_key()
            new.data = PyBytes_AS_STRING(owner)
            memcpy(<char *>new.data, written, new.length)
        _old_owner = self.key_owner
        self.key.number, self.key.data, self.key.length, self.key.group = new.number, new.data, new.length, new.group
        self.key_owner = owner
        self.has_key = True
        if is_expected and namespace_of_hash == self.key.namespace:
            self.key.hash = hash_made
            self.turn += 1
            self.core.calls += 1
        else:
            is_expected = False
            self.hash_key()
        self.ahead.is_complete = True
        return is_expected

    cdef object room_for_key(self):
        """Memory for the bytes of the next key: the last one's, without another owner."""
        if self.key_room is None or holders(<PyObject *>self.key_room) > 1 + (self.key_owner is self.key_room):
            self.key_room = PyBytes_FromStringAndSize(NULL, COMING_BYTES)
        return self.key_room

    cdef int adopt(self, CoreKey *key, object owner) except -1:
        """Take over a key with its key group; the namespace stays."""
        cdef object _old_owner = self.key_owner      # ends with this call, when all is set
        self.key.number = key.number
        self.key.data = key.data
        self.key.length = key.length
        self.key.group = key.group
        self.key_owner = owner
        self.has_key = True
        self.hash_key()
        return 0

    cdef void hash_key(self) noexcept:
        if self.codec.is_int:
            self.key.hash = hash_int(self.key.number, self.key.namespace, self.core.core.seed)
        else:
            self.key.hash = hash_bytes(<const unsigned char *>self.key.data, self.key.length,
                                       self.core.core.seed + self.key.namespace)
        self.turn += 1
        self.core.calls += 1

    # --- calls ---

    def _check_call(self):
        """Raise where a call may not begin: the backend is closed, or a call is in progress."""
        self.core._check_call()

    @property
    def _calls_inside(self):
        return 0 if self.core is None else self.core.inside + self.core.core.busy

    @property
    def _under_way(self):
        return 0 if self.core is None else self.core.under_way

    @_under_way.setter
    def _under_way(self, uint32_t calls):
        self.core.under_way = calls
        self.core.inside_thread = PyThread_get_thread_ident()

    @property
    def _inside_thread(self):
        return self.core.core.busy_thread if self.core.core.busy else self.core.inside_thread

    def _run(self, function, *arguments):
        """Call a function of the user's inside a call: it may not call the backend."""
        cdef uint64_t entered = go_in(self.core)
        try:
            return function(*arguments)
        finally:
            come_out(self.core, entered)

    def _settle(self):
        self.core.settle()

    def _do_later(self, deferred):
        self.core._do_later(deferred)

    @property
    def current_key(self):
        """The current key, in its canonical form; the object that was set, where that is known to be the same."""
        cdef object key
        if self.core.closed:
            raise ClosedError("the backend is closed", hint="create another one")
        if not self.has_key:
            self.no_key()
        if self.key_turn == self.turn and self.key_object is not None:
            return self.key_object
        if self.codec.form == KEY_STRING and PyUnicode_CheckExact(self.key_owner):
            return self.key_owner
        key = self.codec.key_of(self.key.number, self.key.data, self.key.length)
        if self.codec.has_constant_keys():
            self.key_object, self.key_turn = key, self.turn
        return key

    cdef int take(self, CoreKey *key, object owner) except -1:
        self.find_group(key)
        key.namespace = self.key.namespace
        self.adopt(key, owner)
        return 0

    cdef int drop_key(self) noexcept:
        self.has_key = False
        self.turn += 1
        self.core.calls += 1
        return 0

    cdef int return_to(self, CoreKey *key, object owner) except -1:
        """Back to a key that was current, with the namespace's number that it had, which was pinned meanwhile."""
        self.number_namespace(key.namespace)
        self.adopt(key, owner)
        return 0

    # --- the namespace ---

    def set_current_namespace(self, namespace):
        """Make `namespace` the one that handles work in. O(1); the objects given last are known again."""
        if unlikely(self.core.closed or self.core.inside):
            self.core._check_call()
        if namespace is self.namespace_object and namespace is not None:
            return
        if self.to_near_namespace(namespace):
            return
        self.name_namespace(self.encode_namespace(namespace))
        self.namespace_object = None
        if type(namespace) in self.frozen_types:
            self.keep_near(namespace)
            self.namespace_object = namespace

    cdef bint to_near_namespace(self, object namespace) except -1:
        """Make a namespace current if this very object was given before; return False if it is not known."""
        cdef uint32_t first = near_set(namespace), i, number
        cdef list names = self.core.namespaces.names
        for i in range(first, first + NEAR_WAYS):
            if self.near_objects[i] is namespace and namespace is not None:
                number = self.near_numbers[i]
                if number >= <uint32_t>len(names) or names[number] is not self.near_names[i]:
                    return False
                self.number_namespace(number)
                self.namespace_object = namespace
                return True
        return False

    cdef int keep_near(self, object namespace) except -1:
        """Remember the object that names the current namespace, in place of another one."""
        cdef uint32_t first = near_set(namespace), i, at
        if len(self.namespace_name) > NEAR_LONGEST:
            return 0
        self.near_turn += 1
        at = first + self.near_turn % NEAR_WAYS
        for i in range(first, first + NEAR_WAYS):
            if self.near_objects[i] is namespace or (self.near_objects[i] is None
                                                     and self.near_objects[at] is not namespace):
                at = i
        self.near_objects[at] = namespace
        self.near_names[at] = self.namespace_name
        self.near_numbers[at] = self.key.namespace
        return 0

    cdef int name_namespace(self, bytes name) except -1:
        if name != self.namespace_name:
            self.number_namespace(self.core.namespaces.intern(name))
        return 0

    cdef int number_namespace(self, uint32_t number) except -1:
        """Make a namespace current by its number, which stays its own for as long as it is current."""
        cdef list names = self.core.namespaces.names
        cdef int64_t *refs
        cdef object _old_object          # ends with this call, when all is set
        if number == self.key.namespace:
            return 0
        self.core.namespaces.usable()
        refs = self.core.core.namespace_refs
        if number >= <uint32_t>len(names) or names[number] is None:
            raise KeyError(number)
        # A number that is not held is good until Python runs.
        refs[number] += 1
        refs[self.key.namespace] -= 1
        _old_object, self.namespace_object = self.namespace_object, None
        self.namespace_name = names[number]
        self.key.namespace = number
        if self.has_key:
            self.hash_key()
        else:
            self.turn += 1
            self.core.calls += 1
        return 0

    # --- time ---

    def _saw(self, int64_t now):
        """A call uses this time; gives it back."""
        if now < self.latest:
            self.setbacks += 1
        self.latest = now
        return now


@cython.final
cdef class Each:
    """Makes each of some keys current in its turn; made by `KeyContext._each`."""
    cdef KeyContext context
    cdef object source                   # an iterator over more keys; None: there are no more
    cdef list keys                       # the next ones, as far as they are known
    cdef Py_ssize_t at                   # of the next key in them
    cdef object failure                  # of the source, when it was asked for a key whose turn has not come

    def __iter__(self):
        return self

    def __next__(self):
        cdef KeyContext context = self.context
        cdef object key
        cdef PyObject *later = NULL
        cdef int64_t number, number_later, length = 0
        cdef char bytes_later[COMING_BYTES]
        if self.source is not None:
            self.read_on()
        if self.at >= len(self.keys):
            failure, self.failure = self.failure, None
            if failure is not None:
                raise failure
            raise StopIteration
        key = self.keys[self.at]
        if self.at + BUCKETS_AHEAD < len(self.keys):
            later = <PyObject *>self.keys[self.at + BUCKETS_AHEAD]
            if self.at + 2 * BUCKETS_AHEAD < len(self.keys):     # the number is in the object
                prefetch(<PyObject *>self.keys[self.at + 2 * BUCKETS_AHEAD])
        self.at += 1
        if context.codec.form == KEY_NUMBER and PyLong_CheckExact(key) and long_as_int64(key, &number):
            context.set_key_of_run(
                key, number,
                &number_later if later != NULL and PyLong_CheckExact(<object>later)
                and long_as_int64(<object>later, &number_later) else NULL)
        elif context.shape.form != SHAPE_NONE and not context.core.closed:
            if later != NULL:
                length = bytes_of_key(&context.shape, later, bytes_later)
            context.set_bytes_of_run(key, bytes_later, length)
        else:
            context.set_current_key(key)
        return key

    cdef int read_on(self) except -1:
        """Take keys from the source until those are known that come next."""
        if self.at >= MOST_PASSED:
            del self.keys[:self.at]
            self.at = 0
        while len(self.keys) <= self.at + BUCKETS_AHEAD:
            try:
                self.keys.append(next(self.source))
            except StopIteration:
                self.source = None
                return 0
            except Exception as error:   # raised when it is its turn, as in a loop over the source
                self.source, self.failure = None, error
                return 0
        return 0
