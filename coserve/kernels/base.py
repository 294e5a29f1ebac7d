"""What a backend is: everything that may have a fast version on some device, as one interface.

A backend is a folder (or a module) of `coserve/kernels/` that names its class as `BACKEND`. It is
chosen once, when a model is loaded (`find_backend`), and what runs the model never asks which it
is. `plain/` has all of it in PyTorch for any device; another backend is best a subclass of
`PlainBackend` that replaces what it does better.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from coserve.kernels.attention import AttentionBatch, AttentionRoom, AttentionSpec, Segment
from coserve.kernels.gated_delta import (
    GatedDeltaGradients,
    GatedDeltaRows,
    GatedDeltaSpec,
    GatedDeltaWeights,
)
from coserve.kernels.low_rank import AdapterBatch, AdapterRows
from coserve.kernels.row_copies import RowCopies
from coserve.kernels.trace import Trace, TracedCalls


class SiluMulGradients(NamedTuple):
    """Gradients of both factors [n, width]; y again, if it was asked for."""

    gate: Tensor
    up: Tensor
    y: Tensor | None


@dataclass(frozen=True, kw_only=True, eq=False)
class Grouped:
    """The same parameter of several adapters, all of one shape, for rows that stand adapter by
    adapter.
    """

    tensors: tuple[Tensor, ...]
    rows: AdapterRows


# A factor of an adapter's product (or the sum of its gradients): of the one adapter of all rows, or
# of several.
Factor = Tensor | Grouped


@dataclass(frozen=True, kw_only=True, eq=False)
class JoinedRows:
    """The rows of several owners, which lie apart: they are copied side by side for those who read
    them as one, and only then.
    """

    tensors: tuple[Tensor, ...]


def rows_of_owner(x: Tensor | JoinedRows, index: int, rows: slice) -> Tensor:
    """One owner's rows, which are these among all rows."""
    return x.tensors[index] if isinstance(x, JoinedRows) else x[rows]


