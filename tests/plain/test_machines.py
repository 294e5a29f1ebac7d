"""Waits of a machine when it joins a cluster and when it leaves, whatever the front and other
machines do.
"""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from coserve.cluster.ray.joining import drain_machines, wait_for_nodes, wait_until_served
from coserve.errors import ClusterError, FrontSilentError

SILENT = FrontSilentError("the front does not answer within 10 s")
NO_FRONT = ClusterError("the cluster has no front")


def node(name: str, machine: str | None, state: str = "ready", **more: Any) -> dict[str, Any]:
    usual: dict[str, Any] = {"problem": None, "refused": None, "jobs": [], "requests": 0}
    return {"name": name, "machine": machine, "state": state} | usual | more


def refused(name: str, machine: str) -> dict[str, Any]:
    return node(
        name, machine, "not ready", problem="its model is other", refused="its model is other"
    )


class Front:
    """A front that returns one state after the other, the last one again and again. `drained` has
    the names, by call.
    """

    def __init__(self, *said: Sequence[dict[str, Any]] | Exception, drain_s: float = 5.0) -> None:
        self._said, self._drain_s = list(said), drain_s
        self.drained = list[tuple[str, ...]]()
        self.draining = set[str]()
        self.wrong: Callable[[], Exception | None] = lambda: None

    def status(self) -> dict[str, Any]:
        said = self._said.pop(0) if len(self._said) > 1 else self._said[0]
        if isinstance(said, Exception):
            raise said
        nodes = [
            each | ({"state": "draining"} if each["name"] in self.draining else {}) for each in said
        ]
        return {"nodes": nodes, "drain_s": self._drain_s}

    def drain(self, names: Sequence[str], limit_s: float) -> None:
        assert limit_s > 0
        self.drained.append(tuple(names))
        if (wrong := self.wrong()) is not None:
            raise wrong
        self.draining |= {*names}

    def ready(self, machine: str | None, number: int, limit_s: float = 20.0) -> int | None:
        """Wait for a machine's nodes as when it joins."""
        return wait_for_nodes(self, machine, lambda: number, lambda: False, limit_s)


# -- it joins ------------------------------------------------------------------------


def test_a_machine_waits_for_its_own_nodes_alone():
    of_others = [
        node("node-0", "a", "draining"),
        refused("node-1", "b"),
        node("node-2", "c", "not ready"),
    ]
    own = node("node-3", "here", "not ready")
    front = Front([*of_others], [*of_others, own], [*of_others, own | {"state": "ready"}])
    assert front.ready("here", 1) == 1


def test_one_that_drains_meanwhile_is_not_waited_for():
    assert Front([node("node-0", "here", "draining"), node("node-1", "a")]).ready("here", 1) == 1


def test_another_front_may_take_over_meanwhile():
    assert Front(SILENT, SILENT, [node("node-0", "here")]).ready("here", 1) == 1
    with pytest.raises(ClusterError, match="does not answer within 10 s, after 0 s"):
        Front(SILENT).ready("here", 1, limit_s=0.0)


def test_what_is_wrong_with_its_own_nodes_is_said():
    with pytest.raises(ClusterError, match="the node node-0 cannot be used: its model is other"):
        Front([refused("node-0", "here"), node("node-1", "a")]).ready("here", 1)
    slow = node("node-0", "here", "not ready", problem="it does not answer")
    with pytest.raises(
        ClusterError, match="0 of 1 nodes are ready; node-0: it does not answer, after 0 s"
    ):
        Front([slow, node("node-1", "a")]).ready("here", 1, limit_s=0.0)
    with pytest.raises(ClusterError, match="has no front"):
        Front(NO_FRONT).ready("here", 1)


def test_a_front_without_devices_waits_for_those_of_others_that_can_be_used():
    nodes = [node("node-0", "a", "draining"), refused("node-1", "b"), node("node-2", "c")]
    assert Front(nodes[:2], nodes).ready(None, 3) == 1
    with pytest.raises(ClusterError, match="the node node-1 cannot be used: its model is other"):
        Front([nodes[1]]).ready(None, 1)


def test_one_that_is_ended_meanwhile_waits_no_more():
    assert wait_for_nodes(Front(SILENT), "here", lambda: 1, lambda: True) is None


def test_what_joins_before_anything_is_served_waits_for_it():
    said = iter([None, None, "tiny"])
    assert wait_until_served(lambda: next(said), "192.0.2.7:6379") == "tiny"
    with pytest.raises(
        ClusterError,
        match=r"at 192.0.2.7:6379 has served nothing for 0 s: .* MODEL --address .* --nodes 0",
    ):
        wait_until_served(lambda: None, "192.0.2.7:6379", limit_s=0.0)


# -- it leaves -----------------------------------------------------------------------


def test_a_machine_that_leaves_drains_all_its_nodes_at_once_and_no_others_and_waits_for_requests():
    own = [
        node("node-0", "here", requests=2),
        node("node-1", "here", "not ready"),
        node("node-2", "a", requests=9),
    ]
    later = [own[0] | {"requests": 1}, *own[1:]]
    front, said = Front(own, later, [own[0] | {"requests": 0}, *own[1:]]), list[str]()
    drain_machines(front, ["here"], say=said.append)
    assert front.drained == [("node-0", "node-1")]
    assert said == ["1 open request is waited for, 5 s at most"]


def test_requests_are_waited_for_no_longer_than_the_cluster_does():
    said = list[str]()
    drain_machines(
        Front([node("node-0", "here", requests=2)], drain_s=0.5), ["here"], say=said.append
    )
    assert said[-1] == "2 open requests are not over after 0.5 s: what is left of them is cut off"


def test_a_front_that_takes_over_meanwhile_is_told_to_drain_them_too():
    front = Front(
        [node("node-0", "here")],
        SILENT,
        [node("node-0", "here", requests=1)],
        [node("node-0", "here")],
    )

    def forgets() -> None:
        front.wrong = lambda: None
        raise SILENT

    front.wrong = forgets
    drain_machines(front, ["here"])
    assert front.drained == [("node-0",), ("node-0",)]


def test_jobs_that_do_not_move_are_an_error_and_requests_are_waited_for_all_the_same():
    front = Front(
        [node("node-0", "here", jobs=["one"], requests=1)],
        [node("node-0", "here", jobs=["one"], requests=1)],
        [node("node-0", "here", jobs=["one"])],
    )
    front.wrong = lambda: ClusterError("it has not drained")
    with pytest.raises(ClusterError, match="it has not drained"):
        drain_machines(front, ["here"])
    assert len(front.drained) == 1


def test_jobs_that_stay_are_told_after_a_while():
    front = Front([node("node-0", "here", jobs=["one"])])
    with pytest.raises(ClusterError, match="jobs of node-0 have not moved in time"):
        drain_machines(front, ["here"], move_s=0.5)


def test_a_cluster_without_a_front_has_nothing_to_wait_for():
    drain_machines(Front(NO_FRONT), ["here"])
    drain_machines(Front([node("node-0", "here")], NO_FRONT), ["here"])
    drain_machines(Front([node("node-0", None), node("node-1", "a")]), ["here"])
