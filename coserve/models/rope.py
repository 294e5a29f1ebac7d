"""Rotary angles: cos and sin for any positions, by a configuration."""

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from coserve.errors import UnsupportedModelError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# Scalings whose frequencies do not depend on the length of the sequence at hand, so that a cached
# key stays valid; of LongRoPE's two sets one is chosen.
_SCALED = ("linear", "llama3", "longrope", "yarn")


@dataclass(frozen=True, kw_only=True)
class RotaryTable:
    """Inverse frequencies, with the scalings that some models have."""

    inverse_frequencies: Tensor
    """Inverse frequencies, float32 [D / 2]."""
    factor: float = 1.0
    """Factor on cos and sin."""
    scale_beta: float = 0.0
    """Growth of cos and sin with the position p, by 1 + beta * log(1 + floor(p / after)), as for
    queries of Llama 4 and Ministral 3; 0: none.
    """
    scale_after: int = 1
    """Number of positions, `after` in this formula."""
    short_frequencies: Tensor | None = None
    """Inverse frequencies of LongRoPE for short sequences."""
    short_positions: int = 0
    """Number of tokens of the longest sequence that is short."""

    def up_to(self, max_positions: int) -> "RotaryTable":
        """Return the table of a model whose sequences have at most `max_positions` tokens.

        All sequences share one set of frequencies, since cached keys stay as they are when their
        sequence grows.
        """
        if self.short_frequencies is None:
            return self
        chosen = (
            self.short_frequencies
            if max_positions <= self.short_positions
            else self.inverse_frequencies
        )
        return replace(self, inverse_frequencies=chosen, short_frequencies=None)

    def angles(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cos and sin [n, D] of positions int64 [n], from float32, both halves alike."""
        angles = positions[:, None].float() * self.inverse_frequencies
        angles = torch.cat((angles, angles), -1)
        factor: Tensor | float = self.factor
        if self.scale_beta:
            factor = (
                factor
                * (1 + self.scale_beta * torch.log(1 + torch.floor(positions / self.scale_after)))[
                    :, None
                ]
            )
        return (angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype)

    def to(self, device: torch.device) -> "RotaryTable":
        return replace(self, inverse_frequencies=self.inverse_frequencies.to(device))


def rotary_table(
    config: "PretrainedConfig",
    head_dim: int,
    layer_type: str | None = None,
    *,
    of_a_part: bool = False,
) -> RotaryTable:
    """Return the table of a configuration; scalings are transformers' own (`modeling_rope_utils`).

    Args:
        layer_type: Type of the layers, where the configuration has parameters for each type.
        of_a_part: Whether the family rotates a part of each head by `partial_rotary_factor`, which
            transformers does not read for all families.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = (
        config.rope_parameters if layer_type is None else config.rope_parameters[layer_type]
    )
    kind = parameters.get("rope_type", "default")
    if kind != "default" and kind not in _SCALED:
        raise UnsupportedModelError(
            f"rope scaling {kind!r} is not supported; known: default, {', '.join(_SCALED)}"
        )
    part = parameters.get("partial_rotary_factor") or 1.0
    if kind != "default" and part != 1.0 and not of_a_part:
        raise UnsupportedModelError(
            f"rope scaling {kind!r} with partial_rotary_factor={part!r} is not supported: "
            f"{config.model_type} turns whole heads"
        )
    try:
        if kind == "default":
            num_rotated = (
                int(head_dim * parameters.get("partial_rotary_factor", 1.0))
                if of_a_part
                else head_dim
            )
            exponents = torch.arange(0, num_rotated, 2, dtype=torch.float32) / num_rotated
            return RotaryTable(inverse_frequencies=1.0 / (parameters["rope_theta"] ** exponents))
        of_layers = {} if layer_type is None else {"layer_type": layer_type}
        init = partial(ROPE_INIT_FUNCTIONS[kind], config, device=torch.device("cpu"), **of_layers)
        if kind == "longrope":
            original = parameters["original_max_position_embeddings"]
            (long, factor), (short, _) = init(seq_len=original + 1), init(seq_len=original)
            if {len(parameters["long_factor"]), len(parameters["short_factor"])} != {len(long)}:
                raise ValueError(f"long_factor and short_factor must have {len(long)} numbers each")
            return RotaryTable(
                inverse_frequencies=long,
                factor=factor,
                short_frequencies=short,
                short_positions=original,
            )
        frequencies, factor = init()
    except (TypeError, ValueError, KeyError, ZeroDivisionError, RuntimeError) as error:
        raise UnsupportedModelError(
            f"rope scaling {dict(parameters)} is not valid: {error!r}"
        ) from None
    return RotaryTable(inverse_frequencies=frequencies, factor=factor)
