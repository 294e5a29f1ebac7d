"""Answers to the questions of jobs' validation sets: greedy, by the adapter as it is, as requests
that no client sent.

They run as batch work does, in capacity that requests leave over, and the job waits for them. Their
chunks end here, and the adapter version that they read has a name that no client can ask for.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from coserve.devices.base import Device
from coserve.devices.sampling_params import SamplingParams
from coserve.engine.jobs.job import Job
from coserve.engine.request import Chunk
from coserve.engine.request_lifecycle import RequestLifecycle
from coserve.engine.served_adapters import ServedAdapters
from coserve.errors import AdapterError, RequestError
from coserve.tuning.evaluation import is_right

_log = logging.getLogger(__name__)

# Within which answers to a validation set should be there: the time of a batch.
_ANSWERS_S = 86_400.0

# The text of tokens, without those that are special.
Decode = Callable[[Sequence[int]], str]


@dataclass(kw_only=True)
class _Round:
    """The questions of a job, asked once."""

    left: set[int]
    """Indices of questions that are not answered yet."""
    own: str | None
    """Name of the adapter version that is unloaded at the end; None: the job is live, and the
    served one answers.
    """
    num_right: int = 0
    """Number of right answers so far."""
    tokens: dict[int, list[int]] = field(default_factory=dict)
    """Tokens of unfinished answers, by question."""


class Answers:
    """Answers of all jobs that are being evaluated."""

    def __init__(
        self,
        adapters: ServedAdapters,
        request_lifecycle: RequestLifecycle,
        device: Device,
        *,
        decode: Decode | None,
    ) -> None:
        """Begin without questions. decode: decodes answers; None: they are generated and not
        judged, as in a replay.
        """
        self._adapters = adapters
        self._request_lifecycle = request_lifecycle
        self._device = device
        self._decode = decode
        self._rounds: dict[str, _Round] = {}
        self._asked: dict[str, tuple[Job, int]] = {}  # job and question by request

    def begin(self, job: Job) -> None:
        """Ask a job's questions, unless that is under way.

        Raises:
            DeviceMemoryError: there is no room for the adapter version.
        """
        if job.id in self._rounds:
            return
        # A live job's newest version answers; otherwise one is published for these questions alone.
        own = None if job.config.live else f"{job.name}@answers"
        if own is not None:
            self._adapters.publish(
                job.id, own, job.num_steps_done, costs=job.costs, transient=False, model=job.model
            )
        self._rounds[job.id] = _Round(left=set(range(len(job.questions))), own=own)
        for index, question in enumerate(job.questions):
            name = f"{job.id}@answers/{index}"
            room = (
                self._device.info.max_positions
                - len(question.prompt)
                - job.costs.num_virtual_tokens
            )
            params = SamplingParams(
                temperature=0.0, max_tokens=min(job.config.evaluation.max_tokens, room), seed=0
            )
            self._asked[name] = job, index
            try:
                self._add(name, question.prompt, params, own or job.name, job.tenant)
            except (RequestError, AdapterError) as error:
                # A question that cannot become a request counts as wrong; it must not fail the job.
                del self._asked[name]
                self._close(job, index, str(error))

    def found(self, job: Job) -> dict[str, float] | None:
        """Return the metric by its name once all questions are answered, and end the round; None
        before.
        """
        asked = self._rounds.get(job.id)
        if asked is None or asked.left:
            return None
        self._end(job)
        return (
            {}
            if self._decode is None
            else {job.config.evaluation.metric: asked.num_right / len(job.questions)}
        )

    def cancel(self, job: Job) -> None:
        """Cancel a job's questions, if any are asked."""
        if job.id in self._rounds:
            for index in sorted(self._rounds[job.id].left):
                self._request_lifecycle.cancel(f"{job.id}@answers/{index}")
            self._end(job)

    def take(self, chunk: Chunk) -> bool:
        """Take a chunk if it is of an answer. Returns whether it is."""
        if chunk.request not in self._asked:
            return False
        job, index = self._asked[chunk.request]
        asked = self._rounds[job.id]
        asked.tokens.setdefault(index, []).extend(chunk.tokens)
        if chunk.finish_reason is not None:
            del self._asked[chunk.request]
            self._close(job, index, chunk.error)
        return True

    def _add(
        self, name: str, prompt: Sequence[int], params: SamplingParams, adapter: str, tenant: str
    ) -> None:
        now_s = self._device.clock.now()
        self._request_lifecycle.add(
            name,
            prompt,
            params,
            adapter=adapter,
            arrival_s=now_s,
            tenant=tenant,
            batch_due_s=now_s + _ANSWERS_S,
        )

    def _close(self, job: Job, index: int, error: str | None) -> None:
        asked = self._rounds[job.id]
        asked.left.discard(index)
        tokens = asked.tokens.pop(index, [])
        if error is not None:
            _log.warning(
                "job %s: a question of its validation set has no answer, and counts as wrong: %s",
                job.id,
                error,
            )
        elif self._decode is not None:
            expected = self._text(job.questions[index].expected)
            asked.num_right += is_right(job.config.evaluation.metric, expected, self._text(tokens))

    def _text(self, tokens: Sequence[int]) -> str:
        """Return the text up to the first token that ends a text, which may not be special."""
        assert self._decode is not None
        end_tokens = self._request_lifecycle.end_tokens
        for place, token in enumerate(tokens):
            if token in end_tokens:
                return self._decode(tokens[:place])
        return self._decode(tokens)

    def _end(self, job: Job) -> None:
        own = self._rounds[job.id].own
        if own is not None and own in self._adapters.versions:
            self._adapters.unload(own)
        del self._rounds[job.id]
