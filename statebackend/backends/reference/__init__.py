"""The reference backend: plain Python over nested dicts, simple enough to be checked by reading it.

Other backends are tested against it. It stores serialised values, so nothing that it returns is shared, and it does
everything at once: no background cleanup, nothing incremental. Appending to a list or putting into a map copies the
whole collection. For real work use ``heap``.
"""

from statebackend.backends.reference.reference_backend import ReferenceBackend, ReferenceKeyedBackend

__all__ = ["ReferenceBackend", "ReferenceKeyedBackend"]
