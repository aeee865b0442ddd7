"""Tools for stored state: they read, check, copy, rewind and make it without a job."""

from statebackend.tools.build import bootstrap
from statebackend.tools.export import savepoint
from statebackend.tools.history import reset, rewind, set_time
from statebackend.tools.map_migration import split_maps
from statebackend.tools.read import read_state
from statebackend.tools.results import Dropped, Problem, Repaired, Report, Reset, Rewound, TakenBack, Times
from statebackend.tools.rewrite import drop_state, rescale
from statebackend.tools.verification import repair, verify

__all__ = [
    "Dropped",
    "Problem",
    "Repaired",
    "Report",
    "Reset",
    "Rewound",
    "TakenBack",
    "Times",
    "bootstrap",
    "drop_state",
    "read_state",
    "repair",
    "rescale",
    "reset",
    "rewind",
    "savepoint",
    "set_time",
    "split_maps",
    "verify",
]
