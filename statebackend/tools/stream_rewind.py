"""Takes Spark's checkpointLocation back to a batch: the half of a rewind that concerns the stream.

Spark starts from the newest entry of ``offsets``, and runs that batch again unless ``commits`` has it. So a rewind to
batch B moves away, newest first: the commits after B, the offsets after B, the entries of the file sources that the
offsets of B do not have yet, and the versions of Spark's state after B + 1, which batch B made. ``metadata`` and the
origins of other sources stay. Files are moved to ``.rewound`` and never deleted. A kill between two moves leaves a
query that repeats its newest batch or is refused with `BATCH_GAP.STREAM_BEHIND` or `BATCH_GAP.OTHER_ROWS`; the same
rewind then completes it.

Spark removes old entries of its logs. A rewind to a batch before them first writes them again, from the manifests of
the store. Spark ignores them until the newer ones have moved. State of Spark's own is not in the manifests.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, TypeAlias
from urllib.parse import unquote, urlsplit

from statebackend.checkpoint.files import PosixFiles, local_path, open_target_folder
from statebackend.errors import UsageError
from statebackend.runtime.batch_progress import Json

REWOUND = ".rewound"
#: A version of Spark's state in a file, or the entry of a log; the ending says how it is stored.
_NUMBERED = re.compile(r"(\d+)(?:_[0-9a-f-]+)?(?:\.(delta|snapshot|zip|changelog|compact))?")
#: The forms that hold all earlier entries.
_WHOLE = ("snapshot", "zip", "compact")


#: The part of Spark's log that the manifest of a batch keeps, as `SparkLog.entries` gives it.
LogEntries: TypeAlias = "Mapping[str, Json]"


class Numbered(NamedTuple):
    """A file with a number in its name, below the checkpointLocation."""

    number: int
    path: Path
    #: Its ending, which says how it is stored; empty if it has none.
    form: str


def stream_not_rewindable(reason: str, where: object, hint: str) -> UsageError:
    return UsageError(
        f"cannot continue the stream from this batch: {reason}",
        code="USAGE.STREAM_REWIND",
        detail=str(where),
        hint=hint,
    )


_BY_HAND = (
    "rewind to a newer batch; or restore the checkpointLocation of that batch from a copy and pass "
    "checkpoint_location=None"
)


class SparkCheckpoint:
    """The checkpointLocation of a stopped query, in a folder of this machine."""

    def __init__(
        self,
        location: str | os.PathLike[str],
        refused: Callable[[str, object, str], UsageError] = stream_not_rewindable,
        otherwise: str = "take the stream back by hand and pass checkpoint_location=None",
    ) -> None:
        folder = local_path(os.fspath(location))
        if folder is None or not os.path.isfile(f"{folder}/metadata"):
            raise refused(
                "there is no checkpointLocation of Spark in a folder of this machine",
                location,
                f"give the checkpointLocation of the query; in an object store, {otherwise}",
            )
        self.folder = Path(folder)
        #: Spark's id of the query.
        self.id = str(json.loads((self.folder / "metadata").read_text(encoding="utf-8"))["id"])

    def batches(self) -> list[tuple[int, int | None]]:
        """The batches after which Spark's logs let it go on, ascending, each with the time of its plan."""
        planned = {each.number: each.path for each in self.numbered(self.folder / "offsets")}
        done = {each.number for each in self.numbered(self.folder / "commits")}
        found = sorted(each for each in done & {*planned} if not each or each - 1 in planned)
        return [(each, _planned_at(planned[each])) for each in found]

    def files_until(self, batch: int) -> list[Path]:
        """The files from which Spark goes on after ``batch``, each with its checksum, and no others."""
        after = {*self.files_after(batch, again=False)}
        found = [each for each in sorted(self.folder.rglob("*")) if each not in after and each.is_file()]
        found = [each for each in found if each.relative_to(self.folder).parts[0] != REWOUND]
        kept = [each for each in found if not each.name.startswith(".")]
        checksums = {each.with_name(f".{each.name}.crc") for each in kept}
        return [*kept, *(each for each in found if each in checksums)]

    def lost_entries(self, batch: int, logs: Mapping[int, LogEntries]) -> dict[str, str]:
        """The entries that Spark has removed and that it needs to go on after ``batch``: each path with its text.

        ``logs`` are the parts of Spark's log in the manifest of the batch and in the next one that is kept. Empty if
        nothing is lost, or if it cannot be made again; `files_after` then says what is missing.
        """
        names = _needed(batch)
        gone = [name for name in names if not (self.folder / name).is_file()]
        log = logs.get(batch, {})
        before = log.get("before") or []
        if (
            not gone
            or self._newest_planned() <= batch
            or log.get("plan") is None
            or not isinstance(before, list)
        ):
            return {}
        if any(self.numbered(folder) for folder in self._state_folders()):
            raise stream_not_rewindable(
                f"Spark's log has no {gone[0]} any more, and an operator of Spark has state",
                self.folder,
                _BY_HAND,
            )
        plan = str(log["plan"])
        commit = _commit_after(batch, logs)
        if commit is None and f"commits/{batch}" in gone:
            raise stream_not_rewindable(
                "Spark's log has lost the commit of the batch, and the watermark after it is not known",
                self.folder,
                "rewind to a newer batch, or to one whose next checkpoint is kept too",
            )
        texts = {f"offsets/{batch}": plan, f"commits/{batch}": str(commit)}
        if batch:
            # Spark takes from it where the sources ended, and nothing else.
            texts[f"offsets/{batch - 1}"] = "\n".join([*plan.splitlines()[:2], *map(str, before)])
        # The sources come first: a rewind that is killed then sees that more is lost.
        lost: dict[str, str] = {}
        for at, line in enumerate(plan.splitlines()[2:]):
            end = _log_offset(line)
            if end is not None:
                lost.update(self._lost_of_source(f"sources/{at}", end))
        return {**lost, **{name: texts[name] for name in gone}}

    def _lost_of_source(self, folder: str, end: int) -> dict[str, str]:
        """All entries of a file source until ``end`` as one, if Spark has compacted earlier ones into a later one."""
        entries = self.numbered(self.folder / folder)
        wholes = [each.path for each in entries if each.number > end and each.form == "compact"]
        if _is_complete(entries, -1, end) or not wholes:
            return {}
        version, *lines = wholes[-1].read_text(encoding="utf-8").splitlines()
        kept = [line for line in lines if json.loads(line)["batchId"] <= end]
        return {f"{folder}/{end}.compact": "\n".join([version, *kept])}

    def files_after(
        self, batch: int | None, lost: Mapping[str, str] = {}, *, again: bool = True
    ) -> list[Path]:
        """The files that a rewind to ``batch`` moves, in order; None: to before the first batch. Changes nothing.

        ``lost`` are the entries that it writes first. `UsageError` if Spark could not go on from that batch, or, with
        ``again``, run the later batches again.
        """
        last = -1 if batch is None else batch
        if batch is not None:
            self._check_logs(batch, lost)
        logs = [self.numbered(self.folder / name) for name in ("commits", "offsets")]
        found = [path for log in logs for path in _after(log, last)]
        for folder, end in self._ends(batch, lost).items():
            is_whole = f"{folder.relative_to(self.folder)}/{end}.compact" in lost
            found += self._of_source(folder, end, is_whole=is_whole, again=again)
        if batch is None:  # Spark begins at batch 0 only without any state
            return [*found, *filter(Path.exists, [self.folder / "state"])]
        for folder in self._state_folders():
            found += self._of_state(folder, last)
        return found

    def write(self, lost: Mapping[str, str]) -> None:
        """Write lost entries again, durably."""
        place = open_target_folder(self.folder)
        for name, text in lost.items():
            path = self.folder / name
            place.prepare(os.path.dirname(name))
            place.remove(str(path.with_name(f".{path.name}.crc").relative_to(self.folder)))
            place.write(name, [text.encode("utf-8")])

    def move(self, files: list[Path], incarnation: str) -> None:
        """Move files, each with its checksum, to where nothing reads them, and make that durable."""
        for path in files:
            for each in (path.with_name(f".{path.name}.crc"), path):
                if each.exists():
                    self._move(each, incarnation)

    def _move(self, path: Path, incarnation: str) -> None:
        files = PosixFiles(str(self.folder))
        target = self.folder / REWOUND / incarnation / path.relative_to(self.folder)
        files.make_folder(str(target.parent.relative_to(self.folder)))
        while target.exists():  # a batch that was planned between two attempts
            target = target.with_name(f"{target.name}~")
        os.rename(path, target)
        for folder in (target.parent, path.parent):
            files.sync_folder(str(folder.relative_to(self.folder)))

    # --- the logs of the query ---

    def _newest_planned(self) -> int:
        """The newest batch in Spark's log of offsets; -1 if there is none."""
        return max((each.number for each in self.numbered(self.folder / "offsets")), default=-1)

    def _check_logs(self, batch: int, lost: Mapping[str, str]) -> None:
        newest = self._newest_planned()
        for name in _needed(batch):
            if name not in lost and not (self.folder / name).is_file():
                begun = newest < batch and any((self.folder / REWOUND).glob(f"*/{name}"))
                raise stream_not_rewindable(
                    f"Spark's log has no {name} any more",
                    self.folder,
                    "a rewind to an earlier batch was begun: run it again" if begun else _BY_HAND,
                )

    def _ends(self, batch: int | None, lost: Mapping[str, str]) -> dict[Path, int]:
        """The last entry of each file source that the offsets of a batch have; -1 for before the first batch."""
        if batch is None:  # an attempt that was killed may have moved all offsets
            return dict.fromkeys(self._file_sources(), -1)
        path = self.folder / f"offsets/{batch}"
        text = lost.get(f"offsets/{batch}") or path.read_text(encoding="utf-8")
        lines = text.splitlines()
        if len(lines) < 2 or lines[0] != "v1":
            raise stream_not_rewindable("Spark's log of offsets has an unknown version", path, _BY_HAND)
        ends = {self.folder / f"sources/{at}": _log_offset(line) for at, line in enumerate(lines[2:])}
        return {folder: end for folder, end in ends.items() if end is not None}

    def _file_sources(self) -> Iterator[Path]:
        """The logs of file sources, which name files; another source keeps its origin in such a folder."""
        for folder in sorted((self.folder / "sources").glob("*")):
            if any(
                '"batchId":' in each.path.read_text(encoding="utf-8") for each in self.numbered(folder)[:1]
            ):
                yield folder

    def _of_source(self, folder: Path, end: int, *, is_whole: bool, again: bool) -> list[Path]:
        """The entries of a file source after ``end``. With ``again``, their input files must be there."""
        entries = self.numbered(folder)
        if not is_whole and not _is_complete(entries, -1, end):
            raise stream_not_rewindable(
                "the log of a file source has lost entries of earlier batches", folder, _BY_HAND
            )
        after = _after(entries, end)
        for path in after if again else ():
            for line in path.read_text(encoding="utf-8").splitlines()[1:]:
                if json.loads(line).get("batchId", end + 1) > end:
                    _check_input(line, path)
        return after

    # --- Spark's own state ---

    def _state_folders(self) -> Iterator[Path]:
        """All folders of Spark's state that have versions: of each operator, partition and store."""
        for folder, names, _ in os.walk(self.folder / "state"):
            names[:] = sorted({*names} - {"SSTs", "logs", "_stateSchema"})
            yield Path(folder)

    def _of_state(self, folder: Path, last: int) -> list[Path]:
        """The versions after the one that batch ``last`` made, which Spark must be able to load."""
        found, version = self.numbered(folder), last + 1
        if folder.parent.name == "_metadata":
            return _after(found, last)  # the metadata of an operator, by batch
        if found and not _is_complete(found, 0, version):
            raise stream_not_rewindable(
                f"Spark's state cannot be loaded at version {version} any more", folder, _BY_HAND
            )
        return _after(found, version)

    def numbered(self, folder: Path) -> list[Numbered]:
        """The files with a number, the highest first."""
        names = [each.name for each in folder.iterdir() if each.is_file()] if folder.is_dir() else []
        matches = [(name, found) for name in names if (found := _NUMBERED.fullmatch(name))]
        return sorted(
            (Numbered(int(found[1]), folder / name, found[2] or "") for name, found in matches), reverse=True
        )


