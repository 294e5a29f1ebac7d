"""Requests on a torch device: their pages, the rows that they run, the tokens that are chosen for
them.

Of several ranks that hold a model together, rank 0 alone chooses tokens and scores prompts. The
others run the same rows, keep no tokens, and get what was chosen with the rows of the next step.
"""

from array import array
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from itertools import accumulate, groupby
from math import nan

import torch
from torch import Tensor
from torch.profiler import record_function

from coserve.adapters.base import Adapter
from coserve.devices.grammars.device_grammars import DeviceGrammars
from coserve.devices.grammars.matching import Matcher
from coserve.devices.messages.commands import OpenRequest
from coserve.devices.messages.steps import RequestRows, TokenLogprob
from coserve.devices.torch.readout import Pending, Readout
from coserve.devices.torch.requests_result import RequestsResult, TokenReadout, score_rows
from coserve.devices.torch.sampling import SampledParams, SamplingRow, TokenCounts, sample
from coserve.kernels.attention import PageTables
from coserve.kernels.transfer import int_tensor, on_device
from coserve.memory.tensors.paged_kv import PagedKv
from coserve.models.backbone import Backbone
from coserve.models.batch import RowSpan
from coserve.models.bypasses import Bypasses
from coserve.models.head import final_states, likeliest_on_rank_0, logits_on_rank_0
from coserve.tuning.objective import chunk_rows

# The name under which PyTorch's profiler shows how tokens are chosen.
SAMPLING = "sampling"


class RequestHandle:
    """A request as a device keeps it."""

    def __init__(
        self,
        command: OpenRequest,
        grammars: DeviceGrammars,
        vocab_size: int,
        *,
        samples: bool = True,
    ) -> None:
        """Make the handle of an opened request.

        Args:
            command: The command that opens it.
            grammars: The device's grammars.
            vocab_size: Number of tokens of its model.
            samples: Whether this rank chooses its tokens, and so keeps what they depend on.
        """
        self.vocab_size = vocab_size
        """Number of tokens of its model."""
        self.params, self.seed, self.version = command.params, command.seed, command.version
        self.pages = array("q", command.pages)
        """Page table."""
        self.counts: TokenCounts | None = None
        """Used tokens, if its params penalize them."""
        self.matcher: Matcher | None = None
        """State in its grammar, if it has one."""
        self.constant_row: SamplingRow | None = None
        """How each of its tokens is chosen, if that does not depend on the tokens before."""
        if not samples:
            return
        if command.params.penalizes:
            self.counts = TokenCounts(command.prompt)
            # Not only the prompt: a request that was preempted or replayed has an output already.
            for token in command.output:
                self.counts.add(token)
        if (grammar := command.params.grammar) is not None:
            self.matcher = grammars.matcher(grammar, command.output, vocab_size)
        # Such a row is the same in every step, so it is made once.
        if not self.follows and not command.params.draws:
            self.constant_row = SamplingRow(params=self.params, seed=self.seed)

    @property
    def follows(self) -> bool:
        """Return whether chosen tokens change how the next ones are chosen."""
        return self.counts is not None or self.matcher is not None

    def sampling_row(self, rows: RequestRows) -> SamplingRow:
        """Return how the token after these rows is to be chosen."""
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
        """Note a chosen token."""
        if self.counts is not None:
            self.counts.add(token)
        if self.matcher is not None:
            self.matcher.accept(token)


# The last row that a request runs in a step, counted among the rows of all, and what the step says
# of it.
_LastRow = tuple[int, RequestRows]


class _StepRequests:
    """Requests that have rows in a step, in this order, with what is the same in every step of
    theirs.
    """

    def __init__(self, ids: Sequence[str], handles: Sequence[RequestHandle]) -> None:
        self.ids, self.handles = ids, handles
        self.by_version = [
            (key, len(list(own))) for key, own in groupby([handle.version for handle in handles])
        ]

    @cached_property
    def tables(self) -> PageTables:
        """Return their page tables, which change now and then."""
        return PageTables([handle.pages for handle in self.handles])


