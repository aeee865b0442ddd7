"""A state backend that logs when all state of a key is erased; otherwise it is the reference backend."""

import logging
from typing import Any

from statebackend.backends.reference import ReferenceBackend, ReferenceKeyedBackend

log = logging.getLogger(__name__)


class AuditedKeyedBackend(ReferenceKeyedBackend):
    def __init__(self, key_type: Any, *, label: str, **options: Any) -> None:
        super().__init__(key_type, **options)
        self._label = label

    def clear_key(self) -> None:
        super().clear_key()
        log.info("%s: a key was erased", self._label)


class AuditedBackend(ReferenceBackend):
    name = "audited"

    def __init__(self, *, label: str = "state") -> None:  # the options, all of them by name
        self.label = label

    def create_keyed_backend(self, key_type: Any, **options: Any) -> AuditedKeyedBackend:
        return AuditedKeyedBackend(key_type, label=self.label, **options)

    def __repr__(self) -> str:
        return f"AuditedBackend(label={self.label!r})"