def _needed(batch: int) -> list[str]:
    """The entries of Spark's logs without which it does not go on after a batch."""
    return [f"offsets/{batch}", f"commits/{batch}", *([f"offsets/{batch - 1}"] if batch else [])]


def _commit_after(batch: int, logs: Mapping[int, LogEntries]) -> Json:
    """The commit of a batch, or the equal one of a later batch that has not moved the watermark on; None if unknown."""
    later = max(logs)
    if later > batch + 1:
        before, after = (
            re.search(r'"batchWatermarkMs":\d+', str(logs[each]["plan"])) for each in (batch, later)
        )
        if before is None or after is None or before[0] != after[0]:
            return None
    return logs[later].get("done") if later > batch else None


def _after(entries: list[Numbered], last: int) -> list[Path]:
    return [each.path for each in entries if each.number > last]


def _is_complete(entries: list[Numbered], before: int, last: int) -> bool:
    """Return True if all from the one after ``before``, or from the newest whole one, to ``last`` are there."""
    kept = [each for each in entries if each.number <= last]
    whole = max((each.number for each in kept if each.form in _WHOLE), default=before)
    return {*range(whole + 1, last + 1)} <= {each.number for each in kept}


def _log_offset(line: str) -> int | None:
    """The entry of a file source's log at which a batch ends; None for other sources."""
    try:
        return int(json.loads(line)["logOffset"])
    except (KeyError, TypeError, ValueError):
        return None


def _planned_at(entry: Path) -> int | None:
    """When Spark planned a batch, in milliseconds since 1970, by its entry in ``offsets``."""
    try:
        return int(json.loads(entry.read_text(encoding="utf-8").splitlines()[1])["batchTimestampMs"])
    except (IndexError, KeyError, TypeError, ValueError):
        return None


def _check_input(line: str, entry: Path) -> None:
    """Raise if an input file that comes again was deleted: Spark would pass over it without an error."""
    address = urlsplit(json.loads(line)["path"])
    if address.scheme in ("", "file") and not os.path.exists(unquote(address.path)):
        raise stream_not_rewindable(
            "an input file of a later batch is gone",
            entry,
            "bring the input files back, then run the rewind again",
        )
