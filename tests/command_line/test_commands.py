"""The console script: output for people and for programs, questions, and statuses."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from ciphers import Shifting
from processes import environment, run_command
from shells import COLUMNS, LINES, in_pipe, on_terminal

import statebackend as sb
from statebackend.command_line.parser import make_parser

pytestmark = pytest.mark.usefixtures("no_fsync")

COMMANDS = sorted(make_parser()._subparsers._group_actions[0].choices)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "command", [(), *((each,) for each in COMMANDS)], ids=lambda each: "".join(each) or "all"
)
def test_help_fits_a_terminal(command: tuple[str, ...]) -> None:
    for run in (in_pipe, on_terminal):
        status, out, _ = run(*command, "--help")
        assert status == 0
        assert len(out.splitlines()) <= LINES
        assert max(map(len, out.splitlines())) <= COLUMNS
    if not command:
        assert all(f"  {name} " in out for name in COMMANDS)


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("unknown",),
        ("verify",),
        ("rewind", "s", "--to", "1"),
        ("rewind", "s", "--to", "x", "--store-only"),
        ("rewind", "s", "--to", "1", "--store-only", "--checkpoint-location", "t"),
        ("reset", "s"),
        ("set-time", "s", "--now", "yesterday"),
        ("verify", "s", "--cipher", "no_module:cipher"),
        ("verify", "s", "--cipher", "json"),
    ],
)
def test_wrong_usage_ends_with_2(arguments: tuple[str, ...]) -> None:
    status, out, err = in_pipe(*arguments)
    assert (status, out) == (2, "")
    assert "error:" in err


@pytest.mark.parametrize("command", COMMANDS)
def test_command_is_refused_without_a_store(tmp_path: Path, command: str) -> None:
    more = {
        "rewind": ["--to", "1", "--store-only", "--yes"],
        "reset": ["--first-batch", "1", "--yes"],
        "set-time": ["--now", "1", "--yes"],
        "drop": ["total", "--yes"],
        "savepoint": [tmp_path / "made"],
        "backup": [tmp_path / "made", "--store-only"],
        "restore": [tmp_path / "made", "--store-only"],
        "read": ["total"],
        "changes": ["total"],
        "diff": [tmp_path / "nothing"],
        "sql": ["select 1"],
        "rescale": [tmp_path / "made", "--max-parallelism", "8"],
    }
    where = [command, *(["builtins:dict"] if command == "plan" else []), tmp_path / "nothing"]
    status, out, err = in_pipe(*where, *more.get(command, []))
    assert (status, out) == (1, "")
    assert "[USAGE.NO_CHECKPOINT]" in err
    status, out, _ = in_pipe(*where, *more.get(command, []), "--json")
    assert (status, json.loads(out)["error"]["code"]) == (1, "USAGE.NO_CHECKPOINT")
    assert not (tmp_path / "made").exists()


READING = {
    "ls": [],
    "verify": [],
    "states": [],
    "timers": [],
    "growth": [],
    "read": ["name"],
    "changes": ["name"],
    "sql": ["select key, repeat('long ', 50) from name"],
    "diff": [],
}


@pytest.mark.parametrize("command", READING)
def test_output_fits_a_terminal_and_is_whole_in_a_pipe(keyed_store: Path, command: str) -> None:
    more = [keyed_store, "--id", "5"] if command == "diff" else READING[command]
    shown = on_terminal(command, keyed_store, *more)
    assert shown.out
    assert max(map(len, shown.out.splitlines())) <= COLUMNS
    piped = in_pipe(command, keyed_store, *more)
    assert piped.status == shown.status == (3 if command == "diff" else 0)
    assert "…" not in piped.out
    assert json.loads(in_pipe(command, keyed_store, *more, "--json").out)


def test_ls_shows_checkpoints_and_reach(job: Path) -> None:
    state, stream = job / "state", job / "stream"
    status, out, _ = on_terminal("ls", state, "--checkpoint-location", stream)
    assert status == 0
    lines = out.splitlines()
    assert lines[0].split() == ["id", "time", "(UTC)", "rows", "entries", "bytes", "duration"]
    assert [line.split()[0] for line in lines[1:8]] == [str(batch) for batch in range(38, 45)]
    reach = [["store", "38", "44"], ["Spark", "41", "44"], ["rewind", "41", "44"]]
    assert [line.split()[:3] for line in lines[10:]] == reach
    assert lines[11].endswith("3 min 0 s")
    assert max(map(len, lines)) <= COLUMNS
    found = json.loads(in_pipe("ls", state, "--json").out)
    assert [each["rows"] for each in found["checkpoints"]] == [2] * 7
    assert [each["of"] for each in found["reach"]] == ["store"]  # the recorded location is not there
    assert in_pipe("ls", state, "--checkpoint-location", job).status == 1


def test_state_is_read(keyed_store: Path) -> None:
    listed = json.loads(in_pipe("states", keyed_store, "--json").out)
    assert {"count", "name"} <= {each["name"] for each in listed}
    assert on_terminal("states", keyed_store).out.split()[:3] == ["name", "kind", "types"]
    rows = json.loads(in_pipe("read", keyed_store, "count", "--json").out)
    assert rows == sb.tools.state(keyed_store, "count").to_table().to_pylist()
    status, out, err = in_pipe("read", keyed_store, "count", "--limit", "3", "--columns", "key,value")
    assert (status, len(out.splitlines()), out.split()[:2]) == (0, 4, ["key", "value"])
    assert "more than 3 rows" in err
    key = rows[0]["key"]
    for keys in (f"[{key}]", f"{key}"):
        found = json.loads(in_pipe("read", keyed_store, "count", "--keys", keys, "--json").out)
        assert found == [row for row in rows if row["key"] == key]
    assert in_pipe("read", keyed_store, "count", "--keys", "[-1]").out == "no rows\n"
    assert in_pipe("read", keyed_store, "count", "--keys", "[").status == 2
    older = json.loads(in_pipe("read", keyed_store, "count", "--id", "5", "--json").out)
    assert older == sb.tools.state(keyed_store, "count", id=5).to_table().to_pylist()
    assert in_pipe("timers", keyed_store).status == 0
    (counted,) = json.loads(in_pipe("sql", keyed_store, "select count(*) n from count", "--json").out)
    assert counted == {"n": len(rows)}


def test_changes_and_differences_are_printed(keyed_store: Path) -> None:
    found = json.loads(in_pipe("changes", keyed_store, "count", "--since", "6", "--json").out)
    assert found == sb.tools.changes(keyed_store, "count", since=6).to_table().to_pylist()
    assert {row["batch_id"] for row in found} == {7}
    same = in_pipe("diff", keyed_store, keyed_store)
    assert (same.status, same.out) == (0, "no difference\n")
    arguments = ["diff", keyed_store, keyed_store, "--id", "6", "--state", "count"]
    status, out, _ = in_pipe(*arguments, "--json")
    rows = json.loads(out)["count"]
    assert status == 3
    assert [row["key"] for row in rows] == [row["key"] for row in found]
    shown = on_terminal(*arguments, "--other-id", "5")
    assert (shown.status, shown.out.splitlines()[0]) == (3, "count:")


def test_growth_shows_states_and_largest_keys(keyed_store: Path) -> None:
    found = json.loads(in_pipe("growth", keyed_store, "--max-bytes", "1000000", "--json").out)
    grown = sb.tools.growth(keyed_store)
    assert found["largest"] == grown.largest.to_table().to_pylist()
    assert (found["untouched"], found["batches_left"]) == (grown.untouched, None)
    for run in (in_pipe, on_terminal):
        status, out, _ = run("growth", keyed_store, "--top", "2", "--max-bytes", "1m")
        assert status == 0
        assert [line.split()[-1] for line in out.splitlines()[:3]] == ["?", "?", "?"]
        assert out.split("most bytes:\n")[1].split("most entries")[0].count("\n") <= 4
        assert max(map(len, out.splitlines())) <= COLUMNS


def test_plan_is_shown_and_approved(keyed_store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = "import statebackend as sb\nstates = [sb.ValueStateDescriptor('count', int)]\n"
    (keyed_store.parent / "own_states.py").write_text(program)
    monkeypatch.chdir(keyed_store.parent)
    monkeypatch.syspath_prepend(keyed_store.parent)
    arguments = ["plan", "own_states:states", keyed_store]
    status, out, _ = on_terminal(*arguments)
    assert status == 1
    assert out.splitlines()[-1].split() == ["name", "keyed", "stored,", "not", "declared"]
    states = json.loads(in_pipe(*arguments, "--json").out)["states"]
    assert {each["name"]: each["action"] for each in states} == {
        "count": "kept",
        "name": "stored, not declared",
    }
    assert in_pipe(*arguments, "--approve").status == 2
    assert on_terminal(*arguments, "--approve", answer="n\n").status == 1
    assert in_pipe(*arguments, "--approve", "--dry-run").status == 0
    assert in_pipe(*arguments).status == 1
    assert in_pipe(*arguments, "--approve", "--yes").status == 0
    assert in_pipe(*arguments).status == 0


def test_ls_names_a_damaged_checkpoint(keyed_store: Path) -> None:
    manifest = keyed_store / sb.CheckpointStore(keyed_store).open(6).manifest.name
    manifest.write_bytes(manifest.read_bytes()[:-5])
    status, out, _ = in_pipe("ls", keyed_store)
    assert status == 0
    assert out.splitlines()[2].split() == ["6", "CORRUPT_CHECKPOINT"]
    assert in_pipe("verify", keyed_store).status == 1
    report = json.loads(in_pipe("verify", keyed_store, "--json").out)
    assert (report["ok"], report["problems"][0]["checkpoints"]) == (False, [6])
    assert "problems:\nfile" in on_terminal("verify", keyed_store).out


def test_repair_goes_back_to_the_newest_whole_checkpoint(keyed_store: Path) -> None:
    manifest = keyed_store / sb.CheckpointStore(keyed_store).open(7).manifest.name
    manifest.write_bytes(b"damaged")
    status, _, err = in_pipe("ls", keyed_store)
    assert status == 1
    assert "statebackend repair STORE" in err
    assert on_terminal("repair", keyed_store, answer="y\n").status == 0
    assert sb.CheckpointStore(keyed_store).latest() == 6


def newest(store: Path) -> Any:
    return sb.CheckpointStore(store).open_latest()


#: A command that changes a store, and what tells that it has.
CHANGES = {
    "rewind": (["--to", "5", "--store-only"], lambda store: newest(store).id == 5),
    "reset": (["--first-batch", "9"], lambda store: sb.CheckpointStore(store).latest() is None),
    "set-time": (["--now", "1970-01-01T00:01:00Z"], lambda store: newest(store).now == 60_000),
    "drop": (["name"], lambda store: "name" in newest(store).dropped_states),
}


@pytest.mark.parametrize("command", CHANGES)
def test_change_is_shown_and_confirmed(keyed_store: Path, command: str) -> None:
    arguments, is_changed = CHANGES[command]
    arguments = [command, keyed_store, *arguments]
    looked = in_pipe(*arguments, "--dry-run")
    assert looked.status == 0
    assert looked.out
    asked = on_terminal(*arguments, answer="n\n")
    assert asked.status == 1
    assert asked.out.startswith(looked.out)
    assert "Change the store? [y/N] " in asked.out
    assert asked.out.endswith("nothing was changed\n")
    assert on_terminal(*arguments, answer="\x04").status == 1  # the end of input
    piped = in_pipe(*arguments)
    assert (piped.status, piped.out) == (2, looked.out)
    assert "expected --yes or --dry-run" in piped.err
    assert not is_changed(keyed_store)
    done = on_terminal(*arguments, answer="y\n")
    assert done.status == 0
    assert done.out.endswith("done\n")
    assert max(map(len, done.out.splitlines())) <= COLUMNS
    assert is_changed(keyed_store)


@pytest.mark.parametrize("command", CHANGES)
def test_change_without_a_terminal_needs_yes(keyed_store: Path, command: str) -> None:
    arguments, is_changed = CHANGES[command]
    looked = json.loads(in_pipe(command, keyed_store, *arguments, "--dry-run", "--json").out)
    assert not is_changed(keyed_store)
    status, out, err = in_pipe(command, keyed_store, *arguments, "--yes", "--json")
    assert (status, json.loads(out)) == (0, looked)
    assert err
    assert is_changed(keyed_store)


def test_rewind_takes_sinks_and_stream_back(job: Path) -> None:
    where = ["--checkpoint-location", job / "stream"]
    status, out, _ = on_terminal("rewind", job / "state", "--to", "42", *where, answer="y\n")
    assert status == 0
    assert "taken_back:" in out
    assert len(list((job / "out").glob("*.parquet"))) == 5
    assert sorted(path.name for path in (job / "stream" / "offsets").iterdir()) == ["40", "41", "42"]
    status, _, err = in_pipe("rewind", job / "state", "--to", "39", *where, "--yes")
    assert status == 1
    assert "use --store-only" in err
    whole = ["--store-only", "--keep-sinks", "--yes"]
    assert in_pipe("rewind", job / "state", "--to", "start", *whole).status == 0
    assert len(list((job / "out").glob("*.parquet"))) == 5


def test_copies_are_made(keyed_store: Path, tmp_path: Path) -> None:
    status, out, _ = in_pipe("savepoint", keyed_store, tmp_path / "savepoint", "--id", "6", "--json")
    assert (status, json.loads(out)) == (0, {"savepoint": str(tmp_path / "savepoint")})
    assert in_pipe("states", tmp_path / "savepoint").status == 0
    assert in_pipe("rescale", keyed_store, tmp_path / "copy", "--max-parallelism", "8").status == 0
    assert newest(tmp_path / "copy").metadata.max_parallelism == 8
    assert in_pipe("drop", keyed_store, "name", "--target", tmp_path / "slim", "--id", "5").status == 0
    assert newest(tmp_path / "slim").id == 5
    status, _, err = in_pipe("drop", keyed_store, "name", "--id", "5", "--yes")
    assert status == 1
    assert "hint: without --target" in err


def test_backup_is_restored(job: Path, tmp_path: Path) -> None:
    stream, copied = job / "stream", tmp_path / "copied"
    (stream / "commits" / ".43.crc").write_bytes(b"sum")
    (stream / "commits" / ".44.tmp").write_bytes(b"unfinished")
    (stream / "commits" / "44").unlink()  # Spark has not finished batch 44
    status, out, _ = in_pipe("backup", job / "state", copied, "--checkpoint-location", stream, "--json")
    assert status == 0
    made = json.loads(out)
    assert (made["checkpoint"], made["stream_files"]) == (43, 10)
    assert in_pipe("verify", copied).status == 0
    state, location = tmp_path / "new" / "state", tmp_path / "new" / "stream"
    assert in_pipe("restore", copied, state, "--checkpoint-location", location).status == 0
    assert sb.CheckpointStore(state).checkpoints() == [43]
    assert newest(state).outputs.keys() == {"main"}
    assert not [file for file in newest(state).files.values() if file.kind == "stream"]
    found = {path.relative_to(location): path.read_bytes() for path in location.rglob("*") if path.is_file()}
    later = {"offsets/44", "commits/.44.tmp"}
    expected = {path.relative_to(stream): path.read_bytes() for path in stream.rglob("*") if path.is_file()}
    assert found == {path: content for path, content in expected.items() if str(path) not in later}
    assert sorted(path.name for path in location.parent.iterdir()) == ["state", "stream"]
    status, _, err = in_pipe("restore", copied, tmp_path / "other", "--checkpoint-location", location)
    assert status == 1
    assert "USAGE.TARGET_EXISTS" in err
    assert sb.CheckpointStore(tmp_path / "other").latest() is None


def test_backup_is_refused_for_another_stream(job: Path, tmp_path: Path) -> None:
    (job / "stream" / "metadata").write_text('{"id": "another"}')
    where = ["--checkpoint-location", job / "stream"]
    status, _, err = in_pipe("backup", job / "state", tmp_path / "copied", *where)
    assert status == 1
    assert "another query" in err
    assert in_pipe("backup", job / "state", tmp_path / "copied", "--store-only").status == 0
    status, _, err = in_pipe(
        "restore", tmp_path / "copied", tmp_path / "new", "--checkpoint-location", tmp_path / "l"
    )
    assert status == 1
    assert "no files of Spark's checkpointLocation" in err


def test_damaged_backup_is_refused(job: Path, tmp_path: Path) -> None:
    where = ["--checkpoint-location", job / "stream"]
    assert in_pipe("backup", job / "state", tmp_path / "copied", *where, "--id", 42).status == 0
    checkpoint = newest(tmp_path / "copied")
    file = next(each for each in checkpoint.manifest.files if each.label == "offsets/42")
    path = tmp_path / "copied" / file.name
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    for location in (["--store-only"], ["--checkpoint-location", tmp_path / "l"]):
        assert in_pipe("restore", tmp_path / "copied", tmp_path / "new", *location).status == 1
    assert not (tmp_path / "l").exists()
    assert not (tmp_path / "new").exists()


def test_encrypted_store_needs_its_cipher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with sb.CheckpointStore(tmp_path / "state", encryption=Shifting()).open_for_writing() as store:
        store.commit(0)
    (tmp_path / "own_keys.py").write_text("from ciphers import Shifting\ncipher = Shifting()\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    assert in_pipe("verify", "state").status == 1
    assert in_pipe("verify", "state", "--cipher", "own_keys:cipher").status == 0


def test_module_runs_in_a_separate_process(keyed_store: Path) -> None:
    command = [sys.executable, "-m", "statebackend"]
    shown = run_command(*command, "ls", keyed_store, env=environment())
    assert shown.stdout == in_pipe("ls", keyed_store).out
    refused = run_command(
        *command, "reset", keyed_store, "--first-batch", 1, env=environment(), status=2, input=""
    )
    assert refused.stderr.startswith("error: cannot ask")
    version = run_command(*command, "--version", env=environment())
    assert version.stdout.strip() == sb.__version__
