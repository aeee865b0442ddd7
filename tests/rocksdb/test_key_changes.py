"""Keys that have changed, against a dict that follows the same rule."""

from __future__ import annotations

import random

import numpy as np
import pytest
from rocks import rows, texts

from statebackend._core.rocksdb.overlay.key_changes import NOT_NOTED, KeyChanges

pytestmark = pytest.mark.checked

Model = dict[bytes, int]


def followed(before: int | None, after: int) -> int:
    if after >= 0 or before is None:
        return after
    return before + after if before < 0 else 1


def some(rng: random.Random, count: int) -> tuple[KeyChanges, Model]:
    made, model = KeyChanges(), Model()
    for _ in range(count):
        key = bytes(rng.choices(b"\0\1a\xff", k=rng.randrange(7)))
        became = rng.choice((0, 1, -rng.randrange(1, 9)))
        made.add(key, became)
        model[key] = followed(model.get(key), became)
    return made, model


def check(made: KeyChanges, model: Model) -> None:
    assert len(made) == len(model)
    keys, became = made.in_order()
    assert list(zip(texts(*keys), became.tolist(), strict=True)) == sorted(model.items())
    asked = [*model, b"never noted"]
    offsets, data = rows(asked)
    found = made.became_of(offsets, np.frombuffer(data, np.uint8))
    assert found.tolist() == [model.get(key, NOT_NOTED) for key in asked]
    assert [made.get(key) for key in asked] == [model.get(key) for key in asked]


@pytest.mark.parametrize("count", [0, 1, 10, 40, 3000])
def test_changes_name_the_fate_of_each_key(count: int, rng: random.Random) -> None:
    check(*some(rng, count))


@pytest.mark.parametrize("joined", ["follow", "precede"])
def test_two_that_are_joined_say_what_both_say_together(joined: str, rng: random.Random) -> None:
    for _ in range(50):
        (first, before), (second, after) = some(rng, rng.randrange(300)), some(rng, rng.randrange(300))
        model = dict(before)
        for key, became in after.items():
            model[key] = followed(model.get(key), became)
        kept = first.copy()
        if joined == "follow":
            first.follow(second)
            check(first, model)
            check(second, after)
        else:
            second.precede(first)
            check(second, model)
            check(first, before)
        check(kept, before)
