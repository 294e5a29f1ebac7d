"""Ministral 3: Mistral whose queries grow with their position, as Llama 4's do."""

from collections.abc import Mapping
from dataclasses import replace

from coserve.models.rope import RotaryTable, rotary_table
from coserve.models.rotary_decoder import RotaryDecoder

# What stands before the names of the constants that turn queries.
_QUERY = "query_"


class Ministral3(RotaryDecoder):
    def sliding_window(self, layer: int) -> int | None:
        window: int | None = self.config.sliding_window
        return window

    def rotary_tables(self) -> Mapping[str, RotaryTable]:
        table, parameters = rotary_table(self.config, self.head_dim), self.config.rope_parameters
        beta, after = (
            parameters.get("llama_4_scaling_beta"),
            parameters.get("original_max_position_embeddings"),
        )
        return {
            "": table,
            _QUERY: replace(table, scale_beta=beta or 0.0, scale_after=after or self.max_positions),
        }

    def query_rotary_prefix(self, layer: int) -> str:
        return _QUERY
