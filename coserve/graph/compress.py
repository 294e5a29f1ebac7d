"""Lossless compression of saved activations: one bit where a gradient needs only a sign (FlexLLM
section 5.2).
"""

from collections import Counter
from dataclasses import replace

from coserve.graph.differentiate import BackwardGraph
from coserve.graph.ir import GraphBuilder


def compress(backward: BackwardGraph) -> BackwardGraph:
    """Let VJPs read packed signs of a tensor instead of the tensor, where they can and nothing else
    reads it.

    A tensor that is read elsewhere (a LoRA on the layer after a ReLU) is kept whole anyway, and its
    signs with it.
    """
    graph = backward.graph
    readers = Counter(name for gradient in backward.nodes for name in gradient.reads().values())
    builder = GraphBuilder(*graph.tensors, nodes=graph.nodes)
    nodes = []
    for gradient in backward.nodes:
        reads = gradient.reads()
        slots = [
            slot
            for slot in gradient.node.operator.sign_suffices
            # One reader, which is this one: signs beside the whole tensor would only add bytes.
            if slot in reads and readers[reads[slot]] == 1
        ]
        signs = tuple(
            (slot, builder.apply("sign_bits", f"{reads[slot]}.sign", {"x": reads[slot]}))
            for slot in slots
        )
        nodes.append(replace(gradient, substitutes=signs))
    return BackwardGraph(graph=builder.build(*graph.outputs), nodes=tuple(nodes))
