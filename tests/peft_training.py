"""What autograd and AdamW make of PEFT's model in the steps of a job: what a job's adapter is held
against."""

from collections.abc import Sequence
from typing import Any

import torch
from support import summed_loss

from coserve.tuning.config import TuningConfig
from coserve.tuning.examples import Example, epoch_order


def train_by_autograd(model: Any, examples: Sequence[Example], config: TuningConfig) -> list[float]:
    """Train a PEFT model in place, in a job's order, each batch at once, at one learning rate; each
    step's loss."""
    losses: list[float] = []
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    rates = config.optimizer
    adamw = torch.optim.AdamW(trained, lr=rates.learning_rate, weight_decay=rates.weight_decay)
    for epoch in range(config.num_epochs):
        order = epoch_order(len(examples), seed=config.seed, epoch=epoch, shuffle=True)
        for start in range(0, len(order), config.batch_size):
            batch = [examples[index] for index in order[start : start + config.batch_size]]
            adamw.zero_grad()
            sequences = [(list(example.tokens), list(example.trained)) for example in batch]
            loss: Any = summed_loss(model, sequences) / sum(
                example.num_trained for example in batch
            )
            loss.backward()
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            adamw.step()
            losses.append(float(loss.detach()))
    return losses