class _Samplers(_StepRequests):
    """Requests that sample in a step."""

    def __init__(
        self,
        ids: Sequence[str],
        handles: Sequence[RequestHandle],
        device: torch.device,
        vocab_size: int,
    ) -> None:
        """Note the requests.

        Args:
            ids: Their ids.
            handles: Their handles, in the same order.
            device: Device of the model.
            vocab_size: Number of the backbone's tokens.
        """
        super().__init__(ids, handles)
        self._device, self._vocab_size = device, vocab_size
        self.followed = [(place, handle) for place, handle in enumerate(handles) if handle.follows]
        self.embedded = [place for place, handle in enumerate(handles) if handle.params.embeds]
        # If all requests choose alike in every step, their rows need not be collected again.
        rows = [handle.constant_row for handle in handles]
        self._constant = [row for row in rows if row is not None] if None not in rows else None

    @cached_property
    def params(self) -> SampledParams:
        """Return how their tokens are chosen, for the rank that chooses them."""
        sizes = [handle.vocab_size for handle in self.handles]
        own = sizes if any(size != self._vocab_size for size in sizes) else ()
        return SampledParams([handle.params for handle in self.handles], self._device, own)

    def sampling_rows(self, sampled: Sequence[RequestRows]) -> Sequence[SamplingRow]:
        """Return how the tokens after these rows are to be chosen."""
        if self._constant is not None and not any(rows.forbidden for rows in sampled):
            return self._constant
        return [
            handle.sampling_row(rows) for handle, rows in zip(self.handles, sampled, strict=True)
        ]

    @cached_property
    def matchers(self) -> Mapping[str, Matcher]:
        """Return the matchers of requests that have a grammar."""
        pairs = zip(self.ids, self.handles, strict=True)
        return {request: handle.matcher for request, handle in pairs if handle.matcher is not None}


