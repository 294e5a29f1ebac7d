"""A request as the engine sees it: one sequence that is to be continued, what has come of it, and
when it is over.
"""

from collections.abc import Sequence
from typing import Literal

import msgspec

from coserve.devices.messages.commands import CloseRequest, OpenRequest
from coserve.devices.messages.steps import RequestRows, TokenLogprob
from coserve.devices.sampling_params import SamplingParams
from coserve.engine.served_adapters import AdapterVersion
from coserve.engine.text import TextStream
from coserve.memory.pages.kv_cache import PagedSequence
from coserve.memory.pages.prefix_index import PrefixOwner
from coserve.scheduling.plan import RequestInfo, RequestProgress
from coserve.scheduling.slo import Slo
from coserve.scheduling.slo.taken_time import Taken, TakenTime

FinishReason = Literal["stop", "length", "cancelled", "error"]


class Chunk(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What a step brought a request: tokens, the text that can be shown now, and on the last one
    why it is over.

    index: which of the request's `n` sequences. prompt_logprobs: of the prompt's tokens but the
    first, if they were asked for, with the first chunk of sequence 0. embedding: see
    `SamplingParams.embeds`. stop_reason: the stop string or token id that ended it. error: in one
    line, if finish_reason is "error".
    """

    request: str
    index: int = 0
    tokens: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    embedding: tuple[float, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    num_cached_tokens: int = 0
    slo: Slo | None = None


def virtual_tokens(number: int) -> range:
    """The ids of an adapter's virtual tokens, in their order: -1, -2, …."""
    return range(-1, -1 - number, -1)


class Request:
    """One sequence of a request. `sequence` is None while it waits for pages. `prompt`: its tokens,
    after the `num_virtual` virtual ones of its adapter.
    """

    def __init__(
        self,
        *,
        id: str,
        info: RequestInfo,
        request: str,
        index: int,
        prompt: Sequence[int],
        params: SamplingParams,
        seed: int,
        version: AdapterVersion | None,
        slo: Slo,
        asked_slo: Slo,
        end_tokens: frozenset[int],
        text: TextStream | None,
        without_jobs: bool = False,
        prefix_source: "Request | None" = None,
        taken_time: TakenTime | None = None,
        num_model_changes: int = 0,
        prefix_tenant: str = "",
    ) -> None:
        """info: what stays the same of its request. slo: what it is served by; asked_slo: what was
        asked for, which may be beyond the device. taken_time: what is taken of the engine's time.
        without_jobs: see `TokenEngine.add_tokens`. prefix_source: the sequence with the same prompt
        that runs first, so that this one finds its pages. prefix_tenant: see `PrefixOwner`.
        """
        self.id, self.info, self.request, self.index = id, info, request, index
        self.prefix_source = prefix_source
        self.num_virtual = 0 if version is None else version.num_virtual_tokens
        self.prompt = [*virtual_tokens(self.num_virtual), *prompt]
        self.params, self.seed = params, seed
        self.version, self.slo, self.asked_slo = version, slo, asked_slo
        self.is_batch = info.batch_due_s is not None  # nobody waits for it
        self.without_jobs = without_jobs
        self._prefix_tenant = prefix_tenant
        self.prefix_owner = PrefixOwner("")
        self.note_model_changes(num_model_changes)
        self.tokens = list(self.prompt)  # and the output after it
        self.num_output = 0
        self.sequence: PagedSequence | None = None
        self.started_s: float | None = None  # when a step began that had its first rows
        self.first_token_s: float | None = None
        self.last_token_s = info.arrival_s
        self.finish_reason: FinishReason | None = None
        self.num_cached_tokens: int | None = None
        self.num_preemptions = 0
        self.taken_before = Taken()  # before its first token
        self._taken_time = taken_time or TakenTime()
        self._taken_mark = self._taken_time.at(info.arrival_s)
        self._num_pages_sent = 0
        self._prompt_logprobs: list[TokenLogprob] = []
        self._num_unscored = (
            len(prompt) - 1 if params.prompt_logprobs is not None and not index else 0
        )
        self._may_forbid = params.min_tokens > 0 or bool(params.bad_words)
        self._end_tokens = end_tokens
        self._stop_tokens = end_tokens | set(params.stop_token_ids)
        # A server looks for stop strings itself and leaves them out of `params`: such a request may
        # end all the same.
        may_end = not params.ignore_eos or params.stop_token_ids or params.stop or params.grammar
        self._num_sure = params.min_tokens if may_end else params.max_tokens
        self._text = text
        self._progress = self._new_progress()

    def note_model_changes(self, number: int) -> None:
        """How often the weights have been changed that it is to be computed with; before its first
        row.
        """
        self.num_model_changes = number
        parts = [self.info.version, *([self.params.cache_salt] if self.params.cache_salt else [])]
        version = "\0".join(parts) + (f"\1{number}" if number else "")
        # Public prompts are the base's: blocks of an adapter are its tenant's in any case.
        num_public = 0 if self.info.version else self.params.num_public_tokens
        self.prefix_owner = PrefixOwner(version, self._prefix_tenant, num_public)

    # -- questions ----------------------------------------------------------------

    @property
    def may_start(self) -> bool:
        """Whether its turn has come to be admitted."""
        source = self.prefix_source
        return (
            source is None or source.first_token_s is not None or source.finish_reason is not None
        )

    @property
    def taken(self) -> Taken:
        """What has been taken of its time since its first token; before that, since it came."""
        return self._taken_time.total.since(self._taken_mark)

    @property
    def num_rows(self) -> int:
        """Tokens to run before the next one can be chosen."""
        assert self.sequence is not None
        return len(self.tokens) - self.sequence.length

    @property
    def scores_prompt(self) -> bool:
        """Whether rows of its prompt are still to be run for the log-probabilities of what comes
        after them.
        """
        return self._num_unscored > 0

    def progress(self) -> RequestProgress:
        """Return how far it is while it runs: for a policy, until the next step is planned."""
        sequence = self.sequence
        assert sequence is not None
        progress = self._progress
        progress.num_past = num_past = sequence.length
        progress.num_rows = num_rows = len(self.tokens) - num_past
        progress.num_pages = sequence.num_pages_missing(num_rows)
        progress.num_held = len(sequence.pages)
        progress.may_start = self.prefix_source is None or self.may_start
        self._bring_up_to_date(progress)
        return progress

    def progress_waiting(self, num_known: int, num_pages: int, *, is_held: bool) -> RequestProgress:
        """Return how far it is while it waits.

        Args:
            num_known: of its tokens, those whose keys and values it need not compute.
            num_pages: that its admission would take.
            is_held: whether it may not start yet.
        """
        progress = self._progress
        progress.num_past = num_known
        progress.num_rows = len(self.tokens) - num_known
        progress.num_pages = num_pages
        progress.num_held = 0
        progress.may_start = not is_held and (self.prefix_source is None or self.may_start)
        self._bring_up_to_date(progress)
        return progress

    def wait(self) -> None:
        """It waits from now on. What a policy has seen of it in this step stays as it was."""
        self._progress = self._new_progress()

    def _new_progress(self) -> RequestProgress:
        return RequestProgress(
            id=self.id,
            info=self.info,
            num_rows=0,
            num_past=0,
            num_output=0,
            first_token_s=None,
            last_token_s=self.last_token_s,
        )

    def _bring_up_to_date(self, progress: RequestProgress) -> None:
        """What runs and what waits have in common; field by field, since a step does this some
        hundred times.
        """
        progress.num_output = num_output = self.num_output
        progress.first_token_s = self.first_token_s
        progress.last_token_s = self.last_token_s
        progress.num_scored = self._num_unscored
        num_left = self.params.max_tokens - num_output
        progress.num_left = num_left if num_left > 1 else 1
        progress.num_sure = self._num_sure - num_output
        progress.jobs_s = self._taken_time.total.jobs_s - self._taken_mark.jobs_s

    # -- what a device is told ------------------------------------------------------

    def open(self, sequence: PagedSequence) -> OpenRequest:
        """It has its pages, and may run."""
        self.sequence = sequence
        self._num_pages_sent = len(sequence.pages)
        if self.num_cached_tokens is None:
            self.num_cached_tokens = max(0, sequence.length - self.num_virtual)
        used, continues = (
            self.params.penalizes,
            self.params.penalizes or self.params.grammar is not None,
        )
        return OpenRequest(
            request=self.id,
            params=self.params,
            seed=self.seed,
            version=self.info.version,
            pages=tuple(sequence.pages),
            prompt=tuple(self.prompt[self.num_virtual :]) if used else (),
            output=tuple(self.tokens[len(self.prompt) :]) if continues else (),
        )

    def close(self) -> CloseRequest:
        """Its pages go back."""
        assert self.sequence is not None
        self.sequence.close()
        self.sequence = None
        return CloseRequest(self.id)

    def next_rows(self, num_rows: int) -> RequestRows:
        """Its next rows, whose pages are reserved."""
        assert self.sequence is not None
        start, pages = self.sequence.length, self.sequence.pages
        samples = start + num_rows == len(self.tokens)
        new_pages: tuple[int, ...] = ()
        if len(pages) > self._num_pages_sent:
            new_pages, self._num_pages_sent = tuple(pages[self._num_pages_sent :]), len(pages)
        tokens = (
            (self.tokens[start],) if num_rows == 1 else tuple(self.tokens[start : start + num_rows])
        )
        forbidden = self._forbidden() if samples and self._may_forbid else ()
        if not self._num_unscored:
            return RequestRows(
                self.id, start, tokens, new_pages, samples, self.num_output, forbidden
            )
        scored = self._scored_rows(start, start + num_rows)
        targets = tuple(self.prompt[scored.start + 1 : scored.stop + 1])
        return RequestRows(
            self.id,
            start,
            tokens,
            new_pages,
            samples,
            self.num_output,
            forbidden,
            scored.start,
            targets,
        )

    def _forbidden(self) -> tuple[int, ...]:
        """Tokens that must not come next."""
        ends = tuple(self._stop_tokens) if self.num_output < self.params.min_tokens else ()
        if not self.params.bad_words:
            return ends
        output = tuple(self.tokens[len(self.prompt) :])
        bad = (
            word[-1]
            for word in self.params.bad_words
            if output[len(output) - len(word) + 1 :] == word[:-1]
        )
        return (*ends, *bad)

    def _scored_rows(self, start: int, end: int) -> range:
        """Of these rows, those after which the prompt's next token is to be scored; none that has
        been before.
        """
        first = max(start, self.num_virtual + len(self._prompt_logprobs))
        return range(first, max(first, min(end, len(self.prompt) - 1)))

    # -- what happened ----------------------------------------------------------------

    def commit(self, num_rows: int, scored: Sequence[TokenLogprob]) -> None:
        """Rows have run; scored: what came of their targets."""
        assert self.sequence is not None
        self.sequence.commit(num_rows, self.tokens, self.prefix_owner)
        if scored:
            self._prompt_logprobs += scored
            self._num_unscored -= len(scored)

    def accept(self, chosen: TokenLogprob, now_s: float, *, ends_here: bool = False) -> Chunk:
        """Take the next token; the chunk says whether that was the last. ends_here: the caller ends
        it after that, since its grammar lets nothing follow; then it is not cut for its length.
        """
        first = self.first_token_s is None
        if first:
            self.first_token_s, self.taken_before = now_s, self.taken
            self._taken_mark = self._taken_time.total
        self.last_token_s = now_s
        if not self.params.max_tokens:  # only the prompt's scores were wanted
            return self.end("length")
        token = chosen.token
        self.tokens.append(token)
        self.num_output += 1
        text = ""
        stop_reason: str | int | None = None
        if token in self._stop_tokens and self.num_output > self.params.min_tokens:
            # The end is not part of the text.
            self.finish_reason, stop_reason = "stop", None if token in self._end_tokens else token
        else:
            if self._text is not None:
                text = self._text.push(token, may_stop=self.num_output > self.params.min_tokens)
                stop_reason = self._text.stopped
            if stop_reason is not None:
                self.finish_reason = "stop"
            elif self.num_output >= self.params.max_tokens and not ends_here:
                self.finish_reason = "length"
        if self.finish_reason is not None and self._text is not None and self._text.stopped is None:
            text += self._text.finish()
        return Chunk(
            request=self.request,
            index=self.index,
            tokens=(token,),
            text=text,
            logprobs=() if self.params.logprobs is None else (chosen,),
            prompt_logprobs=tuple(self._prompt_logprobs) if first else (),
            finish_reason=self.finish_reason,
            stop_reason=stop_reason,
            num_cached_tokens=self.num_cached_tokens or 0,
            slo=self.slo if first and self.slo != self.asked_slo else None,
        )

    def end(self, reason: FinishReason, error: str | None = None) -> Chunk:
        """It is over without a further token."""
        self.finish_reason = reason
        text = self._text.finish() if self._text is not None else ""
        prompt_logprobs = (
            () if self.num_output or self.params.max_tokens else tuple(self._prompt_logprobs)
        )
        return Chunk(
            request=self.request,
            index=self.index,
            text=text,
            prompt_logprobs=prompt_logprobs,
            finish_reason=reason,
            error=error,
            num_cached_tokens=self.num_cached_tokens or 0,
        )
