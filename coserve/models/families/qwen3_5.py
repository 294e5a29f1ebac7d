"""Qwen3.5 as it is published, with a part that sees pictures: its text part."""

from coserve.models.families.qwen3_5_text import Qwen35Text
from coserve.models.vision_language import VisionLanguage


class Qwen35(VisionLanguage, Qwen35Text):
    """The text part of a Qwen3.5 that reads pictures."""

    text_types = ("qwen3_5_text",)
