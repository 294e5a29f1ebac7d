"""A `dummy:` model as a directory in Hugging Face's layout, for servers that need one."""

from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers

from coserve.bench.baselines import transformers_model
from coserve.models.backbone import load_backbone


def write_model(name: str, directory: Path, *, dtype: str) -> None:
    """Write random weights, and a tokenizer with one word per token, so that every token is seen as
    text.
    """
    backbone = load_backbone(name, dtype=dtype)
    transformers_model(backbone).save_pretrained(directory)
    words = {f"w{token}": token for token in range(backbone.architecture.vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    _save(tokenizer, directory)


def _save(tokenizer: Tokenizer, directory: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0").save_pretrained(directory)
