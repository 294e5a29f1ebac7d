"""A request as the engine sees it: one sequence to be continued, its output so far, and the reason
for which it ends.
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
    """Output of a step for one sequence of a request."""

    request: str
    """Id of the request."""
    index: int = 0
    """Index of the sequence among the request's `n`."""
    tokens: tuple[int, ...] = ()
    """New tokens."""
    text: str = ""
    """Text that can be shown now; "" without a tokenizer."""
    logprobs: tuple[TokenLogprob, ...] = ()
    """Log-probabilities of the new tokens, if they were requested."""
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    """Log-probabilities of the prompt's tokens but the first, if they were requested, with the
    first chunk of sequence 0.
    """
    embedding: tuple[float, ...] = ()
    """Embedding of the prompt, if it was requested (`SamplingParams.embeds`)."""
    finish_reason: FinishReason | None = None
    """Reason for the end, on the last chunk of a sequence; None on others."""
    stop_reason: str | int | None = None
    """Stop string or token id that has ended the sequence."""
    error: str | None = None
    """Error in one line, if the finish_reason is "error"."""
    num_cached_tokens: int = 0
    """Number of prompt tokens that were found in the cache."""
    slo: Slo | None = None
    """SLO by which the request is served, on the first chunk if it is not the requested one.
    """


def virtual_tokens(number: int) -> range:
    """Return the ids of an adapter's virtual tokens, in order from -1 downward."""
    return range(-1, -1 - number, -1)


class Request:
    """One sequence of a request.

    `sequence` has its pages, and is None while it waits. `tokens` are the prompt, after the
    `num_virtual` virtual tokens of the adapter, and the output so far.
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
        """Make a sequence that waits.

        Args:
            info: What a policy sees of the request that does not change.
            slo: SLO by which it is served.
            asked_slo: SLO that was requested, which may be beyond the device.
            without_jobs: Whether no job may have a step beside it.
            prefix_source: Sequence with the same prompt that runs first, so that this one shares
                its pages.
            taken_time: Time of the engine that was spent on other work.
            prefix_tenant: Tenant whose prefixes are shared; see `PrefixOwner`.
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
        self.tokens = list(self.prompt)  # the output is appended
        self.num_output = 0
        self.sequence: PagedSequence | None = None
        self.started_s: float | None = None  # when a step began that had its first rows
        self.first_token_s: float | None = None
        self.last_token_s = info.arrival_s
        self.finish_reason: FinishReason | None = None
        self.num_cached_tokens: int | None = None
        self.num_preemptions = 0
        self.taken_before = Taken()  # time spent on other work before the first token
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
        """Set the number of changes of the weights so far, which separates the prefixes computed
        before a change from those after; only before the first row.
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
        """Return whether the sequence may be admitted: the one whose prefix it shares has its first
        token, or has ended.
        """
        source = self.prefix_source
        return (
            source is None or source.first_token_s is not None or source.finish_reason is not None
        )

    @property
    def taken(self) -> Taken:
        """Return the time spent on other work since the first token (before it: since arrival)."""
        return self._taken_time.total.since(self._taken_mark)

    @property
    def num_rows(self) -> int:
        """Return the number of tokens to run before the next one can be sampled."""
        assert self.sequence is not None
        return len(self.tokens) - self.sequence.length

    @property
    def scores_prompt(self) -> bool:
        """Return whether prompt rows are still to be run for the log-probabilities of the tokens
        after them.
        """
        return self._num_unscored > 0

    def progress(self) -> RequestProgress:
        """Return the progress of a running sequence as a policy sees it; the object is reused, and
        valid until the next step is planned.
        """
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
        """Return the progress of a waiting sequence as a policy sees it.

        Args:
            num_known: Number of its tokens whose keys and values need not be computed.
            num_pages: Number of pages that its admission would take.
            is_held: Whether it may not start yet.
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
        """Note that the sequence waits; what a policy has seen in this step is not changed."""
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
        """Update what running and waiting sequences share; field by field, for speed: a step does
        this some hundred times.
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
        """Take over pages, and return the command that opens the sequence on the device."""
        self.sequence = sequence
        self._num_pages_sent = len(sequence.pages)
        if self.num_cached_tokens is None:
            self.num_cached_tokens = max(0, sequence.length - self.num_virtual)
        used = self.params.penalizes
        continues = self.params.penalizes or self.params.grammar is not None
        return OpenRequest(
            request=self.id,
            params=self.params,
            seed=self.seed,
            version=self.info.version,
            pages=tuple(sequence.pages),
            # Penalties count prompt and output; a grammar has to be advanced over the output.
            prompt=tuple(self.prompt[self.num_virtual :]) if used else (),
            output=tuple(self.tokens[len(self.prompt) :]) if continues else (),
        )

    def close(self) -> CloseRequest:
        """Give the pages back, and return the command that closes the sequence on the device."""
        assert self.sequence is not None
        self.sequence.close()
        self.sequence = None
        return CloseRequest(self.id)

    def next_rows(self, num_rows: int) -> RequestRows:
        """Return the next rows, whose pages are reserved."""
        assert self.sequence is not None
        start, pages = self.sequence.length, self.sequence.pages
        samples = start + num_rows == len(self.tokens)
        new_pages: tuple[int, ...] = ()
        # The device keeps each sequence's pages, so only new ones are sent.
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
        """Return the tokens that must not be sampled next."""
        # Ends are forbidden until the minimum is reached.
        ends = tuple(self._stop_tokens) if self.num_output < self.params.min_tokens else ()
        if not self.params.bad_words:
            return ends
        output = tuple(self.tokens[len(self.prompt) :])
        bad = (
            word[-1]
            # A word's last token is forbidden where the output ends with the word's other tokens.
            for word in self.params.bad_words
            if output[len(output) - len(word) + 1 :] == word[:-1]
        )
        return (*ends, *bad)

    def _scored_rows(self, start: int, end: int) -> range:
        """Return the rows among these after which the next prompt token is to be scored, without
        those that were scored before.
        """
        first = max(start, self.num_virtual + len(self._prompt_logprobs))
        return range(first, max(first, min(end, len(self.prompt) - 1)))

    # -- what happened ----------------------------------------------------------------

    def commit(self, num_rows: int, scored: Sequence[TokenLogprob]) -> None:
        """Note that rows have run. scored: log-probabilities of their targets."""
        assert self.sequence is not None
        self.sequence.commit(num_rows, self.tokens, self.prefix_owner)
        if scored:
            self._prompt_logprobs += scored
            self._num_unscored -= len(scored)

    def accept(self, chosen: TokenLogprob, now_s: float, *, ends_here: bool = False) -> Chunk:
        """Append a sampled token, and return its chunk, which has a finish_reason if it is the
        last.

        Args:
            ends_here: Whether the caller ends the sequence after this token, since its grammar lets
                nothing follow; then it is not cut for its length.
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
        """End the sequence without a further token, and return its last chunk."""
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
