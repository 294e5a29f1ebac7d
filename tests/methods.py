"""PEFT methods for tests: the adapter interface fits the other methods of the papers as it is, in a few lines each."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from coserve.adapters import AdapterConfig
from coserve.graph.bypass import Bypass
from coserve.graph.ir import GraphBuilder
from coserve.graph.operators.base import Attributes, Context, RowWise, Values
from coserve.models.base import Architecture, Part

Sequences = list[tuple[list[int], list[bool]]]


@dataclass(frozen=True, kw_only=True)
class Method(AdapterConfig):
    """What the methods below share: sites by the end of their names."""

    peft_type = "TEST"
    targets: tuple[str, ...] = ()

    def sites(self, architecture: Architecture, *, every_target: bool = True) -> dict[str, tuple[Part, str]]:
        return {name: site for name, site in architecture.linear_sites.items() if name.endswith(self.targets)}

    def initial(self, parameter: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        return torch.randn(shape, generator=generator) * 0.2

    def to_peft(self) -> dict[str, Any]:
        return {}

    @classmethod
    def from_peft(cls, fields: Mapping[str, Any]) -> Self:
        return cls()


class IA3(Method):
    """y * l, as y + y * (l - 1); PEFT scales a feed-forward layer's input, which is its output in the layer before."""

    def bypass(self, module: str, inputs: int, outputs: int, *, training: bool) -> Bypass:
        b = GraphBuilder()
        factor = b.parameter("ia3_l_minus_1", outputs)
        y = b.apply("mul", "scaled", {"x": b.rows("x", outputs), "factor": factor}, per_row=False)
        return Bypass(graph=b.build(y), reads="output")


class Bottleneck(Method):
    """y + up(gelu(down(y))). Source: arXiv 1902.00751."""

    def bypass(self, module: str, inputs: int, outputs: int, *, training: bool) -> Bypass:
        b = GraphBuilder()
        x = b.rows("x", outputs)
        h = b.apply("linear", "down", {"x": x, "weight": b.parameter("down.weight", 5, outputs)})
        h = b.apply("gelu", "act", {"x": h}, approximate="none")
        y = b.apply("linear", "up", {"x": h, "weight": b.parameter("up.weight", outputs, 5)})
        return Bypass(graph=b.build(y), reads="output")


class Difference(Method):
    """y + D x with a whole matrix D: diff pruning before its mask, and LoRA of full rank."""

    def bypass(self, module: str, inputs: int, outputs: int, *, training: bool) -> Bypass:
        b = GraphBuilder()
        weight = b.parameter("difference.weight", outputs, inputs)
        return Bypass(graph=b.build(b.apply("linear", "difference", {"x": b.rows("x", inputs), "weight": weight})))


class Transform(Method):
    """y + D y: one product that reads the sum that it is added to."""

    def bypass(self, module: str, inputs: int, outputs: int, *, training: bool) -> Bypass:
        b = GraphBuilder()
        weight = b.parameter("transform.weight", outputs, outputs)
        y = b.apply("linear", "transform", {"x": b.rows("x", outputs), "weight": weight})
        return Bypass(graph=b.build(y), reads="output")


class Prompt(Method):
    """Virtual tokens, whose embeddings are the parameters. Source: arXiv 2104.08691."""

    num_virtual = 3

    def sites(self, architecture: Architecture, *, every_target: bool = True) -> dict[str, tuple[Part, str]]:
        return {architecture.embedding_name: ("embed", architecture.embedding_name)}

    def bypass(self, module: str, inputs: int, outputs: int, *, training: bool) -> Bypass:
        b = GraphBuilder()
        b.rows("x", outputs)
        table = b.parameter("prompt", self.num_virtual, outputs)
        tokens = b.constant("tokens", dtype=torch.int64)
        y = b.apply("embedding", "looked_up", {"ids": tokens, "weight": table}, offset=0, virtual=True)
        return Bypass(graph=b.build(y), reads="output")


class VirtualRows(RowWise):
    """p - x on rows of virtual tokens, zero elsewhere: x + y is p there."""

    name = "virtual_rows"
    inputs = ("x", "p", "tokens")
    needs = {"x": ("tokens",), "p": ("tokens",), "tokens": None}  # noqa: RUF012

    def forward(self, values: Values, attributes: Attributes, context: Context) -> dict[str, Tensor]:
        return {"y": (values["p"] - values["x"]) * (values["tokens"] < 0)[:, None]}

    def vjp(
        self, wanted: Collection[str], values: Values, gradients: Values, attributes: Attributes, context: Context
    ) -> dict[str, Tensor]:
        masked = gradients["y"] * (values["tokens"] < 0)[:, None]
        return {slot: {"x": -masked, "p": masked}[slot] for slot in wanted}


class Prefix(Prompt):
    """Keys and values of virtual tokens are the parameters. Source: arXiv 2101.00190, without its reparametrisation."""

    def sites(self, architecture: Architecture, *, every_target: bool = True) -> dict[str, tuple[Part, str]]:
        return {
            architecture.prefix(layer) + node: (layer, node)
            for layer in range(architecture.num_layers)
            for node in ("rope_k", "self_attn.v_proj")
        }

    def bypass(self, module: str, inputs: int, outputs: int, *, training: bool) -> Bypass:
        b = GraphBuilder()
        x = b.rows("x", outputs)
        table = b.parameter("prefix", self.num_virtual, outputs)
        tokens = b.constant("tokens", dtype=torch.int64)
        p = b.apply("embedding", "looked_up", {"ids": tokens, "weight": table}, offset=0, virtual=True)
        y = b.apply("virtual_rows", "virtual_rows", {"x": x, "p": p, "tokens": tokens})
        return Bypass(graph=b.build(y), reads="output")


def with_virtual(sequences: Sequences, num_virtual: int) -> Sequences:
    """The sequences after virtual tokens, which are not trained on."""
    virtual = [-1 - j for j in range(num_virtual)]
    return [(virtual + ids, [False] * num_virtual + marks) for ids, marks in sequences]
