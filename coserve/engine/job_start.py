"""What a job begins with: a fresh adapter, one that is served, or a checkpoint."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from coserve.devices.messages import OpenTrainer
from coserve.engine.versions import AdapterVersions
from coserve.errors import JobError
from coserve.tuning.config import TuningConfig
from coserve.tuning.examples import Example


class PeftFields(Protocol):
    """A PEFT method with its settings."""

    def to_peft(self) -> dict[str, Any]:
        """The fields of PEFT's adapter_config.json that say what it says."""
        ...


def trainer_start(
    job_id: str,
    config: TuningConfig,
    examples: Sequence[Example],
    versions: AdapterVersions,
    *,
    adapter: PeftFields | Mapping[str, Any] | str | None,
    checkpoint: str | Path | None,
) -> OpenTrainer:
    """What the device is told of a job: its trainer begins with a checkpoint, with a version (by its label), or with a
    fresh adapter. JobError without any of them.
    """
    fields: dict[str, Any] | None = None
    version: str | None = None
    if checkpoint is None:
        if adapter is None:
            raise JobError("a job needs an adapter to begin with, or a checkpoint to resume from")
        if isinstance(adapter, str):
            version = versions.resolve(adapter).key
        else:
            fields = dict(adapter) if isinstance(adapter, Mapping) else adapter.to_peft()
    num_tokens = sum(len(example.tokens) for example in examples)
    return OpenTrainer(
        job=job_id,
        config=config,
        mean_context_len=sum(len(example.tokens) ** 2 for example in examples) / num_tokens / 2,
        adapter=fields,
        version=version,
        checkpoint=None if checkpoint is None else str(checkpoint),
    )
