"""The ways in which a LoRA changes embeddings and head of a model: as targets, as whole modules, or
for some tokens, tied or not.

Source: the meaning of `ensure_weight_tying` and `trainable_token_indices` in
https://huggingface.co/docs/peft/package_reference/lora.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property

from coserve.adapters.embedding_lora import is_tied_name, tied_modules
from coserve.adapters.frozen_weights import HEAD_MODULE
from coserve.adapters.targets import Targets
from coserve.adapters.trainable_tokens import TOKENS, TokenIndices, token_sites
from coserve.adapters.whole_modules import PREFIX, is_whole
from coserve.errors import AdapterError
from coserve.models.base import Architecture


@dataclass(frozen=True, kw_only=True)
class EmbeddingChoices:
    """A LoRA's settings that concern embeddings and head, on one model."""

    architecture: Architecture
    """The model."""
    targets: Targets
    """Modules that have a LoRA."""
    modules_to_save: tuple[str, ...]
    """Modules that are trained as a whole, as in PEFT's configuration."""
    token_setting: TokenIndices
    """PEFT's `trainable_token_indices`."""
    ensures_tie: bool
    """PEFT's `ensure_weight_tying`."""

    @cached_property
    def ties_whole(self) -> bool:
        """Return whether embeddings and head are trained as one table."""
        return (
            self.ensures_tie
            and self.architecture.tied
            and any(map(is_tied_name, self.modules_to_save))
        )

    @cached_property
    def ties_targets(self) -> bool:
        """Return whether embeddings and head have one LoRA."""
        if not (self.ensures_tie and self.architecture.tied) or self.ties_whole:
            return False
        modules = self.targets.modules
        if isinstance(modules, str):
            return not self.targets.is_all_linear and any(
                map(self.targets.chooses, tied_modules(self.architecture))
            )
        return any(map(is_tied_name, modules))

    @cached_property
    def whole_names(self) -> tuple[str, ...]:
        """Return the names in `modules_to_save`, and those of embeddings and head where these are
        one.
        """
        if not self.ties_whole:
            return self.modules_to_save
        return tuple(
            dict.fromkeys((*self.modules_to_save, self.architecture.embedding_name, HEAD_MODULE))
        )

    @cached_property
    def tokens(self) -> dict[str, tuple[int, ...]]:
        """Return the tokens by the modules that have rows of their own for them."""
        return token_sites(self.token_setting, self.architecture, is_tied=self.ensures_tie)

    @property
    def ties_tokens(self) -> bool:
        """Return whether the head has the rows that the embeddings have for the tokens."""
        table = self.architecture.embedding_name
        return (
            self.architecture.tied
            and table in self.tokens
            and self.tokens[table] == self.tokens[HEAD_MODULE]
        )

    @property
    def shared(self) -> Mapping[str, str]:
        """Return the head's parameters that are those of the embeddings, by full name."""
        table = self.architecture.embedding_name
        if self.ties_whole:
            return {f"{HEAD_MODULE}.{PREFIX}weight": f"{table}.{PREFIX}weight"}
        return {f"{HEAD_MODULE}.{TOKENS}": f"{table}.{TOKENS}"} if self.ties_tokens else {}

    def check_tokens(self, targets: Collection[str], *, use_dora: bool) -> None:
        """AdapterError for tokens at a module of which PEFT cannot run tokens. targets: full names
        of modules.
        """
        for module in self.tokens:
            can_be_target = self.ties_tokens and module == HEAD_MODULE and not use_dora
            other = "modules_to_save" if is_whole(module, self.whole_names) else ""
            other = "target_modules" if module in targets and not can_be_target else other
            if other:
                raise AdapterError(
                    f"{other} and trainable_token_indices both mean {module}, which PEFT cannot "
                    f"run: name it in one of "
                    "them"
                )

    @property
    def why_not_trained(self) -> str:
        """Return why the adapter can be served and not be trained; "" if it can."""
        if not self.ties_targets:
            return ""
        return (
            "ensure_weight_tying with LoRA at the embeddings can be served and not be trained: "
            "PEFT moves the two "
            "halves of the one LoRA apart; name the embeddings in modules_to_save, or leave "
            "ensure_weight_tying out"
        )
