"""What a test needs that is not there yet."""

from __future__ import annotations

import os

import pytest

#: The tests of jobs wait for backends that write checkpoints; with this variable they run.
CHECKPOINTS = bool(os.environ.get("STATEBACKEND_TEST_CHECKPOINTS"))
checkpoints = pytest.mark.skipif(not CHECKPOINTS, reason="the backends write no checkpoints yet")
