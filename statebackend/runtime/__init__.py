"""The runtime joins the pieces: it opens, restores, runs a batch, commits, rolls back."""

from statebackend.runtime.arrow_rows import OutputSchema
from statebackend.runtime.batch_identity import BatchSource
from statebackend.runtime.batch_rows import Batch
from statebackend.runtime.job import Job
from statebackend.runtime.output import CommittedBatch
from statebackend.runtime.runner import Runner
from statebackend.runtime.task import Task

__all__ = ["Batch", "CommittedBatch", "BatchSource", "Job", "OutputSchema", "Runner", "Task"]
