"""Whose weights the nodes of a cluster serve: the model's own, or what full fine-tuning makes of
them.

There is one copy of the weights on each node, which a job trains where it serves. So such a job is
divided among all nodes; and a node whose engine starts when the job is over, with the model's own
weights, is used beside the others only when it has taken in what the job has made (`newcomers.py`).
"""

from dataclasses import replace

from coserve.engine.commands import JobStart
from coserve.tuning.shard import DataParallel


class ChangedWeights:
    """Of a cluster, since its engines are those of this front."""

    def __init__(self) -> None:
        self._by: JobStart | None = None
        self._is_over = False

    def asked(self, job: JobStart) -> DataParallel | None:
        """How a job is divided; None: not at all."""
        if job.changes_model:
            return job.data_parallel or DataParallel()
        return (
            None
            if job.data_parallel is None or job.data_parallel.num_nodes == 1
            else job.data_parallel
        )

    def number(self, job: JobStart, asked: DataParallel, num_nodes: int) -> int:
        """Among how many of as many nodes."""
        return max(1, num_nodes if job.changes_model else min(asked.num_nodes, num_nodes))

    def begin(self, job: JobStart) -> None:
        """It is started, or started again; engines of nodes may have what it makes from now on."""
        if job.changes_model:
            self._by, self._is_over = job, False

    def keep(self, job: JobStart, directory: str | None) -> None:
        """It has succeeded: what it has made is served, and lies there."""
        if self._is_by(job):
            self._by, self._is_over = replace(job, checkpoint=directory), True

    def undo(self, job: JobStart) -> None:
        """It has ended otherwise: nodes that had a part of it are given fresh engines."""
        if self._is_by(job):
            self._by = None

    def changed_by(self, *, has_others: bool) -> JobStart | None:
        """The job whose weights, in its checkpoint, an engine that has just started is to take in;
        None: none, it is as the others are. has_others: of the cluster's engines, some are in use.
        """
        if not has_others:
            self._by = None if self._is_over else self._by
        return self._by if self._is_over else None

    def _is_by(self, job: JobStart) -> bool:
        return self._by is not None and self._by.id == job.id
