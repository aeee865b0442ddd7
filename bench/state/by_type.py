"""What values, keys and map keys of other types than LONG cost, one by one and in batches; timers; memory by type."""

from __future__ import annotations

import os
from collections.abc import Collection
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import statebackend as sb
from bench.flink import random_keys
from bench.flink.keys import Int64Array
from bench.state.kinds import KINDS
from bench.state.lockstep import Rounds, Timing, in_turns
from bench.state.processes import OwnProcess
from bench.state.sides import OURS, Sides
from bench.state.typed import expected, keyed_backend, make_typed
from bench.timers.ours import Rounds as TimerRounds

#: What can be asked for, and the figures that it stands for.
PARTS = {
    "types": ("P18", "P19", "P20"),
    "timers": ("P21",),
    "memory-by-type": ("memory-by-type",),
    "P18": ("P18",),
    "P19": ("P19",),
    "P20": ("P20",),
    "P21": ("P21",),
}
OF_FLINK = 0.8
#: How many times the time of LONG a value may take.
OF_BIGINT = {
    "timestamp": 2.5,
    "date": 2.5,
    "decimal(18,2)": 2.5,
    "struct<a:bigint,b:bigint>": 2.5,
    "struct<a:bigint,b:string>": 4.0,
    "array<bigint>": 6.0,
    "map<string,bigint>": 6.0,
}
#: Nanoseconds that a row of a batch may take.
BATCH_VALUES_NS = {
    "struct<a:bigint,b:bigint>": 80.0,
    "struct<a:bigint,b:string>": 200.0,
    "array<bigint>": 300.0,
    "map<string,bigint>": 300.0,
}
BATCH_KEYS_NS = 70.0
KEYS_OF_BIGINT = 3.0
KEY_TYPES = (
    "bigint",
    "string",
    "timestamp",
    "decimal(18,2)",
    "struct<a:bigint,b:bigint>",
    "struct<a:bigint,b:string>",
)
#: Those of them that have a limit; STRING keys have theirs in P9.
LIMITED_KEY_TYPES = KEY_TYPES[2:]
MAP_KEY_TYPES = ("string",)
#: What each operation has to reach of the rate of Flink's timer service, and its name there.
TIMERS = {
    "timer_register": (0.8, "service_register"),
    "timer_poll": (1.0, "service_fire"),
    "timer_move": (0.8, "service_move"),
}
_BIGINT = "bigint"
#: Ours with `set_current_key` for each key instead of `each`.
PLAIN = "plain loop"
#: Entries whose objects are alive at once while memory is measured.
_PART = 1000


