"""The backend on RocksDB, for state that is larger than memory.

>>> from statebackend.state import ValueStateDescriptor
>>> with RocksDbBackend().create_keyed_backend(str) as keyed:
...     count = keyed.get_value_state(ValueStateDescriptor("count", int))
...     keyed.set_current_key("ann")
...     count.update(1)
...     count.value()
1
"""

from statebackend.backends.rocksdb.backend import RocksDbBackend

__all__ = ["RocksDbBackend"]
