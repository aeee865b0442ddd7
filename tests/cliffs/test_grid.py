"""No call becomes dearer by what was before it, or by what it does not touch: every public method, every condition.

A cell is a method, a condition, a type of values and a time to live. The condition is there at two sizes, the second a
hundred times the first. A cell fails if a call takes more than three times as long at the large size, moves or copies
more entries, or if the memory for what is there grows likewise.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
from cliffs.measuring import ATTEMPTS, LIMIT, Side, core_bytes, growth
from cliffs.operations import ELSEWHERE, INTERFACES, OPERATIONS, SLOW, public
from cliffs.stated_costs import DOCUMENTED
from cliffs.worlds import DESCRIPTORS, FORMER, GROWTHS, ROWS, VARIANTS, Growth, World, without_fsync

from statebackend._core.memory.arena import is_checked_build

PAGES = Path(__file__).parents[2] / "docs"

#: Whatever kind of state it has, a backend treats alike.
BACKEND_VARIANTS = [("LONG", "for ever"), ("LONG", "never"), ("STRING", "shown, kept")]

Cell = tuple[str, str, str]

#: How many entries one operation moves at most, whatever there is: a step of a rehash.
MOVES_OF_ONE = 8


@pytest.fixture(autouse=True)
def no_fsync(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    without_fsync(monkeypatch)
    yield
    gc.collect()


@pytest.mark.parametrize("kind", INTERFACES)
def test_every_public_method_has_a_cell(kind: str) -> None:
    interface = INTERFACES[kind]
    covered = {name.rpartition(" ")[2] for name in OPERATIONS[kind]} | ELSEWHERE.get(kind, set())
    missing = [
        f"no cell covers {interface.__name__}.{name}" for name in public(interface) if name not in covered
    ]
    assert missing == []
    assert covered <= set(public(interface)), "a cell for something that is not there"


def test_the_docs_state_the_cost() -> None:
    for (kind, method, condition), (page, sentence, _) in DOCUMENTED.items():
        assert sentence in " ".join((PAGES / page).read_text().split())
        assert method in OPERATIONS[kind] or method in ELSEWHERE[kind]
        assert condition in [each.name for each in GROWTHS]


class Pair:
    def __init__(self, kind: str, grown: Growth, values: str, time: str) -> None:
        self.kind, self.grown, self.values, self.time = kind, grown, values, time
        self.sizes = (grown.small, grown.large)
        self.worlds = [self._made(size) for size in self.sizes]

    def _made(self, size: int) -> World:
        kinds = {"backend": tuple(DESCRIPTORS), "factory": tuple(DESCRIPTORS)}.get(self.kind, (self.kind,))
        if self.kind == "timers":
            kinds = ("value", "map")
        world = World(kinds, self.values, self.time)
        self.grown.prepare(world, size)
        if self.grown.name.endswith("gone"):
            world.settle()
        return world

    def close(self) -> None:
        for world in self.worlds:
            world.close()

    def memory(self) -> float:
        """The bytes for each entry that is there, at the large size in those at the small one."""
        small, large = (core_bytes(world.keyed) / world.live for world in self.worlds)
        return large / max(small, 64.0)

    def time_of(self, method: str) -> float:
        """How a call grows; or how many more entries it moves or copies, if that is more."""
        call = OPERATIONS[self.kind][method]
        slow = (self.kind, method) in SLOW
        most = 1 if slow else 100 if self.grown is FORMER else 2_000
        sides = [Side(lambda number, world=world: call(world, number), most=most) for world in self.worlds]
        if slow:
            for side in sides:
                side.run(1)
        if self.grown is FORMER:
            for side, world, size in zip(sides, self.worlds, self.sizes, strict=True):
                world.held.append(world.keyed.mark())
                side.run(size)
        before = [self._work(world) for world in self.worlds]
        numbers = [side.number for side in sides]
        found = growth(*sides)
        if self.grown is ROWS:
            return found * self.sizes[0] / self.sizes[1]
        small, large = (
            (self._work(world) - first) / (side.number - number)
            for world, first, side, number in zip(self.worlds, before, sides, numbers, strict=True)
        )
        # An operation may move as many entries as the core allows it: maps shrink while what has expired goes.
        allowed = MOVES_OF_ONE * (self.worlds[1].rows if method.endswith("_many") else 1)
        return max(found, (large - allowed) / max(small, 1.0))

    @staticmethod
    def _work(world: World) -> int:
        """Counts what the core has moved and copied since it was made."""
        metrics = world.keyed.core.metrics()
        return int(metrics["rehashed_entries"] + metrics["copied_entries"])


def limit(cell: Cell) -> float:
    return DOCUMENTED[cell].bound if cell in DOCUMENTED else LIMIT


def variants(kind: str, grown: Growth) -> list[tuple[str, str]]:
    of_backend = BACKEND_VARIANTS if kind == "backend" else BACKEND_VARIANTS[1:2]
    chosen = VARIANTS if kind in DESCRIPTORS else of_backend
    return [each for each in chosen if not grown.expiring or each[1] != "for ever"]


def methods(kind: str, grown: Growth) -> list[str]:
    names = [name for name in OPERATIONS[kind] if math.isfinite(limit((kind, name, grown.name)))]
    return [name for name in names if name.endswith("_many")] if grown is ROWS else names


def measured(kind: str, grown: Growth, variant: tuple[str, str], wanted: list[str]) -> dict[str, float]:
    """The growth of each method in one variant; "memory" is that of the world."""
    found = {}
    if grown is FORMER:
        for method in wanted:
            if method == "memory" or (kind, method) in SLOW:
                continue
            pair = Pair(kind, grown._replace(large=5_000 if method.endswith("_many") else 20_000), *variant)
            found[method] = pair.time_of(method)
            pair.close()
        return found
    pair = Pair(kind, grown, *variant)
    for method in wanted:
        if method != "memory":
            found[method] = pair.time_of(method)
    # By now thousands of calls have had the time to reclaim what they need not keep.
    if not grown.takes_memory and grown is not ROWS and kind != "factory":
        found["memory"] = pair.memory()
    pair.close()
    return {method: factor for method, factor in found.items() if method in wanted or method == "memory"}


CELLS = [
    pytest.param(kind, grown, id=f"{kind}-{grown.name.replace(' ', '_')}")
    for kind in INTERFACES
    for grown in GROWTHS
    if methods(kind, grown)
]


@pytest.mark.skipif(is_checked_build(), reason="the checked build checks in proportion to what is there")
@pytest.mark.sampled(30)
@pytest.mark.parametrize(("kind", "grown"), CELLS)
def test_no_call_becomes_dearer(kind: str, grown: Growth) -> None:
    failing: dict[str, dict[str, float]] = {}
    for variant in variants(kind, grown):
        found = measured(kind, grown, variant, methods(kind, grown))
        limits = {method: limit((kind, method, grown.name)) for method in found}
        for _ in range(ATTEMPTS - 1):
            again = [method for method, factor in found.items() if factor > limits[method]]
            if not again:
                break
            for method, factor in measured(kind, grown, variant, again).items():
                found[method] = min(factor, found.get(method, factor))
        for method, factor in found.items():
            if factor > limits[method]:
                failing.setdefault(method, {})[", ".join(variant)] = round(factor, 1)
    if failing:
        lines = [f"{method}: {by_variant}" for method, by_variant in failing.items()]
        pytest.fail(f"dearer by {grown.name}, times as much:\n" + "\n".join(lines), pytrace=False)
