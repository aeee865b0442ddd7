"""The results of tools: small frozen records, which a terminal shows line by line."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

_MOST_SHOWN = 10


class _Result:
    """Shows each field on separate lines; of a long list, the first ten members and the number of the others."""

    def __repr__(self) -> str:
        names = [each.name for each in fields(self)]  # type: ignore[arg-type]
        width = max(map(len, names))
        lines = [type(self).__name__]
        for name in names:
            first, *others = _shown(getattr(self, name))
            lines += [f"  {name:{width}}  {first}", *(f"  {'':{width}}  {each}" for each in others)]
        return "\n".join(lines)


def _shown(value: object) -> list[str]:
    if not isinstance(value, list):
        return [str(value)]
    shown = [str(each) for each in value[:_MOST_SHOWN]]
    left = len(value) - len(shown)
    if all(isinstance(each, int) for each in value):
        shown = [", ".join(shown)]
    return [*shown, f"and {left} more"] if left else shown if value else ["none"]


@dataclass(frozen=True, order=True)
class Problem:
    """A file that is not as it was written."""

    #: Its name in the store.
    file: str
    #: The ids of the checkpoints that need it, ascending; none if it belongs to the store as a whole.
    checkpoints: list[int]
    #: The code of the error that reading it raises, and its message.
    code: str
    message: str


@dataclass(frozen=True, repr=False)
class Report(_Result):
    """The result of `verify`. It is `ok` without problems."""

    #: The ids of the checkpoints that were checked, ascending. Those that were dropped meanwhile are left out.
    checkpoints: list[int]
    #: The newest checkpoint that is whole; None if there is none, or if the metadata are damaged. If the newest entry
    #: of the log is damaged, the store can be opened after `repair`, which goes back to this checkpoint.
    newest_intact: int | None
    #: How many files were checked, and their size.
    files: int
    bytes: int
    problems: list[Problem]
    #: Data files that no manifest names: of snapshots in flight, of dropped checkpoints, of writers that crashed. Empty
    #: if a manifest cannot be read, because it may name any of them.
    left_over: list[str]

    @property
    def ok(self) -> bool:
        """True without problems."""
        return not self.problems


@dataclass(frozen=True, repr=False)
class Repaired(_Result):
    """The result of `repair`."""

    #: The newest checkpoint now; None if the store has none and is not damaged.
    to: int | None
    #: The damaged files of the log, which were removed. Empty if there were none.
    removed: list[str]


@dataclass(frozen=True)
class TakenBack:
    """A batch that `rewind` has removed from a store.

    Its sinks may have been called: with ``rows`` rows, and with a `SinkContext` of this ``incarnation``.
    """

    batch_id: int
    #: None, like the incarnation, if the manifest cannot be read.
    rows: int | None
    incarnation: str | None
    #: The targets that its sinks have published, or were about to, by the names of the outputs; a function by its name
    #: alone.
    targets: dict[str, str]
    #: The removals that the sinks given to `rewind` have reported.
    removed: tuple[str, ...] = ()


@dataclass(frozen=True, repr=False)
class Rewound(_Result):
    """The result of `rewind`."""

    #: The newest checkpoint now; None if there is none.
    to: int | None
    #: Oldest first.
    taken_back: list[TakenBack]
    #: The files of Spark's checkpointLocation that were moved.
    moved: list[str]
    #: The entries of Spark's logs that were written again, because Spark had removed them.
    written: list[str] = field(default_factory=list)


@dataclass(frozen=True, repr=False)
class Copied(_Result):
    """The result of `backup` and `restore`."""

    checkpoint: int
    #: How many files of state and output, and of Spark's checkpointLocation, were copied, and the size of all.
    files: int
    stream_files: int
    bytes: int


@dataclass(frozen=True, repr=False)
class Reset(_Result):
    """The result of `reset`: the batch that the store begins with, and the checkpoints that were dropped."""

    first_batch: int
    dropped: list[int]


@dataclass(frozen=True, repr=False)
class Times(_Result):
    """The result of `set_time`: the times of the newest checkpoint, in milliseconds since 1970."""

    checkpoint: int
    now: int | None
    watermark: int | None


@dataclass(frozen=True, repr=False)
class Dropped(_Result):
    """The result of `drop_state`."""

    name: str
    #: The checkpoint that has lost the state; None if the store has none yet.
    checkpoint: int | None
    #: The names of the other states.
    left: list[str]


@dataclass(frozen=True, repr=False)
class Emigrated(_Result):
    """The result of `from_spark_state`: the savepoint and location to continue with, and the names of the states."""

    savepoint: str
    checkpoint_location: str
    #: The batch that comes next, for ``start=StartFrom(savepoint, first_batch=...)``.
    first_batch: int
    states: list[str]
