"""Has methods in Python and the compiled core stop collections by one count. Backends on the core import this.

>>> from statebackend.state import COLLECTIONS
>>> COLLECTIONS.stop is collecting.stop
True
"""

from statebackend._core.memory import collecting
from statebackend.state import COLLECTIONS

__all__: list[str] = []

COLLECTIONS.count_with(collecting.stop, collecting.go_on)
