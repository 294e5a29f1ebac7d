"""Separate processes: requests in one process beside fine-tuning in another, from two copies of the
weights.

They show what the same machine does with known parts: transformers' continuous batching, or vLLM
for CPUs, beside PEFT. The two share the processor by the operating system, or each has cores of its
own, in every split. A GPU is shared freely.
"""

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Timer
from typing import Any

from coserve.bench.cells import Cell, CompareConfig, Watch
from coserve.bench.open_loop import Played
from coserve.bench.vllm import check_answers, vllm_server
from coserve.errors import CoserveError
from coserve.scheduling.latency import LatencyModel
from coserve.scheduling.slo import Slo
from coserve.workloads.load import LoadGenerator, completions
from coserve.workloads.summary import RequestOutcome
from coserve.workloads.traces import TracedRequest, rescale

_ROOT = Path(__file__).parents[2]
# A process that says nothing for this long beyond its work is ended.
_START_S, _LATE_S = 600.0, 120.0
# Both sides begin to play this long after they have been told to.
_UNTIL_START_S = 0.5
# Rows of a step of transformers: chunks of prompts are as long as the TPOT SLO allows, within
# these.
_MIN_BATCH_ROWS, _MAX_BATCH_ROWS = 64, 2048


@dataclass(frozen=True, kw_only=True)
class Arrangement:
    """Cores of each side; all of them for both means that they are shared freely."""

    server: str
    """Name of the server."""
    serving: tuple[int, ...]
    """Cores of the server."""
    training: tuple[int, ...]
    """Cores of the trainer."""

    @property
    def name(self) -> str:
        """Return the name in the rows of a comparison."""
        cores = (
            "shared"
            if self.serving == self.training
            else f"{len(self.serving)}|{len(self.training)}"
        )
        return f"{self.server}+peft:{cores}"


@dataclass(frozen=True, kw_only=True)
class Ended:
    """An arrangement of which a process ended, or did not start."""

    policy: str
    """Name of the arrangement."""
    load: str
    """First load without a cell."""
    reason: str
    """Last line of output of the process."""


@dataclass(frozen=True, kw_only=True)
class SeparateProcesses:
    """Separate processes to run beside the policies."""

    model: str
    """Model, as `coserve up` takes it."""
    dtype: str
    """Dtype of the model."""
    cores: tuple[int, ...]
    """Cores of the machine."""
    device: str = "cpu"
    """"cpu", or the GPU that both sides share."""
    memory_bytes: int | None = None
    """Bytes of transformers' pages; None: its default."""
    vllm: Path | None = None
    """Python of an environment with vLLM; None: without vLLM."""

    def arrangements(self) -> list[Arrangement]:
        """Return every server, sharing freely and in every split of the cores."""
        every, splits = self.cores, range(1, len(self.cores)) if self.device == "cpu" else ()
        return [
            Arrangement(server=server, serving=serving, training=training)
            for server in ("transformers", *(["vllm"] if self.vllm is not None else []))
            for serving, training in [(every, every), *((every[:k], every[k:]) for k in splits)]
        ]

    def cells(
        self,
        trace: Sequence[TracedRequest],
        slo: Slo,
        rates: dict[str, float],
        config: CompareConfig,
        latency: LatencyModel,
        watch: Watch,
    ) -> Iterator[Cell | Ended]:
        """Yield every arrangement at every rate, until one of its processes ends; the others still
        run.
        """
        for arrangement in self.arrangements():
            name, load = arrangement.name, next(iter(rates))
            watch(f"{name}: two processes start")
            try:
                with self._processes(arrangement, slo, config, latency) as (server, trainer):
                    for load, rate in rates.items():
                        watch(f"{name}, {load}: {rate:.3g} requests/s")
                        requests = rescale(trace, rate=rate, seconds=config.seconds)
                        played = _play(server, trainer, requests, slo, config)
                        yield Cell(
                            policy=name,
                            load=load,
                            rate=rate,
                            played=played,
                            slo=slo,
                            is_separate=True,
                        )
            except CoserveError as error:
                yield Ended(policy=name, load=load, reason=str(error))

    @contextmanager
    def _processes(
        self, arrangement: Arrangement, slo: Slo, config: CompareConfig, latency: LatencyModel
    ) -> Iterator[tuple["_Transformers | _Vllm", "_Worker"]]:
        """Yield the server and the trainer.

        Raises:
            CoserveError: One of them ended; the message has its last line of output.
        """
        settings = {
            "model": self.model,
            "dtype": self.dtype,
            "device": self.device,
            "seed": config.seed,
        }
        with ExitStack() as stack:
            server: _Transformers | _Vllm
            if arrangement.server == "vllm":
                server = stack.enter_context(self._vllm(arrangement, config))
            else:
                rows = {
                    "max_batch_rows": _batch_rows(latency, slo),
                    "memory_bytes": self.memory_bytes,
                }
                worker = _Worker("serve", arrangement.serving, settings | rows)
                server = _Transformers(stack.enter_context(worker))
            examples = {
                "batch": config.batch,
                "sequence": config.sequence,
                "lengths": _lengths(config),
            }
            yield (
                server,
                stack.enter_context(_Worker("train", arrangement.training, settings | examples)),
            )

    @contextmanager
    def _vllm(self, arrangement: Arrangement, config: CompareConfig) -> Iterator["_Vllm"]:
        from coserve.bench.model_directory import write_model
        from coserve.models.source import find_model

        assert self.vllm is not None
        with TemporaryDirectory() as home:
            source = find_model(self.model, with_weights=False)
            directory = source.directory
            if directory is None:
                directory = Path(home) / "model"
                write_model(self.model, directory, dtype=self.dtype)
            log, vocab_size = Path(home) / "log", source.config.vocab_size
            cores = arrangement.serving
            with vllm_server(self.vllm, directory, dtype=self.dtype, log=log, cores=cores) as url:
                yield _Vllm(url, str(directory), log, vocab_size=vocab_size, seed=config.seed)


