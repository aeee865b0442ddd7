"""The heap backend: Flink's copy-on-write state maps, compiled, with values of declared types stored natively.

>>> from statebackend.state import ValueStateDescriptor
>>> keyed = HeapBackend().create_keyed_backend(str)
>>> count = keyed.get_value_state(ValueStateDescriptor("count", int))
>>> keyed.set_current_key("a")
>>> mark = keyed.mark()
>>> count.update(1)
>>> keyed.rollback(mark)
>>> count.value() is None
True
"""

from statebackend.backends.heap.backend import HeapBackend

__all__ = ["HeapBackend"]
