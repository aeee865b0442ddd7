"""The compiled map and its twin, as what a test runs on, and what the tests of rules share."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import twin.state_core
import twin.state_table
from statebackend._core import core_probe
from statebackend._core.tables import state_core


class Implementation:
    """A map, and how to make a core with one table in it."""

    def __init__(self, name: str, core: Any, table: Any) -> None:
        self.name, self.StateCore, self.StateTable = name, core, table

    def make(self, **options: Any) -> SimpleNamespace:
        """`core` and `table`: integer keys, LONG values, one key group, unless `options` say otherwise."""
        core = self.StateCore(seed=options.pop("seed", 7))
        return SimpleNamespace(core=core, table=self.add(core, **options))

    def add(self, core: Any, **options: Any) -> Any:
        return self.StateTable(core, **{"max_parallelism": 1, **options})

    def chained(self, *keys: Any, **options: Any) -> SimpleNamespace:
        """A table whose keys are all in one bucket, the last of `keys` at its head; each key is its value."""
        made = self.make(hash_mask=0, **options)
        for key in keys:
            made.table.put(key, key)
        return made


COMPILED = Implementation("compiled", state_core.StateCore, core_probe.StateTable)
TWIN = Implementation("twin", twin.state_core.StateCore, twin.state_table.StateTable)


@pytest.fixture(params=[COMPILED, TWIN], ids=lambda which: which.name)
def implementation(request: pytest.FixtureRequest) -> Implementation:
    return request.param


def slots(table: Any, key: Any) -> dict[Any, int]:
    """The chain of a key, head first: which slot holds which key."""
    return {entry.key: entry.slot for entry in table.chain(key)}


def contents(table: Any) -> dict[Any, Any]:
    return {entry.key: entry.value for entry in table}


def view_contents(view: Any, table: Any) -> dict[Any, Any]:
    return {key: value for (key, _), value in table.rows_in(view).items()}


def reclaim(core: Any) -> None:
    """Let go of all that nobody needs."""
    while core.advance(1 << 20):
        pass


class MapRules:
    """The base of the classes of rules: every test of a subclass runs on both implementations."""

    implementation: Implementation

    @pytest.fixture(autouse=True, params=[COMPILED, TWIN], ids=lambda which: which.name)
    def use(self, request):
        self.implementation = request.param

    def chained(self, *keys, **options):
        made = self.implementation.chained(*keys, **options)
        return made.core, made.table

    def make(self, **options):
        made = self.implementation.make(**options)
        return made.core, made.table


def copies(table):
    return table.metrics()["copied_entries"], table.metrics()["copied_pages"]
