"""Rotary angles: from a configuration to cos and sin for any positions."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from coserve.errors import UnsupportedModelError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# Those whose frequencies do not depend on the length of the sequence at hand, so that a cached key stays right.
_SCALED = ("linear", "llama3", "yarn")


@dataclass(frozen=True, kw_only=True)
class RotaryTable:
    """Inverse frequencies float32 [D / 2] and the factor on cos and sin that some scalings ask for."""

    inverse_frequencies: Tensor
    factor: float = 1.0

    def angles(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Positions int64 [n] -> cos and sin [n, D], computed in float32, both halves alike."""
        angles = positions[:, None].float() * self.inverse_frequencies
        angles = torch.cat((angles, angles), -1)
        return (angles.cos() * self.factor).to(dtype), (angles.sin() * self.factor).to(dtype)

    def to(self, device: torch.device) -> "RotaryTable":
        return RotaryTable(inverse_frequencies=self.inverse_frequencies.to(device), factor=self.factor)


def rotary_table(config: "PretrainedConfig", head_dim: int) -> RotaryTable:
    """The table of a configuration; scalings are transformers' own (`modeling_rope_utils`)."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = config.rope_parameters
    kind = parameters.get("rope_type", "default")
    if parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedModelError(f"{config.model_type} with partial_rotary_factor is not supported")
    if kind != "default" and kind not in _SCALED:
        raise UnsupportedModelError(f"rope scaling {kind!r} is not supported; known: default, {', '.join(_SCALED)}")
    try:
        if kind == "default":
            exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
            return RotaryTable(inverse_frequencies=1.0 / (parameters["rope_theta"] ** exponents))
        frequencies, factor = ROPE_INIT_FUNCTIONS[kind](config, device=torch.device("cpu"))
    except (TypeError, ValueError, KeyError, ZeroDivisionError) as error:
        raise UnsupportedModelError(f"rope scaling {dict(parameters)} is not valid: {error!r}") from None
    return RotaryTable(inverse_frequencies=frequencies, factor=factor)
