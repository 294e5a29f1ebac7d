"""Models, devices, traces and cells that the figures share."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import torch

from coserve.adapters.methods.lora import LoraConfig
from coserve.bench.cells import ALONE, ATTAINMENT, JOBS_ALONE, Bench, CompareConfig
from coserve.bench.open_loop import Played
from coserve.bench.places import ModelledPlace
from coserve.models import Backbone, load_backbone
from coserve.models.weights import weight_tensors
from coserve.scheduling.slo import Slo
from coserve.simulate.hardware import Hardware
from coserve.simulate.modelled_ranks import on_ranks
from coserve.tuning.examples import Example
from coserve.workloads.arrivals import RecordedLengths
from coserve.workloads.datasets import read_dataset
from coserve.workloads.summary import percentile
from coserve.workloads.traces import TracedRequest, read_lengths, read_trace, rescale

Row = dict[str, Any]
# Some rows of a figure, to be run in a process of its own.
Task = Callable[[], list[Row]]

ALL_LINEAR = LoraConfig(r=16, alpha=32, target_modules="all-linear")
_CHARACTERS_PER_TOKEN = 4


@dataclass(frozen=True, kw_only=True)
class Data:
    """Traces and examples."""

    folder: Path
    """Folder of the files (`../shared/data`)."""
    seconds: float
    """Seconds of a trace, in each cell."""

    def conversations(self) -> list[TracedRequest]:
        """Return Azure's conversations as recorded."""
        return read_trace(self.folder / "azure_conv.csv.gz")

    def bursts(
        self, rate: float, *, seconds: float | None = None, skip: int = 0
    ) -> list[TracedRequest]:
        """Return Azure's arrivals at a mean rate, with the lengths of ShareGPT's first turns;
        without the first `skip`.
        """
        drawn = _lengths(self.folder)
        trace = [
            replace(each, num_prompt_tokens=prompt, num_output_tokens=output)
            for each, (prompt, output) in zip(self.conversations(), drawn, strict=False)
        ]
        return rescale(
            trace, rate=rate, seconds=self.seconds if seconds is None else seconds, skip=skip
        )

    def steady(self, rate: float) -> list[TracedRequest]:
        """Return the same lengths at a steady rate."""
        drawn = _lengths(self.folder)[: int(rate * self.seconds)]
        return [
            TracedRequest(at_s=index / rate, num_prompt_tokens=prompt, num_output_tokens=output)
            for index, (prompt, output) in enumerate(drawn)
        ]

    def alpaca(self) -> tuple[Example, ...]:
        """Return random examples with about as many tokens as Alpaca's lines."""
        lines = read_dataset(self.folder / "alpaca_5k.jsonl.gz", most=512)
        texts = [str(line["prompt"]) + str(line["completion"]) for line in lines]
        sizes = [max(2, len(text) // _CHARACTERS_PER_TOKEN) for text in texts]
        return tuple([Example(tokens=(1,) * size, trained=(True,) * size) for size in sizes])


@cache
def _lengths(folder: Path) -> list[tuple[int, int]]:
    """Return the lengths of ShareGPT's first turns, in random order.

    A conversation's later prompts hold all before them, so a shorter prompt begins another
    conversation.
    """
    recorded = read_lengths(folder / "sharegpt_lengths.csv.gz")
    lengths = RecordedLengths([own for before, own in pairwise(recorded) if own[0] < before[0]])
    random = Random(0)
    return [lengths.draw(random) for _ in range(20_000)]


@cache
def shapes(model: str, num_ranks: int = 1) -> Backbone:
    """Return a preset without weights, or what each of several ranks holds of it."""
    if num_ranks > 1:
        return on_ranks(shapes(model), num_ranks)
    return load_backbone(f"dummy:{model}", dtype="bfloat16", device=torch.device("meta"))


def weight_bytes(model: str, num_ranks: int = 1) -> int:
    """Return the bytes of one copy, or of what each of several ranks holds of it."""
    tensors = {
        id(one): one
        for held in shapes(model, num_ranks).weights.values()
        for one in weight_tensors(held)
    }
    return sum(tensor.nbytes for tensor in tensors.values())


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A model on a device, or on a group of devices, and the jobs that train there."""

    model: str
    """Preset of the model."""
    hardware: Hardware
    """Each device."""
    slo: Slo
    """SLO of all requests."""
    num_ranks: int = 1
    """Number of devices that hold the model together."""
    lora: LoraConfig = ALL_LINEAR
    """Adapter of the jobs."""
    batch: int = 1
    """Examples per optimizer step."""
    sequence: int = 512
    """Maximum tokens per example."""
    examples: tuple[Example, ...] = ()
    """Examples of the jobs; without any, random ones."""
    num_pages: int | None = None
    """Pages of the pool; None: as many as fit."""
    handed_over: bool = False
    """Whether prompts come from a prefill instance."""

    def bench(self, seconds: float) -> Bench:
        place = ModelledPlace.of_hardware(shapes(self.model, self.num_ranks), self.hardware)
        if self.num_pages is not None:
            place = replace(place, num_pages=self.num_pages)
        config = CompareConfig(
            policies=(),
            seconds=seconds,
            batch=self.batch,
            sequence=self.sequence,
            lora=self.lora,
            examples=self.examples,
            handed_over=self.handed_over,
        )
        return Bench(place, config)

    def run(self, policy: str, trace: Sequence[TracedRequest], seconds: float) -> Played:
        """Play requests beside a job."""
        return self.bench(seconds).run(policy, trace, self.slo)[0]

    def requests_alone(self, trace: Sequence[TracedRequest], seconds: float) -> Played:
        return self.bench(seconds).run(ALONE, trace, self.slo, num_jobs=0)[0]

    def tuning_alone(self) -> float:
        """Return the tokens/s of a job that has the device to itself."""
        return self.bench(60.0).run(JOBS_ALONE, [], self.slo)[0].tuning_tokens_per_s

    def attainment(self, played: Played) -> float:
        return played.attainment(self.slo) or 0.0

    def holds(self, played: Played) -> bool:
        return self.attainment(played) >= ATTAINMENT

    def on_parts(self, num_units: int) -> tuple["Setting", "Setting"]:
        """Return settings of requests and jobs as processes of their own on fixed parts of the
        device.

        Requests get `num_units` of it. Each side has its own copy of the weights, and both wait for
        the memory while the other moves data (HARLI equation 5).
        """
        profile = ModelledPlace.of_hardware(
            shapes(self.model, self.num_ranks), self.hardware
        ).profile
        assert profile.sharing is not None
        total, found = self.hardware.num_units, []
        for own, interference in (
            (num_units, profile.sharing.forward_interference),
            (total - num_units, profile.sharing.backward_interference),
        ):
            part = self.hardware.part(own)
            slower = 1 + interference * (total - own) / total
            part = replace(
                part, flops_per_s=part.flops_per_s / slower, bytes_per_s=part.bytes_per_s / slower
            )
            found.append(replace(self, hardware=part))
        requests, jobs = found
        left = self.hardware.memory_bytes - weight_bytes(self.model, self.num_ranks)
        return replace(requests, hardware=replace(requests.hardware, memory_bytes=left)), jobs


def p99_ms(played: Played, what: str) -> float | None:
    """Return the p99 of `ttft_s` or `tpot_s` of the answered requests, in milliseconds."""
    values = [getattr(each, what) for each in played.outcomes if each.error is None]
    known = [value for value in values if value is not None]
    return round(1e3 * percentile(known, 0.99), 1) if known else None


def ratio(value: float, other: float) -> float | None:
    """Return a ratio; None over 0."""
    return round(value / other, 2) if other else None


def run_task(task: Task) -> list[Row]:
    """Run a task; this module defines it so that fresh processes find it, unlike what `__main__`
    defines.
    """
    return task()


class Claim(NamedTuple):
    """A claim of a paper about a figure, and the result here."""

    claim: str
    """The claim."""
    paper: str
    """The paper's numbers."""
    ours: str
    """Our numbers."""
    holds: bool | None
    """Whether the trend is the same; None where the paper says nothing."""


class Figure(NamedTuple):
    """A figure of a paper."""

    title: str
    """Title of the figure."""
    tasks: Callable[[Data], list[Task]]
    """Function that returns the tasks to run."""
    claims: Callable[[list[Row]], list[Claim]]
    """Function from the rows to the claims."""


def between(values: Iterable[float]) -> str:
    """Return the minimum and the maximum in words."""
    known = list(values)
    return f"{min(known):g} to {max(known):g}" if known else "none"
