"""Weights that the nodes of a cluster serve: the model's own, or those that full fine-tuning makes.

There is one copy of the weights on each node, which a job trains where it serves. So such a job is
divided among all nodes; and a node whose engine starts when the job is over, with the model's own
weights, is used beside the others only when it has loaded what the job has made
(`coserve.cluster.nodes.joins`).
"""

from dataclasses import replace

from coserve.engine.commands import JobStart
from coserve.tuning.shard import DataParallel


class ChangedWeights:
    """The job that has changed the weights that a cluster serves, since its engines belong to this
    front.
    """

    def __init__(self) -> None:
        self._by: JobStart | None = None
        self._is_over = False

    def asked(self, job: JobStart) -> DataParallel | None:
        """Return how a job is divided among nodes; None: it runs on one."""
        if job.changes_model:
            return job.data_parallel or DataParallel()
        return (
            None
            if job.data_parallel is None or job.data_parallel.num_nodes == 1
            else job.data_parallel
        )

    def number(self, job: JobStart, asked: DataParallel, num_nodes: int) -> int:
        """Return among how many of the available nodes a job is divided."""
        return max(1, num_nodes if job.changes_model else min(asked.num_nodes, num_nodes))

    def begin(self, job: JobStart) -> None:
        """Note that a job starts or restarts; from now on engines may have its weights."""
        if job.changes_model:
            self._by = job
            self._is_over = False

    def keep(self, job: JobStart, directory: str | None) -> None:
        """Note that a job has succeeded: the cluster serves its weights, which lie in this
        directory.
        """
        if self._is_by(job):
            self._by, self._is_over = replace(job, checkpoint=directory), True

    def undo(self, job: JobStart) -> None:
        """Note that a job has ended otherwise: nodes that had a part in it get fresh engines."""
        if self._is_by(job):
            self._by = None

    def changed_by(self, *, has_others: bool) -> JobStart | None:
        """Return the job whose weights, in its checkpoint, an engine that has just started has to
        load; None if the others serve the model's own.

        Args:
            has_others: Whether other engines of the cluster are in use.
        """
        if not has_others:
            self._by = None if self._is_over else self._by
        return self._by if self._is_over else None

    def _is_by(self, job: JobStart) -> bool:
        return self._by is not None and self._by.id == job.id
