"""Mistral Small 3.1 and later, and Ministral 3 as it is published, with a part that sees pictures:
their text part.
"""

from coserve.models.families.ministral3 import Ministral3
from coserve.models.vision_language import LlavaNames


class Mistral3(LlavaNames, Ministral3):
    # A Mistral is a Ministral 3 whose queries do not grow.
    """The text part of a Mistral or Ministral 3 that reads pictures."""

    text_types = ("mistral", "ministral3")
