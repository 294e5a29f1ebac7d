"""Gemma 3 with a part that sees pictures (4B, 12B, 27B): its text part."""

from coserve.models.families.gemma3_text import Gemma3Text
from coserve.models.vision_language import LlavaNames


class Gemma3(LlavaNames, Gemma3Text):
    """The text part of a Gemma 3 that reads pictures."""

    text_types = ("gemma3_text",)
    caps_logits = False
