"""The operator table: one entry per operator, one file per family of operators. Every class in them
is an entry.
"""

from coserve.discovery import variant_classes, variant_names
from coserve.errors import GraphError
from coserve.graph.operators.base import Operator

_TABLE: dict[str, Operator] = {
    entry.name: entry()
    for family in variant_names(__path__)
    for entry in variant_classes(__name__, family, Operator)
}


def operator(name: str) -> Operator:
    """The table's entry; GraphError names the known ones when there is none."""
    if name not in _TABLE:
        raise GraphError(f"no operator {name!r}; known: {', '.join(sorted(_TABLE))}")
    return _TABLE[name]


def operators() -> tuple[str, ...]:
    """The names of all operators."""
    return tuple(_TABLE)
