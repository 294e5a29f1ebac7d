"""States in which the ranks of a tensor-parallel group hold tensors, and the layouts in which an
operator can run.

Every tensor of a rank's graph is in one of these states, of which only a cut has data of its own:

- WHOLE: every rank has the whole tensor.
- COPIED: the same, after a `rank_copy`: its gradient is a part of a sum on each rank, which the
  copy adds up.
- PART: the ranks' tensors add up to the whole one.
- FIRST: rank 0 has the whole tensor, all others have zeros (weights that are added to a PART).
- a `Cut`: each rank has some entries of one dimension.

The gradient of a WHOLE or PART tensor is whole, that of a COPIED one is a part, and that of a cut
one is cut alike. Where several ranks hold the same entries of a cut, their gradients of these add
up. Every rank computes the whole gradient of a FIRST tensor, and those above 0 drop it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeAlias

from coserve.graph.tensors import TensorSpec
from coserve.kernels.cuts import Cut


class State(Enum):
    """A relation of a rank's tensor to the whole one, where it is not cut; see the module's
    docstring.
    """

    WHOLE = "="
    COPIED = "c"
    PART = "+"
    FIRST = "-"


WHOLE, COPIED, PART, FIRST = State.WHOLE, State.COPIED, State.PART, State.FIRST
AnyState: TypeAlias = State | Cut


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One way for ranks to run an operator.

    An input that is left out is WHOLE or, if it is a row that needs a gradient, COPIED, since each
    rank then gives a part of that gradient.
    """

    inputs: Mapping[str, AnyState] = field(default_factory=dict)
    """States of its inputs, by slot."""
    outputs: Mapping[str, AnyState] = field(default_factory=dict)
    """States of its outputs, by slot."""
    op: str | None = None
    """The operator that runs in its place, with collectives of its own; None: the operator itself.
    """
    link: int = 0
    """Elements per row that this operator's own collectives move."""


@dataclass(frozen=True, kw_only=True)
class Given:
    """Everything that an operator's layouts depend on."""

    size: int
    """Number of ranks."""
    specs: Mapping[str, TensorSpec]
    """The whole tensors, by slot."""
    attributes: Mapping[str, Any]
    """The node's attributes."""
    states: Mapping[str, frozenset[AnyState]] = field(default_factory=dict)
    """States in which each row input is available, by slot."""
    cuts: Mapping[str, Cut] = field(default_factory=dict)
    """The cut in which readers can use an output, by slot."""

    def cuts_of(self, slot: str) -> list[Cut]:
        """Return the cuts in which a row input is available."""
        return [state for state in self.states.get(slot, ()) if isinstance(state, Cut)]
