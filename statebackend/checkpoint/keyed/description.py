"""The description of a keyed state in a checkpoint, and the check if a descriptor can take the state over."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import pyarrow as pa

from statebackend.checkpoint.store.manifest import CheckedStates, checked_states
from statebackend.checkpoint.store.sealed import MAX_INTEGER, JsonObject, Malformed, instance, integer
from statebackend.errors import CorruptCheckpointError, SerializationError, StateMigrationError, usage
from statebackend.state import (
    MAX_TIMESTAMP,
    RESERVED,
    ListStateDescriptor,
    MapStateDescriptor,
    StateDescriptor,
    StateTtlConfig,
    ValueStateDescriptor,
    newest_expired,
)
from statebackend.types import Compatibility, RowType, Type, from_config
from statebackend.types.serializers import compatibility, describe

_VALUE_ROLES = {"value": "value", "list": "element", "map": "value", "reducing": "value"}


def value_role(kind: str) -> str:
    """The role in a descriptor's `stored_types` of the values in the column ``value``."""
    return _VALUE_ROLES.get(kind, "accumulator")


class Lifetime(NamedTuple):
    """A time to live, in milliseconds."""

    ttl: int
    in_event_time: bool

    @classmethod
    def read(cls, data: object) -> Lifetime | None:
        """Read it from a description; None in stores of older versions, which do not have it."""
        if data is None:
            return None
        members = instance(data, dict, "the lifetime of a state")
        in_event_time = instance(members.get("event_time"), bool, "the time of a lifetime")
        return cls(integer(members.get("ttl"), "a lifetime", 1), in_event_time)

    def to_json(self) -> JsonObject:
        return {"ttl": self.ttl, "event_time": self.in_event_time}


@dataclass(frozen=True)
class StateDescription:
    """A state as `StateSnapshot.states` describes it: name, kind, types by role, with a time to live or without."""

    name: str
    kind: str
    types: dict[str, JsonObject]
    ttl: bool
    #: The time to live in milliseconds, and if it counts in event time; None if there is none, or it is unknown.
    lifetime: Lifetime | None = field(default=None, compare=False)
    #: False if a backend keeps the state, and it was not requested since the restore.
    is_declared: bool = field(default=True, compare=False)

    def expired_before(self, now: int | None, watermark: int | None) -> int | None:
        """The newest timestamp that has expired at these times; None if nothing has, or no TTL is known."""
        if self.lifetime is None:
            return None
        time = watermark if self.lifetime.in_event_time else now
        return None if time is None else newest_expired(self.lifetime.ttl, time)

    @classmethod
    def of(cls, descriptor: StateDescriptor) -> StateDescription:
        ttl = descriptor.ttl_config
        lifetime = None if ttl is None else Lifetime(min(ttl.ttl, MAX_INTEGER), ttl.is_in_event_time)
        return cls(descriptor.name, **descriptor.config(), lifetime=lifetime)

    @classmethod
    def read(cls, data: Mapping[str, object], where: str) -> StateDescription:
        """Read the description in a manifest; `CorruptCheckpointError` naming ``where`` if it is none."""
        try:
            return cls(
                instance(data.get("name"), str, "the name of a state"),
                instance(data.get("kind"), str, "the kind of a state"),
                instance(data.get("types"), dict, "the types of a state"),
                instance(data.get("ttl"), bool, "the time to live of a state"),
                Lifetime.read(data.get("lifetime")),
                data.get("declared") is not False,
            )
        except Malformed as error:
            raise CorruptCheckpointError(f"a state is described wrongly: {error}", detail=where) from error

    @property
    def is_reserved(self) -> bool:
        """True if the state belongs to the library, as timers do."""
        return self.name.startswith(RESERVED)

    def to_json(self) -> JsonObject:
        described: JsonObject = {"name": self.name, "kind": self.kind, "types": self.types, "ttl": self.ttl}
        if self.lifetime is not None:
            described["lifetime"] = self.lifetime.to_json()
        if not self.is_declared:
            described["declared"] = False
        return described

    def descriptor(self) -> StateDescriptor:
        """A descriptor that takes the state over as it is; of a state of values, a list or a map."""
        types = {role: from_config(config) for role, config in self.types.items()}
        made: StateDescriptor
        if self.kind == "map":
            made = MapStateDescriptor(self.name, types["key"], types["value"])
        elif self.kind == "list":
            made = ListStateDescriptor(self.name, types["element"])
        else:
            made = ValueStateDescriptor(self.name, types["value"])
        if self.ttl:
            made.enable_time_to_live(StateTtlConfig(MAX_TIMESTAMP))
        return made

    def check(self, descriptor: StateDescriptor) -> Compatibility:
        """Tell how a descriptor can take over the rows; `StateMigrationError` if it cannot."""
        answer = Compatibility.AS_IS if descriptor.name == self.name else Compatibility.AFTER_MIGRATION
        stored = descriptor.stored_types()
        if descriptor.kind != self.kind or set(stored) != set(self.types):
            raise self._refused(descriptor)
        for role, declared in stored.items():
            found = _compare(self.types[role], declared)
            must_be_the_same = role == "key" and found is not Compatibility.AS_IS
            if descriptor.migrate is not None and found is Compatibility.INCOMPATIBLE:
                found = Compatibility.AFTER_MIGRATION
            if must_be_the_same or found is Compatibility.INCOMPATIBLE:
                raise self._refused(descriptor)
            if found is Compatibility.AFTER_MIGRATION:
                answer = found
        if self.ttl != (descriptor.ttl_config is not None):
            answer = Compatibility.AFTER_MIGRATION
        value = stored[value_role(self.kind)]
        if descriptor.new_fields.keys() - set(value.names if isinstance(value, RowType) else ()):
            raise usage.descriptor(
                "new_fields names a field that the type of the values does not have",
                detail=f"state {descriptor.name!r}, {describe(value.config())}",
            )
        return answer

    def is_migrated(self, descriptor: StateDescriptor) -> bool:
        """True if the descriptor's ``migrate`` makes its values from the stored ones."""
        role = value_role(self.kind)
        same = _compare(self.types[role], descriptor.stored_types()[role]) is Compatibility.AS_IS
        return descriptor.migrate is not None and (descriptor.name != self.name or not same)

    def how(self, descriptor: StateDescriptor) -> str | None:
        """How a migration to this descriptor changes values; None for TTLs alone."""
        role = value_role(self.kind)
        stored, declared = self.types[role], descriptor.stored_types()[role].config()
        steps = [
            *([f"renamed from {self.name!r}"] if descriptor.name != self.name else []),
            *([f"{describe(stored)} to {describe(declared)}"] if stored != declared else []),
            *(["by migrate="] if self.is_migrated(descriptor) else []),
        ]
        return ", ".join(steps) or None

    def _refused(self, descriptor: StateDescriptor) -> StateMigrationError:
        mine = ", ".join(describe(config) for config in self.types.values())
        is_kind = descriptor.kind == self.kind
        return StateMigrationError(
            f"state {self.name!r} is {self.kind.upper()} of {mine} in the checkpoint, and is asked for as "
            f"{descriptor.describe()}",
            code="STATE_MIGRATION.INCOMPATIBLE",
            hint=f"{'declare a type that the stored one widens to, pass migrate=, or ' * is_kind}give the new state "
            "another name; "
            "sb.tools.drop_state removes the stored one",
        )


