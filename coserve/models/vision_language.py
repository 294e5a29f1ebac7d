"""Models that read pictures, too: their text part is a model here, and the rest is not read."""

from copy import copy
from typing import TYPE_CHECKING, ClassVar

from coserve.errors import UnsupportedModelError
from coserve.models.rotary_decoder import RotaryDecoder
from coserve.models.stored import AsItIs, Stored

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_TEXT = "model.language_model."
# Fields that are taken from the whole model's configuration where both have them.
_WHOLE = ("model_type", "tie_word_embeddings", "quantization_config", "dtype", "eos_token_id")


def text_config(config: "PretrainedConfig") -> "PretrainedConfig":
    """Return the configuration of the text part, by the whole model's type; the configuration
    itself for a text model.
    """
    if (text := config.get_text_config()) is config:
        return config
    text = copy(text)
    for name in _WHOLE:
        if getattr(config, name, None) is not None:
            setattr(text, name, getattr(config, name))
    return text


class VisionLanguage(RotaryDecoder):
    """A model with a text part; a text family comes after it among the bases."""

    embedding_name = f"{_TEXT}embed_tokens"
    block_prefix = f"{_TEXT}layers"
    norm_name = f"{_TEXT}norm"
    unread = (
        rf"{RotaryDecoder.unread}|mtp\..*|(model\.)?(visual|vision_tower|multi_modal_projector)\..*"
    )
    text_types: ClassVar[tuple[str, ...]]
    """Model types of the text parts that it runs."""

    def __init__(self, config: "PretrainedConfig") -> None:
        # The instance has the whole model's.
        if (kind := type(config).model_type) not in self.text_types:
            raise UnsupportedModelError(
                f"{config.model_type} with a text_config of model_type {kind!r} is not supported; "
                f"it must be "
                f"{' or '.join(self.text_types)}"
            )
        super().__init__(config)


class LlavaNames(VisionLanguage):
    """A model whose checkpoints have the names of LLaVA's, which were those of transformers'
    modules once.
    """

    def stored_as(self, name: str) -> Stored:
        rest = name.removeprefix(_TEXT)
        return AsItIs(f"language_model.{rest}" if rest == name else f"language_model.model.{rest}")
