"""Gemma 3, its text models (270M, 1B): Gemma 2 with norms on queries and keys, other rotary angles
where a window slides, and without caps. Source: arXiv 2503.19786.
"""

from collections.abc import Mapping

from coserve.models.families.gemma2 import Gemma2
from coserve.models.rope import RotaryTable, rotary_table

# Prefix of the constants of sliding layers.
_LOCAL = "local_"


class Gemma3Text(Gemma2):
    """A text model of Gemma 3."""

    norm_queries_and_keys = True
    caps_scores = False

    def rotary_tables(self) -> Mapping[str, RotaryTable]:
        types = {"": "full_attention", _LOCAL: "sliding_attention"}
        used = {prefix: kind for prefix, kind in types.items() if kind in self.config.layer_types}
        return {
            prefix: rotary_table(self.config, self.head_dim, kind) for prefix, kind in used.items()
        }

    def rotary_prefix(self, layer: int) -> str:
        return "" if self.config.layer_types[layer] == "full_attention" else _LOCAL
