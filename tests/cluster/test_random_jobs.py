"""Random jobs over hosts give and keep what they do in one process, batch by batch, whatever the job asks for."""

from __future__ import annotations

import collections
import random
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pytest
from all_backends import BACKENDS
from host_queries import HostQuery, LocalQuery, executors, rows_out, state_of

import statebackend as sb
from statebackend.runtime import CommittedBatch, Job
from statebackend.runtime.start_checks import StartFrom
from statebackend.testing import ManualClock

pytestmark = pytest.mark.usefixtures("nothing_left_open")

_DAY = 86_400_000


class Totals(sb.KeyedProcessFunction):
    """A running total of each key; a second output has the large ones. A rule says how numbers count from now on."""

    def open(self, ctx: sb.FunctionContext) -> None:
        self.total = ctx.get_reducing_state(sb.ReducingStateDescriptor("total", "sum", int))
        self.rules = ctx.operator_backend.get_broadcast_state(sb.MapStateDescriptor("rules", str, int))

    def process_broadcast(self, row: Any, ctx: sb.FunctionContext) -> None:
        # The order of rules matters, and so does that all of them are there before any other row.
        self.rules.put("factor", 3 * self.rules.get("factor", 1) % 7 + row.n % 5)

    def process_element(self, row: Any, ctx: sb.FunctionContext) -> Iterator[Any]:
        ctx.metrics.counter("seen").inc()
        self.total.add(row.n * self.rules.get("factor", 1))
        if row.n > 80:
            ctx.output("large", (repr(ctx.current_key), row.seq, row.n))
        yield repr(ctx.current_key), row.seq, self.total.get()


class Fussy(Totals):
    """Some rows fail, after they have changed state, given rows out and registered a timer."""

    def process_element(self, row: Any, ctx: sb.FunctionContext) -> Iterator[Any]:
        ctx.timer_service().register_processing_time_timer(ctx.now + row.n)
        yield from super().process_element(row, ctx)
        if row.n % 7 == 3:
            raise ValueError("three of seven")

    def on_timer(self, timestamp: int, ctx: sb.FunctionContext) -> Iterator[Any]:
        yield repr(ctx.current_key), -1, timestamp


class Timed(sb.KeyedProcessFunction):
    """Timers of both kinds, and states that live for a time of either kind."""

    def __init__(self, *, tells_watermark: bool = True) -> None:
        self.tells_watermark = tells_watermark

    def open(self, ctx: sb.FunctionContext) -> None:
        event = sb.StateTtlConfig.TtlTimeCharacteristic.EventTime
        by_rows = sb.StateTtlConfig(400, ttl_time_characteristic=event, cleanup_idle=True)
        by_clock = sb.StateTtlConfig(150, cleanup_idle=True)
        self.recent = ctx.get_map_state(
            sb.MapStateDescriptor("recent", int, int).enable_time_to_live(by_rows)
        )
        self.seen = ctx.get_value_state(sb.ValueStateDescriptor("seen", int).enable_time_to_live(by_clock))
        self.rows = ctx.get_list_state(sb.ListStateDescriptor("rows", int))

    def process_element(self, row: Any, ctx: sb.FunctionContext) -> Iterator[Any]:
        self.seen.update((self.seen.value() or 0) + 1)
        self.recent[row.n % 5] = row.seq
        self.rows.add(row.seq)
        if ctx.timestamp is not None:
            ctx.timer_service().register_event_time_timer(ctx.timestamp + 100)
        ctx.timer_service().register_processing_time_timer(ctx.now + 10 * row.n)
        yield repr(ctx.current_key), row.seq, self.seen.value(), len(list(self.recent.items()))

    def on_timer(self, timestamp: int, ctx: sb.FunctionContext) -> Iterator[Any]:
        assert ctx.timestamp is None or ctx.watermark is None or ctx.watermark >= timestamp
        told = ctx.watermark if self.tells_watermark else 0
        yield repr(ctx.current_key), -timestamp, told, len(list(self.recent.items()))
        self.rows.clear()


class Whole(sb.KeyRowsFunction):
    """All rows of a key at once, in their order."""

    def open(self, ctx: sb.FunctionContext) -> None:
        self.last = ctx.get_value_state(sb.ValueStateDescriptor("last", list[int]))

    def process_rows(self, key: Any, rows: list[Any], ctx: sb.FunctionContext) -> Iterator[Any]:
        told = [row.seq for row in rows]
        yield repr(key), sum(self.last.value() or [0]), repr(told)
        self.last.update(told[-3:])


