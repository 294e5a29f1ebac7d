"""A modelled device that knows what the tensors would hold, and holds the engine to the protocol.

Keys and values are a number for each slot of a page, made of the adapter version and all tokens up
to there; an adapter is the list of the optimizer steps that made it, each as the sequences that it
learned from. So whatever the engine gets wrong (a page of another request, a pack that counts
twice, a step that is lost) is seen where it happens.
"""

import json
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from dataclasses import replace as replace_fields
from functools import singledispatchmethod
from pathlib import Path
from typing import Any
from zlib import crc32

from msgspec.structs import replace

from coserve.devices.base import CommandCount
from coserve.devices.messages.commands import (
    CloseRequest,
    Command,
    CountCommands,
    DropVersion,
    OpenRequest,
    OpenVersion,
    Reply,
    SaveAdapter,
)
from coserve.devices.messages.jobs import (
    OPTIMIZER_FILE,
    BeginPack,
    CloseTrainer,
    DropCheckpoint,
    DropPack,
    DropTrainer,
    OpenTrainer,
    PlaceOptimizer,
    PublishVersion,
    TakeCheckpoint,
    TrainerOpened,
    WriteCheckpoint,
)
from coserve.devices.messages.pages import (
    MovePack,
    MovePages,
    SwapIn,
    SwapInTensors,
    SwapOut,
    SwapOutTensors,
)
from coserve.devices.messages.steps import RequestRows, StepBatch, StepResult, Update
from coserve.memory.pages.allocator import PageAllocator
from coserve.memory.pages.pack_pages import PackPages
from coserve.simulate.modelled_device import ModelledDevice
from coserve.tuning.cursor import Cursor

_STATE_FILE = "ledger.json"

# Of a pack: its first row among all that the job ever trains on, and its sequences of token ids.
Learned = tuple[int, tuple[tuple[int, ...], ...]]


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """What has become of an adapter: where it began, and the packs of each optimizer step since.
    fields: PEFT's."""

    start: str
    fields: Mapping[str, Any]
    steps: tuple[tuple[Learned, ...], ...] = ()


class Disk:
    """What was written: outlives devices. The files hold the numbers of the adapters here."""

    def __init__(self) -> None:
        self._adapters: list[Adapter] = []

    def write(self, adapter: Adapter, directory: Path, *, with_optimizer: bool) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "adapter_config.json").write_text(json.dumps(adapter.fields))
        (directory / _STATE_FILE).write_text(json.dumps(len(self._adapters)))
        if with_optimizer:
            (directory / OPTIMIZER_FILE).touch()
        self._adapters.append(adapter)

    def read(self, directory: str) -> Adapter:
        return self._adapters[int((Path(directory) / _STATE_FILE).read_text())]


@dataclass(kw_only=True)
class _Table:
    """An open request. tokens: of its prompt, and all that it will ever choose. keys: one for each
    of its tokens, of what K and V are made of. num_chosen: tokens that the device counts as used,
    if it counts them.
    """

    opened: OpenRequest
    tokens: list[int]
    pages: list[int]
    keys: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.counts_tokens, self.num_chosen = self.opened.params.penalizes, len(self.opened.output)

    def key(self, position: int) -> int:
        keys = self.keys
        while len(keys) <= position:
            keys.append(
                hash((keys[-1] if keys else hash(self.opened.version), self.tokens[len(keys)]))
            )
        return keys[position]


class _PackMemory(PageAllocator):
    """The pages that one pack still holds."""

    def __init__(self, runs: Sequence[range]) -> None:
        self.held = {page for run in runs for page in run}

    def give_back_runs(self, owner: str, runs: Sequence[range]) -> None:
        gone = {page for run in runs for page in run}
        assert gone <= self.held, f"pages {sorted(gone - self.held)} are not the pack's any more"
        self.held -= gone


@dataclass(kw_only=True)
class _Pack:
    """number: of all that were ever begun. num_moves: steps that have written to its pages.
    is_lost: something else lies in them; that is well if it never runs again, or comes back from
    the host first.
    """

    number: int
    command: BeginPack
    cursor: Cursor
    memory: _PackMemory
    pages: PackPages
    num_moves: int = 0
    is_lost: bool = False

    def contents(self) -> list[int]:
        """What lies in each of the pages that it still holds."""
        return [hash((self.number, self.num_moves, place)) for place in range(self.pages.num_pages)]

    @property
    def learned(self) -> Learned:
        return self.command.first_row, tuple(tokens for tokens, _ in self.command.sequences)


