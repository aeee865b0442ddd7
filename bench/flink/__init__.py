"""Flink's heap keyed-state backend as a peer: its real classes in a JVM, without a cluster.

``FlinkPeer`` runs them and returns one dict per measurement; ``round_order`` gives our side the same keys in
the same random orders. On the command line: ``python -m bench.flink``.
"""

from bench.flink.harness import (
    BACKEND_OPS,
    MAP_OPS,
    SERVICE_OPS,
    TIMER_OPS,
    TTL_MODES,
    TYPE_OPS,
    FlinkPeer,
)
from bench.flink.jvm import PeerFailed, Session
from bench.flink.keys import KeyFile, random_keys, round_order
from bench.flink.provision import PeerUnavailable

__all__ = [
    "BACKEND_OPS",
    "MAP_OPS",
    "SERVICE_OPS",
    "TIMER_OPS",
    "TTL_MODES",
    "TYPE_OPS",
    "FlinkPeer",
    "KeyFile",
    "PeerFailed",
    "PeerUnavailable",
    "Session",
    "random_keys",
    "round_order",
]