class TorchRequests:
    """All requests of a device, by id."""

    def __init__(self, pages: PagedKv, versions: Mapping[str, Adapter]) -> None:
        self._pages, self._versions = pages, versions
        self._handles: dict[str, RequestHandle] = {}
        # Those of the last step; the same requests decode step after step, until one comes or goes.
        self._rows: _StepRequests | None = None
        self._samplers: dict[
            bool, _Samplers
        ] = {}  # by whether the likeliest token is all that is asked for
        group = pages.backbone.group
        self._is_divided, self._samples = group.size > 1, group.rank == 0
        self.grammars = DeviceGrammars(compiles=self._samples)

    def open(self, command: OpenRequest) -> None:
        """Carry out `OpenRequest`."""
        architecture = self._backbone.architecture
        if command.version:
            architecture = self._versions[command.version].architecture
        self._handles[command.request] = RequestHandle(
            command, self.grammars, architecture.vocab_size, samples=self._samples
        )
        # Kept lists are compared by ids alone, and an id may be opened again with another handle.
        self._forget()

    def close(self, request: str) -> None:
        self._handles.pop(request, None)
        self._forget()

    def _forget(self) -> None:
        self._rows = None
        self._samplers.clear()

    def _forget_tables(self) -> None:
        if self._rows is not None:
            vars(self._rows).pop("tables", None)

    def extend_tables(self, requests: Sequence[RequestRows]) -> None:
        """Add new pages to their requests' page tables."""
        for rows in requests:
            if rows.new_pages:
                self._handles[rows.request].pages.extend(rows.new_pages)
                self._forget_tables()

    def move_pages(self, targets: Mapping[int, int]) -> None:
        """Note that pages are others now."""
        for handle in self._handles.values():
            handle.pages = array("q", [targets.get(page, page) for page in handle.pages])
        self._forget_tables()

    def spans(self, requests: Sequence[RequestRows]) -> list[RowSpan]:
        """Return the rows as spans of a forward batch, one for each adapter."""
        if not requests:
            return []
        ids = [rows.request for rows in requests]
        # Decoding steps mostly have the requests of the step before.
        if self._rows is None or ids != self._rows.ids:
            self._rows = _StepRequests(ids, [self._handles[request] for request in ids])
        return self._pages.spans(
            self._rows.tables,
            [rows.start for rows in requests],
            [rows.tokens for rows in requests],
            [(number, self._bypasses(version)) for version, number in self._rows.by_version],
        )

    def finish(
        self, hidden: Tensor, requests: Sequence[RequestRows], readout: Readout
    ) -> RequestsResult:
        """Choose tokens and score prompts after the requests' rows, which are the first of hidden
        [n, hidden_size].
        """
        # Where each request's rows end among all; its last row gives the next token.
        ends = list(accumulate([len(rows.tokens) for rows in requests]))
        sampled = [
            (end - 1, rows) for end, rows in zip(ends, requests, strict=True) if rows.samples
        ]
        likeliest, others = self._by_choice(sampled)
        takers = self._those_of(likeliest, are_takers=True)
        samplers = self._those_of(others, are_takers=False)
        return RequestsResult(
            (
                self._take_likeliest(hidden, likeliest, takers, readout),
                self._sample(hidden, others, samplers, readout),
            ),
            self._score_prompts(hidden, ends, requests, readout),
            samplers.matchers,
            self._embeddings(hidden, likeliest, takers, readout)
            | self._embeddings(hidden, others, samplers, readout),
        )

    def _by_choice(
        self, sampled: Sequence[_LastRow]
    ) -> tuple[Sequence[_LastRow], Sequence[_LastRow]]:
        """Return the rows of which ranks exchange their likeliest tokens, and those whose whole
        logits rank 0 gets.

        All rows are of one kind: the head's weights are read once, which takes longer than sending
        logits.
        """
        # One rank has all logits anyway: the likeliest token costs nothing more than the argmax.
        if not self._is_divided:
            return (), sampled
        takes = [
            self._handles[rows.request].params.takes_likeliest and not rows.forbidden
            for _, rows in sampled
        ]
        return (sampled, ()) if all(takes) else ((), sampled)

    def _those_of(self, sampled: Sequence[_LastRow], *, are_takers: bool) -> _Samplers:
        """Return the requests of these rows: the object of the step before, unless a request has
        come or gone.
        """
        ids = [rows.request for _, rows in sampled]
        samplers = self._samplers.get(are_takers)
        if samplers is None or ids != samplers.ids:
            handles = [self._handles[request] for request in ids]
            vocab_size = self._backbone.architecture.vocab_size
            samplers = self._samplers[are_takers] = _Samplers(
                ids, handles, self._backbone.device, vocab_size
            )
        return samplers

    def _bypasses(self, version: str) -> Bypasses | None:
        return self._versions[version].bypasses() if version else None

    def _last_rows(
        self, hidden: Tensor, sampled: Sequence[_LastRow], samplers: _Samplers
    ) -> tuple[Tensor, list[tuple[int, Bypasses | None]]]:
        """Return the rows after which tokens are chosen, and their adapters."""
        rows = hidden[on_device(int_tensor([row for row, _ in sampled]), hidden.device)]
        return rows, [
            (num_rows, self._bypasses(version)) for version, num_rows in samplers.by_version
        ]

    def _take_likeliest(
        self, hidden: Tensor, sampled: Sequence[_LastRow], samplers: _Samplers, readout: Readout
    ) -> Callable[[], dict[str, TokenLogprob]]:
        """Choose tokens of rows that ask for the likeliest and nothing else."""
        if not sampled:
            return dict
        tokens = likeliest_on_rank_0(self._backbone, *self._last_rows(hidden, sampled, samplers))
        if tokens is None:
            return dict
        read = readout.add(tokens)
        return lambda: {
            request: TokenLogprob(token=token, logprob=nan)
            for request, token in zip(samplers.ids, read.ints(), strict=True)
        }

    def _sample(
        self, hidden: Tensor, sampled: Sequence[_LastRow], samplers: _Samplers, readout: Readout
    ) -> Callable[[], dict[str, TokenLogprob]]:
        """Choose tokens of any rows."""
        if not sampled:
            return dict
        scores = logits_on_rank_0(self._backbone, *self._last_rows(hidden, sampled, samplers))
        if scores is None:
            return dict
        points = samplers.sampling_rows([rows for _, rows in sampled])
        with record_function(SAMPLING):
            chosen = sample(scores, points, self._backbone.backend, samplers.params)
        read = TokenReadout(
            readout, chosen.tokens, chosen.logprobs, chosen.top_tokens, chosen.top_logprobs
        )

        def result() -> dict[str, TokenLogprob]:
            # Runs when the step is read: only then are tokens on the host, for penalties and
            # grammars.
            lines = read.lines(samplers.params.num_top)
            for place, handle in samplers.followed:
                handle.accept(lines[place].token)
            return dict(zip(samplers.ids, lines, strict=True))

        return result

    def _embeddings(
        self, hidden: Tensor, sampled: Sequence[_LastRow], samplers: _Samplers, readout: Readout
    ) -> dict[str, Pending]:
        """Return the states of requests that ask for them; on rank 0."""
        embeddings: dict[str, Pending] = {}
        for place in samplers.embedded:
            # On all ranks, since they compute it together; rank 0 alone keeps it.
            states = final_states(self._backbone, hidden[sampled[place][0], None])
            if self._samples:
                embeddings[samplers.ids[place]] = readout.add(states)
        return embeddings

    def _score_prompts(
        self, hidden: Tensor, ends: Sequence[int], requests: Sequence[RequestRows], readout: Readout
    ) -> dict[str, list[Callable[[], list[TokenLogprob]]]]:
        """Return the log-probabilities of prompts' tokens, on rank 0.

        A chunk of rows at a time: the logits of all never exist at once.
        """
        most = chunk_rows(self._backbone.architecture.vocab_size, torch.float32)
        scored: dict[str, list[Callable[[], list[TokenLogprob]]]] = {}
        for end, rows in [
            (end, rows) for end, rows in zip(ends, requests, strict=True) if rows.targets
        ]:
            handle = self._handles[rows.request]
            # From a place in the prompt to the row of the batch that holds it.
            first = end - len(rows.tokens) + rows.scored_row - rows.start
            for start in range(0, len(rows.targets), most):
                targets = rows.targets[start : start + most]
                some = slice(first + start, first + start + len(targets))
                users = [(len(targets), self._bypasses(handle.version))]
                scores = logits_on_rank_0(self._backbone, hidden[some], users)
                if scores is None:
                    continue
                k = min(handle.params.prompt_logprobs or 0, handle.vocab_size)
                scored.setdefault(rows.request, []).append(score_rows(scores, targets, k, readout))
        return scored

    @property
    def _backbone(self) -> Backbone:
        return self._pages.backbone
