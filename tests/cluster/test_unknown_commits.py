"""A commit of what hosts have written whose outcome nobody knows, and two queries on one store."""

from __future__ import annotations

from typing import Any

import pytest
from host_queries import HostQuery
from host_worlds import JOB, PARALLELISM, PARTITIONS, World
from thread_cluster import batch_of

import statebackend as sb
from statebackend.checkpoint.files.posix import PosixFiles
from statebackend.runtime.batch_identity import rows_identity
from statebackend.runtime.batch_progress import Stopwatch

pytestmark = pytest.mark.usefixtures("nothing_left_open")


@pytest.mark.parametrize("was_committed", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(("of", "name"), [(sb.CheckpointStore, "commit"), (PosixFiles, "publish")])
def test_after_a_commit_whose_outcome_is_unknown_nothing_that_it_names_is_gone(
    world: World, monkeypatch: pytest.MonkeyPatch, of: type, name: str, was_committed: bool
) -> None:
    real, fails = getattr(of, name), [True]

    def failing(*arguments: Any, **options: Any) -> Any:
        done = real(*arguments, **options) if was_committed or not fails else None
        if fails:
            fails.clear()
            error = OSError("the answer was lost")
            error.unknown = of is PosixFiles  # type: ignore[attr-defined]
            raise error
        return done

    world.open()
    world.batch()
    monkeypatch.setattr(of, name, failing)
    table = world.table()
    query = world.query
    with pytest.raises(OSError, match=r"answer was lost|not known"):
        query.run(world.next, table, PARTITIONS)
    assert not query.runner.is_open
    query.close()
    reader = sb.CheckpointStore(world.folder, single_writer=True)
    reader.open_latest().verify()
    world.open()
    assert world.query.runner.last_id == (world.next if was_committed else world.next - 1)
    if was_committed:
        digest = rows_identity(table)
        again = world.query.runner.run(
            world.next, batch_of(table)._replace(identify=lambda: digest), Stopwatch()
        )
        assert again.is_replay
        world.check(again, table)
    else:
        world.batch(table)
    world.batch()


def test_of_two_queries_on_one_store_one_is_refused(world: World) -> None:
    query = world.open()
    world.batch()
    with pytest.raises(sb.UsageError):
        HostQuery(world.folder, JOB, PARALLELISM)
    world.batch()
    assert query.runner.is_open


def test_hosts_of_a_query_that_was_overtaken_end(world: World) -> None:
    query = world.open()
    world.batch()
    other = sb.CheckpointStore(world.folder).open_for_writing(refuse_live=False)
    try:
        with pytest.raises(sb.CommitConflictError):
            query.run(world.next, world.table(), PARTITIONS)
    finally:
        other.close()
    query.close()
    # The cluster begins others meanwhile, which find nobody.
    ended = [each for each in world.cluster.ended if each in ("the driver let it go", "the driver has gone")]
    assert len(ended) >= PARALLELISM
    world.open()
    world.batch()
