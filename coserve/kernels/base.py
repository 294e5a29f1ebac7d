"""The interface of kernel backends: everything that may have a fast version on some device.

A backend is a folder (or a module) of `coserve/kernels/` that names its class as `BACKEND`. It is
chosen once, when a model is loaded (`find_backend`), and the code that runs the model never
branches on it. `plain/` has all of it in PyTorch for any device. Another backend is best a subclass
of `PlainBackend` that replaces what it does better.
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
    """Gradients of a gated unit."""

    gate: Tensor
    """Gradient of the gate [n, width]."""
    up: Tensor
    """Gradient of the other factor [n, width]."""
    y: Tensor | None
    """The unit's result [n, width], if it was asked for."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Grouped:
    """The same parameter of several adapters, for rows that stand adapter by adapter."""

    tensors: tuple[Tensor, ...]
    """The parameter of each adapter, all of one shape."""
    rows: AdapterRows
    """The rows of each adapter."""


# A factor of an adapter's product (or the sum of its gradients): of the one adapter of all rows, or
# of several.
Factor = Tensor | Grouped


@dataclass(frozen=True, kw_only=True, eq=False)
class JoinedRows:
    """Rows of several owners that lie apart. They are copied side by side only for operators that
    read them as one tensor.
    """

    tensors: tuple[Tensor, ...]
    """The rows of each owner."""


def rows_of_owner(x: Tensor | JoinedRows, index: int, rows: slice) -> Tensor:
    """Return one owner's rows, which are `rows` among those of all."""
    return x.tensors[index] if isinstance(x, JoinedRows) else x[rows]


