"""Tensor parallelism as a rewriting of graphs: from a whole graph to the one that each rank of a
group runs.

`placement` says in which state every tensor is and where collectives stand, and writes a rank's
graph down. `search` finds the best placement of a part of the backbone, `bypasses` that of an
adapter's bypasses on it.
"""
