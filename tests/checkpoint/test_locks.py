"""The lock that says that a writer is alive: it ends with its process, whoever was forked from that."""

from __future__ import annotations

import errno
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from processes import started
from watched_calls import WatchedCalls

import statebackend as sb
from statebackend.checkpoint.files import PosixFiles

DRIVER = """
import os, sys, time
import statebackend as sb
store = sb.CheckpointStore(sys.argv[1]).open_for_writing()
store.commit(0)
child = os.fork()
if child == 0:
    print(os.getpid(), flush=True)  # by the child itself: it has done by now what is done after a fork
    time.sleep(600)
    os._exit(0)
time.sleep(600)
"""


def test_a_forked_child_does_not_keep_the_lock_of_a_driver_that_died(tmp_path: Path) -> None:
    with started(DRIVER, tmp_path) as driver:
        child = int(driver.stdout.readline())
        try:
            with pytest.raises(sb.UsageError, match="another query is writing"):
                sb.CheckpointStore(tmp_path).open_for_writing(refuse_live=True)
            driver.kill()
            driver.wait()
            os.kill(child, 0)  # it lives
            with sb.CheckpointStore(tmp_path).open_for_writing(refuse_live=True) as store:
                store.commit(1)
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_child_leaves_the_lock_to_its_parent(tmp_path: Path) -> None:
    with sb.CheckpointStore(tmp_path).open_for_writing() as store:
        child = os.fork()
        if child == 0:
            os._exit(0)  # its copies of what is open are closed
        os.waitpid(child, 0)
        time.sleep(0)
        with pytest.raises(sb.UsageError, match="another query is writing"):
            sb.CheckpointStore(tmp_path).open_for_writing(refuse_live=True)
        store.commit(0)


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF])
def test_without_locks_a_live_writer_is_fenced_instead_of_refused(tmp_path: Path, code: int) -> None:
    def before(number: int, name: str, *arguments: Any) -> None:
        if name == "lock_folder" and os.path.isdir(arguments[0]):
            raise OSError(code, os.strerror(code), arguments[0])

    def opened() -> sb.CheckpointStore:
        files = PosixFiles(str(tmp_path), WatchedCalls(before))
        return sb.CheckpointStore(tmp_path, _files=files).open_for_writing(refuse_live=True)

    first = opened()
    first.commit(0)
    second = opened()
    second.commit(1)
    with pytest.raises(sb.CommitConflictError):
        first.commit(1)
    second.close()
    first.close()
