"""Ministral 3: Mistral whose queries grow with their position, as Llama 4's do."""

from collections.abc import Mapping
from dataclasses import replace

from coserve.models.rope import RotaryTable, rotary_table
from coserve.models.rotary_decoder import RotaryDecoder

# Prefix of the constants that rotate queries.
_QUERY = "query_"


class Ministral3(RotaryDecoder):
    """A Ministral 3."""

    def sliding_window(self, layer: int) -> int | None:
        window: int | None = self.config.sliding_window
        return window

    def rotary_tables(self) -> Mapping[str, RotaryTable]:
        parameters = self.config.rope_parameters
        beta = parameters.get("llama_4_scaling_beta") or 0.0
        after = parameters.get("original_max_position_embeddings") or self.max_positions
        table = rotary_table(self.config, self.head_dim)
        return {"": table, _QUERY: replace(table, scale_beta=beta, scale_after=after)}

    def query_rotary_prefix(self, layer: int) -> str:
        return _QUERY
