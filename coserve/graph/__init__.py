"""The operator graph: what a model computes as data, its reverse, and what the reverse needs to
keep.

The way of a graph: `ir` describes it, `bypass` attaches an adapter, `differentiate` builds the
backward graph, `prune` drops what nobody asked for, `compress` replaces a tensor by its signs where
those suffice, `rematerialize` chooses what is kept, and `compile_program` (in `program`) writes the
result down as instructions, which `execute` runs. `fuse` makes one operator of several that a
backend has one kernel for. Operators live in `operators/`, one entry each.
"""
