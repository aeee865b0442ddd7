"""The implementations of backends, and the registry in which each has a name."""

from statebackend.backends.registry import (
    BackendAvailability,
    available_backends,
    create_backend,
    register_backend,
)

__all__ = ["BackendAvailability", "available_backends", "create_backend", "register_backend"]