class Sums(sb.BatchProcessFunction):
    """Whole columns; a timer for each key of a batch."""

    def open(self, ctx: sb.FunctionContext) -> None:
        self.sum = ctx.get_reducing_state(sb.ReducingStateDescriptor("sum", "sum", int))

    def process_batch(self, batch: pa.RecordBatch, ctx: sb.FunctionContext) -> pa.RecordBatch:
        keys, sums, _ = self.sum.add_many(ctx.keys, batch["n"], return_changed=True)
        due = pa.array([ctx.now + 30] * len(keys), pa.int64())
        ctx.timer_service().register_processing_time_timers(keys, due)
        return pa.record_batch({"key": pa.array([repr(each) for each in keys.to_pylist()]), "sum": sums})

    def on_timers(
        self, keys: pa.Array, timestamps: pa.Array, namespaces: Any, ctx: sb.FunctionContext
    ) -> Any:
        told = pa.array([repr(each) for each in keys.to_pylist()], pa.string())
        return pa.record_batch({"key": told, "sum": timestamps.cast(pa.int64())})


class Instances(sb.KeyedProcessFunction, sb.CheckpointedFunction):
    """Operator state of all kinds, which says the same of all instances together, however many there are."""

    def initialize_state(self, ctx: Any) -> None:
        store = ctx.operator_state_store
        self.split = store.get_list_state(sb.ListStateDescriptor("split", int))
        self.union = store.get_union_list_state(sb.ListStateDescriptor("union", int))
        self.rules = store.get_broadcast_state(sb.MapStateDescriptor("rules", int, int))
        self.newest = max(self.union.get(), default=-1)

    def process_broadcast(self, row: Any, ctx: sb.FunctionContext) -> None:
        self.rules.put(row.n, row.seq)
        self.newest = max(self.newest, row.seq)

    def process_element(self, row: Any, ctx: sb.FunctionContext) -> Iterator[Any]:
        self.split.add(row.seq)
        yield repr(ctx.current_key), row.seq, len(list(self.rules.items()))

    def snapshot_state(self, ctx: Any) -> None:
        self.union.update([self.newest])


def counted(row: Any, state: Any) -> Any:
    state = (state or 0) + 1
    return ((repr(row.user), row.seq, state) if row.n % 3 else None), (None if row.n == 50 else state)


ROW = "key string, seq bigint, told bigint"


class Case(NamedTuple):
    """A job by the arguments that make it, and the key type."""

    function: Callable[[], Any]
    options: dict[str, Any]
    key_type: str = "string"


CASES = {
    "rows": Case(
        Totals,
        {
            "key": "user",
            "schema": {"main": ROW, "large": ROW},
            "order_by": "seq",
            "broadcast_when": "rule",
            "null_keys": "drop",
        },
    ),
    "composite key": Case(
        Totals,
        {"key": ["user", "item"], "schema": {"main": ROW, "large": ROW}, "broadcast_when": "rule"},
        "struct<user:string,item:int>",
    ),
    "long key": Case(
        Totals, {"key": "id", "schema": {"main": ROW, "large": ROW}, "order_by": ["n", "seq"]}, "bigint"
    ),
    "errors": Case(
        Fussy,
        {
            "key": "user",
            "schema": {
                "main": ROW,
                "large": ROW,
                "errors": "user string, seq bigint, error_class string, error_code string",
            },
            "order_by": "seq",
            "null_keys": "drop",
            "errors": sb.to_output("errors"),
        },
    ),
    "errors dropped": Case(
        Fussy,
        {"key": "user", "schema": {"main": ROW, "large": ROW}, "order_by": "seq", "errors": "drop"},
    ),
    "time": Case(
        Timed,
        {
            "key": "user",
            "schema": f"{ROW}, more bigint",
            "event_time": sb.EventTime(
                "at",
                watermark_delay=50,
                late="keep",
                timers="after_batch",
                max_ahead=_DAY,
                idle_after=200,
            ),
            "order_by": "seq",
            "null_keys": "drop",
        },
    ),
    "late rows dropped": Case(
        Timed,
        {
            "key": ["user", "id"],
            "schema": f"{ROW}, more bigint",
            "event_time": sb.EventTime(
                "at", watermark_delay=20, late="drop", timers="after_batch", max_ahead=_DAY
            ),
        },
        "struct<user:string,id:bigint>",
    ),
    "late rows apart, in order": Case(
        # What watermark fires a timer between rows is up to the rows of other keys at the host.
        lambda: Timed(tells_watermark=False),
        {
            "key": "user",
            "schema": {
                "main": f"{ROW}, more bigint",
                "late": "user string, seq bigint, at bigint",
                "no key": "user string, seq bigint",
            },
            "event_time": sb.EventTime("at", watermark_delay=20, late=sb.to_output("late"), max_ahead=_DAY),
            "null_keys": sb.to_output("no key"),
        },
    ),
    "rows of a key": Case(
        Whole,
        {
            "key": ["item", "user"],
            "schema": "key string, before bigint, told string",
            "order_by": ["at", "seq"],
        },
        "struct<item:int,user:string>",
    ),
    "columns": Case(Sums, {"key": "id", "schema": "key string, sum bigint"}, "bigint"),
    "columns of strings": Case(
        Sums, {"key": "user", "schema": "key string, sum bigint", "null_keys": "drop"}
    ),
    "one value": Case(
        lambda: sb.map_with_state(counted, int), {"key": "user", "schema": ROW, "null_keys": "drop"}
    ),
    "instances": Case(
        Instances, {"key": "user", "schema": ROW, "broadcast_when": "rule", "null_keys": "drop"}
    ),
}


