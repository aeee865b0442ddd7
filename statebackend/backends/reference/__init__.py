"""The reference backend: plain Python, nested dicts, simple enough to be seen to be right.

It is what other backends are tested against. It stores serialised values, so that nothing it returns is
shared, and does everything at once: no background cleanup, no incremental anything. Appending to a list or
putting into a map copies it. For real work use ``heap``.

>>> from statebackend.state import ValueStateDescriptor
>>> keyed = ReferenceBackend().create_keyed_backend(str)
>>> count = keyed.get_value_state(ValueStateDescriptor("count", int))
>>> keyed.set_current_key("a")
>>> mark = keyed.mark()
>>> count.update(1)
>>> keyed.rollback(mark)
>>> count.value() is None
True
"""

from statebackend.backends.reference.backend import ReferenceBackend, ReferenceKeyedBackend

__all__ = ["ReferenceBackend", "ReferenceKeyedBackend"]
