"""Models: families as graphs, weights in Hugging Face's layout, and the forward pass over a mixed batch of rows."""

from coserve.models.backbone import Backbone, load_backbone
from coserve.models.batch import Span, forward, logits
from coserve.models.sequence import CachedSequence

__all__ = ["Backbone", "CachedSequence", "Span", "forward", "load_backbone", "logits"]