class Backend(ABC):
    """Tensors are on the backend's device. Rows are [n, width], and may be a slice of wider rows'
    columns; sums are float32, and results are rounded once to the dtype of the rows.
    """

    # Of those that are available on a device, the one of the highest priority is chosen.
    priority: ClassVar[int] = 0
    # Whether calls can be captured (`capture`); and numbers of requests for which steps in which
    # all decode, and rows for which steps with pieces of prompts, are captured when a device
    # starts, so that none waits for that later.
    captures: ClassVar[bool] = False
    captured_rows: Sequence[int] = ()
    captured_prompts: Sequence[int] = ()
    # Whether traces may have rows of training windows (`Trace.keep`).
    traces_windows: ClassVar[bool] = False
    # Kernels by the name of the fused operator that they compute, whose class says what they take
    # and give; None: a kernel is not for these tensors.
    fused: Mapping[str, Callable[..., Tensor | None]] = MappingProxyType({})

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @classmethod
    @abstractmethod
    def is_available(cls, device: torch.device) -> bool:
        """Whether it can run on a device."""

    @classmethod
    def why_unavailable(cls, device: torch.device) -> str:
        """Return why it cannot run on a device that it is made for, as one line for users; ""
        otherwise.
        """
        return ""

    @classmethod
    def prepare(
        cls, device: torch.device, progress: Callable[[int, int], None] | None = None
    ) -> None:
        """Do once what takes long before it can run on a device, such as compiling; progress: parts
        done, and all.
        """
        return

    @property
    def identity(self) -> str:
        """What its speed depends on beside the device, in a few words."""
        return type(self).__name__

    @property
    def for_losses(self) -> "Backend":
        """The backend for a head whose logits only a loss reads: its products may lie in memory as
        the loss reads them best. Here the backend itself.
        """
        return self

    def trace(
        self, dtype: torch.dtype, run: Callable[[Trace["Backend"]], Tensor]
    ) -> TracedCalls | None:
        """The calls of what `run` does with rows of this compute dtype, whenever it is asked to; it
        gives the output's rows. None where this backend traces nothing; UntraceableError for what
        it cannot write down.
        """
        return None

    def capture(self, run: Callable[[], None]) -> Callable[[], None] | None:
        """What `run` asks of the device, as one call that asks for all of it again, on what its
        tensors hold then. It is run meanwhile, some times. None where this backend captures
        nothing, or not what was asked for.
        """
        return None

    def attention_room(
        self, *, num_rows: int, num_keys: int, num_segments: int
    ) -> AttentionRoom | None:
        """For calls that are captured: room for batches of as many rows and segments at most, in
        stores of as many keys; None where this backend captures nothing.
        """
        return None

    def row_copies(
        self, tensors: Sequence[Tensor], *, in_place: bool, most_rows: int
    ) -> RowCopies | None:
        """For calls that are captured: copies of up to as many rows between these tensors and
        others. in_place: whether rows stand for the others' rows of the same number; otherwise the
        first row stands for the first that is copied. None where this backend captures nothing.
        """
        return None

    # -- products with the weights of the backbone ------------------------------------

    @abstractmethod
    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """x W^T + b; x [n, in], weight [out, in], bias [out] -> [n, out]."""

    @abstractmethod
    def input_gradient(self, grad: Tensor, weight: Tensor, onto: Tensor | None = None) -> Tensor:
        """dx = dy W; grad [n, out], weight [out, in] -> [n, in], added to `onto` in place if that
        is given.
        """

    @abstractmethod
    def weight_gradient(self, grad: Tensor, x: Tensor) -> Tensor:
        """dW = dy^T x; grad [n, out], x [n, in] -> [out, in], in float32 where that costs
        nothing.
        """

    @abstractmethod
    def int8_product(
        self, x: Tensor, values: Tensor, scales: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        """`product` with a weight of int8 values [out, in] and float32 scales [out]."""

    @abstractmethod
    def int8_input_gradient(
        self, grad: Tensor, values: Tensor, scales: Tensor, onto: Tensor | None = None
    ) -> Tensor:
        """`input_gradient` with such a weight."""

    @abstractmethod
    def grouped_product(self, x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        """`product` of rows [m, in] that stand group after group, each group with its own of the
        weights [groups, out, in] -> [m, out]; ends int32 [groups]: where each group's rows end.
        """

    @abstractmethod
    def int8_grouped_product(
        self, x: Tensor, values: Tensor, scales: Tensor, ends: Tensor
    ) -> Tensor:
        """`grouped_product` with weights of int8 values [groups, out, in] and float32 scales
        [groups, out].
        """

    @abstractmethod
    def int8_grouped_input_gradient(
        self, grad: Tensor, values: Tensor, scales: Tensor, ends: Tensor
    ) -> Tensor:
        """dx = dy W of each group with such weights; grad [m, out] -> [m, in]."""

    @abstractmethod
    def grouped_weight_gradient(self, grad: Tensor, x: Tensor, ends: Tensor) -> Tensor:
        """`weight_gradient` of each group: grad [m, out], x [m, in] -> float32 [groups, out,
        in].
        """

    # -- products with the adapters of the rows ------------------------------------------

    @abstractmethod
    def low_rank_product(self, x: Tensor, factor: Factor, onto: Tensor | None = None) -> Tensor:
        """x F^T, with F [out, in] of low rank (one of both is the rank), added to `onto` in place
        if that is given.
        """

    @abstractmethod
    def add_adapters(
        self, x: Tensor, outputs: Sequence[Tensor], first_place: int, batch: AdapterBatch
    ) -> None:
        """Add what adapters add to neighbouring places that read the same rows, each row with its
        own adapter, in place: x [n, in] and the places' outputs [n, out] each; the rest of the rows
        stay as they are.

        A row's A x and its product with the scale are rounded to the dtype, and the sum once.
        """

    @abstractmethod
    def low_rank_input_gradient(
        self, grad: Tensor, factor: Factor, onto: Tensor | None = None
    ) -> Tensor:
        """dx = dy F, added to `onto` in place if that is given."""

    @abstractmethod
    def add_low_rank_gradient(self, grad: Tensor, x: Tensor | JoinedRows, onto: Factor) -> None:
        """Add dF = dy^T x of each adapter's rows to its sum, float32 [out, in], in place; grad [n,
        out], x [n, in].
        """

    @abstractmethod
    def dropped(self, x: Tensor, row_ids: Tensor, *, p: float, salt: int) -> Tensor:
        """x [n, width] without the features that its rows drop, scaled up for them; see
        `kernels.dropout`.
        """

    # -- attention -----------------------------------------------------------------------

    @abstractmethod
    def prepare_attention(
        self, segments: Sequence[Segment], *, block_tokens: int
    ) -> AttentionBatch:
        """What the layers of a step share: segments whose keys lie in stores of pages of this many
        keys.
        """

    @abstractmethod
    def attention(
        self, q: Tensor, keys: Tensor, values: Tensor, batch: AttentionBatch, spec: AttentionSpec
    ) -> tuple[Tensor, Tensor]:
        """Attend. q [n, Hq, D], keys and values [num_pages, block_tokens, Hkv * D] -> output [n,
        Hq, D] in q's dtype, log-sum-exp float32 [n, Hq].
        """

    @abstractmethod
    def attention_gradient(
        self,
        grad: Tensor,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        out: Tensor,
        lse: Tensor,
        batch: AttentionBatch,
        spec: AttentionSpec,
        *,
        key_grads: Tensor,
        value_grads: Tensor,
    ) -> Tensor:
        """Reverse. grad and out [n, Hq, D], lse [n, Hq]; keys and values in a store of one page ->
        gradient of q.

        The gradients of keys and values are added to key_grads and value_grads, float32 of the
        store's shape, contiguous.
        """

    # -- linear attention ----------------------------------------------------------------

    @abstractmethod
    def gated_delta(
        self, rows: GatedDeltaRows, weights: GatedDeltaWeights, state: Tensor, spec: GatedDeltaSpec
    ) -> tuple[Tensor, Tensor]:
        """The gated delta rule after a short convolution, on sequences with states [B, state_size]
        -> y [B, T, Hv * Dv] in x's dtype, the states after the rows.
        """

    @abstractmethod
    def gated_delta_gradient(
        self,
        grad: Tensor,
        state_grad: Tensor,
        rows: GatedDeltaRows,
        weights: GatedDeltaWeights,
        state: Tensor,
        spec: GatedDeltaSpec,
    ) -> GatedDeltaGradients:
        """Reverse, of `CHUNK_ROWS` rows at most, from the gradients of y and of the states after
        the rows.
        """

    # -- pieces that work row by row -------------------------------------------------------

    @abstractmethod
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """weight * x / rms(x); x [n, width], weight [features], of which width is a multiple (arXiv
        1910.07467).
        """

    @abstractmethod
    def rms_norm_gradient(
        self, grad: Tensor, x: Tensor, weight: Tensor, eps: float, *, with_y: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Gradient of x from that of y, both [n, width]; and y, if it is asked for."""

    @abstractmethod
    def rms_norm_weight_gradient(
        self, grad: Tensor, x: Tensor, weight: Tensor, eps: float
    ) -> Tensor:
        """Gradient of the weight, float32."""

    @abstractmethod
    def silu_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        """silu(gate) * up, the gated unit of Llama's MLP (arXiv 2002.05202)."""

    @abstractmethod
    def silu_mul_gradients(
        self, grad: Tensor, gate: Tensor, up: Tensor, *, with_y: bool = False
    ) -> SiluMulGradients:
        """From the gradient of y [n, width]."""

    @abstractmethod
    def rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate each head of x by its row's angles, in the half-split layout; x [n, heads * D],
        cos and sin [n, D] (arXiv 2104.09864).
        """

    @abstractmethod
    def rope_gradient(self, grad: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Gradient of x from that of the rotated, both [n, heads * D]."""

    @abstractmethod
    def cross_entropy(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Loss of each row, whether no other token is likelier than its target, and the logarithm
        of the sum of its logits' exponentials: logits [n, vocabulary], targets int64 [n] -> float32
        [n], bool [n], float32 [n].
        """

    @abstractmethod
    def cross_entropy_gradient(
        self,
        logits: Tensor,
        targets: Tensor,
        log_sum: Tensor,
        loss_grad: Tensor,
        *,
        overwrites: bool = False,
    ) -> Tensor:
        """Gradient of the logits [n, vocabulary]; log_sum from `cross_entropy`, loss_grad float32
        [n].

        overwrites: nobody needs the logits any more, and it may lie in their place.
        """

    @abstractmethod
    def argmax(self, logits: Tensor) -> Tensor:
        """The place of the largest of each row, int64 [n]: the first of equal ones, or the first
        NaN.
        """

    @abstractmethod
    def draw(
        self, scores: Tensor, uniform: Sequence[float], top_k: Sequence[int], top_p: Sequence[float]
    ) -> Tensor:
        """A place of each row, int64 [n]: the first at which the cumulative probability of what is
        kept exceeds its number from [0, 1) times all of that.

        scores float32 [n, width]: probabilities are their softmax. Kept are the top_k likeliest
        (all, where it is not above 0), and of those the fewest whose probabilities sum to top_p,
        which is relative to what top_k leaves; of equal ones, the first. A row without numbers
        gives any place.
        """

    @abstractmethod
    def pack_signs(self, x: Tensor) -> Tensor:
        """x [n, width] -> uint8 [n, ceil(width / 8)]; a bit is set where x > 0."""

    @abstractmethod
    def unpack_signs(self, bits: Tensor, width: int) -> Tensor:
        """The inverse: uint8 [n, ceil(width / 8)] -> bool [n, width]."""
