"""The peer of the comparisons. Tests import ``bench`` from the checkout: it is not installed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

sys.path.append(str(Path(__file__).parents[2]))

if TYPE_CHECKING:
    from bench.flink import FlinkPeer


@pytest.fixture(scope="module")
def peer() -> FlinkPeer:
    from bench.flink import FlinkPeer

    peer = FlinkPeer(download=False, timeout=120)
    there, reason = peer.available()
    if not there:
        pytest.skip(reason)
    return peer
