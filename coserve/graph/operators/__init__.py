"""The operator table: one entry per operator, one file per family of operators. Adding one is adding a class to a
file and to `_TABLE`.
"""

from coserve.errors import GraphError
from coserve.graph.operators import activations, attention, elementwise, linear, loss, norms, positions
from coserve.graph.operators.base import Operator

_TABLE: dict[str, Operator] = {
    entry.name: entry
    for entry in (
        linear.Linear(),
        linear.LowRank(),
        linear.DropoutLowRank(),
        linear.Embedding(),
        norms.RmsNorm(),
        norms.LayerNorm(),
        positions.Rope(),
        attention.Attention(),
        activations.Silu(),
        activations.Gelu(),
        activations.Relu(),
        activations.SiluMul(),
        activations.SignBits(),
        elementwise.Add(),
        elementwise.Mul(),
        elementwise.Scale(),
        loss.CrossEntropy(),
    )
}


def operator(name: str) -> Operator:
    """The table's entry; GraphError names the known ones when there is none."""
    if name not in _TABLE:
        raise GraphError(f"no operator {name!r}; known: {', '.join(sorted(_TABLE))}")
    return _TABLE[name]


def operators() -> tuple[str, ...]:
    """The names of all operators."""
    return tuple(_TABLE)
