"""A backend whose process is killed at any moment: what was committed is there, and the disk is tidied up.

This file is also the program that is killed. It commits batches, each of which goes through `STEPS`. From the moment
when the asked step of the asked batch begins, it says what it has committed; it is killed some time after the first
thing that it says. Where it was then is what `Whereabouts` has noted: in shared memory, which a killed process leaves
as it was.
"""

from __future__ import annotations

import mmap
import random
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from processes import JOBS, serve, server

import statebackend as sb
from statebackend.checkpoint import CheckpointReader

# --- the program ---


#: Where a batch can be killed, in its order.
STEPS = ("restore", "writes", "rollback", "release", "flush", "compaction", "snapshot", "commit")
#: What goes on beside the steps, in threads of its own.
BESIDE = ("compacting", "writing files")

GROUPS = 16
KEYS = range(60)
COUNT = sb.ValueStateDescriptor("count", int)
TEXTS = sb.ListStateDescriptor("texts", str)
SEEN = sb.MapStateDescriptor("seen", str, bytes)

Model = dict[str, dict[int, Any]]


class Whereabouts:
    """Where a process is: a byte for the step, and one for each thing that goes on beside it."""

    def __init__(self, root: Path) -> None:
        self._path = root / "whereabouts"

    def note_from_now_on(self) -> None:
        """In the process itself."""
        self._path.write_bytes(bytes(1 + len(BESIDE)))
        with open(self._path, "r+b") as file:
            self._bytes = mmap.mmap(file.fileno(), 0)

    def at(self, step: str) -> None:
        self._bytes[0] = 1 + STEPS.index(step)

    @contextmanager
    def doing(self, what: str) -> Iterator[None]:
        self._bytes[1 + BESIDE.index(what)] = 1
        yield
        self._bytes[1 + BESIDE.index(what)] = 0

    def left(self) -> list[str]:
        """Where the process was when it was killed; nothing before its first step."""
        step, *beside = self._path.read_bytes()
        found = [STEPS[step - 1]] if step else []
        return found + [what for what, goes_on in zip(BESIDE, beside, strict=True) if goes_on]


def new_model() -> Model:
    return {"count": {}, "texts": {}, "seen": {}}


def changes_of(batch: int) -> list[tuple[str, int, Any]]:
    """What a batch does, drawn from its number: some hundred kilobytes."""
    rng = random.Random(batch)
    changes: list[tuple[str, int, Any]] = []
    for _ in range(200):
        key = rng.choice(KEYS)
        what = rng.choice(["update", "clear", "append", "put", "put", "put", "remove", "forget"])
        value: Any = None
        if what == "update":
            value = rng.randrange(10**6)
        elif what == "append":
            value = str(rng.random())
        elif what == "put":
            value = (f"entry {rng.randrange(12)}", rng.randbytes(rng.randrange(1500)))
        elif what == "remove":
            value = f"entry {rng.randrange(12)}"
        changes.append((what, key, value))
    return changes


def apply_to_model(model: Model, batch: int) -> None:
    for what, key, value in changes_of(batch):
        if what == "update":
            model["count"][key] = value
        elif what == "clear":
            model["count"].pop(key, None)
        elif what == "append":
            model["texts"].setdefault(key, []).append(value)
        elif what == "put":
            model["seen"].setdefault(key, {})[value[0]] = value[1]
        elif what == "remove":
            model["seen"].get(key, {}).pop(value, None)
        else:
            model["texts"].pop(key, None)


def apply_to_state(keyed: Any, batch: int) -> None:
    count, texts, seen = (keyed.get_state(each) for each in (COUNT, TEXTS, SEEN))
    for what, key, value in changes_of(batch):
        keyed.set_current_key(key)
        if what == "update":
            count.update(value)
        elif what == "clear":
            count.clear()
        elif what == "append":
            texts.add(value)
        elif what == "put":
            seen.put(*value)
        elif what == "remove":
            seen.remove(value)
        else:
            texts.clear()


def contents(keyed: Any) -> Model:
    """What a backend holds, as a model has it."""
    count, texts, seen = (keyed.get_state(each) for each in (COUNT, TEXTS, SEEN))
    found = new_model()
    for key in KEYS:
        keyed.set_current_key(key)
        if count.exists():
            found["count"][key] = count.value()
        if elements := list(texts.get() or ()):
            found["texts"][key] = elements
        if entries := dict(seen.items()):
            found["seen"][key] = entries
    return found


def without_empty(model: Model) -> Model:
    return {
        name: {key: value for key, value in held.items() if value not in ([], {})}
        for name, held in model.items()
    }


def open_keyed(root: Path, backend: str, restore: Any, checkpoints: str = "rows") -> Any:
    options: dict[str, Any] = {}
    if backend == "rocksdb":
        (root / "local").mkdir(parents=True, exist_ok=True)
        options = {"local_dir": root / "local", "memory_limit": 4 << 20, "checkpoints": checkpoints}
    return sb.create_backend(backend, **options).create_keyed_backend(
        int, max_parallelism=GROUPS, restore=restore
    )


