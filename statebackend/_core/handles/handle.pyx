"""`Handle`: what the handles of all states have in common.

    KeyContext  key, hash, group, namespace, now          StateCore.calls
        |                                                        |
    Handle  --- plain, spaced: the tables --- map --- slot, valid while `stamp` == calls
      StateHandle       `state_handle`: the descriptor and the rules of expiry
      TableHandle       `table_handle`: finds the current key's entry
      CleanupHandle     `cleanup`: removes what has expired

Order of work. Serializers, functions and copies of the user's run inside the call (`go_in`, `come_out`): calls that
they make are refused. They and finalisers run before anything of the core has changed, or after all of it has.
Afterwards the handle finds its slot again if the count of calls has changed.
"""

cimport cython
from libc.stdint cimport uint32_t

from statebackend._core.tables.cow_map cimport entry_at
from statebackend._core.handles.table_handle cimport WANT_ALIVE
from statebackend._core.handles.cleanup cimport CleanupHandle
from statebackend._core.handles.enumeration cimport entries_of, numbers_of_key


@cython.no_gc_clear                      # C pointers into the core must not outlive it
cdef class Handle(CleanupHandle):
    """The base of the handles that states have; each kind of state derives its own."""

    def __init__(self, *arguments, **options):
        CleanupHandle.__init__(self, *arguments, **options)
        self.declared()

    # --- for users ---

    def clear(self):
        if self.cleanup_size:
            self.clean_some(self.cleanup_size)
        self.clear_here()

    def exists(self):
        """Return True if a read would return something stored. Copies and changes nothing. O(1) expected."""
        if self.stamp != self.core.calls:
            self.find_here()
        if self.slot == 0:
            return False
        if self.ttl == 0 or self.shows_expired:
            return True
        return self.has_any(self.table, entry_at(self.table.core, self.slot), WANT_ALIVE)

    # --- for the backend ---

    def _entries(self, uint32_t number=0, bint all_namespaces=True):
        """Two lists: the canonical keys and namespace numbers of entries with something unexpired. O(entries)."""
        return entries_of(self, all_namespaces, number)

    def _count(self):
        """Count the keys and namespaces that have the state, expired ones included. O(1)."""
        return self.plain_table.lane.entries + (self.spaced_table.lane.entries if self.spaced_table != NULL else 0)

    def _numbers_of_key(self):
        """Return the numbers of the namespaces other than VOID in which the current key has an entry.

        O(namespaces of the backend) or O(entries of the key group), whichever is less.
        """
        return numbers_of_key(self)

    def _metrics(self):
        """Return bytes, copies made for snapshots, and rehash progress of this state."""
        total = {}
        for table in self._tables():
            for name, figure in table.metrics().items():
                total[name] = total.get(name, 0) + figure
        return {name: total[name] for name in (
            "entry_bytes", "used_slots", "buckets", "rehashing_maps", "rehashed_entries", "copied_entries",
            "copied_pages")}

    def _tables(self):
        return [self.plain] if self.spaced is None else [self.plain, self.spaced]

    def _current_number(self):
        return self.context.key.namespace

    def _table_of(self, bint spaced, bint makes):
        """Return the table of VOID, or of all other namespaces; None if it was never made and is not made now."""
        if spaced and makes and self.spaced_table == NULL:
            self.make_spaced()
        return self.spaced if spaced else self.plain

    def _enter_namespace(self, uint32_t number):
        self.context.number_namespace(number)