class Backend(ABC):
    """Kernels for one kind of device.

    Tensors are on the backend's device. Rows are [n, width], and may be a slice of wider rows'
    columns. Sums are float32, and results are rounded once to the dtype of the rows.
    """

    priority: ClassVar[int] = 0
    """Rank among the available backends of a device; the highest is chosen."""
    captures: ClassVar[bool] = False
    """Whether calls can be captured (`capture`)."""
    captured_rows: Sequence[int] = ()
    """Numbers of requests for which decode steps are captured when a device starts, so that no step
    waits for that later.
    """
    captured_prompts: Sequence[int] = ()
    """Numbers of rows for which steps with pieces of prompts are captured when a device starts."""
    traces_windows: ClassVar[bool] = False
    """Whether traces may have rows of training windows (`Trace.keep`)."""
    fused: Mapping[str, Callable[..., Tensor | None]] = MappingProxyType({})
    """Kernels by the name of the fused operator that they compute. The operator's class documents
    the arguments and the result; None: the kernel is not for these tensors.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @classmethod
    @abstractmethod
    def is_available(cls, device: torch.device) -> bool:
        """Return whether it can run on a device."""

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
        """Prepare for a device, once, what takes long, such as compiling.

        Args:
            progress: called with the number of finished parts, and of all.
        """
        return

    @property
    def identity(self) -> str:
        """Return a few words for everything that its speed depends on beside the device."""
        return type(self).__name__

    @property
    def for_losses(self) -> "Backend":
        """Return the backend for a head whose logits only a loss reads, so that its products may
        lie in memory as the loss reads them best; by default the backend itself.
        """
        return self

    def trace(
        self, dtype: torch.dtype, run: Callable[[Trace["Backend"]], Tensor]
    ) -> TracedCalls | None:
        """Trace calls for rows of this compute dtype.

        Args:
            run: runs the operators on the trace's stand-ins, whenever the trace needs that; it
                returns the output's rows.

        Returns:
            The calls; None where this backend traces nothing.

        Raises:
            UntraceableError: a call cannot be recorded.
        """
        return None

    def capture(self, run: Callable[[], None]) -> Callable[[], None] | None:
        """Capture the device work of `run`, as one call that repeats it on the values that its
        tensors hold then. `run` runs meanwhile, several times.

        Returns:
            The call; None where this backend captures nothing, or cannot capture this.
        """
        return None

    def attention_room(
        self, *, num_rows: int, num_keys: int, num_segments: int
    ) -> AttentionRoom | None:
        """Allocate, for calls that are captured, room for batches of at most as many rows and
        segments, in stores of as many keys; None where this backend captures nothing.
        """
        return None

    def row_copies(
        self, tensors: Sequence[Tensor], *, in_place: bool, max_rows: int
    ) -> RowCopies | None:
        """Make copies, for calls that are captured, of rows between these tensors and others; None
        where this backend captures nothing.

        Args:
            in_place: whether rows stand for the others' rows of the same number; otherwise the
                first row stands for the first that is copied.
            max_rows: maximum number of rows.
        """
        return None

    # -- products with the weights of the backbone ------------------------------------

    @abstractmethod
    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return x W^T + b; x [n, in], weight [out, in], bias [out] -> [n, out]."""

    @abstractmethod
    def input_gradient(self, grad: Tensor, weight: Tensor, onto: Tensor | None = None) -> Tensor:
        """Return dx = dy W; grad [n, out], weight [out, in] -> [n, in], added to `onto` in place if
        that is given.
        """

    @abstractmethod
    def weight_gradient(self, grad: Tensor, x: Tensor) -> Tensor:
        """Return dW = dy^T x; grad [n, out], x [n, in] -> [out, in], in float32 where that costs
        nothing.
        """

    @abstractmethod
    def int8_product(
        self, x: Tensor, values: Tensor, scales: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        """Return the `product` with a weight of int8 values [out, in] and float32 scales [out]."""

    @abstractmethod
    def int8_input_gradient(
        self, grad: Tensor, values: Tensor, scales: Tensor, onto: Tensor | None = None
    ) -> Tensor:
        """Return the `input_gradient` with a weight of int8 values [out, in] and float32 scales
        [out].
        """

    @abstractmethod
    def grouped_product(self, x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        """Return the `product` of rows [m, in] that stand group after group, each group with its
        own of the weights [groups, out, in] -> [m, out]; ends int32 [groups]: ends of the groups'
        rows.
        """

    @abstractmethod
    def int8_grouped_product(
        self, x: Tensor, values: Tensor, scales: Tensor, ends: Tensor
    ) -> Tensor:
        """Return the `grouped_product` with weights of int8 values [groups, out, in] and float32
        scales [groups, out].
        """

    @abstractmethod
    def int8_grouped_input_gradient(
        self, grad: Tensor, values: Tensor, scales: Tensor, ends: Tensor
    ) -> Tensor:
        """Return dx = dy W of each group with such weights; grad [m, out] -> [m, in]."""

    @abstractmethod
    def grouped_weight_gradient(self, grad: Tensor, x: Tensor, ends: Tensor) -> Tensor:
        """Return the `weight_gradient` of each group: grad [m, out], x [m, in] -> float32 [groups,
        out, in].
        """

    # -- products with the adapters of the rows ------------------------------------------

    @abstractmethod
    def low_rank_product(self, x: Tensor, factor: Factor, onto: Tensor | None = None) -> Tensor:
        """Return x F^T, with F [out, in] of low rank (one of out and in is the rank), added to
        `onto` in place if that is given.
        """

    @abstractmethod
    def add_adapters(
        self, x: Tensor, outputs: Sequence[Tensor], first_place: int, batch: AdapterBatch
    ) -> None:
        """Add, in place, the results of adapters at neighbouring places that read the same rows,
        each row with its own adapter.

        A row's A x and its product with the scale are rounded to the dtype, and the sum once. Rows
        without an adapter stay as they are.

        Args:
            x: rows that the places read, [n, in].
            outputs: rows of each place [n, out], which are added to.
            first_place: number of the first place.
            batch: the adapters and their rows.
        """

    @abstractmethod
    def low_rank_input_gradient(
        self, grad: Tensor, factor: Factor, onto: Tensor | None = None
    ) -> Tensor:
        """Return dx = dy F, added to `onto` in place if that is given."""

    @abstractmethod
    def add_low_rank_gradient(self, grad: Tensor, x: Tensor | JoinedRows, onto: Factor) -> None:
        """Add dF = dy^T x of each adapter's rows to its sum, float32 [out, in], in place; grad [n,
        out], x [n, in].
        """

    @abstractmethod
    def dropped(self, x: Tensor, row_ids: Tensor, *, p: float, salt: int) -> Tensor:
        """Return x [n, width] without the features that its rows drop, scaled up for them; see
        `kernels.dropout`.
        """

    # -- attention -----------------------------------------------------------------------

    @abstractmethod
    def prepare_attention(
        self, segments: Sequence[Segment], *, block_tokens: int
    ) -> AttentionBatch:
        """Prepare the part of attention that the layers of a step share: segments whose keys lie in
        stores of pages of this many keys.
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
        """Return the gradient of q, and add those of keys and values to their sums.

        Args:
            grad: gradient of the output [n, Hq, D].
            q: queries [n, Hq, D].
            keys: a store of one page.
            values: a store of one page.
            out: the output [n, Hq, D].
            lse: log-sum-exp float32 [n, Hq].
            batch: the segments.
            spec: how scores are computed.
            key_grads: sum of the gradients of the keys, float32 of the store's shape, contiguous.
            value_grads: the same for the values.
        """

    # -- linear attention ----------------------------------------------------------------

    @abstractmethod
    def gated_delta(
        self, rows: GatedDeltaRows, weights: GatedDeltaWeights, state: Tensor, spec: GatedDeltaSpec
    ) -> tuple[Tensor, Tensor]:
        """Apply the gated delta rule, after a short convolution, to sequences with states [B,
        state_size] -> y [B, T, Hv * Dv] in x's dtype, the states after the rows.
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
        """Return the gradients of at most `CHUNK_ROWS` rows, from those of y and of the states
        after the rows.
        """

    # -- pieces that work row by row -------------------------------------------------------

    @abstractmethod
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Return weight * x / rms(x); x [n, width], weight [features], of which width is a multiple
        (arXiv 1910.07467).
        """

    @abstractmethod
    def rms_norm_gradient(
        self, grad: Tensor, x: Tensor, weight: Tensor, eps: float, *, with_y: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Return the gradient of x from that of y, both [n, width]; and y, if it is asked for."""

    @abstractmethod
    def rms_norm_weight_gradient(
        self, grad: Tensor, x: Tensor, weight: Tensor, eps: float
    ) -> Tensor:
        """Return the gradient of the weight, float32."""

    @abstractmethod
    def silu_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        """Return silu(gate) * up, the gated unit of Llama's MLP (arXiv 2002.05202)."""

    @abstractmethod
    def silu_mul_gradients(
        self, grad: Tensor, gate: Tensor, up: Tensor, *, with_y: bool = False
    ) -> SiluMulGradients:
        """Return the gradients of both factors from that of y [n, width]."""

    @abstractmethod
    def rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate each head of x by its row's angles, in the half-split layout; x [n, heads * D],
        cos and sin [n, D] (arXiv 2104.09864).
        """

    @abstractmethod
    def rope_gradient(self, grad: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return the gradient of x from that of the rotated rows, both [n, heads * D]."""

    @abstractmethod
    def cross_entropy(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return each row's loss, float32 [n], whether no other token is likelier than its target,
        bool [n], and the logarithm of the sum of its logits' exponentials, float32 [n]; logits [n,
        vocabulary], targets int64 [n].
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
        """Return the gradient of the logits [n, vocabulary].

        Args:
            log_sum: from `cross_entropy`.
            loss_grad: gradient of the loss, float32 [n].
            overwrites: whether the result may take the place of the logits, which nothing reads any
                more.
        """

    @abstractmethod
    def argmax(self, logits: Tensor) -> Tensor:
        """Return the place of the largest logit of each row, int64 [n]: the first of equal ones, or
        the first NaN.
        """

    @abstractmethod
    def draw(
        self, scores: Tensor, uniform: Sequence[float], top_k: Sequence[int], top_p: Sequence[float]
    ) -> Tensor:
        """Draw a place of each row, int64 [n]: the first at which the cumulative probability of the
        kept places exceeds the row's number from [0, 1) times the probability of all of them.

        Probabilities are the softmax of the scores. Kept are the top_k likeliest places (all, where
        top_k is not above 0), and of those the fewest whose probabilities sum to top_p, which is
        relative to the top_k; of equal ones, the first. A row without numbers gives any place.

        Args:
            scores: float32 [n, width].
        """

    @abstractmethod
    def pack_signs(self, x: Tensor) -> Tensor:
        """Return, for x [n, width], uint8 [n, ceil(width / 8)]; a bit is set where x > 0."""

    @abstractmethod
    def unpack_signs(self, bits: Tensor, width: int) -> Tensor:
        """Return packed signs, uint8 [n, ceil(width / 8)], as bool [n, width]."""
