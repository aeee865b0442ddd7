"""The comparison by type holds the same on all sides, and notices when it does not.

The tests that start a JVM are skipped without a JDK or without Flink in the cache; they never download it.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from house_tools import ROOT

from bench.flink import TYPE_OPS, FlinkPeer, random_keys
from bench.state.__main__ import main
from bench.state.by_type import KEY_TYPES, TIMERS, Memory
from bench.state.kinds import KINDS
from bench.state.lockstep import Flink, Rounds, WrongResult, in_turns
from bench.state.processes import OwnProcess
from bench.state.typed import TYPED, Typed, expected, make_typed
from bench.state.types_page import main as renew_page

N = 200
SMALL = {"key_groups": 16, "samples": 2, "warmup": 1, "heap": "256m", "gc": "G1"}
STRUCT = "struct<a:bigint,b:string>"
#: Each operation with each type that it is measured with.
CASES = [
    (operation, kind)
    for operation, contender in TYPED.items()
    for kind in KINDS
    if kind in KEY_TYPES or not (contender.of_keys or operation.startswith("map_"))
]


def rounds() -> Rounds:
    return Rounds(random_keys(N), warmup=1, samples=2)


def contender(operation: str, kind: str, backend: str = "heap") -> Typed:
    return make_typed(operation, kind, backend, rounds(), 16)


def flink(peer: FlinkPeer, operation: str, **more: str):
    return peer.session(operation, rounds().keys, **SMALL, **more)


@pytest.fixture(scope="module")
def run(tmp_path_factory, in_this_process) -> Path:
    """The JSON of a small run of all parts, of three types."""
    out = tmp_path_factory.mktemp("run") / "types.json"
    parts = ["types", "timers", "memory-by-type", "--no-flink", "--types", "bigint", "string", STRUCT]
    assert main([*parts, "--n", "50", "--samples", "1", "--warmup", "1", "--out", str(out)]) == 0
    return out


class TestKinds:
    NUMBERS = np.array([5, 1_000_000_007, 999_999_999])

    @pytest.mark.parametrize("kind", KINDS.values(), ids=list(KINDS))
    def test_objects_and_columns_hold_the_same_values_of_their_numbers(self, kind):
        objects, column = kind.objects(self.NUMBERS), kind.arrow(self.NUMBERS)
        assert column.type == kind.type.arrow
        column.validate(full=True)
        back = [dict(each) if kind.name.startswith("map") else each for each in column.to_pylist()]
        if kind.name.startswith("struct"):
            back = [tuple(each.values()) for each in back]
        assert back == objects
        read = [kind.numbers(each) for each in objects]
        assert read == kind.held(self.NUMBERS).tolist()
        assert read[0] != read[1]
        made = kind.objects(np.full(3, 7))
        assert kind.name == "bigint" or len({id(each) for each in made}) == 3, "each row has its own object"

    def test_keys_of_other_types_are_as_distinct_as_their_numbers(self):
        keys = random_keys(N)
        for name in KEY_TYPES:
            assert len(set(KINDS[name].objects(keys))) == N


class TestOurs:
    @pytest.mark.parametrize(("operation", "kind"), CASES)
    def test_both_backends_end_with_the_state_of_the_operation(self, operation, kind):
        given = rounds()
        sides = {backend: contender(operation, kind, backend) for backend in ("heap", "reference")}
        checksums = dict.fromkeys(sides, expected(operation, kind, given))
        timings = in_turns(operation, sides, given, N, checksums)
        for timing in timings.values():
            assert len(timing.nanos) == 2
            assert all(nanos > 0 for nanos in timing.nanos)

    def test_other_values_than_expected_are_noticed(self):
        given, ours = rounds(), contender("value_update", STRUCT)
        checksum = expected("value_get", STRUCT, given)
        with pytest.raises(WrongResult, match="the state of ours"):
            in_turns("value_update", {"ours": ours}, given, N, {"ours": checksum})

    @pytest.mark.parametrize(
        ("operation", "change"),
        [
            ("value_get", lambda state: state.clear()),
            ("get_many", lambda state: state.clear()),
            ("get_many", lambda state: state.update((7, "user-8"))),
        ],
    )
    def test_another_value_or_none_is_noticed(self, operation, change):
        ours = contender(operation, STRUCT)
        ours.keyed.set_current_key(int(ours.rounds.keys[7]))
        change(ours.state)
        with pytest.raises(WrongResult, match="read other values"):
            ours.run_round(0)

    @pytest.mark.parametrize("role", ["value", "key"])
    def test_an_entry_takes_at_least_what_is_in_it(self, role):
        arguments = role, "struct<a:bigint,b:bigint>", random_keys(60_000), "heap", 16
        with OwnProcess(Memory, *arguments) as measured:
            found = measured.details()
        # Three numbers of eight bytes in the entry, and no more than a Python object of each would take.
        assert 24 <= found["run_bytes"] < 200
        assert 0 <= found["blob_bytes"] < found["run_bytes"]
        assert 24 <= found["resident_bytes"] < 400


class TestFlink:
    @pytest.mark.parametrize("kind", KINDS)
    def test_flink_ends_with_the_same_values(self, peer, kind):
        self.assert_same(peer, "value_update", kind)

    @pytest.mark.parametrize(
        ("operation", "kind"),
        [
            *(("key_update", kind) for kind in KEY_TYPES if kind != "bigint"),
            ("value_get", STRUCT),
            ("map_put", "string"),
            ("map_get", "string"),
            ("map_get", "bigint"),
        ],
    )
    def test_flink_ends_with_the_same_state(self, peer, operation, kind):
        assert operation in TYPE_OPS
        self.assert_same(peer, operation, kind)

    @staticmethod
    def assert_same(peer: FlinkPeer, operation: str, kind: str) -> None:
        given = rounds()
        with flink(peer, operation, suite="types", type_name=kind) as session:
            sides = {"Flink": Flink(session), "ours": contender(operation, kind)}
            checksums = dict.fromkeys(sides, expected(operation, kind, given))
            in_turns(operation, sides, given, N, checksums)


class TestRun:
    def test_a_run_has_a_row_for_each_type_and_part(self, run):
        rows = json.loads(run.read_text())["rows"]
        by_figure = {}
        for row in rows:
            by_figure.setdefault(row["figure"], []).append(row)
        # Two operations of three types, as many plain loops, and against bigint of two; two operations of three types;
        # the same of keys, maps and sums; three operations; three values and two keys.
        counts = {"P18": 16, "P19": 6, "P20": 8 + 6 + 3, "P21": 3, "memory-by-type": 5}
        assert {figure: len(found) for figure, found in by_figure.items()} == counts
        assert {row["operation"] for row in rows if "operation" in row} == {*TYPED, *TIMERS}
        assert all(row["ours"] > 0 for row in rows if row["figure"] != "memory-by-type")

    @pytest.mark.parametrize(
        ("arguments", "complaint"),
        [(["P1", "types"], "in a run of their own"), (["types", "--scattered"], "cannot be scattered")],
    )
    def test_arguments_that_exclude_each_other_are_refused(self, arguments, complaint, capsys):
        with pytest.raises(SystemExit):
            main(arguments)
        assert complaint in capsys.readouterr().err


class TestPage:
    def test_a_run_fills_every_table_of_the_page(self, run, tmp_path):
        page = tmp_path / "types.md"
        page.write_text((ROOT / "docs/performance/types.md").read_text(encoding="utf-8"), encoding="utf-8")
        renew_page(["--run", str(run), "--page", str(page)])
        text = page.read_text(encoding="utf-8")
        assert "Not measured yet" not in text
        assert text.count("backend `heap`") == 5
        for line in (
            f"| update of `{STRUCT}` | Row |",
            "| nanoseconds a row | `update_many` | `get_many` |",
            f"| update under keys of `{STRUCT}` | Row |",
            "| put under map keys of `string` | String |",
            "| nanoseconds a row | `add_many` |",
            "| set the key, delete and register later | ",
            f"| keys of `{STRUCT}` | ",
            "![Million updates a second by type](types.svg)",
        ):
            assert text.count(line) == 1, line
        assert (tmp_path / "types.svg").read_text(encoding="utf-8").startswith("<?xml")
        page.write_text(text)
        content = json.loads(run.read_text())
        (tmp_path / "none.json").write_text(json.dumps({**content, "rows": []}))
        renew_page(["--run", str(tmp_path / "none.json"), "--page", str(page)])
        assert page.read_text(encoding="utf-8") == text, "parts that were not measured keep their tables"
