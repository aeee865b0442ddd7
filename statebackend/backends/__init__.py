"""The implementations of backends; made by name, see `statebackend.registry`."""
