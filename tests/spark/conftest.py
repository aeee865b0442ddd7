"""The session, streams and disks that the tests of this folder ask for."""

from __future__ import annotations

from refusing_disks import read_only, small_disk
from spark_streams import spark, stream

__all__ = ["read_only", "small_disk", "spark", "stream"]
