"""What a job begins with: a fresh adapter, one that is served, or a checkpoint; and packs that there is memory for."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from coserve.devices.job_messages import OpenTrainer, OtherModel, TrainerOpened, group_bytes
from coserve.engine.jobs.checkpoint import JobPosition, read_position
from coserve.engine.page_broker import PageBroker
from coserve.engine.served_adapters import AdapterVersions
from coserve.errors import AdapterError, JobError
from coserve.settings import shown
from coserve.tuning.config import TuningConfig
from coserve.tuning.examples import Example
from coserve.tuning.order import packed_apart
from coserve.tuning.shard import Shard


class PeftFields(Protocol):
    """A PEFT method with its settings."""

    def to_peft(self) -> dict[str, Any]:
        """The fields of PEFT's adapter_config.json that say what it says."""
        ...


def _fields_of(adapter: Any) -> dict[str, Any]:
    """As PEFT's file would have them; AdapterError if it is no adapter's configuration, coserve's or PEFT's own."""
    if isinstance(adapter, Mapping):
        return dict(adapter)
    if hasattr(adapter, "to_peft"):
        found: dict[str, Any] = adapter.to_peft()
        return found
    if hasattr(adapter, "peft_type") and hasattr(adapter, "to_dict"):
        plain: dict[str, Any] = json.loads(json.dumps(adapter.to_dict(), default=list))  # it has sets and enumerations
        return plain
    raise AdapterError(f"an adapter is a configuration, the fields of PEFT's, or a name, not {shown(adapter)}")


@dataclass(frozen=True, kw_only=True)
class JobStart:
    """trainer: what the device is told of a job. position: that it resumes from; None: it is a new one. model: that it
    trains, by the operator's name for it, if that is not the one that serves. shard: this is one node's part of it.
    """

    trainer: OpenTrainer
    position: JobPosition | None
    model: str = ""
    shard: Shard | None = None


def make_start(
    job_id: str,
    config: TuningConfig,
    examples: Sequence[Example],
    versions: AdapterVersions,
    *,
    adapter: PeftFields | Mapping[str, Any] | str | None,
    checkpoint: str | Path | None,
    model: str = "",
    trainable_models: Mapping[str, str] = MappingProxyType({}),
    shard: Shard | None = None,
) -> JobStart:
    """A job begins with a checkpoint, with a version (by its label), or with a fresh adapter. JobError without any of
    them, if the checkpoint is none, or if the version is of another model than the job's.

    model: its name among the trainable_models, where each has its path; "" for the one that serves.
    """
    path = path_of(model, trainable_models)
    fields: dict[str, Any] | None = None
    version: str | None = None
    if checkpoint is None:
        if adapter is None:
            raise JobError("a job needs an adapter to begin with, or a checkpoint to resume from")
        if isinstance(adapter, str):
            found = versions.resolve(adapter)
            if found.model != model:
                raise JobError(
                    f"adapter {found.label} is of {_named(found.model)}, the job of {_named(model)}: "
                    "continue it on its own model"
                )
            version = found.key
    if adapter is not None and not isinstance(adapter, str):
        fields = _fields_of(adapter)
    num_tokens = sum(len(example.tokens) for example in examples)
    trainer = OpenTrainer(
        job=job_id,
        config=config,
        mean_context_len=sum(length**2 for each in examples for length in each.lengths) / num_tokens / 2,
        adapter=fields,
        version=version,
        checkpoint=None if checkpoint is None else str(checkpoint),
        model=path,
        shard=shard,
    )
    position = None if checkpoint is None else read_position(checkpoint)
    return JobStart(trainer=trainer, position=position, model=model, shard=shard)


def path_of(model: str, trainable_models: Mapping[str, str]) -> str:
    """Of a model that jobs may train, by its name; "" for "", the one that serves. JobError if there is none."""
    if model and model not in trainable_models:
        names = ", ".join(map(repr, trainable_models)) or "none"
        raise JobError(f"model {model!r} is not served here, nor one of those that can be trained beside it: {names}")
    return trainable_models[model] if model else ""


def _window_pages(other: OtherModel, pages: PageBroker, model: str) -> int:
    """The least that its weights need; JobError if the window may not have as many."""
    least, most_bytes = pages.window_need(other).least_pages, pages.max_window_bytes
    if least * pages.pool.page_bytes > most_bytes:
        raise JobError(
            f"two parts of model {model!r} side by side need {least * pages.pool.page_bytes} bytes; the window of "
            f"weights may have {most_bytes}: give it, or the engine, more memory"
        )
    return least


def _named(model: str) -> str:
    return f"model {model!r}" if model else "the model that serves"


def with_pack_size(
    config: TuningConfig, costs: TrainerOpened, pages: PageBroker, examples: Sequence[Example], model: str = ""
) -> TuningConfig:
    """The configuration with packs that the pool can hold; JobError if it cannot hold them, or not the weights beside
    them that a job on another model needs.
    """
    num_all = pages.pool.num_pages
    longest = max(len(example.tokens) for example in packed_apart(examples, config))
    if costs.other is not None:
        num_all -= _window_pages(costs.other, pages, model)
    if costs.moments_need_pages:
        num_all -= pages.num_pages(costs.optimizer_bytes)
        if num_all <= 0:
            raise JobError(
                f"its optimizer's moments take {costs.optimizer_bytes:,} bytes, more than the page pool has, and the "
                "device has no room for them beside it: lower the adapter's rank, or train fewer layers"
            )

    def num_pages(num_rows: int) -> int:
        return sum(pages.num_pages(group_bytes(tensors, num_rows)) for tensors in costs.training)

    if config.max_pack_tokens is None:
        rows = config.pack_tokens
        while rows > longest and num_pages(rows) > num_all // 2:
            rows //= 2
        config = replace(config, max_pack_tokens=max(rows, longest))
    largest = max(config.pack_tokens, longest)
    if (needed := num_pages(largest)) > num_all:
        raise JobError(
            f"a pack of {largest} tokens needs {needed} pages; there are {max(0, num_all)}: "
            "lower max_pack_tokens or max_sequence_length, or give the engine more memory"
        )
    return config
