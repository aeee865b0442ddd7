"""Interrupts while a table changes, and ends that meet."""

from __future__ import annotations

import itertools
import textwrap
from typing import Any

import numpy as np
import pytest
from processes import run

from statebackend._core.core_probe import StateTable
from statebackend._core.kernels import batch_kernels
from statebackend._core.tables.state_core import StateCore

pytestmark = pytest.mark.checked


def test_a_growing_table_runs_no_python() -> None:
    """So that no signal handler runs halfway: what it raises would be lost, or taken for a lack of memory."""
    program = """
        import sys
        import threading
        from statebackend._core.tables.state_core import StateCore
        from statebackend._core.core_probe import StateTable

        def interrupt(frame, event, argument):
            if event == "call":
                raise KeyboardInterrupt(frame.f_code.co_name)

        core = StateCore()
        table = StateTable(core, value=60_000)
        threading.setprofile(interrupt)
        sys.setprofile(interrupt)
        for key in range(1_000):
            table.put(key, bytes(60_000))
        for key in range(1_000):
            table.remove(key)
        while core.advance(1 << 20):
            pass
        core.arena.trim()
        sys.setprofile(None)
        assert core.arena.usage()["extent_bytes"] == 0
        table._check()
        core._check()
    """
    assert run(textwrap.dedent(program)).stderr == ""


def test_an_interrupt_is_neither_lost_nor_a_lack_of_memory() -> None:
    program = """
        import signal
        from statebackend._core.tables.state_core import StateCore
        from statebackend._core.core_probe import StateTable

        armed, raised, caught, unknown = [], 0, 0, set()

        def handler(number, frame):
            global raised
            if armed:
                armed.clear()
                raised += 1
                raise KeyboardInterrupt

        signal.signal(signal.SIGALRM, handler)
        core = StateCore()
        table = StateTable(core, value=60_000)
        signal.setitimer(signal.ITIMER_REAL, 0.0003, 0.0003)
        for key in range(3_000):
            try:
                armed.append(key)
                table.put(key, bytes(60_000))
                armed.clear()
            except KeyboardInterrupt:
                caught += 1
                unknown.add(key)
        signal.setitimer(signal.ITIMER_REAL, 0)
        assert raised == caught and raised
        table._check()
        core._check()
        for key in range(3_000):
            assert table.get(key) == bytes(60_000) or (key in unknown and table.get(key) is None)
    """
    assert run(textwrap.dedent(program)).stderr == ""


@pytest.mark.parametrize("at", range(3))
def test_an_interrupt_while_threads_are_called_refuses_the_batch_whole(
    at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = StateTable(StateCore(), value="long")
    keys = np.arange(20_000)
    batch_kernels.update_many(table, keys, keys)
    pool = batch_kernels._thread_pool()
    numbers = itertools.count()

    class Interrupted:
        @staticmethod
        def submit(work: Any) -> None:
            if next(numbers) == at:
                raise KeyboardInterrupt
            pool.submit(work)

    monkeypatch.setattr(batch_kernels, "_thread_pool", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        batch_kernels.update_many(table, keys, -keys, threads=4)
    values, _ = batch_kernels.get_many(table, keys)
    assert (values == keys).all()
    table._check()


def test_threads_that_close_and_release_at_once_end_it_once() -> None:
    program = """
        import sys
        import threading
        from statebackend._core.tables.state_core import StateCore
        from statebackend._core.core_probe import StateTable

        class Slow:
            def __del__(self):
                for _ in range(20):
                    pass

        sys.setswitchinterval(1e-6)
        for _ in range(30):
            core = StateCore()
            table = StateTable(core, value="object")
            for key in range(500):
                table.put(key, Slow())
            views = [core.snapshot() for _ in range(3)]
            for key in range(500):
                table.put(key, Slow())
            begin = threading.Barrier(4)

            def end(what):
                begin.wait()
                what()

            threads = [threading.Thread(target=end, args=(what,))
                       for what in [core.close, *(view.release for view in views)]]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert core.arena.usage()["run_bytes"] == 0
    """
    assert run(textwrap.dedent(program)).stderr == ""