def run(request: dict[str, Any], say: Callable[[object], None]) -> None:
    root = Path(request["root"])
    store = sb.CheckpointStore(root / "state").open_for_writing(key_type=int, max_parallelism=GROUPS)
    newest = store.latest()
    says = False
    whereabouts = Whereabouts(root)
    whereabouts.note_from_now_on()

    def reached(batch: int, step: str) -> None:
        nonlocal says
        whereabouts.at(step)
        if not says and (batch - first, step) == (request["batch"], request["step"]):
            says = True
            say(["committed", batch - 1])

    first = 0 if newest is None else newest + 1
    reached(first, "restore")
    checkpoints = request["checkpoints"]
    keyed = open_keyed(root, "rocksdb", () if newest is None else store.open(newest), checkpoints)
    for batch in range(first, first + 10**6):
        reached(batch, "writes")
        mark = keyed.mark()
        apply_to_state(keyed, batch + 1_000_000)
        reached(batch, "rollback")
        keyed.rollback(mark)
        apply_to_state(keyed, batch)
        reached(batch, "release")  # what is in the batch goes into the database
        keyed.release(mark)
        reached(batch, "flush")
        keyed.scratch.database.flush()
        reached(batch, "compaction")
        families = [state.table.family for state in keyed._states.values()]

        def compact(families: Any = families) -> None:
            with whereabouts.doing("compacting"):
                for each in families:
                    keyed.scratch.database.compact(each)

        compacting = threading.Thread(target=compact)
        compacting.start()
        keyed.num_entries("seen")
        reached(batch, "snapshot")
        if checkpoints == "native" and batch % 3 == 0:
            keyed._log.forget()  # so that it is a base, which may name files of the one before
        pending = keyed.snapshot(batch, store)  # while the compaction runs
        with whereabouts.doing("writing files"):
            taken = pending.result()
        reached(batch, "commit")
        store.commit(batch, [taken])
        keyed.notify_checkpoint_complete(batch)
        if says:
            say(["committed", batch])
        compacting.join()


JOBS["rocks"] = run


# --- the tests ---


#: From the beginning of a step on. Some take less than a millisecond, so that most kills come soon.
LONGEST_MICROSECONDS = 25_000
#: Where kills have to have happened: one in so many of them, at least.
FEWEST = {"writes": 100, "release": 100, "flush": 100, "compacting": 100, "writing files": 100, "commit": 100}


@pytest.mark.slow
@pytest.mark.parametrize("checkpoints", ["rows", "native"])
@pytest.mark.parametrize("is_long", [False, pytest.param(True, marks=pytest.mark.stress)], ids=["20", "long"])
def test_nothing_that_was_committed_is_lost(
    tmp_path: Path, rng: random.Random, is_long: bool, checkpoints: str, request: pytest.FixtureRequest
) -> None:
    """The long run kills five times for each of ``--kills``: 1,000 times."""
    kills = 5 * request.config.getoption("kills") if is_long else 20
    model, of_batch, caught = new_model(), -1, Counter[str]()
    whereabouts = Whereabouts(tmp_path)
    (tmp_path / "local").mkdir()  # the first process may be killed before it makes it
    reader = CheckpointReader(tmp_path / "state")
    with server(sys.modules[__name__]) as processes:
        for number in range(kills):
            step = STEPS[number % len(STEPS)]
            batch = 0 if step == "restore" else rng.randrange(3)
            after = int(LONGEST_MICROSECONDS * rng.random() ** 5)
            (answer,) = processes.ask(
                "rocks", tmp_path, step=step, batch=batch, microseconds=after, checkpoints=checkpoints
            )
            assert answer["status"] == -signal.SIGKILL
            caught.update(whereabouts.left() or ["before its first step"])
            told = max((batch for _, batch in answer["said"]), default=of_batch)
            newest = reader.latest()
            committed = -1 if newest is None else newest
            assert committed >= max(told, of_batch), "a commit that was told is lost"
            while of_batch < committed:
                of_batch += 1
                apply_to_model(model, of_batch)
            if newest is not None:
                for backend in ("heap", "rocksdb") if number % 10 == 0 else ("heap",):
                    with open_keyed(tmp_path / "reader", backend, reader.open(newest), checkpoints) as keyed:
                        assert contents(keyed) == without_empty(model), (number, step, newest)
            left = [each for each in (tmp_path / "local").iterdir() if list(each.iterdir())]
            assert len(left) <= 1, "each process has removed what the one before it has left"
    assert of_batch > kills / 2, "they were killed before they did anything"
    print(f"{kills} kills, {of_batch + 1} batches committed, killed at {dict(caught)}")
    for where, fewest in FEWEST.items():
        assert caught[where] >= kills // fewest, f"too few kills at {where!r} to tell"
    assert list((tmp_path / "reader" / "local").iterdir()) == []


if __name__ == "__main__":
    serve()
