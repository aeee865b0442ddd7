"""The implementations of backends, and the registry in which each has a name."""

from statebackend._core.memory import collecting
from statebackend.backends.registry import (
    BackendAvailability,
    available_backends,
    create_backend,
    register_backend,
)
from statebackend.state import COLLECTIONS

__all__ = ["BackendAvailability", "available_backends", "create_backend", "register_backend"]

# Methods in Python and the compiled core stop collections by one count.
COLLECTIONS.count_with(collecting.stop, collecting.go_on)
