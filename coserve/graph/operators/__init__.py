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
    """Return an entry of the table.

    Raises:
        GraphError: there is none of this name; the message lists the known ones.
    """
    if name not in _TABLE:
        raise GraphError(f"no operator {name!r}; known: {', '.join(sorted(_TABLE))}")
    return _TABLE[name]


def operators() -> tuple[str, ...]:
    """Return the names of all operators."""
    return tuple(_TABLE)
