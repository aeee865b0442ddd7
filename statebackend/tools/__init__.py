"""Tools for stored state: they read, check, copy, rewind and make it without a job."""

from statebackend.runtime.start_checks import PlannedState
from statebackend.tools.backups import backup, restore
from statebackend.tools.build import bootstrap
from statebackend.tools.comparison import Difference, changes, diff
from statebackend.tools.export import savepoint
from statebackend.tools.growth import Growth, growth
from statebackend.tools.history import reset, rewind, set_time
from statebackend.tools.map_migration import split_maps
from statebackend.tools.plan import Plan, plan
from statebackend.tools.results import (
    Copied,
    Dropped,
    Emigrated,
    Problem,
    Repaired,
    Report,
    Reset,
    Rewound,
    TakenBack,
    Times,
)
from statebackend.tools.rewrite import drop_state, rescale
from statebackend.tools.spark_state import from_spark_state
from statebackend.tools.state_rows import StateRows, operator_state, sql, state, states, timers
from statebackend.tools.verification import repair, verify

__all__ = [
    "Copied",
    "Difference",
    "Dropped",
    "Emigrated",
    "Growth",
    "Plan",
    "PlannedState",
    "Problem",
    "Repaired",
    "Report",
    "Reset",
    "Rewound",
    "StateRows",
    "TakenBack",
    "Times",
    "backup",
    "bootstrap",
    "changes",
    "diff",
    "drop_state",
    "from_spark_state",
    "growth",
    "operator_state",
    "plan",
    "repair",
    "rescale",
    "reset",
    "restore",
    "rewind",
    "savepoint",
    "set_time",
    "split_maps",
    "sql",
    "state",
    "states",
    "timers",
    "verify",
]
