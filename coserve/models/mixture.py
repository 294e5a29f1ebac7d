"""The decoder of mixtures of experts: a router, and an MLP for each expert, whose matrices are one
weight [E, out, in].
"""

from coserve.errors import UnsupportedModelError
from coserve.graph.ir import GraphBuilder
from coserve.models.pieces import added
from coserve.models.rotary_decoder import RotaryDecoder


class MixtureDecoder(RotaryDecoder):
    """A decoder whose blocks have experts in place of an MLP. A family sets its fields."""

    depends_on = "the company of a row in its experts"
    router = "mlp.gate"
    router_bias: bool = False
    """Whether the router has a bias."""
    expert_bias: bool = False
    """Whether the experts have biases."""
    all_scores: bool = False
    """Whether the shares of a row's experts are taken from a softmax over all experts."""
    shared_width: int = 0
    """Width of a shared expert, an MLP with a gate of its own that all rows pass; 0: there is none.
    """
    num_experts: int
    """Number of experts."""
    experts_per_row: int
    """Number of experts that a row is routed to."""
    expert_width: int
    """Width of an expert's MLP."""

    def check_experts(self) -> None:
        """Check the number of experts of a row.

        Raises:
            UnsupportedModelError: it is not valid.
        """
        if not 1 <= self.experts_per_row <= self.num_experts:
            raise UnsupportedModelError(
                f"num_experts_per_tok={self.experts_per_row} must be from 1 to the number of "
                f"experts, "
                f"{self.num_experts}"
            )

    def experts(self, b: GraphBuilder, x: str) -> str:
        """Add router and experts, from rows [hidden_size] to rows [hidden_size]; return the
        output's name.
        """
        weight = b.weight(f"{self.router}.weight", self.num_experts, self.hidden_size)
        bias = b.weight(f"{self.router}.bias", self.num_experts) if self.router_bias else None
        scores = {"x": x, "weight": weight, "bias": bias}
        op = "route_of_all" if self.all_scores else "route"
        shares = b.apply(op, self.router, scores, top_k=self.experts_per_row)
        # The router's second output; `apply` returns the name of the first.
        chosen = f"{self.router}.experts"
        h = self._products(
            b, "mlp.experts.gate_up_proj", x, chosen, 2 * self.expert_width, shared=True
        )
        h = self.expert_gate(b, h)
        h = self._products(b, "mlp.experts.down_proj", h, chosen, self.hidden_size, shared=False)
        y = b.apply("mixture", "mlp.mixture", {"x": h, "shares": shares})
        return added(b, "mlp.sum", y, self._shared_expert(b, x)) if self.shared_width else y

    def _shared_expert(self, b: GraphBuilder, x: str) -> str:
        gate, up = (
            b.linear(f"mlp.shared_expert.{name}_proj", x, self.shared_width)
            for name in ("gate", "up")
        )
        h = self.gated(b, gate, up, "mlp.shared_expert")
        y = b.linear("mlp.shared_expert.down_proj", h, self.hidden_size)
        share = b.linear("mlp.shared_expert_gate", x, 1)
        # One gate per row, [n, 1].
        return b.apply("sigmoid_mul", "mlp.shared_expert.gated", {"gate": share, "x": y})

    def expert_gate(self, b: GraphBuilder, fused: str) -> str:
        """Add the gated unit, from rows [k * 2 * width] to rows [k * width]; return the output's
        name.
        """
        widths = {"mlp.experts.gate": self.expert_width, "mlp.experts.up": self.expert_width}
        # Each of a row's experts has gate and up side by side, [n, k * 2 * width].
        gate, up = b.split(fused, widths, groups=self.experts_per_row)
        return self.gated(b, gate, up)

    def _products(
        self, b: GraphBuilder, name: str, x: str, chosen: str, out: int, *, shared: bool
    ) -> str:
        """Add products with experts' matrices. shared: whether a row is the same for all its
        experts.
        """
        # Rows hold one part for each of their experts, unless all experts read the same.
        width = b.width(x) if shared else b.width(x) // self.experts_per_row
        weight = b.weight(f"{name}.weight", self.num_experts, out, width)
        bias = b.weight(f"{name}.bias", self.num_experts, out) if self.expert_bias else None
        inputs = {"x": x, "experts": chosen, "weight": weight, "bias": bias}
        return b.apply("expert_linear", name, inputs, shared=shared)