class Rows:
    """The batches of a stream: of some rows, of none, of one key, and of broadcast rows alone."""

    def __init__(self, rng: random.Random, clock: ManualClock) -> None:
        self.rng, self.clock = rng, clock
        self.seq = 0

    def batch(self, job: Job) -> pa.Table:
        rng = self.rng
        kind = rng.choice(["many", "many", "many", "few", "none", "one key", "broadcast"])
        size = {"many": rng.randrange(60, 250), "few": rng.randrange(1, 5), "none": 0}.get(kind, 40)
        rows = [self._row(job, kind) for _ in range(size)]
        names = {"user": pa.string(), "item": pa.int32(), "id": pa.int64(), "n": pa.int64()}
        names |= {"at": pa.int64(), "rule": pa.bool_(), "seq": pa.int64()}
        return pa.Table.from_pylist(rows, pa.schema(list(names.items())))

    def _row(self, job: Job, kind: str) -> dict[str, Any]:
        rng, now = self.rng, self.clock.now()
        self.seq += 1
        one = kind == "one key"
        null_key = job.null_keys != "fail" and not rng.randrange(12)
        at = rng.choice([None, now + 10 * _DAY, *[now - rng.randrange(300) for _ in range(10)]])
        rule = True if kind == "broadcast" else rng.choice([None, True, *[False] * 10])
        return {
            "user": None if null_key else "the one" if one else f"user {rng.randrange(30)}",
            "item": 7 if one else rng.randrange(4),
            "id": -7 if one else rng.randrange(-20, 20) * 10**14,
            "n": rng.randrange(100),
            "at": at,
            "rule": rule,
            "seq": self.seq,
        }


def by_key(rows: list[tuple[Any, ...]]) -> dict[Any, list[tuple[Any, ...]]]:
    found = collections.defaultdict(list)
    for row in rows:
        found[row[0]].append(row)
    return dict(found)


#: Figures that are of the process, not of the batch.
_OWN = ("memoryUsedBytes", "commitTimeMs", "hosts", "numHeartbeats")


def same(ours: CommittedBatch, theirs: CommittedBatch) -> None:
    """The same rows, of each key in the same order, and the same figures."""
    assert set(ours.outputs) == set(theirs.outputs)
    for name in theirs.outputs:
        assert by_key(rows_out(ours, name)) == by_key(rows_out(theirs, name))
    figures = [
        {name: each for name, each in committed.progress.items() if name not in _OWN}
        for committed in (ours, theirs)
    ]
    assert figures[0] == figures[1]
    manifests = [committed.checkpoint.manifest for committed in (ours, theirs)]
    assert manifests[0].batch["identity"] == manifests[1].batch["identity"]
    assert (manifests[0].now, manifests[0].watermark) == (manifests[1].now, manifests[1].watermark)


