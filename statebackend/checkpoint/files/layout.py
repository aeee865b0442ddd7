"""The layout of a store: the places and names of its files, all relative to the store's root.

::

    metadata.json                   what the store is for
    checkpoints/<sequence>.json     an entry of the store's log: a commit, or a takeover, a restart, a rewind, another
                                    time, a dropped state; its name coming into being is what makes it happen
    checkpoints/epoch-<epoch>/      on POSIX paths, held by the writer of the newest epoch; entries are written in it
                                    before they get their names
    data/<epoch>/<file>             data files of the writer of that epoch; never changed
    pins/<id>-<token>.json          a reader's: it reads this checkpoint, whose files are to stay for a while

>>> entry_name(12), parse_entry_name("12.json")
('checkpoints/12.json', 12)
>>> epoch_folder(3), parse_epoch_folder("epoch-3")
('checkpoints/epoch-3', 3)
"""

from __future__ import annotations

import re

METADATA = "metadata.json"
CHECKPOINTS = "checkpoints"
DATA = "data"
PINS = "pins"

# Numbers have at most 18 digits, so all fit in 64 bits, and no leading zeros, so each number has one name.
_EPOCH = r"([1-9][0-9]{0,17})"
_ENTRY = re.compile(rf"{_EPOCH}\.json", re.ASCII)
#: The name of an entry in the store, with its sequence.
ENTRY_NAME = re.compile(rf"{CHECKPOINTS}/{_EPOCH}\.json", re.ASCII)
_EPOCH_FOLDER = re.compile(rf"epoch-{_EPOCH}", re.ASCII)
_DATA_FOLDER = re.compile(_EPOCH, re.ASCII)
_DATA_FILE = re.compile(rf"{DATA}/{_EPOCH}/[A-Za-z0-9_][A-Za-z0-9_.=-]{{0,199}}", re.ASCII)


def entry_name(sequence: int) -> str:
    return f"{CHECKPOINTS}/{sequence}.json"


def parse_entry_name(base_name: str) -> int | None:
    """The sequence of an entry, parsed from its name within its folder; None for any other name."""
    found = _ENTRY.fullmatch(base_name)
    return None if found is None else int(found[1])


def epoch_folder(epoch: int) -> str:
    """The folder that the writer of an epoch holds, and loses when it is fenced."""
    return f"{CHECKPOINTS}/epoch-{epoch}"


def parse_epoch_folder(base_name: str) -> int | None:
    """The epoch of such a folder, parsed from its name within its folder; None for any other name."""
    found = _EPOCH_FOLDER.fullmatch(base_name)
    return None if found is None else int(found[1])


def data_folder(epoch: int) -> str:
    return f"{DATA}/{epoch}"


def data_epoch(name: str) -> int:
    """The epoch of a data file or of a folder of data files, parsed from its name; 0 for any other name.

    >>> data_epoch("data/12/a.arrow"), data_epoch("data/12"), data_epoch("data/mine")
    (12, 12, 0)
    """
    parts = name.split("/")
    found = _DATA_FOLDER.fullmatch(parts[1]) if len(parts) >= 2 and parts[0] == DATA else None
    return 0 if found is None else int(found[1])


def is_data_file(name: str) -> bool:
    """Return True if the name can be a data file's. The store reads and removes no other file as one."""
    return _DATA_FILE.fullmatch(name) is not None


def newest_epoch(in_checkpoints: list[str], in_data: list[str]) -> int:
    """The largest epoch or sequence that was ever taken, according to the names in the two folders; 0 if none was."""
    found = [parse_entry_name(name) or parse_epoch_folder(name) or 0 for name in in_checkpoints]
    found += [data_epoch(f"{DATA}/{name}") for name in in_data]
    return max(found, default=0)


def split(name: str) -> tuple[str, str]:
    """Folder and base name."""
    folder, _, base_name = name.rpartition("/")
    return folder, base_name