class ByType(Sides):
    """The rows of P18 to P21, and of memory."""

    def measure(self, wanted: Collection[str], n: int) -> None:
        figures = {figure for part in wanted for figure in PARTS[part]}
        if "P18" in figures:
            for kind in self.args.types:
                for operation in ("value_update", "value_get"):
                    target = None if kind == _BIGINT else OF_FLINK
                    self.one_by_one("P18", operation, kind, n, target, OF_BIGINT.get(kind))
        if "P19" in figures:
            for kind in self.args.types:
                for operation in ("update_many", "get_many"):
                    self.in_batches("P19", operation, kind, n, BATCH_VALUES_NS.get(kind))
        if "P20" in figures:
            self.keys(n)
        if "P21" in figures:
            self.timers(n)
        if "memory-by-type" in figures:
            self.memory(n)

    def one_by_one(
        self,
        figure: str,
        operation: str,
        kind: str,
        n: int,
        of_flink: float | None = None,
        of_bigint: float | None = None,
    ) -> None:
        """A type through the handle, against Flink's and against our own LONG."""
        rounds = self.rounds(n)
        with ExitStack() as stack:
            contenders = self.flink_sides(stack, operation, rounds, suite="types", type_name=kind)
            kinds = dict.fromkeys((*contenders, OURS, PLAIN), kind)
            if kind != _BIGINT:
                kinds[_BIGINT] = _BIGINT
            for who in list(kinds)[len(contenders) :]:
                contenders[who] = stack.enter_context(
                    OwnProcess(
                        make_typed,
                        operation,
                        kinds[who],
                        self.args.backend,
                        rounds,
                        self.args.max_parallelism,
                        PLAIN if who == PLAIN else "each",
                    )
                )
            checksums = {who: expected(operation, held, rounds) for who, held in kinds.items()}
            timings = self.best_collector(in_turns(operation, contenders, rounds, n, checksums))
        what = f"{operation}, {kind}, {n:,} keys"
        self.against_flink(figure, what, operation, n, timings, of_flink, type=kind)
        self.report.row(
            figure,
            f"{what}: our time",
            timings[OURS].ns_per_operation,
            "ns",
            timings[PLAIN].ns_per_operation,
            peer_name=PLAIN,
            at_most=True,
            operation=operation,
            type=kind,
            n=n,
        )
        if kind != _BIGINT:
            self.report.row(
                figure,
                f"{what}: our time",
                timings[OURS].ns_per_operation,
                "ns",
                timings[_BIGINT].ns_per_operation,
                peer_name=_BIGINT,
                target=of_bigint,
                at_most=True,
                operation=operation,
                type=kind,
                n=n,
            )

    def in_batches(self, figure: str, operation: str, kind: str, n: int, limit: float | None) -> None:
        """All rows in one call, from and to Arrow. The peer is the time that a row may take."""
        rounds = self.rounds(n)
        make = OwnProcess(make_typed, operation, kind, self.args.backend, rounds, self.args.max_parallelism)
        with make as ours:
            checksum = expected(operation, kind, rounds)
            timing = in_turns(operation, {OURS: ours}, rounds, n, {OURS: checksum})[OURS]
        self.report.row(
            figure,
            f"{operation}, {kind}, {n:,} keys",
            timing.ns_per_operation,
            "ns/row",
            limit,
            peer_name="the limit",
            target=None if limit is None else 1.0,
            at_most=True,
            operation=operation,
            type=kind,
            n=n,
            ours_samples_ns=[nanos / n for nanos in timing.nanos],
        )

    def keys(self, n: int) -> None:
        """P20: keys of other types, and STRING map keys."""
        kinds = [kind for kind in KEY_TYPES if kind in self.args.types]
        for kind in kinds:
            of_bigint = KEYS_OF_BIGINT if kind in LIMITED_KEY_TYPES else None
            self.one_by_one("P20", "key_update", kind, n, of_bigint=of_bigint)
        for kind in MAP_KEY_TYPES:
            if kind in self.args.types:
                for operation in ("map_put", "map_get"):
                    self.one_by_one("P20", operation, kind, n, of_bigint=KEYS_OF_BIGINT)
        for kind in kinds:
            limit = BATCH_KEYS_NS if kind in LIMITED_KEY_TYPES else None
            self.in_batches("P20", "key_add_many", kind, n, limit)

    def timers(self, n: int) -> None:
        """P21: one timer for each key, at random times."""
        rounds = self.rounds(n)
        for operation, (target, name) in TIMERS.items():
            with ExitStack() as stack:
                contenders = self.flink_sides(stack, name, rounds, suite="timers")
                arguments = operation, rounds, self.args.backend, self.args.max_parallelism
                contenders[OURS] = stack.enter_context(OwnProcess(Timers, *arguments))
                checksums = dict.fromkeys(contenders, int(rounds.keys.sum()))
                timings = self.best_collector(in_turns(operation, contenders, rounds, n, checksums))
            self.against_flink("P21", f"{operation}, {n:,} timers", operation, n, timings, target)

    def memory(self, n: int) -> None:
        """Bytes per entry, each measured in a process of its own, beside the heap that Flink's take."""
        keys = random_keys(n, self.args.seed)
        roles = [("value", kind) for kind in self.args.types]
        roles += [("key", kind) for kind in KEY_TYPES if kind in self.args.types and kind != _BIGINT]
        for role, kind in roles:
            arguments = role, kind, keys, self.args.backend, self.args.max_parallelism
            with OwnProcess(Memory, *arguments) as measured:
                found = measured.details()
            theirs = None
            if self.flink is not None:
                measured_there = self.flink.run_type_bytes(
                    role, kind, keys, self.args.max_parallelism, self.args.heap
                )
                theirs, self.jvm = measured_there["bytes_per_entry"], measured_there["jvm"]
            what = f"resident bytes per entry, {role}s of {kind}, {n:,} keys"
            self.report.row(
                "memory-by-type",
                what,
                found.pop("resident_bytes"),
                "bytes",
                theirs,
                False,
                role=role,
                type=kind,
                n=n,
                **found,
            )

    def against_flink(
        self,
        figure: str,
        what: str,
        operation: str,
        n: int,
        timings: dict[str, Timing],
        target: float | None,
        **details: Any,
    ) -> None:
        """A row of million operations a second, ours and Flink's."""
        ours, theirs = timings[OURS], timings.get("Flink")
        self.report.row(
            figure,
            what,
            ours.mops,
            "M ops/s",
            theirs.mops if theirs else None,
            target=target,
            operation=operation,
            n=n,
            ours_ns=ours.ns_per_operation,
            ours_samples_ns=[nanos / n for nanos in ours.nanos],
            peer_samples_ns=[nanos / n for nanos in theirs.nanos] if theirs else [],
            peer_details=theirs.details if theirs else {},
            **details,
        )


