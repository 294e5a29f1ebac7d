"""Baselines on the same weights: decoding by transformers, and training by PEFT."""

from copy import deepcopy
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from coserve.adapters.base import Adapter
from coserve.adapters.methods.lora import LoraConfig
from coserve.bench.machine import now_s, time_s
from coserve.errors import CoserveError
from coserve.models.backbone import Backbone
from coserve.tuning.config import OptimizerConfig


def transformers_model(backbone: Backbone) -> Any:
    """Return transformers' model with the backbone's weights, a second copy."""
    from transformers import AutoModelForCausalLM

    architecture = backbone.architecture
    # transformers writes into the configuration, by which profiles of the device are stored.
    config = deepcopy(architecture.config)
    with torch.device(backbone.device):  # where random weights are created fastest
        model = AutoModelForCausalLM.from_config(
            config, dtype=backbone.dtype, attn_implementation="sdpa"
        )
    model = model.to(backbone.device).eval()
    own = {
        architecture.prefix(part) + name: held if isinstance(held, Tensor) else held.dense()
        for part in architecture.parts
        for name, held in backbone.weights[part].items()
    }
    # A head that is tied to the embeddings has no weights of its own.
    missing = set(model.load_state_dict(own, strict=False).missing_keys) - {"lm_head.weight"}
    if missing:
        raise CoserveError(
            f"the model in transformers has further weights: {', '.join(sorted(missing)[:3])}"
        )
    return model


def decode_step_s(model: Any, prompts: Tensor, *, num_tokens: int) -> float:
    """Return the seconds that `generate` takes for one more token of each prompt, greedily.

    Args:
        model: Model of transformers.
        prompts: Token ids [batch, context].
        num_tokens: Number of tokens to divide the time by.
    """

    def generate_s(count: int) -> float:
        with torch.inference_mode():
            return time_s(
                lambda: model.generate(
                    prompts,
                    attention_mask=torch.ones_like(prompts),
                    min_new_tokens=count,
                    max_new_tokens=count,
                    do_sample=False,
                    pad_token_id=0,
                ),
                prompts.device,
            )

    # The difference leaves out the prompt, and what every call costs.
    return (generate_s(1 + num_tokens) - generate_s(1)) / num_tokens


class PeftTrainer:
    """A trainer with PEFT, autograd and torch's AdamW, on sequences whose tokens are all trained
    on.
    """

    def __init__(self, backbone: Backbone, lora: LoraConfig, optimizer: OptimizerConfig) -> None:
        try:
            import peft
        except ImportError:
            raise CoserveError("this measurement compares with PEFT: pip install peft") from None
        adapter = Adapter(backbone, lora)
        fields = {
            name: value
            for name, value in lora.to_peft().items()
            if name not in ("peft_type", "inference_mode")
        }
        fields["target_modules"] = sorted(adapter.sites)
        self.model = peft.get_peft_model(transformers_model(backbone), peft.LoraConfig(**fields))
        self.model.train()
        self._parameters = [
            parameter for parameter in self.model.parameters() if parameter.requires_grad
        ]
        self._optimizer = torch.optim.AdamW(
            self._parameters,
            lr=optimizer.learning_rate,
            betas=optimizer.betas,
            eps=optimizer.eps,
            weight_decay=optimizer.weight_decay,
        )
        self._max_grad_norm = optimizer.max_grad_norm
        self._device = backbone.device
        self._frozen = {tensor.untyped_storage().data_ptr() for tensor in self.model.parameters()}

    def step_s(
        self, tokens: Tensor, *, lengths: Tensor | None = None, compiled: bool = False
    ) -> float:
        """Run an optimizer step on a batch, and return its seconds.

        Args:
            tokens: Token ids [sequences, length].
            lengths: Lengths of the sequences; the rest is padding.
            compiled: Whether to use torch.compile, which takes minutes for the first batch of a
                shape.
        """
        start = now_s(self._device)
        self.backward(tokens, lengths=lengths, compiled=compiled)
        self.update()
        return now_s(self._device) - start

    def backward(
        self, tokens: Tensor, *, lengths: Tensor | None = None, compiled: bool = False
    ) -> None:
        """Add the gradients of a batch, as `step_s` takes it, to the present ones."""
        model, inputs = self._compiled if compiled else self.model, {"labels": tokens}
        if lengths is not None:
            mask = torch.arange(tokens.shape[1], device=tokens.device) < lengths[:, None]
            inputs = {"labels": tokens.masked_fill(~mask, -100), "attention_mask": mask.long()}
        model(input_ids=tokens, **inputs).loss.backward()

    def update(self) -> None:
        """Run an optimizer step with the present gradients."""
        if self._max_grad_norm:
            torch.nn.utils.clip_grad_norm_(self._parameters, self._max_grad_norm)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    @cached_property
    def _compiled(self) -> Any:
        """Return the model, compiled for each shape of a batch when it is first seen."""
        return torch.compile(self.model, dynamic=False)

    def state_bytes(self) -> int:
        """Return the bytes of the adapter's parameters and of the optimizer's state, which are held
        between steps.
        """
        state = [value for held in self._optimizer.state.values() for value in held.values()]
        return sum(
            tensor.nbytes for tensor in (*self._parameters, *state) if isinstance(tensor, Tensor)
        )

    def activation_bytes(self, tokens: Tensor) -> int:
        """Return the bytes that autograd holds between forward and backward, without weights."""
        held: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self._frozen:
                held[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = self.model(input_ids=tokens, labels=tokens).loss
        del loss
        return sum(held.values())
