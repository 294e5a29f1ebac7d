"""Qwen3.5's mixtures of experts as they are published, with a part that sees pictures: their text
part.
"""

from coserve.models.families.qwen3_5_moe_text import Qwen35MoeText
from coserve.models.vision_language import VisionLanguage


class Qwen35Moe(VisionLanguage, Qwen35MoeText):
    """The text part of a Qwen3.5 with experts that reads pictures."""

    text_types = ("qwen3_5_moe_text",)
