"""The interface of a serializer, and its verdicts about data that an older one wrote."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from statebackend.errors import StateMigrationError


class Compatibility(enum.Enum):
    """A serializer's verdict about data that was written under an older configuration.

    >>> Compatibility.AS_IS.name
    'AS_IS'
    """

    #: It reads the data unchanged.
    AS_IS = "as_is"
    #: It reads the data once `Serializer.migration` has converted it; restore does so.
    AFTER_MIGRATION = "after_migration"
    #: It cannot read the data: restore raises `StateMigrationError`.
    INCOMPATIBLE = "incompatible"


class Serializer(ABC):
    """Turns values of one type into bytes and back; derive from it to store your own type.

    A serializer is picklable and keeps no state between calls. Two of one class with equal `config` are the same.

    >>> from statebackend.types.serializers import serializer_for
    >>> serializer_for("bigint").serialize(1)
    b'\\x01\\x00\\x00\\x00\\x00\\x00\\x00\\x00'
    """

    #: True if its values cannot be changed in place; then `copy` may return the value itself.
    is_immutable: bool = False
    #: The exact number of bytes of every serialised value, or None where it varies.
    fixed_width: int | None = None

    @abstractmethod
    def serialize(self, value: Any) -> bytes:
        """The bytes of ``value``, which is never None.

        >>> from statebackend.types.serializers import serializer_for
        >>> serializer_for(str).serialize("é")
        b'\\xc3\\xa9'
        """

    @abstractmethod
    def deserialize(self, data: bytes) -> Any:
        """The value that ``data``, from `serialize`, encodes.

        >>> from statebackend.types.serializers import serializer_for
        >>> serializer_for(str).deserialize(b"abc")
        'abc'
        """

    def copy(self, value: Any) -> Any:
        """A value equal to ``value`` that shares nothing mutable with it.

        >>> from statebackend.types.serializers import serializer_for
        >>> original = [1, 2]
        >>> serializer_for(list[int]).copy(original) is original
        False
        """
        return value if self.is_immutable else self.deserialize(self.serialize(value))

    def config(self) -> dict[str, Any]:
        """A JSON-able description of the written form; stored in every checkpoint.

        The default names the class only: override it to add a version or parameters.

        >>> from statebackend.types.serializers import serializer_for
        >>> serializer_for(str).config()
        {'type': 'string'}
        """
        return {"class": f"{type(self).__module__}:{type(self).__qualname__}"}

    def compatibility(self, old_config: dict[str, Any]) -> Compatibility:
        """Tell if this serializer can read data written under ``old_config``, and how.

        >>> from statebackend.types.serializers import serializer_for
        >>> serializer_for("bigint").compatibility({"type": "int"}).name
        'AFTER_MIGRATION'
        """
        return Compatibility.AS_IS if old_config == self.config() else Compatibility.INCOMPATIBLE

    def migration(self, old_config: dict[str, Any]) -> Callable[[bytes], bytes]:
        """The function that turns bytes written under ``old_config`` into bytes of this serializer.

        A serializer that answers `AFTER_MIGRATION` overrides it.

        >>> from statebackend.types.serializers import serializer_for
        >>> migrate = serializer_for("bigint").migration({"type": "short"})
        >>> migrate(b"\\xff\\xff")
        b'\\xff\\xff\\xff\\xff\\xff\\xff\\xff\\xff'
        """
        if self.compatibility(old_config) is Compatibility.AS_IS:
            return bytes
        raise StateMigrationError(
            "the serializer cannot read what an older one wrote",
            code="STATE_MIGRATION.SERIALIZER",
            detail=f"class {type(self).__qualname__}",
            hint="declare the state as it was written, or override Serializer.migration",
        )
