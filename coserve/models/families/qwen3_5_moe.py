"""Qwen3.5's mixtures of experts as they are published, with a part that sees pictures: their text
part.
"""

from coserve.models.families.qwen3_5_moe_text import Qwen35MoeText
from coserve.models.vision_language import VisionLanguage


class Qwen35Moe(VisionLanguage, Qwen35MoeText):
    text_types = ("qwen3_5_moe_text",)
