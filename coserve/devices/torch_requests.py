"""Requests on a torch device: their pages, the rows that they run, the tokens that are chosen for them."""

from array import array
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from itertools import accumulate, groupby
from math import nan

import torch
from msgspec import structs
from torch import Tensor
from torch.profiler import record_function

from coserve.adapters.base import Adapter
from coserve.devices.device_grammars import DeviceGrammars
from coserve.devices.grammar import CANNOT_FOLLOW
from coserve.devices.matching import Matcher
from coserve.devices.messages import OpenRequest
from coserve.devices.readout import Pending, Readout
from coserve.devices.sampling import SampledParams, SamplingRow, TokenCounts, sample
from coserve.devices.step_messages import RequestRows, TokenLogprob
from coserve.kernels.attention import PageTables
from coserve.kernels.transfer import int_tensor, on_device
from coserve.memory.paged_kv import PagedKv
from coserve.models.backbone import Backbone
from coserve.models.batch import Span
from coserve.models.bypasses import Bypasses
from coserve.models.head import final_states, logits
from coserve.tuning.objective import chunk_rows

# The name under which PyTorch's profiler shows how tokens are chosen.
SAMPLING = "sampling"


class RequestHandle:
    """A request as a device keeps it. pages: its page table. vocab_size: of its model."""

    def __init__(self, command: OpenRequest, grammars: DeviceGrammars, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.params, self.seed, self.version = command.params, command.seed, command.version
        self.pages = array("q", command.pages)
        self.counts: TokenCounts | None = None
        if command.params.penalizes:
            self.counts = TokenCounts(command.prompt)
            for token in command.output:
                self.counts.add(token)
        grammar = command.params.grammar
        self.matcher: Matcher | None = None
        if grammar is not None:
            self.matcher = grammars.matcher(grammar, command.output, vocab_size)

        # What no later token changes need not be made again for each.
        is_constant = not self.follows and not command.params.draws
        self.constant_row = SamplingRow(params=self.params, seed=self.seed) if is_constant else None

    @property
    def follows(self) -> bool:
        """Whether its tokens matter to those that come."""
        return self.counts is not None or self.matcher is not None

    def sampling_row(self, rows: RequestRows) -> SamplingRow:
        """How the token after its rows is to be chosen."""
        if self.constant_row is not None and not rows.forbidden:
            return self.constant_row
        return SamplingRow(
            params=self.params,
            seed=self.seed,
            place=rows.place,
            counts=self.counts,
            forbidden=rows.forbidden,
            mask=b"" if self.matcher is None else self.matcher.mask(),
        )

    def accept(self, token: int) -> None:
        """It has been given a token."""
        if self.counts is not None:
            self.counts.add(token)
        if self.matcher is not None:
            self.matcher.accept(token)


class _Rows:
    """Requests that have rows in a step, in this order, with what is the same in every step of theirs."""

    def __init__(self, ids: Sequence[str], handles: Sequence[RequestHandle]) -> None:
        self.ids, self.handles = ids, handles
        self.by_version = [(key, len(list(own))) for key, own in groupby([handle.version for handle in handles])]

    @cached_property
    def tables(self) -> PageTables:
        """Their pages, which change now and then."""
        return PageTables([handle.pages for handle in self.handles])


class _Samplers(_Rows):
    """Requests that sample in a step."""

    def __init__(
        self, ids: Sequence[str], handles: Sequence[RequestHandle], device: torch.device, vocab_size: int
    ) -> None:
        """vocab_size: of the backbone."""
        super().__init__(ids, handles)
        sizes = [handle.vocab_size for handle in handles]
        own = sizes if any(size != vocab_size for size in sizes) else ()
        self.params = SampledParams([handle.params for handle in handles], device, own)
        self.followed = [(place, handle) for place, handle in enumerate(handles) if handle.follows]
        self.embedded = [place for place, handle in enumerate(handles) if handle.params.embeds]
        found = [handle.constant_row for handle in handles]
        self._constant = [row for row in found if row is not None] if None not in found else None

    def sampling_rows(self, sampled: Sequence[RequestRows]) -> Sequence[SamplingRow]:
        """How the tokens after these rows of theirs are to be chosen."""
        if self._constant is not None and not any(rows.forbidden for rows in sampled):
            return self._constant
        return [handle.sampling_row(rows) for handle, rows in zip(self.handles, sampled, strict=True)]

    @cached_property
    def matchers(self) -> Mapping[str, Matcher]:
        """Of those that have one."""
        pairs = zip(self.ids, self.handles, strict=True)
        return {request: handle.matcher for request, handle in pairs if handle.matcher is not None}


class TorchRequests:
    """All requests of a device, by id."""

    def __init__(self, pages: PagedKv, versions: Mapping[str, Adapter]) -> None:
        self._pages, self._versions = pages, versions
        self._handles: dict[str, RequestHandle] = {}
        # Those of the last step; the same requests decode step after step, until one comes or goes.
        self._rows: _Rows | None = None
        self._samplers: _Samplers | None = None
        self.grammars = DeviceGrammars()

    def open(self, command: OpenRequest) -> None:
        """Carry out `OpenRequest`."""
        architecture = self._backbone.architecture
        if command.version:
            architecture = self._versions[command.version].architecture
        self._handles[command.request] = RequestHandle(command, self.grammars, architecture.vocab_size)
        self._forget()

    def close(self, request: str) -> None:
        self._handles.pop(request, None)
        self._forget()

    def _forget(self) -> None:
        self._rows, self._samplers = None, None

    def _forget_tables(self) -> None:
        if self._rows is not None:
            vars(self._rows).pop("tables", None)

    def extend_tables(self, requests: Sequence[RequestRows]) -> None:
        """New pages join their requests'."""
        for rows in requests:
            if rows.new_pages:
                self._handles[rows.request].pages.extend(rows.new_pages)
                self._forget_tables()

    def move_pages(self, targets: Mapping[int, int]) -> None:
        """Pages are elsewhere now."""
        for handle in self._handles.values():
            handle.pages = array("q", [targets.get(page, page) for page in handle.pages])
        self._forget_tables()

    def spans(self, requests: Sequence[RequestRows]) -> list[Span]:
        """The rows as spans of a forward batch, one for each adapter."""
        if not requests:
            return []
        ids = [rows.request for rows in requests]
        if self._rows is None or ids != self._rows.ids:
            self._rows = _Rows(ids, [self._handles[request] for request in ids])
        return self._pages.spans(
            self._rows.tables,
            [rows.start for rows in requests],
            [rows.tokens for rows in requests],
            [(number, self._bypasses(version)) for version, number in self._rows.by_version],
        )

    def finish(self, hidden: Tensor, requests: Sequence[RequestRows], readout: Readout) -> "RequestsResult":
        """Choose tokens and score prompts after the requests' rows, which are the first of hidden [n, hidden_size]."""
        ends = list(accumulate([len(rows.tokens) for rows in requests]))
        sampled = [rows for rows in requests if rows.samples]
        last_rows = [end - 1 for end, rows in zip(ends, requests, strict=True) if rows.samples]
        samplers = self._those_of(sampled)
        return RequestsResult(
            self._sample(hidden, last_rows, sampled, samplers, readout),
            self._score_prompts(hidden, ends, requests, readout),
            samplers.matchers,
            {
                samplers.ids[place]: readout.add(final_states(self._backbone, hidden[last_rows[place], None]))
                for place in samplers.embedded
            },
        )

    def _those_of(self, sampled: Sequence[RequestRows]) -> _Samplers:
        """The requests of these rows: those of the step before, unless they are others, or one has come or gone."""
        ids = [rows.request for rows in sampled]
        if self._samplers is None or ids != self._samplers.ids:
            handles = [self._handles[request] for request in ids]
            vocab_size = self._backbone.architecture.vocab_size
            self._samplers = _Samplers(ids, handles, self._backbone.device, vocab_size)
        return self._samplers

    def _bypasses(self, version: str) -> Bypasses | None:
        return self._versions[version].bypasses() if version else None

    def _sample(
        self,
        hidden: Tensor,
        last_rows: Sequence[int],
        sampled: Sequence[RequestRows],
        samplers: _Samplers,
        readout: Readout,
    ) -> Callable[[], dict[str, TokenLogprob]]:
        if not sampled:
            return dict
        users = [(num_rows, self._bypasses(version)) for version, num_rows in samplers.by_version]
        scores = logits(self._backbone, hidden[on_device(int_tensor(last_rows), hidden.device)], users)
        points = samplers.sampling_rows(sampled)
        with record_function(SAMPLING):
            chosen = sample(scores, points, self._backbone.backend, samplers.params)
        read = _Lines(readout, chosen.tokens, chosen.logprobs, chosen.top_tokens, chosen.top_logprobs)

        def result() -> dict[str, TokenLogprob]:
            lines = read.lines(samplers.params.num_top)
            for place, handle in samplers.followed:
                handle.accept(lines[place].token)
            return dict(zip(samplers.ids, lines, strict=True))

        return result

    def _score_prompts(
        self, hidden: Tensor, ends: Sequence[int], requests: Sequence[RequestRows], readout: Readout
    ) -> dict[str, list[Callable[[], list[TokenLogprob]]]]:
        """Log-probabilities of prompts' tokens, a chunk of rows at a time: the logits of all never exist at once."""
        most = chunk_rows(self._backbone.architecture.vocab_size, torch.float32)
        found: dict[str, list[Callable[[], list[TokenLogprob]]]] = {}
        for end, rows in [(end, rows) for end, rows in zip(ends, requests, strict=True) if rows.targets]:
            handle = self._handles[rows.request]
            first = end - len(rows.tokens) + rows.scored_row - rows.start
            for start in range(0, len(rows.targets), most):
                targets = rows.targets[start : start + most]
                some = slice(first + start, first + start + len(targets))
                scores = logits(self._backbone, hidden[some], [(len(targets), self._bypasses(handle.version))])
                k = min(handle.params.prompt_logprobs or 0, handle.vocab_size)
                found.setdefault(rows.request, []).append(_score(scores, targets, k, readout))
        return found

    @property
    def _backbone(self) -> Backbone:
        return self._pages.backbone


class RequestsResult:
    """What came of requests' rows; to be asked when the step's numbers have been read."""

    def __init__(
        self,
        tokens: Callable[[], dict[str, TokenLogprob]],
        prompts: Mapping[str, Sequence[Callable[[], list[TokenLogprob]]]],
        matchers: Mapping[str, Matcher],
        embeddings: Mapping[str, Pending],
    ) -> None:
        self._tokens, self._prompts, self._matchers = tokens, prompts, matchers
        self._embeddings = embeddings

    def tokens(self) -> dict[str, TokenLogprob]:
        """Of those that sampled; the tokens count as used from now on. To be asked once."""
        return self._tokens()

    def ended(self) -> tuple[str, ...]:
        """Of those that sampled, whose grammar lets nothing follow; after `tokens`."""
        return tuple([request for request, matcher in self._matchers.items() if matcher.has_ended])

    def refused(self) -> dict[str, str]:
        """Those for which no token could be chosen, with the reason."""
        return {
            request: f"{CANNOT_FOLLOW}{matcher.error}"
            for request, matcher in self._matchers.items()
            if matcher.error is not None
        }

    def embeddings(self) -> dict[str, tuple[float, ...]]:
        """Of those that ask for them."""
        return {request: tuple(pending.floats()) for request, pending in self._embeddings.items()}

    def prompts(self) -> dict[str, tuple[TokenLogprob, ...]]:
        """Of those whose prompts were scored."""
        return {request: tuple(one for chunk in chunks for one in chunk()) for request, chunks in self._prompts.items()}


def _score(scores: Tensor, targets: Sequence[int], k: int, readout: Readout) -> Callable[[], list[TokenLogprob]]:
    """Log-probabilities and ranks of a token in each row of scores [n, vocab_size], and the k likeliest."""
    logprobs = scores.float().log_softmax(-1)
    tokens = on_device(targets, scores.device)
    own = logprobs.gather(1, tokens[:, None])
    values, places = logprobs.topk(k)
    read = _Lines(readout, tokens, own[:, 0], places, values)
    ranks = readout.add((logprobs >= own).sum(-1))
    return lambda: [
        structs.replace(line, rank=rank)
        for line, rank in zip(read.lines([k] * len(targets)), ranks.ints(), strict=True)
    ]


class _Lines:
    """Tokens [n] with their logprobs [n] (or [0]: none), and the likeliest [n, k] with theirs, of some rows."""

    def __init__(
        self, readout: Readout, tokens: Tensor, logprobs: Tensor, top_tokens: Tensor, top_logprobs: Tensor
    ) -> None:
        self._tokens, self._logprobs = readout.add(tokens), readout.add(logprobs)
        self._top_tokens, self._top_logprobs = readout.add(top_tokens), readout.add(top_logprobs)

    def lines(self, numbers: Sequence[int]) -> list[TokenLogprob]:
        """What was read; numbers: how many of the likeliest each row asked for."""
        tokens = self._tokens.ints()
        logprobs = self._logprobs.floats() or [nan] * len(tokens)
        if not any(numbers):
            return [TokenLogprob(token=token, logprob=logprob) for token, logprob in zip(tokens, logprobs, strict=True)]
        likeliest = list(zip(self._top_tokens.ints(), self._top_logprobs.floats(), strict=True))
        k = len(likeliest) // max(1, len(tokens))
        return [
            TokenLogprob(token=token, logprob=logprob, top=tuple(likeliest[row * k : row * k + min(number, k)]))
            for row, (token, logprob, number) in enumerate(zip(tokens, logprobs, numbers, strict=True))
        ]
