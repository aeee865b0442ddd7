"""Tools for stored state, to be used while no job runs on it.

>>> from statebackend.tools import read_state
>>> read_state("/nowhere", "total")
Traceback (most recent call last):
statebackend.errors.UsageError: there is no checkpoint (/nowhere). Hint: give the uri of a store [USAGE.NO_CHECKPOINT]
"""

from statebackend.tools.bootstrapping import bootstrap
from statebackend.tools.copying import drop_state, rescale
from statebackend.tools.history import rewind, set_time
from statebackend.tools.states import read_state

__all__ = ["bootstrap", "drop_state", "read_state", "rescale", "rewind", "set_time"]