def _batch_rows(latency: LatencyModel, slo: Slo) -> int:
    rows = _MIN_BATCH_ROWS
    while 2 * rows <= _MAX_BATCH_ROWS and latency.prompt_s(2 * rows) <= slo.tpot_s:
        rows *= 2
    return rows


def _lengths(config: CompareConfig) -> list[int]:
    return [len(example.tokens) for example in config.examples]


def _play(
    server: "_Transformers | _Vllm",
    trainer: "_Worker",
    trace: Sequence[TracedRequest],
    slo: Slo,
    config: CompareConfig,
) -> Played:
    """Play a trace with fine-tuning until its end; answers that arrive later are waited for without
    fine-tuning.
    """
    longest = max([request.num_output_tokens for request in trace], default=0)
    drain_s = min(config.drain_s, slo.ttft_s + 1.5 * longest * slo.tpot_s)
    start_s = time.perf_counter() + _UNTIL_START_S
    trainer.tell({"start_s": start_s, "seconds": config.seconds})
    outcomes = server.play(trace, start_s=start_s, seconds=config.seconds, drain_s=drain_s)
    trained = trainer.answer(config.seconds + _LATE_S)["num_trained"]
    ended_s = time.perf_counter() - start_s
    for index, request in enumerate(trace):
        least_s = slo.ttft_s + request.num_output_tokens * slo.tpot_s
        if (
            index not in outcomes and ended_s - request.at_s > least_s
        ):  # the others might still be in time
            outcomes[index] = RequestOutcome(
                index=index, arrival_s=request.at_s, end_s=ended_s, error="not answered in time"
            )
    return Played(
        seconds=config.seconds,
        outcomes=[outcomes[index] for index in sorted(outcomes)],
        num_output_tokens=sum(
            _num_tokens_by(outcome, config.seconds) for outcome in outcomes.values()
        ),
        num_trained=trained,
    )


def _num_tokens_by(outcome: RequestOutcome, seconds: float) -> int:
    if outcome.ttft_s is None:
        return 0
    times_s = accumulate(outcome.gaps_s, initial=outcome.arrival_s + outcome.ttft_s)
    return sum(time_s <= seconds for time_s in times_s)


class _Worker:
    """A process that answers lines of JSON (`experiments.compare.separate_worker`)."""

    def __init__(self, role: str, cores: Sequence[int], settings: dict[str, Any]) -> None:
        self._role, self._setup = role, {"role": role, "cores": list(cores), **settings}

    def __enter__(self) -> "_Worker":
        command = [sys.executable, "-W", "ignore", "-m", "experiments.compare.separate_worker"]
        # The experiments are not installed: the process may start in any directory.
        path = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._home = TemporaryDirectory()
        self._log = Path(self._home.name) / "log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self.tell(self._setup)
        try:
            self.answer(_START_S)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()
        self._home.cleanup()

    def tell(self, message: dict[str, Any]) -> None:
        """Send a message without waiting."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended, and `answer` says why
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()

    def answer(self, limit_s: float) -> dict[str, Any]:
        """Return the answer to the oldest open message.

        Raises:
            CoserveError: The process has ended, or does not answer in time.
        """
        assert self._process.stdout is not None
        timer = Timer(limit_s, self._process.kill)
        timer.start()
        try:
            line = self._process.stdout.readline()
        finally:
            timer.cancel()
        if line:
            result: dict[str, Any] = json.loads(line)
            return result
        self._process.wait()
        words = [
            each for each in self._log.read_text("utf-8", "replace").splitlines() if each.strip()
        ]
        reason = words[-1] if words else f"nothing was said for {limit_s:g} s"
        raise CoserveError(f"the process that should {self._role} beside the other ended: {reason}")


class _Transformers:
    def __init__(self, worker: _Worker) -> None:
        self._worker = worker

    def play(
        self, trace: Sequence[TracedRequest], *, start_s: float, seconds: float, drain_s: float
    ) -> dict[int, RequestOutcome]:
        """Play a trace, and return the outcomes of answered requests by index; `start_s` is a time
        of time.perf_counter.
        """
        requests = [(each.at_s, each.num_prompt_tokens, each.num_output_tokens) for each in trace]
        self._worker.tell({"start_s": start_s, "end_s": seconds + drain_s, "trace": requests})
        answers = self._worker.answer(seconds + drain_s + _LATE_S)["outcomes"]
        outcomes = [RequestOutcome(**{**each, "gaps_s": tuple(each["gaps_s"])}) for each in answers]
        return {outcome.index: outcome for outcome in outcomes}


class _Vllm:
    def __init__(self, url: str, model: str, log: Path, *, vocab_size: int, seed: int) -> None:
        self._url, self._log = url, log
        self._body = completions(model, vocab_size=vocab_size, seed=seed)

    def play(
        self, trace: Sequence[TracedRequest], *, start_s: float, seconds: float, drain_s: float
    ) -> dict[int, RequestOutcome]:
        """Play a trace as `_Transformers.play` does.

        Raises:
            CoserveError: The server has ended.
        """
        load = LoadGenerator(self._url, trace, self._body)

        async def story() -> None:
            await asyncio.sleep(start_s - time.perf_counter())
            await asyncio.wait_for(load.run(), seconds + drain_s)

        with suppress(TimeoutError):  # what is not over has no outcome
            asyncio.run(story())
        check_answers(self._url, self._log)
        return {outcome.index: outcome for outcome in load.outcomes}