class Timers:
    """A contender: the rounds of ``bench.timers``, which check themselves which timers fired."""

    def __init__(self, operation: str, rounds: Rounds, backend: str, max_parallelism: int) -> None:
        self.operation, self.keys = operation, rounds.keys
        self.timers = TimerRounds(rounds.keys, backend, max_parallelism, rounds.seed)

    def run_round(self, number: int) -> int:
        return round(self.timers.seconds(self.operation, number) * 1e9)

    def contents(self) -> int:
        """The sum of the keys whose timers fired in each round."""
        return int(self.keys.sum())

    def details(self) -> dict[str, Any]:
        return {}


class Memory:
    """What the entries of a value state take, filled one by one: by the backend's own account, and resident."""

    def __init__(self, role: str, kind: str, keys: Int64Array, backend: str, max_parallelism: int) -> None:
        self.of_keys, self.kind, self.keys = role == "key", KINDS[kind], keys
        self.backend, self.max_parallelism = backend, max_parallelism

    def run_round(self, number: int) -> int:
        raise NotImplementedError("memory is measured once")

    def contents(self) -> int:
        raise NotImplementedError("memory is measured once")

    def details(self) -> dict[str, Any]:
        """Bytes per entry."""
        # What the first use of a backend allocates for good is not part of an entry.
        self._filled(self.keys[:_PART]).close()
        before = resident_bytes()
        keyed = self._filled(self.keys)
        entries = keyed.num_entries()
        found = {"resident_bytes": (resident_bytes() - before) / entries}
        metrics = keyed.metrics()
        for name in ("run_bytes", "blob_bytes"):
            found[name] = metrics.get(name, 0) / entries
        keyed.close()
        return found

    def _filled(self, keys: Int64Array) -> Any:
        bigint = KINDS[_BIGINT]
        key_kind, value_kind = (self.kind, bigint) if self.of_keys else (bigint, self.kind)
        keyed = keyed_backend(self.backend, key_kind, self.max_parallelism)
        state = keyed.get_state(sb.ValueStateDescriptor("value", value_kind.type))
        for at in range(0, len(keys), _PART):
            part = keys[at : at + _PART]
            for key, value in zip(key_kind.objects(part), value_kind.objects(part), strict=True):
                keyed.set_current_key(key)
                state.update(value)
        return keyed


def resident_bytes() -> int:
    """What this process takes of the machine's memory, by Linux's account."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
