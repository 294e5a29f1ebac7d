"""Models: families as graphs, weights in Hugging Face's layout, and the forward pass over a mixed
batch of rows.

Importing this package is cheap, so that a model can be refused before torch and transformers are
imported.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from coserve.models.backbone import Backbone, load_backbone
    from coserve.models.batch import RowSpan, forward
    from coserve.models.head import logits
    from coserve.models.sequence import CachedSequence

_MODULE = {
    **dict.fromkeys(("Backbone", "load_backbone"), "coserve.models.backbone"),
    **dict.fromkeys(("RowSpan", "forward"), "coserve.models.batch"),
    "logits": "coserve.models.head",
    "CachedSequence": "coserve.models.sequence",
}
__all__ = ["Backbone", "CachedSequence", "RowSpan", "forward", "load_backbone", "logits"]


def __getattr__(name: str) -> Any:
    if name not in _MODULE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULE[name]), name)
