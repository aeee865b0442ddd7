"""Makes golden files: ``python tests/golden/make.py tests/golden/2``, once for each version of the format that is
released. They are a checkpoint, a savepoint and the outputs of all sinks. Later versions read them: see
`test_golden.py`.
"""

from __future__ import annotations

import json
import random
import shutil
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
sys.path.insert(0, str(Path(__file__).parents[2]))

from keyed_story import Story, contents
from sink_jobs import sink_job

import statebackend as sb
from statebackend.keys import range_for

#: What has objects of Python is left out: pickles are Python's format.
NAMES = ["count", "pair", "name", "tags", "numbers", "seen", "deep", "total", "mean", "joined"]


def make(folder: Path) -> None:
    """A checkpoint of a base and two deltas, one of the same state in two ranges of key groups, a savepoint of the same
    moment, and what they hold as text.
    """
    folder.mkdir()
    clock = sb.testing.ManualClock(1000)
    store = sb.CheckpointStore(folder / "store", retain=1).open_for_writing(
        key_type="string", max_parallelism=16
    )
    keyed = sb.create_backend("heap").create_keyed_backend("string", max_parallelism=16, clock=clock)
    operator = sb.create_backend("heap").create_operator_backend()
    operator.get_list_state(sb.ListStateDescriptor("offsets", "bigint")).update([3, 1, 2])
    operator.get_union_list_state(sb.ListStateDescriptor("parts", "string")).update(["a", "b"])
    operator.get_broadcast_state(sb.MapStateDescriptor("rules", "string", "double")).put("limit", 0.5)
    story = Story(keyed, random.Random(1), str, names=NAMES, keys=15)
    aging = keyed.get_state(aging_descriptor())
    story.change(400)
    for checkpoint_id in range(3):
        clock.advance(10)
        aging.put_many(["key 1"], [checkpoint_id], [str(checkpoint_id)])
        story.change(12)
        taken = [each.snapshot(checkpoint_id, store) for each in (keyed, operator)]
        store.commit(checkpoint_id, [pending.result() for pending in taken])
    for each in (keyed, operator):
        each.savepoint(folder / "savepoint")
    ranges = sb.CheckpointStore(folder / "ranges").open_for_writing(key_type="string", max_parallelism=16)
    halves = [
        sb.create_backend("heap").create_keyed_backend(
            "string",
            max_parallelism=16,
            key_group_range=range_for(16, 2, index),
            clock=clock,
            restore=store.open(2),
        )
        for index in range(2)
    ]
    ranges.commit(0, [each.snapshot(0, ranges).result() for each in halves])
    for each in (*halves, ranges):
        each.close()
    (folder / "expected.txt").write_text(held(keyed, operator), encoding="utf-8")
    (folder / "versions.json").write_text(json.dumps({"statebackend": sb.__version__}) + "\n")
    keyed.close()
    store.close()


def aging_descriptor() -> sb.MapStateDescriptor:
    return sb.MapStateDescriptor("aging", "int", "string").enable_time_to_live(sb.StateTtlConfig(1_000_000))


def held(keyed: sb.KeyedStateBackend, operator: sb.OperatorStateBackend) -> str:
    """Everything, a line each."""
    rows = contents(keyed, NAMES)
    aging = keyed.get_state(aging_descriptor())
    keyed.set_current_namespace(sb.VOID)
    for key in sorted(keyed.keys("aging")):
        keyed.set_current_key(key)
        rows.append(("aging", key, list(aging.items())))
    rows.append(("offsets", operator.get_list_state(sb.ListStateDescriptor("offsets", "bigint")).get()))
    rows.append(("parts", operator.get_union_list_state(sb.ListStateDescriptor("parts", "string")).get()))
    rules = operator.get_broadcast_state(sb.MapStateDescriptor("rules", "string", "double"))
    rows.append(("rules", sorted(rules.items())))
    return "".join(f"{row!r}\n" for row in rows)


#: Where the outputs were written: the log of published files names it.
WRITTEN_IN = Path("/tmp/golden")


def sinks_in(folder: Path) -> dict[str, Any]:
    """All sinks of the library, over outputs in a folder."""
    return {
        "files": sb.spark.sinks.parquet(folder / "files"),
        "parts": sb.spark.sinks.parquet(folder / "parts", partition_by="user"),
        "table": sb.spark.sinks.delta(folder / "table"),
    }


def run_sinks(folder: Path, batches: range) -> None:
    """Run a query over the store in a folder, whose outputs each sink of the library writes next to it."""
    sinks = sinks_in(folder)
    schema = dict.fromkeys(sinks, "user string, v bigint")
    with sink_job(folder / "state", sinks, schema, retain=5) as job:
        for batch_id in batches:
            job.run(batch_id)


if __name__ == "__main__":
    make(Path(sys.argv[1]))
    WRITTEN_IN.mkdir()
    run_sinks(WRITTEN_IN, range(3))
    shutil.move(WRITTEN_IN, Path(sys.argv[1]) / "outputs")
