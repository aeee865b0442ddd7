"""Runs the Java side and returns its measurements.

Every operation runs in a JVM of its own unless told otherwise, so that what the compiler learned from one
operation cannot slow the next one down. Input is built outside the timed part and every result is checked in
the JVM; a wrong one ends the run with ``PeerFailed``.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy.typing as npt

from bench.flink.jvm import Measurement, PeerFailed, Session, run_to_end
from bench.flink.keys import KeyFile
from bench.flink.provision import Installation, PeerUnavailable, default_cache, install

#: Operations on the raw state maps. ``get`` to ``update_under_snapshot`` are timed per key;
#: ``snapshot_pause`` is one operation for all maps; the last three are distributions and memory and have
#: fields of their own.
MAP_OPS = (
    "add",
    "update",
    "get",
    "transform",
    "update_under_snapshot",
    "snapshot_pause",
    "snapshot_write",
    "worst_put_wall",
    "worst_put_cpu",
    "bytes_per_entry",
)
#: Operations through the state API: ``setCurrentKey`` and the handle. For ``map_iterate`` an operation is one
#: map entry (four per key), for ``list_get`` one list (of two elements).
BACKEND_OPS = (
    "value_update",
    "value_get",
    "value_rmw",
    "value_add",
    "reducing_add",
    "map_get",
    "map_update",
    "map_iterate",
    "list_append",
    "list_get",
)
#: Operations through the state API by type: of values, of keys, and of the keys of maps.
TYPE_OPS = ("value_update", "value_get", "key_update", "map_put", "map_get")
TIMER_OPS = ("timer_register", "timer_poll")
#: Of the timer service above the queue: the key is set before a timer is registered, and current when it fires.
SERVICE_OPS = ("service_register", "service_fire", "service_move")
#: ``default`` is Flink's default clean-up (incremental, five entries per access); ``no_cleanup`` disables it.
TTL_MODES = ("off", "default", "no_cleanup")

_MAINS = {
    "map": "org.apache.flink.runtime.state.heap.MapBench",
    "backend": "statebackend.bench.BackendBench",
    "snapshot": "statebackend.bench.SnapshotBench",
    "timers": "statebackend.bench.TimerBench",
    "types": "statebackend.bench.TypesBench",
}
_SESSIONS = {"backend": BACKEND_OPS, "timers": SERVICE_OPS, "types": TYPE_OPS}
_COLLECTORS = {
    "G1": "-XX:+UseG1GC",
    "Parallel": "-XX:+UseParallelGC",
}
# Neither is best for every operation: G1's write barrier makes updates of state in the old generation several
# times slower, but it is what the JVM takes by default.
_CANDIDATES = ("G1", "Parallel")
# A full collection of the parallel (and serial) collector may leave dead objects at the bottom of the heap;
# one of G1 does not, so only there memory in use is memory needed.
_COLLECTOR_OF_MEMORY = "G1"
_MEMORY_OP = "bytes_per_entry"
# Enough rows for the last tier of the compiler, and at least two rounds whatever the size.
_WARMUP_ROWS = 4_000_000


@dataclass(frozen=True)
class _Settings:
    """What the ``run_`` methods have in common; ``FlinkPeer`` says what each means."""

    key_groups: int
    samples: int
    heap: str
    gc: str
    warmup: int | None
    huge_pages: bool
    settled: bool
    fork: bool

    def warmup_rounds(self, n: int) -> int:
        return min(50, max(2, -(-_WARMUP_ROWS // n))) if self.warmup is None else self.warmup

    def arguments(self, n: int) -> dict[str, object]:
        """What every suite is told."""
        return {"key-groups": self.key_groups, "samples": self.samples, "warmup": self.warmup_rounds(n)}


class FlinkPeer:
    """Flink's heap backend in a JVM.

    ``cache`` is the folder for Flink's jar and the compiled classes (see ``provision``); ``download`` says
    whether the jar may be fetched; ``timeout`` is the limit in seconds of one JVM; ``seed`` gives the random
    orders.

    All ``run_`` methods take distinct signed integers as ``keys``, in insertion order, and raise
    ``PeerUnavailable`` where ``available`` would say no. ``warmup`` counts rounds (by default as many as make
    four million rows, at least two), ``heap`` sets ``-Xms`` and ``-Xmx``, ``huge_pages`` turns transparent
    huge pages on for the heap, and ``fork`` gives each operation its own JVM. The heap is touched before the
    start, so that page faults are not part of a figure.

    ``gc`` is ``"G1"``, ``"Parallel"``, or ``"best"``: both, and for each operation the figure that is better
    for Flink, with the other one as ``other_gc`` (``gc`` and the figure's field). ``settled`` collects fully
    before each sample, which puts the state where that of a long-running job is, in the old generation; it
    costs G1 dearly, so by default collections come when the JVM wants them (operations that start from empty
    state excepted).

    Each measurement has ``name``, ``n``, ``key_groups``, ``gc``, ``huge_pages``, ``settled`` and ``jvm``
    (versions, flags, collectors, load of the machine). Timed ones have ``operations`` per sample,
    ``samples_ns_per_op``, ``median_ns_per_op``, ``median_mops``, ``samples_ms`` and ``median_ms`` of whole
    samples, ``gc_ms_in_samples`` (collections within the timed parts, all together) and ``warmup_rounds``.
    """

    def __init__(
        self,
        cache: Path | str | None = None,
        *,
        download: bool = True,
        timeout: float = 1800.0,
        seed: int = 1,
    ) -> None:
        self.cache = Path(cache) if cache is not None else default_cache()
        self.download = download
        self.timeout = timeout
        self.seed = seed
        self._installation: Installation | None = None

    def prepare(self) -> None:
        """Download and compile what is missing, or raise ``PeerUnavailable``."""
        if self._installation is None:
            self._installation = install(self.cache, self.download)

    def available(self) -> tuple[bool, str]:
        """Return whether the peer can run and, if not, why; prepares it on the way.

        The second item is meant for ``pytest.skip``.
        """
        try:
            self.prepare()
        except PeerUnavailable as unavailable:
            return False, unavailable.reason
        return True, ""

    def run_map(
        self,
        ops: Sequence[str],
        keys: npt.ArrayLike,
        key_groups: int = 128,
        samples: int = 7,
        heap: str = "8g",
        gc: str = "best",
        *,
        warmup: int | None = None,
        huge_pages: bool = False,
        settled: bool = False,
        fork: bool = True,
    ) -> list[Measurement]:
        """Measure ``MAP_OPS`` on raw maps from Long to Long, one map per key group.

        The key group of every row is computed inside the timed part, as Flink does for every record.
        ``worst_put_wall`` and ``worst_put_cpu`` have ``quantiles_ns`` (``p50`` to ``p99_9999`` and ``max``,
        medians over the rounds), ``max_ns_per_round`` and ``clock_cost_ns`` (contained in each figure);
        ``bytes_per_entry`` has ``bytes_per_entry`` and ``bytes_total``, key and value objects included; it
        comes last and always from a JVM of its own with G1.
        """
        return self._run_map(
            ops, keys, "long", _Settings(key_groups, samples, heap, gc, warmup, huge_pages, settled, fork)
        )

    def run_strings(
        self,
        ops: Sequence[str],
        keys: npt.ArrayLike,
        key_groups: int = 128,
        samples: int = 7,
        heap: str = "8g",
        gc: str = "best",
        *,
        warmup: int | None = None,
        huge_pages: bool = False,
        settled: bool = False,
        fork: bool = True,
    ) -> list[Measurement]:
        """Measure ``MAP_OPS`` on raw maps from String to Long; the key of a number ``k`` is ``f"user-{k}"``.

        The strings of a round are fresh objects that have not computed their hash yet, as records have not.
        """
        return self._run_map(
            ops, keys, "string", _Settings(key_groups, samples, heap, gc, warmup, huge_pages, settled, fork)
        )

    def run_backend(
        self,
        ops: Sequence[str],
        keys: npt.ArrayLike,
        key_groups: int = 128,
        samples: int = 7,
        heap: str = "8g",
        gc: str = "best",
        *,
        ttl: str = "off",
        warmup: int | None = None,
        huge_pages: bool = False,
        settled: bool = False,
        fork: bool = True,
    ) -> list[Measurement]:
        """Measure ``BACKEND_OPS`` through the state API, Long keys, with one of the ``TTL_MODES``.

        Measurements have ``ttl`` too.
        """
        _require(ops, BACKEND_OPS)
        _require([ttl], TTL_MODES)
        settings = _Settings(key_groups, samples, heap, gc, warmup, huge_pages, settled, fork)
        return self._run("backend", ops, keys, settings, ttl=ttl)

    def run_timers(
        self,
        ops: Sequence[str],
        keys: npt.ArrayLike,
        key_groups: int = 128,
        samples: int = 7,
        heap: str = "8g",
        gc: str = "best",
        *,
        warmup: int | None = None,
        huge_pages: bool = False,
        settled: bool = False,
        fork: bool = True,
    ) -> list[Measurement]:
        """Measure ``TIMER_OPS`` on the heap timer queue, or ``SERVICE_OPS``: one timer per key at a random time."""
        _require(ops, TIMER_OPS + SERVICE_OPS)
        return self._run(
            "timers", ops, keys, _Settings(key_groups, samples, heap, gc, warmup, huge_pages, settled, fork)
        )

    def run_type_bytes(
        self,
        role: str,
        type_name: str,
        keys: npt.ArrayLike,
        key_groups: int = 128,
        heap: str = "8g",
    ) -> Measurement:
        """Measure the heap that a value state takes, in ``bytes_per_entry`` and ``bytes_total``.

        Its values are of the type, under Long keys; with the role ``"key"`` its keys are, with Long values. The
        objects of keys and values are included.
        """
        _require([role], ("value", "key"))
        settings = _Settings(key_groups, 1, heap, "best", 0, huge_pages=False, settled=False, fork=True)
        (one,) = self._run("types", [_MEMORY_OP], keys, settings, role=role, type=type_name)
        return one

    def run_snapshot_pause(
        self,
        keys: npt.ArrayLike,
        states: int = 10,
        key_groups: int = 128,
        samples: int = 7,
        heap: str = "8g",
        gc: str = "best",
        *,
        warmup: int = 2,
        huge_pages: bool = False,
        settled: bool = False,
    ) -> list[Measurement]:
        """Measure ``snapshot()`` of a backend with that many value states, each holding all keys.

        One measurement, ``snapshot_pause_backend``: ``samples_ms`` is the time until the future is returned.
        A thread then writes the snapshot to memory while the owner updates batches of ``batch_rows`` rows
        until the future is done: ``batch_us_before`` and ``batch_us_during`` are medians per sample,
        ``median_slowdown`` their ratio, ``batches_during`` the number of batches behind it,
        ``samples_write_ms`` and ``median_write_ms`` the time of the writing. Also ``states``, ``entries``,
        ``bytes_written``.
        """
        # At the sizes in question a round takes seconds: a fixed number of rounds is the warm-up.
        settings = _Settings(key_groups, samples, heap, gc, warmup, huge_pages, settled, fork=True)
        return self._run("snapshot", ["snapshot"], keys, settings, states=states)

    def launch(
        self,
        suite: str,
        key_file: KeyFile,
        arguments: dict[str, object],
        *,
        heap: str = "8g",
        gc: str = "G1",
        huge_pages: bool = False,
        settled: bool = False,
    ) -> list[Measurement]:
        """Run one JVM on a key file that exists; the building block of the ``run_`` methods.

        ``suite`` is ``"map"``, ``"backend"``, ``"snapshot"``, ``"timers"`` or ``"types"``; ``arguments`` go to it as
        ``--name value``.
        """
        command = self._command(
            suite, key_file, arguments, heap=heap, gc=gc, huge_pages=huge_pages, settled=settled
        )
        header, measurements = run_to_end(command, self.timeout, suite, key_file.path.parent)
        settings = _surroundings(header, key_file, gc, huge_pages, settled)
        return [{**measurement, **settings} for measurement in measurements]

    @contextmanager
    def session(
        self,
        op: str,
        keys: npt.ArrayLike,
        key_groups: int = 128,
        samples: int = 7,
        heap: str = "8g",
        gc: str = "G1",
        *,
        suite: str = "backend",
        ttl: str = "off",
        type_name: str = "bigint",
        warmup: int | None = None,
        huge_pages: bool = False,
        settled: bool = False,
    ) -> Iterator[Session]:
        """Open one of ``BACKEND_OPS`` as a `Session`, whose rounds take turns with those of others.

        With the suite ``"types"`` it is one of ``TYPE_OPS``, with values, keys or map keys of ``type_name``; with
        ``"timers"`` one of ``SERVICE_OPS``.

        The arguments are those of ``run_backend``, but one collector has to be named; ``timeout`` is the
        limit of one round. The measurement has ``contents`` too, a checksum of the state after the last round.
        """
        _require([op], _SESSIONS[suite])
        _require([ttl], TTL_MODES)
        settings = _Settings(key_groups, samples, heap, gc, warmup, huge_pages, settled, fork=True)
        with tempfile.TemporaryDirectory(prefix="flink-peer-") as folder:
            key_file = KeyFile.write(Path(folder) / "keys.bin", keys, self.seed)
            arguments = {**settings.arguments(key_file.n), "ops": op, "ttl": ttl, "type": type_name}
            command = self._command(
                suite,
                key_file,
                arguments,
                heap=heap,
                gc=gc,
                huge_pages=huge_pages,
                settled=settled,
                stepwise=True,
            )
            rounds = settings.warmup_rounds(key_file.n) + samples
            with Session(command, self.timeout, suite, key_file.path.parent, rounds) as session:
                session.surroundings = _surroundings(session.header, key_file, gc, huge_pages, settled)
                yield session

    def _command(
        self,
        suite: str,
        key_file: KeyFile,
        arguments: dict[str, object],
        *,
        heap: str,
        gc: str,
        huge_pages: bool,
        settled: bool,
        stepwise: bool = False,
    ) -> list[str]:
        self.prepare()
        assert self._installation is not None
        _require([gc], _COLLECTORS)
        command = [str(self._installation.java), f"-Xms{heap}", f"-Xmx{heap}", _COLLECTORS[gc]]
        command += ["-XX:+AlwaysPreTouch", f"-XX:{'+' if huge_pages else '-'}UseTransparentHugePages"]
        command += ["-cp", self._installation.classpath, _MAINS[suite]]
        given = {
            "keys": key_file.path.resolve(),
            "n": key_file.n,
            "checksum": key_file.checksum,
            "seed": key_file.seed,
            "settled": int(settled),
            "stepwise": int(stepwise),
            **arguments,
        }
        for name, value in given.items():
            command += [f"--{name}", str(value)]
        return command

    def _run_map(
        self, ops: Sequence[str], keys: npt.ArrayLike, key_type: str, settings: _Settings
    ) -> list[Measurement]:
        _require(ops, MAP_OPS)
        return self._run("map", ops, keys, settings, **{"key-type": key_type})

    def _run(
        self, suite: str, ops: Sequence[str], keys: npt.ArrayLike, settings: _Settings, **extra: object
    ) -> list[Measurement]:
        self.prepare()
        with tempfile.TemporaryDirectory(prefix="flink-peer-") as folder:
            key_file = KeyFile.write(Path(folder) / "keys.bin", keys, self.seed)
            shared = {**settings.arguments(key_file.n), **extra}
            measurements = []
            for group, collectors in _plan(ops, settings):
                by_collector = [
                    self.launch(
                        suite,
                        key_file,
                        {**shared, "ops": ",".join(group)},
                        heap=settings.heap,
                        gc=collector,
                        huge_pages=settings.huge_pages,
                        settled=settings.settled,
                    )
                    for collector in collectors
                ]
                measurements += [_better(same_op) for same_op in zip(*by_collector, strict=True)]
            return measurements


def _surroundings(
    header: dict[str, Any], key_file: KeyFile, gc: str, huge_pages: bool, settled: bool
) -> dict[str, Any]:
    """Return what a measurement was made in; raise unless the JVM visits the keys in our order."""
    if header["order_checksum"] != key_file.order_checksum:
        raise PeerFailed(
            "the JVM does not visit the keys in the order of round_order: a fault of the harness"
        )
    jvm = {name: header[name] for name in header if name not in ("record", "suite", "n", "order_checksum")}
    return {"gc": gc, "huge_pages": huge_pages, "settled": settled, "jvm": jvm}


def _plan(ops: Sequence[str], settings: _Settings) -> Iterator[tuple[list[str], Sequence[str]]]:
    """Yield which operations share a JVM, and the collectors to measure them with."""
    timed = [op for op in ops if op != _MEMORY_OP]
    collectors = _CANDIDATES if settings.gc == "best" else (settings.gc,)
    for group in [[op] for op in timed] if settings.fork else [timed]:
        if group:
            yield group, collectors
    if _MEMORY_OP in ops:
        yield [_MEMORY_OP], (_COLLECTOR_OF_MEMORY,)


def _better(same_op: Sequence[Measurement]) -> Measurement:
    """Return the measurement that is better for Flink, with the figure of the other collector beside it."""
    best, *others = sorted(same_op, key=_cost)
    return {**best, "other_gc": {"gc": others[0]["gc"], **_figure(others[0])}} if others else best


def _cost(measurement: Measurement) -> float:
    (value,) = _figure(measurement).values()
    # The far end of the distribution is what it is measured for.
    return float(value["p99_9999"] if isinstance(value, dict) else value)


def _figure(measurement: Measurement) -> dict[str, Any]:
    """Return the field a measurement is made for; less is better in all of them."""
    for field in ("quantiles_ns", "bytes_per_entry", "median_ns_per_op"):
        if field in measurement:
            return {field: measurement[field]}
    raise PeerFailed(f"the measurement {measurement['name']} has no figure")


def _require(names: Iterable[str], known: Iterable[str]) -> None:
    if isinstance(names, str):
        raise ValueError(f"give a list of names, not the string {names!r}")
    known = list(known)
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"unknown: {', '.join(unknown)}; known are {', '.join(known)}")
