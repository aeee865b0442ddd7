"""Random runs of the map against plain dicts, over all layouts, key spaces, collisions and ways to fail.

A failure prints the model with its seed; `MapModel(...)` with the same arguments and `run` with the same
number of steps repeats it exactly.
"""

from __future__ import annotations

import gc
import random
import sys
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from map_model import THINGS, Layout, MapModel

pytestmark = pytest.mark.checked

KINDS = ["long", "int", "short", "byte", "double", "float", "bool", "bytes", "object", "copied"]
WIDTHS = [1, 2, 5, 8, 16, 63, 64, 200]
ELEMENTS = ["long", "int", "short", "byte", "double", "float", "bool", "bytes", "object", 3, 24, 200]
LAYOUTS = [
    *(Layout(value) for value in [*KINDS, *WIDTHS]),
    *(Layout(value, "bytes") for value in ["long", "byte", "bytes", "object", "copied", 5, 64]),
    *(Layout(value, namespaces=True) for value in ["long", "byte", "bytes", "object", 1, 200]),
    *(Layout(value, timestamps=True) for value in ["long", "short", "bytes", "copied", 5]),
    *(Layout(value, "bytes", True, True) for value in [*KINDS, 1, 24]),
    *(Layout(("list", element)) for element in ELEMENTS),
    *(Layout(("list", element), "bytes", True, True) for element in ELEMENTS),
]
FULL = 0xFFFFFFFF
LONG_RUN = 12_000_000


@contextmanager
def told(model: MapModel) -> Iterator[MapModel]:
    try:
        yield model
    except BaseException:
        print(model)
        raise


def run(layout: Layout, steps: int, rng: random.Random, *, check_every: int, **options: object) -> MapModel:
    with told(MapModel(layout, seed=rng.getrandbits(32), **options)) as model:
        model.run(steps, check_every)
        model.finish()
    return model


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_layout_behaves_as_a_dict(layout: Layout, rng: random.Random) -> None:
    run(layout, 3_000, rng, keys=60, max_parallelism=3, check_every=500)


@pytest.mark.parametrize("hash_mask", [0, 1, 7, FULL])
@pytest.mark.parametrize("keys", [5, 50, 600])
def test_collisions_in_small_and_larger_key_spaces(keys: int, hash_mask: int, rng: random.Random) -> None:
    for layout in (Layout("long"), Layout("bytes", "bytes", namespaces=True), Layout(("list", "int"))):
        keys = min(keys, 200) if hash_mask == 0 else keys
        run(
            layout,
            3_000,
            rng,
            keys=keys,
            hash_mask=hash_mask,
            max_parallelism=1,
            initial_capacity=4,
            check_every=500,
        )


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "layout", [Layout("long"), Layout("bytes", "bytes"), Layout(16, timestamps=True)], ids=str
)
@pytest.mark.parametrize("groups", [1, 128])
def test_a_large_key_space(layout: Layout, groups: int, rng: random.Random) -> None:
    model = run(layout, 25_000, rng, keys=100_000, max_parallelism=groups, check_every=12_000)
    assert model.operations > 25_000


@pytest.mark.parametrize(
    "layout", [Layout("long"), Layout("byte", "bytes"), Layout(("list", "bytes"))], ids=str
)
def test_a_range_of_key_groups_refuses_foreign_keys(layout: Layout, rng: random.Random) -> None:
    model = run(layout, 5_000, rng, keys=300, max_parallelism=20, key_group_range=(5, 14), check_every=1_000)
    assert model.failures


@pytest.mark.parametrize(
    "layout",
    [
        Layout("long"),
        Layout("byte"),
        Layout("bytes", "bytes", True, True),
        Layout("object"),
        Layout("copied"),
        Layout(("list", "long")),
        Layout(("list", "bytes"), "bytes"),
        Layout(("list", "object")),
    ],
    ids=str,
)
def test_failing_allocations_at_random_points(layout: Layout, rng: random.Random) -> None:
    model = run(
        layout, 4_000, rng, keys=150, starve=True, max_parallelism=2, initial_capacity=4, check_every=200
    )
    assert model.failures


@pytest.mark.parametrize("layout", [x for x in LAYOUTS if "object" in str(x)], ids=str)
def test_reference_counts_of_objects_are_exact_at_the_end(layout: Layout, rng: random.Random) -> None:
    gc.collect()
    before = [sys.getrefcount(thing) for thing in THINGS]
    run(layout, 3_000, rng, keys=40, max_parallelism=2, check_every=1_000)
    assert [sys.getrefcount(thing) for thing in THINGS] == before

    # A core that goes while marks and snapshots are open drops its references too.
    with told(MapModel(layout, seed=rng.getrandbits(32), keys=40, max_parallelism=2)) as model:
        model.run(2_000)
    del model
    gc.collect()
    assert [sys.getrefcount(thing) for thing in THINGS] == before


@pytest.mark.parametrize(
    "layout", [Layout("long"), Layout("bytes", "bytes", True, True), Layout(("list", 24))], ids=str
)
def test_tracemalloc_is_back_where_it_began(layout: Layout, rng: random.Random) -> None:
    run(layout, 500, rng, keys=40, max_parallelism=2, check_every=100)
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        run(layout, 4_000, rng, keys=400, max_parallelism=2, check_every=1_000)
        gc.collect()
        left = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert left < 30_000, f"{left} bytes stay"


def test_closing_in_the_middle_frees_everything(rng: random.Random) -> None:
    """The checked build counts; conftest compares."""
    for layout in (Layout("bytes", "bytes"), Layout(("list", "object")), Layout("copied")):
        for close in (True, False):
            with told(MapModel(layout, seed=rng.getrandbits(32), keys=100, max_parallelism=2)) as model:
                model.run(3_000)
            if close:
                for view, _ in model.snapshots:
                    view.release()
                model.core.close()


@pytest.mark.stress
def test_ten_million_operations(rng: random.Random) -> None:
    operations, round_ = 0, 0
    while operations < LONG_RUN:
        for layout in rng.sample(LAYOUTS, 10):
            keys = rng.choice((5, 50, 500, 500, 5_000, 100_000))
            mask = (
                rng.choice((0, 1, 7))
                if keys <= 50
                else rng.choice((0x3F, FULL, FULL))
                if keys < 5_000
                else FULL
            )
            options = {
                "keys": keys,
                "hash_mask": mask,
                "max_parallelism": rng.choice((1, 3, 128, 1024)),
                "initial_capacity": rng.choice((4, 64)),
                "starve": rng.random() < 0.3,
            }
            steps = 150_000 if keys == 100_000 else 60_000
            model = run(layout, steps, rng, check_every=max(2_000, keys), **options)
            operations += model.operations
        round_ += 1
        print(f"round {round_}: {operations} operations")
