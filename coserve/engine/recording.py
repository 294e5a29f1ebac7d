"""An engine that writes everything that decides its steps to a file: its inputs, clock readings, and the device's work.

A recording holds the files of the adapters and checkpoints that the engine loaded; of the model it holds only the name.
The lines of the file are in `recorded_lines.py`.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

from coserve.devices.messages import OpenVersion
from coserve.devices.recording import Executed, FrameWriter, RecordingDevice
from coserve.devices.sampling_params import SamplingParams
from coserve.engine.engine import Engine
from coserve.engine.jobs.checkpoint import Checkpoint
from coserve.engine.jobs.opening import PeftFields
from coserve.engine.recorded_lines import (
    FILE_NAMES,
    FORMAT,
    AddTokens,
    Arrive,
    Cancel,
    EnsureFiles,
    Files,
    FinishLoad,
    FlushCommands,
    Header,
    Hold,
    Input,
    LoadFiles,
    OnJob,
    SaveVersion,
    Step,
    Stop,
    SubmitExamples,
    UnloadAdapter,
    UseVocabulary,
)
from coserve.engine.request_queue import ImportedBlocks
from coserve.engine.served_adapters import AdapterLoad, AdapterVersion
from coserve.errors import DataError
from coserve.scheduling.slo import Slo
from coserve.tuning.config import TuningConfig
from coserve.tuning.examples import Example
from coserve.tuning.shard import Shard


class RecordingEngine(Engine):
    """An engine that does everything in view of a recording."""

    def __init__(self, plain: Engine, writer: FrameWriter) -> None:
        """Begin where an engine is that has not done anything yet; that one must not be used any more."""
        self._writer, self._depth, self._plain_device = writer, 0, plain.device
        writer.write(
            Header(
                format=FORMAT,
                info=plain.device.info,
                config=plain.config,
                end_tokens=tuple(sorted(plain.end_tokens)),
                has_tokenizer=plain.tokenizer is not None,
            )
        )
        super().__init__(
            RecordingDevice(plain.device, writer),
            plain.config,
            tokenizer=plain.tokenizer,
            answers_tokenizer=plain.answers_tokenizer,
            end_tokens=tuple(sorted(plain.end_tokens)),
            latency=plain.latency,
        )

    def begin_step(self) -> bool:
        with self._asked(Step()):
            return super().begin_step()

    def add_tokens(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        adapter: str | None = None,
        slo: Slo | None = None,
        request_id: str | None = None,
        arrival_s: float | None = None,
        tenant: str = "",
        priority: int = 0,
        batch_due_s: float | None = None,
        without_jobs: bool = False,
    ) -> str:
        prompt = list(prompt)
        named: dict[str, Any] = {
            "adapter": adapter,
            "slo": slo,
            "request_id": request_id,
            "arrival_s": arrival_s,
            "tenant": tenant,
            "priority": priority,
            "batch_due_s": batch_due_s,
            "without_jobs": without_jobs,
        }
        with self._asked(AddTokens(prompt=prompt, params=params, **named)):
            return super().add_tokens(prompt, params, **named)

    def use_vocabulary(self, pieces: Sequence[bytes], special: Sequence[int]) -> None:
        with self._asked(UseVocabulary(tuple(pieces), tuple(special))):
            super().use_vocabulary(pieces, special)

    def cancel(self, request: str) -> bool:
        with self._asked(Cancel(request)):
            return super().cancel(request)

    def stop(self, request: str, index: int, num_tokens: int) -> bool:
        with self._asked(Stop(request, index, num_tokens)):
            return super().stop(request, index, num_tokens)

    def hold(self, request: str) -> None:
        with self._asked(Hold(request)):
            super().hold(request)

    def arrive(self, request: str, blocks: ImportedBlocks | None) -> None:
        with self._asked(Arrive(request, blocks)):
            super().arrive(request, blocks)

    def begin_load(self, name: str, directory: str) -> AdapterLoad | None:
        load = super().begin_load(name, directory)
        if load is not None:
            load.device = self._plain_device  # read at any moment, but written down when it is served
        return load

    def finish_load(self, load: AdapterLoad) -> None:
        with self._asked(FinishLoad(load.name, load.key, _read(load.directory))):
            self._writer.write(Executed(OpenVersion(load.key, load.directory), load.opened))
            super().finish_load(load)

    def load_adapter(self, name: str, directory: str, model: str = "") -> AdapterVersion:
        with self._asked(LoadFiles(name, _read(directory), model)):
            return super().load_adapter(name, directory, model)

    def ensure_adapter(self, name: str, directory: str, model: str = "") -> None:
        with self._asked(EnsureFiles(name, {} if name in self.versions else _read(directory), model)):
            super().ensure_adapter(name, directory, model)

    def unload_adapter(self, name: str) -> None:
        with self._asked(UnloadAdapter(name)):
            super().unload_adapter(name)

    def save_adapter(self, label: str, directory: str | Path) -> None:
        with self._asked(SaveVersion(label)):
            super().save_adapter(label, directory)

    def flush_commands(self) -> None:
        if self.log.has_commands:  # a server without work asks again and again
            with self._asked(FlushCommands()):
                super().flush_commands()

    def submit_examples(
        self,
        examples: Sequence[Example],
        config: TuningConfig,
        *,
        adapter: PeftFields | Mapping[str, Any] | str | None = None,
        name: str | None = None,
        validation: Sequence[Example] = (),
        job_id: str | None = None,
        checkpoint: str | Path | None = None,
        tenant: str = "",
        alone_until_step: int = 0,
        model: str = "",
        shard: Shard | None = None,
    ) -> str:
        assert shard is None, "nodes of a cluster are not recorded"
        if adapter is not None and not isinstance(adapter, str | Mapping):
            adapter = adapter.to_peft()
        line = SubmitExamples(
            examples=list(examples),
            config=config,
            adapter=dict(adapter) if isinstance(adapter, Mapping) else adapter,
            name=name,
            validation=list(validation),
            job_id=job_id,
            checkpoint=None if checkpoint is None else _read(checkpoint),
            tenant=tenant,
            alone_until_step=alone_until_step,
            model=model,
        )
        with self._asked(line):
            return super().submit_examples(
                examples,
                config,
                adapter=adapter,
                name=name,
                validation=validation,
                job_id=job_id,
                checkpoint=checkpoint,
                tenant=tenant,
                alone_until_step=alone_until_step,
                model=model,
            )

    def pause_job(self, job_id: str) -> None:
        with self._asked(OnJob("pause_job", job_id)):
            super().pause_job(job_id)

    def resume_job(self, job_id: str) -> None:
        with self._asked(OnJob("resume_job", job_id)):
            super().resume_job(job_id)

    def cancel_job(self, job_id: str) -> None:
        with self._asked(OnJob("cancel_job", job_id)):
            super().cancel_job(job_id)

    def forget_job(self, job_id: str) -> None:
        with self._asked(OnJob("forget_job", job_id)):
            super().forget_job(job_id)

    def checkpoint(self, job_id: str) -> Checkpoint:
        with self._asked(OnJob("checkpoint", job_id)):
            return super().checkpoint(job_id)

    @contextmanager
    def _asked(self, line: Input) -> Iterator[None]:
        """Write what was asked; not what one method asks another."""
        if not self._depth:
            self._writer.write(line)
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if not self._depth:
                self._writer.flush()


def record(engine: Engine, path: str) -> RecordingEngine:
    """Have an engine that has not done anything yet written down, to this file; or with a number after its name if it
    is there already, so that an engine that was started again does not overwrite what its end looked like. DataError if
    it cannot be written.
    """
    for number in count():
        try:
            return RecordingEngine(engine, FrameWriter(f"{path}.{number}" if number else path))
        except FileExistsError:
            continue
        except OSError as error:
            raise DataError(f"{path} cannot be written: {error.strerror or error}") from None
    raise AssertionError("numbers do not end")


def _read(directory: str | Path) -> Files:
    """Return the contents of those files of an adapter or a checkpoint that are there."""
    return {name: path.read_bytes() for name in FILE_NAMES if (path := Path(directory) / name).is_file()}
