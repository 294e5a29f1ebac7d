"""What the nodes of a data-parallel job have contributed, in the one order in which each of them takes it in."""

from coserve.jobs.messages import Contributed
from coserve.tuning.shard import Combination


class Contributions:
    """Of one job, while the same nodes have it. Nodes are numbered as their shards.

    A node contributes, and then waits for what it is to take in: with a contribution that meets the others', until all
    have made theirs; else at once what has come since it last took something in, its own contribution last.
    """

    def __init__(self, num_nodes: int) -> None:
        self._log: list[Contributed] = []  # those that not every node has taken in
        self._first = 0  # how many were before those
        self._meeting: dict[int, Contributed] = {}
        self._told = [0] * num_nodes  # how many each has been told of
        self._taken = [0] * num_nodes  # of these, how many it has surely taken in
        self._num_of = [0] * num_nodes  # that each has made
        self._steps: list[int] = []  # that a node has made by its first contribution, its second one, …

    def add(self, node: int, told: Contributed) -> dict[int, Combination]:
        """Returns what nodes are to take in now."""
        self._taken[node] = self._told[node]
        self._num_of[node] += 1
        if self._num_of[node] > len(self._steps):
            self._steps.append(told.step)
        if not told.meets:
            self._log.append(told)
            return {node: self._combination(node)}
        self._meeting[node] = told
        if len(self._meeting) < len(self._told):
            return {}
        self._log += [self._meeting[each] for each in sorted(self._meeting)]
        self._meeting.clear()
        return {each: self._combination(each) for each in range(len(self._told))}

    def take_spent(self) -> list[str]:
        """Directories that no node reads any more, once each."""
        number = min(self._taken) - self._first
        spent, self._log = self._log[:number], self._log[number:]
        self._first += number
        return [each.directory for each in spent]

    def _combination(self, node: int) -> Combination:
        """All that it has not been told of.

        As many contributions as all nodes make once are a version: each node that has taken in that many has the same.
        """
        before, now = self._told[node], self._first + len(self._log)
        self._told[node] = now
        num_versions, rest = divmod(now, len(self._told))
        num_in_version = now - rest - before
        found = self._log[before - self._first :]
        return Combination(
            directories=tuple(each.directory for each in found),
            num_trained=sum(each.num_trained for each in found),
            version=self._steps[num_versions - 1] if num_in_version > 0 else None,
            num_in_version=max(0, num_in_version),
        )
