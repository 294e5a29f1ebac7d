"""The lifecycle of requests: arrival, results of steps, and end."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random

from msgspec import structs

from coserve.devices.base import Device
from coserve.devices.messages.commands import Command
from coserve.devices.messages.steps import StepBatch, StepResult
from coserve.devices.sampling_params import SamplingParams
from coserve.engine.checks import check_request
from coserve.engine.grammars import Grammars
from coserve.engine.records import RequestRecord, record_of
from coserve.engine.request import Chunk, Request
from coserve.engine.request_queue import RequestQueue
from coserve.engine.served_adapters import AdapterVersions
from coserve.engine.text import TextStream
from coserve.errors import RequestError
from coserve.scheduling.fairness import TokenCounters
from coserve.scheduling.latency import LatencyModel
from coserve.scheduling.plan import RequestInfo
from coserve.scheduling.slo import DefaultSlo, Slo, feasible_slo
from coserve.scheduling.slo.headroom import SloHeadroom
from coserve.scheduling.slo.taken_time import TakenTime
from coserve.settings import shown

_NUM_RECORDS = 10_000

TextStreamMaker = Callable[[Sequence[int], SamplingParams], TextStream]


def sample_seed(seed: int, index: int) -> int:
    """Return the seed of one of a request's samples: the request's own for the first; for the
    others not the next numbers, which are seeds of other requests.
    """
    return Random(f"{seed} {index}").getrandbits(63) if index else seed


class RequestLifecycle:
    """Requests from their arrival to their last chunk; `queue` has them meanwhile."""

    def __init__(
        self,
        device: Device,
        queue: RequestQueue,
        versions: AdapterVersions,
        counters: TokenCounters,
        latency: LatencyModel,
        default_slo: DefaultSlo,
        grammars: Grammars,
        *,
        end_tokens: frozenset[int],
        shares_prefixes: bool,
        text_stream: TextStreamMaker | None,
        emit: Callable[[Chunk], None],
        send: Callable[[Command], None],
    ) -> None:
        """Begin without requests.

        Args:
            end_tokens: Ids of the model that end every request.
            shares_prefixes: Whether tenants share cached prompt prefixes.
            text_stream: See `EngineCore`.
            emit: Takes chunks.
            send: Has the device do a command with the next step.
        """
        self._device = device
        self._queue = queue
        self._versions = versions
        self._counters = counters
        self._latency, self._default_slo, self._grammars = latency, default_slo, grammars
        self._text_stream, self._emit, self._send = text_stream, emit, send
        self.end_tokens, self._shares_prefixes = end_tokens, shares_prefixes
        self.records: deque[RequestRecord] = deque(maxlen=_NUM_RECORDS)
        self.num_slos_clamped = 0
        self.taken_time, self.headroom = TakenTime(), SloHeadroom()
        self._seeds = Random(0)

    def add(
        self,
        name: str,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        adapter: str | None,
        tenant: str,
        slo: Slo | None = None,
        arrival_s: float | None = None,
        priority: int = 0,
        batch_due_s: float | None = None,
        without_jobs: bool = False,
    ) -> None:
        """Queue the sequences of a request; see `TokenEngine.add_tokens`."""
        if name in self._queue:
            raise RequestError(f"there is a request {name!r} already")
        if not isinstance(params, SamplingParams):
            kind = type(params).__name__
            raise RequestError(f"params must be one SamplingParams, for all prompts, not a {kind}")
        if slo is not None and not isinstance(slo, Slo):
            raise RequestError(f"slo must be an Slo, not {shown(slo)}")
        if arrival_s is None:
            arrival_s = self._device.clock.now()
        version = None if adapter is None else self._versions.resolve_served(adapter)
        check_request(
            prompt, params, self._device.info, version, has_text=self._text_stream is not None
        )
        if params.grammar is not None:
            self._grammars.open(name, params.grammar, tenant)
        base_seed = self._seeds.getrandbits(63) if params.seed is None else params.seed
        default_slo = self._default_slo.value
        asked_slo = slo or default_slo
        most = max(1, params.max_tokens)
        # Batch work has one deadline, which bounds its first token; divided by the tokens it bounds
        # the time of the others.
        if batch_due_s is not None:
            left_s = max(default_slo.ttft_s, batch_due_s - arrival_s)
            asked_slo = Slo(ttft_s=left_s, tpot_s=max(default_slo.tpot_s, left_s / most))
        slo = feasible_slo(
            asked_slo, default_slo, self._latency, num_prompt_tokens=len(prompt), max_tokens=most
        )
        self.num_slos_clamped += slo != asked_slo
        info = RequestInfo(
            arrival_s=arrival_s,
            ttft_s=slo.ttft_s,
            tpot_s=slo.tpot_s,
            tenant=tenant,
            priority=priority,
            batch_due_s=batch_due_s,
            version="" if version is None else version.key,
            num_bypasses=0 if version is None else version.num_bypasses,
            draws=params.temperature > 0,
            is_masked=params.grammar is not None,
        )
        members: list[Request] = []
        for index in range(params.n):
            request = Request(
                id=f"{name}/{index}",
                info=info,
                request=name,
                index=index,
                prompt=prompt,
                params=params,
                seed=sample_seed(base_seed, index),
                version=version,
                slo=slo,
                asked_slo=asked_slo,
                end_tokens=frozenset() if params.ignore_eos else self.end_tokens,
                text=None if self._text_stream is None else self._text_stream(prompt, params),
                without_jobs=without_jobs,
                prefix_source=members[0] if members else None,
                taken_time=self.taken_time,
                num_model_changes=self._versions.num_model_changes,
                prefix_tenant="" if self._shares_prefixes else tenant,
            )
            if version is not None:
                self._versions.hold(version)
            members.append(request)
        self._queue.add(name, members)

    def cancel(self, name: str) -> bool:
        """End a request at once. Returns whether it was there."""
        members = self._queue.members(name)
        for member in members:
            self._emit(member.end("cancelled"))
            self._leave(member)
        return bool(members)

    def stop(self, name: str, index: int, num_tokens: int) -> bool:
        """End a sequence of which `num_tokens` tokens are wanted. Returns whether it was there."""
        for member in self._queue.members(name):
            if member.index == index:
                self._emit(member.end("stop"))
                if not member.is_batch:
                    self.records.append(replace(record_of(member), num_output_tokens=num_tokens))
                self._leave(member)
                return True
        return False

    def apply(
        self, batch: StepBatch, result: StepResult, *, started_s: float, now_s: float
    ) -> None:
        """Apply the result of a step to its requests: their keys and values are known, and some
        have a new token. started_s: when the step began.
        """
        running = self._queue.running
        prompts = result.prompts
        tokens = result.tokens
        emit = self._emit
        refused, ended, embeddings = result.refused, result.ended, result.embeddings
        num_tokens: dict[str, int] = {}
        for rows in batch.requests:
            id = rows.request
            request = running.get(id)
            if request is None:  # cancelled or stopped while the step ran
                continue
            if request.started_s is None and rows.tokens:
                request.started_s = started_s
            request.commit(len(rows.tokens), prompts.get(id, ()) if prompts else ())
            if not rows.samples:
                continue
            if refused and id in refused:
                emit(request.end("error", refused[id]))
                self._leave(request)
                continue
            ends_here = id in ended
            chunk = request.accept(tokens[id], now_s, ends_here=ends_here)
            if embeddings and id in embeddings:
                chunk = structs.replace(chunk, embedding=embeddings[id])
            num_tokens[request.info.tenant] = num_tokens.get(request.info.tenant, 0) + 1
            emit(chunk)
            if ends_here and chunk.finish_reason is None:
                # A chunk of its own: the token before is part of the text.
                chunk = request.end("stop")
                emit(chunk)
            # Batch work has no latency to keep, so its times are no measure of headroom.
            if (
                request.num_output <= 1 or chunk.finish_reason is not None
            ) and not request.is_batch:
                self._note_slo_use(request, now_s)
            if chunk.finish_reason is not None:
                if not request.is_batch:
                    self.records.append(record_of(request))
                self._leave(request)
        for tenant, number in num_tokens.items():
            self._counters.charge(tenant, output=number)

    def fail(self, batch: StepBatch, reason: str) -> None:
        """End the requests of a step that the device could not run."""
        for rows in batch.requests:
            if (request := self._queue.running.get(rows.request)) is not None:
                self._emit(request.end("error", reason))
                self._leave(request)

    def fail_readers(self, version_key: str, reason: str) -> None:
        """End the requests that wait for an adapter version which the device cannot have."""
        for request in [request for request in self._queue if request.info.version == version_key]:
            self._emit(request.end("error", reason))
            self._leave(request)

    def _note_slo_use(self, request: Request, now_s: float) -> None:
        """Note what share of its SLO a request used by itself, when it has its first token or has
        ended.
        """
        if request.num_output <= 1:
            # Time that was spent on jobs is not the request's own need.
            ttft_s = now_s - request.info.arrival_s - sum(request.taken_before)
            self.headroom.add_first_token(now_s, ttft_s / request.info.ttft_s)
        elif request.finish_reason is not None and request.first_token_s is not None:
            decoding_s = now_s - request.first_token_s - sum(request.taken)
            self.headroom.add_end(
                now_s, decoding_s / (request.num_output - 1) / request.info.tpot_s
            )

    def _leave(self, request: Request) -> None:
        """Give back everything that a request holds, which is over."""
        if (closed := self._queue.remove(request)) is not None:
            self._send(closed)
        # All samples of a request share its grammar.
        if request.request not in self._queue:
            self._grammars.close(request.request)
        if request.version is not None:
            self._versions.release(request.version)