@dataclass(kw_only=True)
class _Trainer:
    """gathered: packs whose gradients are in. last: the last pack that was done, which may still be
    dropped."""

    adapter: Adapter
    costs: TrainerOpened
    is_open: bool = True
    optimizer_away: bool = False
    run: range = range(0)  # where the moments lie, if not beside the pool
    pack: _Pack | None = None
    last: _Pack | None = None
    gathered: list[_Pack] = field(default_factory=list)

    def join_last(self) -> None:
        if self.last is not None and not self.last.command.evaluate:
            self.gathered.append(self.last)
        self.last = None

    def drop_pack(self) -> None:
        if self.pack is not None:
            self.pack.pages.release()
        self.pack = self.last = None


class LedgerDevice:
    """See the module, and `coserve.devices.base.Device`."""

    def __init__(
        self, inner: ModelledDevice, disk: Disk, prompts: Mapping[str, Sequence[int]]
    ) -> None:
        """prompts: of all requests that were ever added, by name."""
        self.inner, self.info, self.clock, self._disk, self._prompts = (
            inner,
            inner.info,
            inner.clock,
            disk,
            prompts,
        )
        self.requests: dict[str, _Table] = {}
        self.versions: dict[str, Adapter] = {}
        self.trainers: dict[str, _Trainer] = {}
        self.copies: dict[str, tuple[Adapter, bool]] = {}
        self._slots: dict[int, list[int]] = {}  # what lies in each page
        self._host: dict[int, list[int]] = {}  # likewise, of the host
        self._away: set[str] = set()  # versions on the host
        self._num_packs = 0
        self._count = CommandCount()
        self.num_packs_moved = self.num_pages_moved = self.num_optimizers_back = (
            self.num_versions_back
        ) = 0
        self.num_optimizers_placed = 0
        self._result: StepResult | None = None

    def execute(self, command: Command) -> Reply:
        if isinstance(command, CountCommands):
            return self._count.reply()
        # Files are written by the ledger: the modelled device has nothing to write.
        try:
            reply = (
                None
                if isinstance(command, SaveAdapter | WriteCheckpoint)
                else self.inner.execute(command)
            )
            self._book(command)
        except Exception:
            self._count.add(command)
            raise
        self._count.add(command)
        if isinstance(command, OpenTrainer):
            assert isinstance(reply, TrainerOpened)
            num_moment_pages = -(-reply.optimizer_bytes // self.info.page_bytes)
            if crc32(command.job.encode()) % 2 and 4 * num_moment_pages <= self.info.num_pages:
                reply = replace(
                    reply, moments_need_pages=True
                )  # as if there were no memory beside the pool
            self.trainers[command.job] = _Trainer(adapter=self._beginning(command), costs=reply)
        return reply

    def submit(self, batch: StepBatch) -> None:
        """Done at once, as on a CPU."""
        for command in batch.commands:
            self.execute(command)
        for rows in batch.requests:
            self.requests[rows.request].pages += rows.new_pages
        self.inner.submit(replace(batch, commands=()))
        self._result = self.inner.collect()
        self._run_packs(batch, self._result)
        for update in batch.updates:
            self._update(update)
        self._run_requests(batch)

    def collect(self) -> StepResult:
        result, self._result = self._result, None
        assert result is not None, "no step was submitted"
        return result

    def close(self) -> None:
        self.inner.close()

    # -- steps ----------------------------------------------------------------------

    def _run_packs(self, batch: StepBatch, result: StepResult) -> None:
        for piece in batch.losses:
            cursor = self._pack(piece.job).cursor
            start, end = cursor.next_loss(piece.num_rows)
            cursor.advance_loss(end - start)
        for part in batch.tasklets:
            cursor = self._pack(part.job).cursor
            for _ in range(result.num_tasklets[part.job]):
                start, end = cursor.next_backward(part.num_rows)
                cursor.advance_backward(end - start)
        for window in batch.windows:
            self._pack(window.job).cursor.advance_forward(window.num_rows)
        for job in {
            piece.job
            for pieces in (batch.losses, batch.tasklets, batch.windows)
            for piece in pieces
        }:
            pack, trainer = self._pack(job), self.trainers[job]
            pack.pages.follow(pack.cursor)
            pack.num_moves += 1
            self._fill(pack)
            if pack.cursor.done:
                trainer.pack, trainer.last = None, pack

    def _update(self, update: Update) -> None:
        trainer = self.trainers[update.job]
        trainer.join_last()
        packs, trainer.gathered = trainer.gathered, []
        assert trainer.is_open and trainer.pack is None and packs and not trainer.optimizer_away
        assert update.num_trained == sum(pack.cursor.num_trained for pack in packs)
        step = tuple(sorted(pack.learned for pack in packs))
        self._check_moments(update.job)
        assert trainer.run or not trainer.costs.moments_need_pages, (
            "a step without pages for its moments"
        )
        trainer.adapter = replace_fields(trainer.adapter, steps=(*trainer.adapter.steps, step))
        self._fill_moments(update.job)

    def _run_requests(self, batch: StepBatch) -> None:
        """All rows write their keys and values; then each must find those of all tokens before
        it."""
        assert self._away.isdisjoint(
            {self.requests[rows.request].opened.version for rows in batch.requests}
        )
        for rows in batch.requests:
            self._write(self.requests[rows.request], rows)
        for rows in batch.requests:
            table = self.requests[rows.request]
            self._check_slots(table, rows.start + len(rows.tokens))
            if rows.samples:
                assert not table.counts_tokens or rows.place == table.num_chosen, (
                    "other tokens count as used"
                )
                table.num_chosen += 1
            assert rows.targets == tuple(table.tokens[rows.scored_row + 1 :][: len(rows.targets)])

    def _write(self, table: _Table, rows: RequestRows) -> None:
        end, size = rows.start + len(rows.tokens), self.info.block_tokens
        assert list(rows.tokens) == table.tokens[rows.start : end], "rows of other tokens"
        self._lose_packs(set(table.pages[rows.start // size : -(-end // size)]))
        for position in range(rows.start, end):
            page = table.pages[position // size]
            slots = self._slots.setdefault(page, [0] * size)
            slots[position % size] = table.key(position)

    def _check_slots(self, table: _Table, num_tokens: int) -> None:
        """Of each page the last slot: it is made of all tokens before it."""
        size = self.info.block_tokens
        for start in range(0, num_tokens, size):
            position, slots = (
                min(start + size, num_tokens) - 1,
                self._slots.get(table.pages[start // size]),
            )
            assert slots is not None and slots[position % size] == table.key(position), (
                "K and V of something else"
            )

    def _pack(self, job: str) -> _Pack:
        trainer = self.trainers[job]
        assert trainer.is_open and trainer.pack is not None, f"job {job} has no pack"
        assert not trainer.pack.is_lost, (
            f"something else lies in the pages of the pack of job {job}"
        )
        return trainer.pack

    def _fill(self, pack: _Pack) -> None:
        """Its pages hold what it has saved so far."""
        for page, content in zip(pack.pages.pages, pack.contents(), strict=True):
            self._slots[page] = [content] * self.info.block_tokens

    def _moments(self, job: str) -> list[int]:
        """What lies in each page of a job's moments; before the first step, nothing."""
        trainer = self.trainers[job]
        is_there = trainer.is_open and not trainer.optimizer_away and trainer.adapter.steps
        return (
            [hash((job, trainer.adapter.steps, place)) for place in range(len(trainer.run))]
            if is_there
            else []
        )

    def _fill_moments(self, job: str) -> None:
        self._lose_packs(set(self.trainers[job].run))
        for page, content in zip(self.trainers[job].run, self._moments(job), strict=False):
            self._slots[page] = [content] * self.info.block_tokens

    def _check_moments(self, job: str) -> None:
        for page, content in zip(self.trainers[job].run, self._moments(job), strict=False):
            assert self._slots[page] == [content] * self.info.block_tokens, (
                f"something else than the moments of {job}"
            )

    def _lose_packs(self, pages: set[int]) -> None:
        """Something else comes into these pages."""
        for trainer in self.trainers.values():
            if trainer.pack is not None and not pages.isdisjoint(trainer.pack.memory.held):
                trainer.pack.is_lost = True

    # -- commands -------------------------------------------------------------------

    @singledispatchmethod
    def _book(self, command: Command) -> None:
        """What the modelled device has done, or cannot do."""
        assert isinstance(command, OpenTrainer), command

    @_book.register
    def _(self, command: OpenRequest) -> None:
        assert command.request not in self.requests, "it is open already"
        assert not command.version or command.version in self.versions
        name = command.request.rpartition("/")[0]
        prompt = self._prompts[name]
        chosen = [
            (command.seed + i) % self.info.vocab_size for i in range(command.params.max_tokens)
        ]
        table = _Table(opened=command, tokens=[*prompt, *chosen], pages=list(command.pages))
        self.requests[command.request] = table
        if command.params.penalizes:
            assert list(command.prompt) == list(prompt)
            assert list(command.output) == chosen[: len(command.output)]
        self._check_slots(table, len(command.pages) * self.info.block_tokens)

    @_book.register
    def _(self, command: CloseRequest) -> None:
        self.requests.pop(command.request, None)

    @_book.register
    def _(self, command: SwapOut) -> None:
        for page, slot in zip(command.pages, command.slots, strict=True):
            assert 0 <= slot < self.info.num_host_pages
            self._host[slot] = list(self._slots[page])

    @_book.register
    def _(self, command: SwapIn) -> None:
        self._lose_packs(set(command.pages))
        for page, slot in zip(command.pages, command.slots, strict=True):
            self._slots[page] = list(self._host[slot])

    @_book.register
    def _(self, command: MovePages) -> None:
        targets = dict(zip(command.pages, command.targets, strict=True))
        assert len({*command.pages, *command.targets}) == 2 * len(targets), (
            "a page is in two places"
        )
        self._lose_packs(set(command.targets))
        for page, target in targets.items():
            self._slots[target] = list(self._slots.get(page, [0] * self.info.block_tokens))
        for table in self.requests.values():
            table.pages = [targets.get(page, page) for page in table.pages]
        self.num_pages_moved += len(targets)

    @_book.register
    def _(self, command: SwapOutTensors) -> None:
        assert (
            len({*command.slots}) == len(command.slots)
            and max(command.slots) < self.info.num_host_pages
        )
        content = self._content(command)
        if content is None:
            return
        if command.job:
            self._check_moments(command.job)
            self.trainers[command.job].optimizer_away, self.trainers[command.job].run = (
                True,
                range(0),
            )
        else:
            self._away.add(command.version)
        for place, slot in enumerate(command.slots):
            self._host[slot] = [hash((content, place))]

    @_book.register
    def _(self, command: SwapInTensors) -> None:
        trainer = self.trainers.get(command.job)
        if not (command.version in self._away or (trainer is not None and trainer.optimizer_away)):
            return  # it is back already
        content = self._content(command, is_away=True)
        assert [self._host[slot] for slot in command.slots] == [
            [hash((content, place))] for place in range(len(command.slots))
        ], "something else lies in its slots"
        if trainer is not None:
            trainer.optimizer_away = False
            self._fill_moments(command.job)
            self.num_optimizers_back += 1
        else:
            self._away.discard(command.version)
            self.num_versions_back += 1

    @_book.register
    def _(self, command: PlaceOptimizer) -> None:
        trainer = self.trainers.get(command.job)
        run = range(command.first_page, command.first_page + command.num_pages)
        if trainer is None or not trainer.is_open or trainer.run == run:
            return
        self._check_moments(command.job)
        trainer.run = run
        self._fill_moments(command.job)
        self.num_optimizers_placed += 1

    def _content(
        self, command: SwapOutTensors | SwapInTensors, *, is_away: bool = False
    ) -> Hashable:
        """Of tensors that are there, or on the host; None if they are not."""
        if command.job:
            trainer = self.trainers.get(command.job)
            if trainer is None or not trainer.is_open or trainer.optimizer_away != is_away:
                return None
            assert trainer.adapter.steps, "there are no moments before the first step"
            return "optimizer", command.job, trainer.adapter.steps
        if command.version not in self.versions or (command.version in self._away) != is_away:
            return None
        return "version", command.version

    @_book.register
    def _(self, command: OpenVersion) -> None:
        assert command.version not in self.versions, "a key is never given twice"
        self.versions[command.version] = self._disk.read(command.directory)

    @_book.register
    def _(self, command: SaveAdapter) -> None:
        assert command.version not in self._away
        self._disk.write(
            self.versions[command.version], Path(command.directory), with_optimizer=False
        )

    @_book.register
    def _(self, command: DropVersion) -> None:
        assert all(table.opened.version != command.version for table in self.requests.values()), (
            "it is being read"
        )
        self.versions.pop(command.version, None)
        self._away.discard(command.version)

    @_book.register
    def _(self, command: CloseTrainer) -> None:
        trainer = self.trainers[command.job]
        trainer.drop_pack()
        trainer.gathered, trainer.is_open, trainer.run = [], False, range(0)

    @_book.register
    def _(self, command: DropTrainer) -> None:
        self.trainers.pop(command.job, None)

    @_book.register
    def _(self, command: BeginPack) -> None:
        trainer = self.trainers[command.job]
        assert trainer.is_open
        trainer.join_last()
        runs = [range(start, start + number) for start, number in command.runs]
        memory = _PackMemory(runs)
        assert len(memory.held) == sum(map(len, runs))
        trainer.pack = None
        self._lose_packs(memory.held)
        num_parts = 0 if command.evaluate else trainer.costs.trained_parts
        cursor = Cursor(
            num_rows=sum(len(tokens) for tokens, _ in command.sequences),
            num_trained=sum(sum(trained[1:]) for _, trained in command.sequences),
            num_parts=num_parts,
        )
        pages = PackPages(memory, runs, num_parts)
        self._num_packs += 1
        trainer.pack = _Pack(
            number=self._num_packs, command=command, cursor=cursor, memory=memory, pages=pages
        )
        self._fill(trainer.pack)

    @_book.register
    def _(self, command: MovePack) -> None:
        trainer = self.trainers[command.job]
        pack = trainer.pack
        assert trainer.is_open and pack is not None, f"job {command.job} has no pack"
        runs = iter([range(start, start + number) for start, number in command.runs])
        groups = pack.pages.group_pages
        new = PackPages(
            pack.memory,
            [None if size is None else next(runs) for size in groups],
            pack.cursor.num_parts,
        )
        assert next(runs, None) is None and new.group_pages == groups
        for page, content in zip(new.pages, pack.contents(), strict=True):
            assert self._slots[page] == [content] * self.info.block_tokens, (
                "another state of the pack, or none"
            )
        pack.memory.held = set(new.pages)
        pack.pages, pack.is_lost = new, False
        self.num_packs_moved += 1

    @_book.register
    def _(self, command: DropPack) -> None:
        self.trainers[command.job].drop_pack()

    @_book.register
    def _(self, command: PublishVersion) -> None:
        assert command.version not in self.versions, "a key is never given twice"
        self.versions[command.version] = self.trainers[command.job].adapter

    @_book.register
    def _(self, command: TakeCheckpoint) -> None:
        assert command.checkpoint not in self.copies
        trainer = self.trainers[command.job]
        self._check_moments(command.job)
        self.copies[command.checkpoint] = trainer.adapter, trainer.is_open

    @_book.register
    def _(self, command: WriteCheckpoint) -> None:
        adapter, with_optimizer = self.copies[command.checkpoint]
        self._disk.write(adapter, Path(command.directory), with_optimizer=with_optimizer)

    @_book.register
    def _(self, command: DropCheckpoint) -> None:
        self.copies.pop(command.checkpoint, None)

    def _beginning(self, command: OpenTrainer) -> Adapter:
        assert command.job not in self.trainers, "it is open already"
        if command.checkpoint is not None:
            assert (Path(command.checkpoint) / OPTIMIZER_FILE).is_file()
            return self._disk.read(command.checkpoint)
        if command.version is not None:
            assert command.version not in self._away
            return self.versions[command.version]
        assert command.adapter is not None
        return Adapter(start=f"fresh {command.config.seed}", fields=command.adapter)
