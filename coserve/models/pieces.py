"""Pieces of graphs that families share: each adds its nodes to a builder, and returns its output's
name.
"""

from coserve.graph.ir import GraphBuilder

_GELUS = {
    "gelu": "none",
    "gelu_new": "tanh",
    "gelu_fast": "tanh",
    "gelu_pytorch_tanh": "tanh",
}
# Activation functions by transformers' names.
ACTIVATIONS = ("relu", "silu", *_GELUS)


def activation(b: GraphBuilder, node: str, function: str, x: str) -> str:
    """Add one of `ACTIVATIONS`."""
    if function in _GELUS:
        return b.apply("gelu", node, {"x": x}, approximate=_GELUS[function])
    return b.apply(function, node, {"x": x})


def layer_norm(b: GraphBuilder, name: str, x: str, eps: float, *, bias: bool = True) -> str:
    """Add a layer norm of whole rows."""
    weight = b.weight(f"{name}.weight", b.width(x))
    offset = b.weight(f"{name}.bias", b.width(x)) if bias else None
    return b.apply("layer_norm", name, {"x": x, "weight": weight, "bias": offset}, eps=eps)


def scaled(b: GraphBuilder, node: str, x: str, factor: float, *, rounded: bool = False) -> str:
    """Multiply by a number; a factor of 1 adds no node. rounded: see `Scale`."""
    more = {"rounded": True} if rounded else {}
    return x if factor == 1.0 else b.apply("scale", node, {"x": x}, factor=factor, **more)


def added(b: GraphBuilder, node: str, *terms: str) -> str:
    """Add rows up, the first two first."""
    total, *others = terms
    for index, term in enumerate(others):
        total = b.apply(
            "add", f"{node}_{index}" if index < len(others) - 1 else node, {"a": total, "b": term}
        )
    return total


def angles(b: GraphBuilder, num_rotated: int, prefix: str = "") -> tuple[str, str]:
    """Declare the constants of a rotary table that rotates this many features."""
    return b.constant(f"{prefix}cos", num_rotated), b.constant(f"{prefix}sin", num_rotated)


def rotated(
    b: GraphBuilder,
    node: str,
    x: str,
    table: tuple[str, str],
    head_dim: int,
    *,
    interleaved: bool = False,
) -> str:
    """Rotate all features of the heads by angles, or the first ones."""
    cos, sin = table
    partial = (
        {"head_dim": head_dim, "interleaved": interleaved}
        if interleaved or b.width(cos) < head_dim
        else {}
    )
    return b.apply("rope", node, {"x": x, "cos": cos, "sin": sin}, **partial)
