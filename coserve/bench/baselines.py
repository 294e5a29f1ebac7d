"""The others: transformers decoding, and PEFT training, on the same weights."""

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
    """transformers' model with the backbone's weights (a second copy)."""
    from transformers import AutoModelForCausalLM

    architecture = backbone.architecture
    # transformers writes into the configuration that it is given, and profiles of the device are
    # kept by that.
    config = deepcopy(architecture.config)
    with torch.device(backbone.device):  # where random weights are made soonest
        model = AutoModelForCausalLM.from_config(
            config, dtype=backbone.dtype, attn_implementation="sdpa"
        )
    model = model.to(backbone.device).eval()
    own = {
        architecture.prefix(part) + name: held if isinstance(held, Tensor) else held.dense()
        for part in architecture.parts
        for name, held in backbone.weights[part].items()
    }
    missing = set(model.load_state_dict(own, strict=False).missing_keys) - {"lm_head.weight"}
    if missing:
        raise CoserveError(f"transformers has weights of its own: {', '.join(sorted(missing)[:3])}")
    return model


def decode_step_s(model: Any, prompts: Tensor, *, num_tokens: int) -> float:
    """Seconds that `generate` takes for a token more of each prompt [batch, context], greedily."""

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

    return (generate_s(1 + num_tokens) - generate_s(1)) / num_tokens


class PeftTrainer:
    """PEFT with autograd and torch's AdamW, on sequences that are trained on whole."""

    def __init__(self, backbone: Backbone, lora: LoraConfig, optimizer: OptimizerConfig) -> None:
        try:
            import peft
        except ImportError:
            raise CoserveError("this experiment compares with PEFT: pip install peft") from None
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
        """Seconds of an optimizer step on a batch [sequences, length].

        lengths: of the sequences; the rest is padding. compiled: by torch.compile, which takes
        minutes for the first batch of a shape.
        """
        start = now_s(self._device)
        self.backward(tokens, lengths=lengths, compiled=compiled)
        self.update()
        return now_s(self._device) - start

    def backward(
        self, tokens: Tensor, *, lengths: Tensor | None = None, compiled: bool = False
    ) -> None:
        """Add the gradients of a batch, as `step_s` takes it, to those that are there."""
        model, inputs = self._compiled if compiled else self.model, {"labels": tokens}
        if lengths is not None:
            mask = torch.arange(tokens.shape[1], device=tokens.device) < lengths[:, None]
            inputs = {"labels": tokens.masked_fill(~mask, -100), "attention_mask": mask.long()}
        model(input_ids=tokens, **inputs).loss.backward()

    def update(self) -> None:
        """An optimizer step with the gradients that are there."""
        if self._max_grad_norm:
            torch.nn.utils.clip_grad_norm_(self._parameters, self._max_grad_norm)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    @cached_property
    def _compiled(self) -> Any:
        """The model, compiled for each shape of a batch when it is first seen."""
        return torch.compile(self.model, dynamic=False)

    def state_bytes(self) -> int:
        """Bytes of the adapter's parameters and of the optimizer's state, which are held between
        steps.
        """
        state = [value for held in self._optimizer.state.values() for value in held.values()]
        return sum(
            tensor.nbytes for tensor in (*self._parameters, *state) if isinstance(tensor, Tensor)
        )

    def activation_bytes(self, tokens: Tensor) -> int:
        """Bytes that autograd holds between forward and backward, weights apart."""
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
