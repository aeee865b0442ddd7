"""Disks that refuse: a small one that can be filled, and a folder that nothing can be written to."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

SealOff = Callable[[Path], None]


def may_mount() -> bool:
    return sys.platform.startswith("linux") and os.getuid() == 0


def mounted(*arguments: str) -> bool:
    return not subprocess.run(["mount", *arguments], capture_output=True, check=False).returncode


@contextlib.contextmanager
def disk(folder: Path, size: str) -> Iterator[Path]:
    """A file system of a size; skipped where none can be made."""
    folder.mkdir()
    if not (may_mount() and mounted("-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder))):
        pytest.skip("needs the right to mount a small file system")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with disk(tmp_path / "small", "1m") as made:
        yield made


def fill(ballast: Path) -> None:
    """Take all space there is, to the last byte."""
    with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(4096)):
            pass


@pytest.fixture
def read_only() -> Iterator[SealOff]:
    """Makes a folder one that nothing can be written to, also for root; skipped where that cannot be done."""
    sealed: list[Path] = []

    def seal_off(folder: Path) -> None:
        if os.getuid() != 0:
            for path in [folder, *folder.rglob("*")]:
                path.chmod(0o555 if path.is_dir() else 0o444)
        elif not may_mount():
            pytest.skip("root may write everywhere here")
        elif not mounted("--bind", str(folder), str(folder)):
            pytest.skip("needs the right to mount")
        else:
            subprocess.run(["mount", "-o", "remount,ro,bind", str(folder)], check=True)
        sealed.append(folder)

    yield seal_off
    for folder in sealed:
        if os.getuid() == 0:
            subprocess.run(["umount", "-l", str(folder)], check=True)
            continue
        for path in [folder, *folder.rglob("*")]:
            path.chmod(0o755 if path.is_dir() else 0o644)
