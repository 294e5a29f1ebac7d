"""Driving a device by hand: what the engine would send, without an engine."""

from collections.abc import Sequence
from itertools import count
from typing import Any

from coserve.devices.base import Device
from coserve.devices.messages.commands import OpenRequest
from coserve.devices.messages.jobs import BeginPack, OpenTrainer, TrainerOpened, group_bytes
from coserve.devices.messages.steps import (
    LossRows,
    RequestRows,
    StepBatch,
    StepResult,
    Tasklets,
    WindowRows,
)
from coserve.devices.sampling_params import SamplingParams
from coserve.tuning.config import TuningConfig

Sequences = Sequence[tuple[Sequence[int], Sequence[bool]]]


class Driver:
    """Gives out pages from the bottom, and steps with numbers."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._steps, self._pages = count(), 0

    def step(self, **pieces: Any) -> StepResult:
        """A step of these pieces, which must succeed."""
        result = self.try_step(**pieces)
        assert result.failure is None, result.failure
        return result

    def try_step(self, **pieces: Any) -> StepResult:
        batch = StepBatch(
            step=next(self._steps), **{name: as_tuple(value) for name, value in pieces.items()}
        )
        self.device.submit(batch)
        result = self.device.collect()
        assert result.step == batch.step
        return result

    def pages(self, number: int) -> tuple[int, ...]:
        """Pages that nobody has."""
        start, self._pages = self._pages, self._pages + number
        assert self._pages <= self.device.info.num_pages
        return tuple(range(start, self._pages))

    def reuse_pages(self) -> None:
        """Give out all pages again: nobody has any of them now."""
        self._pages = 0

    def pages_for(self, num_tokens: int) -> tuple[int, ...]:
        return self.pages(-(-num_tokens // self.device.info.block_tokens))

    # -- requests ---------------------------------------------------------------------

    def open(
        self, request: str, params: SamplingParams, *, seed: int = 0, version: str = "", **more: Any
    ) -> None:
        self.device.execute(
            OpenRequest(request=request, params=params, seed=seed, version=version, **more)
        )

    def generate(
        self,
        request: str,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        chunk: int = 1000,
        **opened: Any,
    ) -> list[int]:
        """A whole request by itself: its prompt in chunks, then one token after the other."""
        self.open(request, params, prompt=tuple(prompt) if params.penalizes else (), **opened)
        new_pages, tokens = self.pages_for(len(prompt) + params.max_tokens), list(prompt)
        for place in range(params.max_tokens):
            start = 0 if not place else len(tokens) - 1
            while start < len(tokens):
                end = min(start + chunk, len(tokens))
                rows = RequestRows(
                    request=request,
                    start=start,
                    tokens=tuple(tokens[start:end]),
                    new_pages=new_pages,
                    samples=end == len(tokens),
                    place=place,
                )
                result, new_pages, start = self.step(requests=[rows]), (), end
            tokens.append(result.tokens[request].token)
        return tokens[len(prompt) :]

    # -- jobs -------------------------------------------------------------------------

    def open_trainer(self, job: str, config: TuningConfig, **source: Any) -> TrainerOpened:
        opened = self.device.execute(
            OpenTrainer(job=job, config=config, mean_context_len=8.0, **source)
        )
        assert isinstance(opened, TrainerOpened)
        return opened

    def begin(
        self,
        job: str,
        opened: TrainerOpened,
        sequences: Sequences,
        *,
        first_row: int = 0,
        evaluate: bool = False,
    ) -> None:
        self.device.execute(
            self.begin_command(job, opened, sequences, first_row=first_row, evaluate=evaluate)
        )

    def begin_command(
        self,
        job: str,
        opened: TrainerOpened,
        sequences: Sequences,
        *,
        first_row: int = 0,
        evaluate: bool = False,
    ) -> BeginPack:
        """A pack with pages of its own."""
        num_rows = sum(len(tokens) for tokens, _ in sequences)
        runs = []
        for group in opened.evaluation if evaluate else opened.training:
            pages = self.pages(-(-group_bytes(group, num_rows) // self.device.info.page_bytes))
            runs.append((pages[0] if pages else 0, len(pages)))
        laid = tuple((tuple(tokens), tuple(trained)) for tokens, trained in sequences)
        return BeginPack(
            job=job, sequences=laid, first_row=first_row, runs=tuple(runs), evaluate=evaluate
        )

    def forward_and_loss(
        self, job: str, opened: TrainerOpened, sequences: Sequences, *, window: int = 1000
    ) -> None:
        """A pack up to where it can go backward."""
        self.begin(job, opened, sequences)
        num_rows = sum(len(tokens) for tokens, _ in sequences)
        num_trained = sum(sum(trained[1:]) for _, trained in sequences)
        for start in range(0, num_rows, window):
            self.step(windows=[WindowRows(job, min(window, num_rows - start))])
        for start in range(0, num_trained, window):
            self.step(losses=[LossRows(job, min(window, num_trained - start))])

    def train(
        self,
        job: str,
        opened: TrainerOpened,
        sequences: Sequences,
        *,
        window: int = 1000,
        tasklet: int = 1000,
    ) -> StepResult:
        """A pack from its beginning to its end, one kind of piece in each step; the result of the
        last."""
        num_rows = sum(len(tokens) for tokens, _ in sequences)
        self.forward_and_loss(job, opened, sequences, window=window)
        for _ in range(opened.trained_parts * -(-num_rows // tasklet)):
            result = self.step(tasklets=[Tasklets(job, tasklet, 1)])
        return result


def as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