class Twins:
    """One stream through two queries: over hosts, and in one process."""

    def __init__(self, folder: Path, case: Case, backend: str, rng: random.Random) -> None:
        self.case, self.rng = case, rng
        self.ours, self.theirs = folder / "ours", folder / "theirs"
        self.clock = ManualClock(1000 * _DAY)
        self.job = Job(case.function(), backend=backend, **case.options)
        self.rows = Rows(rng, self.clock)
        self.next = 0
        self.queries: list[HostQuery | LocalQuery] = []

    def open(self, parallelism: int, memory: int | str = "256m", **options: Any) -> None:
        options["clock"] = self.clock
        theirs = {name: each["theirs"] if isinstance(each, dict) else each for name, each in options.items()}
        ours = {name: each["ours"] if isinstance(each, dict) else each for name, each in options.items()}
        self.queries.append(LocalQuery(self.theirs, self.job, self.case.key_type, **theirs))
        hosts = executors(parallelism, batch_memory=memory)
        self.queries.append(HostQuery(self.ours, self.job, hosts, self.case.key_type, **ours))

    def batches(self, count: int) -> None:
        for _ in range(count):
            self.clock.advance(self.rng.choice([0, 1, 60, 60, 300]))
            table = self.rows.batch(self.job)
            theirs, ours = (query.run(self.next, table) for query in self.queries)
            same(ours, theirs)
            self.next += 1

    def close(self) -> None:
        queries, self.queries = self.queries, []
        for query in queries:
            query.close()

    def check_state(self) -> None:
        """The stores hold the same, and go on alike in one process."""
        assert state_of(self.ours) == state_of(self.theirs)
        for folder in (self.theirs, self.ours):
            self.queries.append(LocalQuery(folder, self.job, self.case.key_type, clock=self.clock))
        self.batches(1)
        self.close()
        assert state_of(self.ours) == state_of(self.theirs)


def run_case(folder: Path, case: Case, backend: str, rng: random.Random, batches: int) -> None:
    with closing(Twins(folder, case, backend, rng)) as twins:
        done = 0
        while done < batches:
            count = min(rng.randrange(2, 6), batches - done)
            # A function over whole batches gets one that does not fit into memory in several calls.
            few = "256m" if twins.job.is_batch else rng.choice([1, 2000, 1 << 20])
            twins.open(rng.randrange(1, 6), memory=few)
            twins.batches(count)
            twins.close()
            done += count
        twins.check_state()


@pytest.mark.parametrize("case", CASES)
def test_a_random_job_gives_what_one_process_gives(tmp_path: Path, rng: random.Random, case: str) -> None:
    run_case(tmp_path, CASES[case], "heap", rng, 4)


@pytest.mark.parametrize("backend", [each for each in BACKENDS if each != "heap"])
@pytest.mark.parametrize("case", ["rows", "time", "columns", "instances"])
def test_it_does_so_on_every_backend(tmp_path: Path, rng: random.Random, case: str, backend: str) -> None:
    run_case(tmp_path, CASES[case], backend, rng, 3)


@pytest.mark.stress
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES)
def test_it_does_so_for_long(tmp_path: Path, rng: random.Random, case: str, backend: str) -> None:
    for nth in range(10):
        run_case(tmp_path / str(nth), CASES[case], backend, rng, 30)


@pytest.mark.parametrize(
    ("kind", "backend"), [("savepoint", "heap"), *(("store", backend) for backend in BACKENDS)]
)
def test_a_job_begins_with_the_state_of_another(
    tmp_path: Path, rng: random.Random, kind: str, backend: str
) -> None:
    with closing(Twins(tmp_path / "before", CASES["instances"], backend, rng)) as before:
        before.open(3)
        before.batches(2)
    folders = {"ours": before.ours, "theirs": before.theirs}
    if kind == "savepoint":
        for name, folder in folders.items():
            sb.tools.savepoint(str(folder), str(tmp_path / f"savepoint of {name}"))
            folders[name] = tmp_path / f"savepoint of {name}"
    with closing(Twins(tmp_path / "after", CASES["instances"], backend, rng)) as after:
        after.clock, after.rows = before.clock, before.rows
        after.next = 57
        after.open(2, start={name: StartFrom(folder, first_batch=57) for name, folder in folders.items()})
        after.batches(2)
        after.close()
        after.check_state()


def test_query_begins_again_after_a_gap(tmp_path: Path, rng: random.Random) -> None:
    with closing(Twins(tmp_path, CASES["rows"], "heap", rng)) as twins:
        twins.open(3)
        twins.batches(2)
        twins.close()
        for folder in (twins.ours, twins.theirs):
            sb.tools.reset(folder, first_batch=9)
        twins.open(3)
        twins.next = 9
        twins.batches(2)
        twins.close()
        twins.check_state()
        twins.open(2)  # hosts go on with what one process has written
        twins.batches(1)


def test_a_null_key_fails_a_batch_before_anything_changes(tmp_path: Path, rng: random.Random) -> None:
    case = CASES["one value"]
    with closing(
        Twins(tmp_path, case._replace(options={**case.options, "null_keys": "fail"}), "heap", rng)
    ) as twins:
        twins.open(3)
        twins.batches(1)
        names = ["user", "n", "seq"]
        table = pa.Table.from_pylist([dict.fromkeys(names, 1) | {"user": user} for user in ("a", None)])
        for query in twins.queries:
            with pytest.raises(sb.SerializationTypeError, match="a key is null"):
                query.run(1, table)
        twins.batches(2)
        twins.close()
        twins.check_state()