class StateDescriptions:
    """The states of a backend at one moment, for checkpoints. A state that is declared again has another descriptor.

    Snapshots share it until a state is declared. Its other properties are computed once, on first use.
    """

    def __init__(self, states: tuple[StateDescriptor | StateDescription, ...]) -> None:
        self.states = states

    @cached_property
    def by_name(self) -> list[StateDescription]:
        described = [
            replace(each, is_declared=False)
            if isinstance(each, StateDescription)
            else StateDescription.of(each)
            for each in self.states
        ]
        return sorted(described, key=lambda each: each.name)

    @cached_property
    def checked(self) -> CheckedStates:
        return checked_states(each.to_json() for each in self.by_name)


def _compare(config: JsonObject, declared: Type) -> Compatibility:
    try:
        return compatibility(config, declared)
    except SerializationError as error:
        raise CorruptCheckpointError("the type of a state is described wrongly") from error


def different_states(whole: str, name: str) -> StateMigrationError:
    """The error for instances of a checkpoint or savepoint that describe one state differently."""
    return StateMigrationError(
        f"the instances of the {whole} have different states {name!r}", code="STATE_MIGRATION.INCOMPATIBLE"
    )


def check_key_type(config: object, key_type: Type, whole: str, where: str) -> None:
    """Raise `StateMigrationError` if the keys of a checkpoint or savepoint have another type than a backend."""
    if config != key_type.config():
        raise StateMigrationError(
            f"the keys of the {whole} are {describe(config)}, and this backend has {key_type.ddl()}",
            code="STATE_MIGRATION.KEY_TYPE",
            detail=where,
            hint="create the backend with the type of key that the state was written with",
        )


def state_schema(key_type: Type, descriptor: StateDescriptor, *, namespaces: bool, ops: bool) -> pa.Schema:
    """The columns that a state has in a data file."""
    stored = descriptor.stored_types()
    is_list = descriptor.kind == "list"
    value = stored[value_role(descriptor.kind)].arrow
    columns = [("key", key_type.arrow)]
    if namespaces:
        columns.append(("namespace", pa.binary()))
    if descriptor.kind == "map":
        columns.append(("map_key", stored["key"].arrow))
    columns.append(("value", pa.list_(value) if is_list else value))
    if descriptor.ttl_config is not None:
        columns.append(("timestamp", pa.list_(pa.int64()) if is_list else pa.int64()))
    if ops:
        columns.append(("op", pa.uint8()))
    return pa.schema(columns)
