"""The gated delta rule after a short causal convolution (arXiv 2412.06464), in chunks of rows, and
its gradient.

With the convolved queries, keys and values of a head, g = -exp(a_log) softplus(a + dt_bias) and
beta = sigmoid(b):

- S_t = exp(g_t) S_{t-1} + k_t delta_t^T
- delta_t = beta_t (v_t - (exp(g_t) S_{t-1})^T k_t)
- y_t = S_t^T q_t

The delta of the rows of a chunk solve one triangular system (section 3.3 there). All of it is
float32.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from coserve.kernels.gated_delta import (
    CHUNK_ROWS,
    GatedDeltaGradients,
    GatedDeltaRows,
    GatedDeltaSpec,
    GatedDeltaWeights,
)


def forward(
    rows: GatedDeltaRows, weights: GatedDeltaWeights, state: Tensor, spec: GatedDeltaSpec
) -> tuple[Tensor, Tensor]:
    """Implement `Backend.gated_delta`."""
    parts = []
    for start in range(0, rows.x.shape[1], CHUNK_ROWS):
        chunk = _Chunk.of(
            GatedDeltaRows(*(x[:, start : start + CHUNK_ROWS] for x in rows)), weights, state, spec
        )
        parts.append(chunk.output())
        state = chunk.state_after()
    return torch.cat(parts, 1).to(rows.x.dtype), state


def backward(
    grad: Tensor,
    state_grad: Tensor,
    rows: GatedDeltaRows,
    weights: GatedDeltaWeights,
    state: Tensor,
    spec: GatedDeltaSpec,
) -> GatedDeltaGradients:
    """Implement `Backend.gated_delta_gradient`."""
    assert rows.x.shape[1] <= CHUNK_ROWS, "a gradient is asked of one chunk"
    return _Chunk.of(rows, weights, state, spec).gradients(grad, state_grad)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Chunk:
    """Some rows with everything that both directions need."""

    rows: GatedDeltaRows
    """The rows."""
    weights: GatedDeltaWeights
    """Weights of the layer."""
    spec: GatedDeltaSpec
    """Sizes of the layer."""
    matrix: Tensor
    """The states' matrices before the rows [B, Hv, Dk, Dv]."""
    extended: Tensor
    """The tail and x [B, K - 1 + T, C]."""
    convolved: Tensor
    """Result of the convolution before its activation [B, T, C]."""
    q: Tensor
    """Queries of length 1, divided by the root of Dk [B, Hv, T, Dk]."""
    k: Tensor
    """Keys of length 1 [B, Hv, T, Dk]."""
    q_inverse: Tensor
    """Factors that gave the queries their length [B, Hv, T, 1]."""
    k_inverse: Tensor
    """Factors that gave the keys their length [B, Hv, T, 1]."""
    v: Tensor
    """Values [B, Hv, T, Dv]."""
    beta: Tensor
    """The gates beta [B, Hv, T, 1]."""
    total: Tensor
    """Sum of g up to a row [B, Hv, T, 1]."""
    decay: Tensor
    """Decay from a row to a later one [B, Hv, T, T]."""
    system: Tensor
    """Factors of earlier deltas in a row's delta [B, Hv, T, T]."""
    delta: Tensor
    """The deltas [B, Hv, T, Dv]."""

    @classmethod
    def of(
        cls, rows: GatedDeltaRows, weights: GatedDeltaWeights, state: Tensor, spec: GatedDeltaSpec
    ) -> "_Chunk":
        num_rows = rows.x.shape[1]
        extended = torch.cat((_tails(state, spec), rows.x.float()), 1)
        matrix = _matrices(state, spec)
        taps = weights.conv[:, 0].float()
        convolved = torch.zeros_like(extended[:, :num_rows])
        for tap in range(spec.kernel_size):
            convolved.addcmul_(extended[:, tap : tap + num_rows], taps[:, tap])
        q, k, v = _split(silu(convolved).to(rows.x.dtype).float(), spec)
        q_inverse, k_inverse = (
            torch.rsqrt(x.square().sum(-1, keepdim=True) + spec.eps) for x in (q, k)
        )
        q_inverse = q_inverse * spec.key_dim**-0.5
        q, k = q * q_inverse, k * k_inverse
        beta = torch.sigmoid(rows.b.float()).mT[..., None]
        total = _log_decay(rows, weights).mT[..., None].cumsum(2)
        later = torch.ones(num_rows, num_rows, dtype=torch.bool, device=q.device).triu(1)
        decay = (total - total.mT).masked_fill(later, float("-inf")).exp()
        system = (beta * (k @ k.mT) * decay).tril(-1)
        right = beta * (v - total.exp() * (k @ matrix))
        delta = (
            torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
            if num_rows > 1
            else right
        )
        return cls(
            rows=rows,
            weights=weights,
            spec=spec,
            matrix=matrix,
            extended=extended,
            convolved=convolved,
            q=q,
            k=k,
            q_inverse=q_inverse,
            k_inverse=k_inverse,
            v=v,
            beta=beta,
            total=total,
            decay=decay,
            system=system,
            delta=delta,
        )

    def output(self) -> Tensor:
        """Return y, float32 [B, T, Hv * Dv]."""
        y = (
            self.total.exp() * (self.q @ self.matrix)
            + (self.q @ self.k.mT * self.decay) @ self.delta
        )
        return y.transpose(1, 2).flatten(2)

    def state_after(self) -> Tensor:
        tail = self.extended[:, self.rows.x.shape[1] :]
        matrix = self._last.exp() * self.matrix + self._keys_at_end.mT @ self.delta
        return torch.cat((tail.flatten(1), matrix.flatten(1)), 1)

    def gradients(self, grad: Tensor, state_grad: Tensor) -> GatedDeltaGradients:
        """Return all gradients, from those of y [B, T, Hv * Dv] and of the state after the rows."""
        spec, num_rows = self.spec, grad.shape[1]
        dy = _heads(grad.float(), spec.value_dim)
        d_matrix = _matrices(state_grad, spec)
        q, k, matrix, delta, beta, decay = (
            self.q,
            self.k,
            self.matrix,
            self.delta,
            self.beta,
            self.decay,
        )
        grown, scores, at_end = self.total.exp(), q @ k.mT * decay, self._keys_at_end

        d_delta = scores.mT @ dy + at_end @ d_matrix
        d_right = d_delta
        if num_rows > 1:
            d_right = torch.linalg.solve_triangular(
                self.system.mT, d_delta, upper=True, unitriangular=True
            )
        d_scores = (dy @ delta.mT).tril()
        d_system = -(d_right @ delta.mT).tril(-1)
        dy_state, d_right_state, d_end = dy @ matrix.mT, d_right @ matrix.mT, delta @ d_matrix.mT

        by_scores, by_system = d_scores * decay, d_system * decay
        dq = grown * dy_state + by_scores @ k
        dk = by_scores.mT @ q + beta * (by_system @ k) + by_system.mT @ (beta * k)
        dk += (self._last - self.total).exp() * d_end - beta * grown * d_right_state
        k_state = (k * d_right_state).sum(-1, keepdim=True)
        d_beta = (d_right * self.v).sum(-1, keepdim=True) - grown * k_state
        d_beta += (by_system * (k @ k.mT)).sum(-1, keepdim=True)

        # Gradients of the sums of g: through the decays between rows, from the state to a row, and
        # to the end.
        pairs = d_scores * scores + d_system * self.system
        kept = (at_end * d_end).sum(-1, keepdim=True)
        d_total = pairs.sum(-1, keepdim=True) - pairs.sum(-2)[..., None] - kept
        d_total += grown * ((q * dy_state).sum(-1, keepdim=True) - beta * k_state)
        d_last = kept.sum(2) + (self._last.exp() * matrix * d_matrix).sum((2, 3))[..., None]
        d_total[:, :, -1] += d_last
        dg = d_total.flip(2).cumsum(2).flip(2)[..., 0].mT

        d_matrix_before = (
            (grown * q).mT @ dy + self._last.exp() * d_matrix - (beta * grown * k).mT @ d_right
        )
        dq, dk = (
            _unit_gradient(dq, q, self.q_inverse, spec.key_dim),
            _unit_gradient(dk, k, self.k_inverse, 1),
        )
        d_convolved = _joined(dq, dk, beta * d_right, spec) * _silu_slope(self.convolved)
        d_extended, d_conv = self._convolution_gradient(d_convolved, state_grad)
        d_b = (d_beta * beta * (1 - beta))[..., 0].mT
        rows, weights = self.rows, self.weights
        rate = -weights.a_log.float().exp()
        d_a = dg * rate * torch.sigmoid(rows.a.float() + weights.dt_bias.float())
        before = spec.kernel_size - 1
        return GatedDeltaGradients(
            rows=GatedDeltaRows(
                d_extended[:, before:].to(rows.x.dtype), d_b.to(rows.b.dtype), d_a.to(rows.a.dtype)
            ),
            state=torch.cat((d_extended[:, :before].flatten(1), d_matrix_before.flatten(1)), 1),
            weights=GatedDeltaWeights(
                conv=d_conv[:, None],
                a_log=(dg * _log_decay(rows, weights)).sum((0, 1)),
                dt_bias=d_a.sum((0, 1)),
            ),
        )

    @property
    def _last(self) -> Tensor:
        """Return the sum of all g, [B, Hv, 1, 1]."""
        return self.total[:, :, -1:]

    @property
    def _keys_at_end(self) -> Tensor:
        return self.k * (self._last - self.total).exp()

    def _convolution_gradient(self, grad: Tensor, state_grad: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of the tail and x [B, K - 1 + T, C], and of the taps [C, K]. The
        tail after the rows is taken from both, too.
        """
        num_rows, spec = grad.shape[1], self.spec
        taps, found = self.weights.conv[:, 0].float(), torch.zeros_like(self.extended)
        found[:, num_rows:] += _tails(state_grad, spec)
        for tap in range(spec.kernel_size):
            found[:, tap : tap + num_rows].addcmul_(grad, taps[:, tap])
        d_taps = [
            (grad * self.extended[:, tap : tap + num_rows]).sum((0, 1))
            for tap in range(spec.kernel_size)
        ]
        return found, torch.stack(d_taps, 1)


def _log_decay(rows: GatedDeltaRows, weights: GatedDeltaWeights) -> Tensor:
    """Return g, float32 [B, T, Hv]."""
    return -weights.a_log.float().exp() * softplus(rows.a.float() + weights.dt_bias.float())


def _tails(states: Tensor, spec: GatedDeltaSpec) -> Tensor:
    """Return the tails of states [B, state_size], [B, K - 1, C]."""
    return states[:, : spec.tail_size].reshape(states.shape[0], -1, spec.num_channels)


def _matrices(states: Tensor, spec: GatedDeltaSpec) -> Tensor:
    """Return the matrices of states [B, state_size], [B, Hv, Dk, Dv]."""
    return states[:, spec.tail_size :].reshape(
        -1, spec.num_value_heads, spec.key_dim, spec.value_dim
    )


def _heads(x: Tensor, width: int) -> Tensor:
    """Return x [B, T, heads * width] as [B, heads, T, width]."""
    return x.reshape(*x.shape[:2], -1, width).transpose(1, 2)


def _split(x: Tensor, spec: GatedDeltaSpec) -> tuple[Tensor, Tensor, Tensor]:
    """Split x [B, T, C] into queries, keys [B, Hv, T, Dk], each for the value heads that share it,
    and values [B, Hv, T, Dv].
    """
    width, num_shared = (
        spec.num_key_heads * spec.key_dim,
        spec.num_value_heads // spec.num_key_heads,
    )
    q, k, v = torch.split(x, [width, width, spec.num_value_heads * spec.value_dim], -1)
    q, k = (_heads(part, spec.key_dim).repeat_interleave(num_shared, 1) for part in (q, k))
    return q, k, _heads(v, spec.value_dim)


def _joined(dq: Tensor, dk: Tensor, dv: Tensor, spec: GatedDeltaSpec) -> Tensor:
    """Apply the transpose of `_split`."""
    shape = (dv.shape[0], spec.num_key_heads, -1, dv.shape[2], spec.key_dim)
    parts = (dq.reshape(shape).sum(2), dk.reshape(shape).sum(2), dv)
    return torch.cat([part.transpose(1, 2).flatten(2) for part in parts], -1)


def _unit_gradient(grad: Tensor, unit: Tensor, inverse: Tensor, squared: int) -> Tensor:
    """Return the gradient of a vector that `inverse` scaled to the length 1 / sqrt(squared)."""
    return inverse * (grad - squared * unit * (unit * grad).sum(-1, keepdim=True))


def _silu_slope(x: Tensor) -> Tensor:
    gate = torch.sigmoid(x)
    return gate * (1 + x * (1 - gate))
