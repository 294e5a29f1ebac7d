"""Replay: a recorded stream as a device, which gives the recorded replies, and has another device
do the same work to compare.

The engine that runs on it must do what the recorded one did: the same commands, the same steps.
Where it does not, `DivergedError` says what was expected.
"""

from collections.abc import Iterator
from math import isfinite, isnan
from typing import Any, NoReturn

from msgspec.structs import asdict, replace

from coserve.devices.base import Clock, CommandCount, Device
from coserve.devices.messages.commands import (
    CloseGrammar,
    CloseRequest,
    Command,
    CountCommands,
    DeviceInfo,
    ImportPages,
    OpenGrammar,
    OpenRequest,
    OpenVersion,
    Reply,
    SetVocabulary,
    VersionOpened,
)
from coserve.devices.messages.jobs import (
    OpenTrainer,
    PublishVersion,
    ReadContributions,
    TrainerOpened,
)
from coserve.devices.messages.steps import PackSums, StepBatch, StepResult
from coserve.devices.process.wire import Call, Done, Raised
from coserve.devices.recording.device import ClockRead, leaves_a_trace, with_trace
from coserve.errors import DataError

# Stands for the directory of any other model than the device's.
_SOME_MODEL = "another"


class DivergedError(Exception):
    """Error for an engine that does something else than in the recording. Not one of coserve's own
    errors: nothing may handle it.
    """


class DamagedRecordingError(Exception):
    """Error for a line of the recording that cannot be read. As with `DivergedError`, nothing in
    the engine may handle it.
    """


class RecordedLines:
    """The lines of a recording, one after the other.

    Raises:
        DamagedRecordingError: At a line that cannot be read.
    """

    def __init__(self, lines: Iterator[Any]) -> None:
        self._lines = lines
        self._ahead: list[Any] = []
        self._damage: DamagedRecordingError | None = None

    def peek(self) -> Any:
        """Return the next line, which stays the next one; None at the end."""
        if self._damage is not None:
            raise self._damage
        if not self._ahead:
            try:
                self._ahead.append(next(self._lines, None))
            except DataError as error:
                self._damage = DamagedRecordingError(str(error))
                raise self._damage from None
        return self._ahead[0]

    def take(self) -> Any:
        """Return the next line; None at the end."""
        line = self.peek()
        self._ahead.clear()
        return line


class EndOfRecordingError(Exception):
    """Error for a recording that ends in the middle of something: its process was killed."""


class ReplayDevice:
    """Device that gives what was recorded; see the module."""

    def __init__(self, info: DeviceInfo, other: Device, lines: RecordedLines) -> None:
        """Begin at the first line.

        Args:
            info: Description of the recorded device.
            other: Device that does the same work.
            lines: Lines of the recording.
        """
        self.info = info
        self._other, self._lines = other, lines
        self.clock: Clock = _ReplayClock(self)
        self.num_steps = 0
        """Steps that were the same so far."""
        self.tokens_equal = True
        """Whether the other device chose the recorded tokens."""
        self.max_loss_difference = 0.0
        """Largest difference of its mean loss of a pack from the recorded one."""
        self.raised: Exception | None = None
        """Error of the last step or command that ended with one."""
        self.stopped: Exception | None = None
        """DivergedError or EndOfRecordingError that has ended the replay."""
        self._runs: StepBatch | None = None
        # How the step that is under way ended when it was recorded.
        self._ended: Done | Raised | None = None
        self._vocabularies = _Vocabularies(info.vocab_size)
        self._count = CommandCount()

    def execute(self, command: Command) -> Reply:
        if isinstance(command, CountCommands):
            return self._count.reply()
        self._count.add(command)
        if isinstance(command, SetVocabulary | OpenGrammar | CloseGrammar | ReadContributions):
            return self._other.execute(command)
        if not leaves_a_trace(command):
            return None
        call = self._next(Call, command)
        recorded = call.command
        if isinstance(recorded, StepBatch) or _without_files(recorded) != _without_files(command):
            self._stop(DivergedError(f"{recorded} was recorded, not {command}"))
        ended = self._end_of(call)
        if isinstance(ended, Raised):
            self.raised = ended.error()
            raise self.raised
        self._check_pages(recorded)
        reply = self._other.execute(recorded if isinstance(command, ImportPages) else command)
        expected = ended.reply
        if isinstance(expected, StepResult) or self._without_sizes(reply) != self._without_sizes(
            expected
        ):
            self._stop(DivergedError(f"{command} was answered by {expected}, now by {reply}"))
        self._vocabularies.note(command, expected)
        return expected

    def submit(self, batch: StepBatch) -> None:
        call = self._next(Call, batch)
        if not isinstance(call.command, StepBatch):
            self._stop(DivergedError(f"{call.command} was recorded, where there is now {batch}"))
        recorded, pages = _taken_apart(call.command)
        if recorded != with_trace(batch):
            self._stop(DivergedError(difference(recorded, batch)))
        for command in batch.commands:
            self._count.add(command)
            self._vocabularies.note(command)
        for command in pages:
            self._check_pages(command)
        batch = _with_pages(batch, pages)
        self.num_steps += 1
        self._ended = self._end_of(call)
        result: StepResult | None = None
        if isinstance(self._ended, Done):
            if not isinstance(self._ended.reply, StepResult):
                self._stop(
                    DivergedError(
                        f"step {batch.step} was recorded with {self._ended.reply} as its result"
                    )
                )
            result = self._ended.reply
            self._check_result(result, batch)
        self._runs = as_it_ran(batch, result, num_units=self._other.info.num_units)
        self._other.submit(self._runs)

    def collect(self) -> StepResult:
        if self.stopped is not None:
            raise self.stopped
        assert self._runs is not None
        own, self._runs = self._other.collect(), None
        if isinstance(self._ended, Raised):
            self.raised = self._ended.error()
            raise self.raised
        assert self._ended is not None and isinstance(self._ended.reply, StepResult)
        result = self._ended.reply
        if result.failure is None:
            self._compare(result, own)
        return result

    def close(self) -> None:
        self._other.close()

    def next_reading(self) -> float:
        """Return the next reading of the recorded clock."""
        now_s = float(self._next(ClockRead, "a look at the clock").now_s)
        if not isfinite(now_s):
            self._stop(DivergedError(f"{now_s} was recorded as a reading of the clock"))
        return now_s

    def _without_sizes(self, reply: Reply) -> object:
        """Return the part of a reply that is compared.

        With other numbers of ranks than in the recording, each rank holds more, or less, than it
        did then.
        """
        if self.info.num_ranks == self._other.info.num_ranks:
            return reply
        if isinstance(reply, VersionOpened):
            return replace(reply, num_bytes=0)
        if isinstance(reply, TrainerOpened):
            return (
                reply.trained_parts,
                reply.num_virtual_tokens,
                reply.changes_model,
                reply.vocab_size,
            )
        return reply

    def _check_pages(self, command: Command) -> None:
        """Raise DivergedError if recorded pages do not have the bytes that they must have: no file
        takes their place.
        """
        if (
            isinstance(command, ImportPages)
            and len(command.data) != len(command.places) * self.info.place_bytes
        ):
            self._stop(
                DivergedError(
                    f"{len(command.places)} pages were recorded with {len(command.data)} bytes"
                )
            )

    def _check_result(self, result: StepResult, batch: StepBatch) -> None:
        """Raise DivergedError for a result that no device can have: the engine uses its tokens and
        counts.
        """
        for request, chosen in result.tokens.items():
            if not 0 <= chosen.token < self._vocabularies.size_of(request):
                self._stop(
                    DivergedError(
                        f"token {chosen.token} was recorded for request {request!r}; no such "
                        "token exists"
                    )
                )
        for part in batch.tasklets:
            if (
                result.failure is None
                and not 0 <= result.num_tasklets.get(part.job, -1) <= part.num_tasklets
            ):
                self._stop(
                    DivergedError(
                        f"step {batch.step} was recorded with other tasklets than job "
                        f"{part.job!r} has"
                    )
                )

    def _stop(self, error: Exception) -> NoReturn:
        """Raise an error that ends the replay, and again at whatever comes next."""
        if self.stopped is None:
            self.stopped = error
        raise self.stopped

    def _end_of(self, call: Call) -> Done | Raised:
        """Take the recorded end of a call, which follows it at once."""
        line = self._lines.take()
        if line is None:
            self._stop(EndOfRecordingError())
        if not isinstance(line, Done | Raised) or line.call != call.call:
            self._stop(DivergedError(f"{line} was recorded, where call {call.call} ended"))
        return line

    def _next(self, kind: type, wanted: Any) -> Any:
        if self.stopped is not None:
            raise self.stopped
        line = self._lines.take()
        if line is None:
            self._stop(EndOfRecordingError())
        if not isinstance(line, kind):
            self._stop(DivergedError(f"{line} was recorded, where there is now {wanted}"))
        return line

    def _compare(self, recorded: StepResult, own: StepResult) -> None:
        if recorded.packs.keys() != own.packs.keys():
            self._stop(
                DivergedError(f"packs {list(recorded.packs)} were done, now {list(own.packs)}")
            )
        for mine, theirs in ((recorded.tokens, own.tokens), (recorded.prompts, own.prompts)):
            self.tokens_equal &= mine.keys() == theirs.keys()
        shared = recorded.tokens.keys() & own.tokens.keys()
        self.tokens_equal &= all(
            recorded.tokens[name].token == own.tokens[name].token for name in shared
        )
        for job, sums in recorded.packs.items():
            self.max_loss_difference = max(
                self.max_loss_difference, _loss_difference(sums, own.packs[job])
            )


class _Vocabularies:
    """Numbers of tokens of requests' models: adapters may have vocabularies of their own."""

    def __init__(self, vocab_size: int) -> None:
        """Begin without requests.

        Args:
            vocab_size: Number of tokens of the device's model.
        """
        self._vocab_size = vocab_size
        # Of those whose vocabulary is another than the device's.
        self._of_jobs: dict[str, int] = {}
        self._of_versions: dict[str, int] = {}
        self._of_requests: dict[str, int] = {}

    def note(self, command: Command, reply: Reply = None) -> None:
        """Note what a command that was carried out says about vocabularies."""
        if isinstance(command, OpenTrainer) and isinstance(reply, TrainerOpened):
            _keep(self._of_jobs, command.job, reply.vocab_size)
        elif isinstance(command, OpenVersion) and isinstance(reply, VersionOpened):
            _keep(self._of_versions, command.version, reply.vocab_size)
        elif isinstance(command, PublishVersion):
            _keep(self._of_versions, command.version, self._of_jobs.get(command.job, 0))
        elif isinstance(command, OpenRequest):
            _keep(self._of_requests, command.request, self._of_versions.get(command.version, 0))
        elif isinstance(command, CloseRequest):
            self._of_requests.pop(command.request, None)

    def size_of(self, request: str) -> int:
        """Return the number of tokens of a request's model."""
        return self._of_requests.get(request, self._vocab_size)


def _keep(sizes: dict[str, int], name: str, vocab_size: int) -> None:
    """Keep a vocabulary's size by name; 0, which stands for the device's, is not kept."""
    sizes.pop(name, None)
    if vocab_size:
        sizes[name] = vocab_size


class _ReplayClock:
    def __init__(self, device: ReplayDevice) -> None:
        self._device = device

    def now(self) -> float:
        return self._device.next_reading()


def as_it_ran(batch: StepBatch, result: StepResult | None, *, num_units: int = 1) -> StepBatch:
    """Return what ran of a step: of tasklets those that came before the time limit; of a step that
    failed, the optimizer steps that had been made (and requests got their pages).

    Args:
        batch: The step.
        result: Its result; None: it has none.
        num_units: Units of the device that is to run it; where there are too few, one side follows
            the other.
    """
    if result is not None and result.failure is None:
        ran = [replace(part, num_tasklets=result.num_tasklets[part.job]) for part in batch.tasklets]
        parts, divided = tuple([part for part in ran if part.num_tasklets]), batch.partition
        if divided is not None:
            fits = divided.forward_units + divided.backward_units <= num_units and (
                batch.losses or parts
            )
            divided = divided._replace(stops=False) if fits else None
        return replace(batch, tasklets=parts, backward_limit_s=None, partition=divided)
    norms = {} if result is None else result.norms
    return StepBatch(
        step=batch.step,
        commands=batch.commands,
        updates=tuple(update for update in batch.updates if update.job in norms),
        requests=tuple(
            replace(rows, tokens=(), samples=False, targets=()) for rows in batch.requests
        ),
    )


def difference(recorded: StepBatch, batch: StepBatch) -> str:
    """Describe the first field in which a step differs from a recorded one."""
    theirs, mine = asdict(recorded), asdict(with_trace(batch))
    name = next(name for name in mine if mine[name] != theirs[name])
    return f"step {recorded.step} had {name} {theirs[name]}, now {mine[name]}"


def _loss_difference(recorded: PackSums, own: PackSums) -> float:
    if not recorded.num_trained or (isnan(recorded.loss) and isnan(own.loss)):
        return 0.0
    return abs(recorded.loss - own.loss) / recorded.num_trained


def _taken_apart(recorded: StepBatch) -> tuple[StepBatch, list[ImportPages]]:
    """Return a step as the engine asked for it, and the pages that came from another instance."""
    pages = [command for command in recorded.commands if isinstance(command, ImportPages)]
    if not pages:
        return recorded, pages
    return replace(recorded, commands=tuple(map(_without_files, recorded.commands))), pages


def _with_pages(batch: StepBatch, pages: list[ImportPages]) -> StepBatch:
    """Return a step with the pages that came from another instance."""
    if not pages:
        return batch
    next_pages = iter(pages)
    return replace(
        batch,
        commands=tuple(
            next(next_pages) if isinstance(c, ImportPages) else c for c in batch.commands
        ),
    )


def _without_files(command: Command) -> Command:
    """Return a command without what differs when a recording is replayed.

    These are directories of models, adapters and checkpoints, and the data of pages, which the
    engine does not have.
    """
    if isinstance(command, ImportPages):
        return replace(command, data=b"")
    if isinstance(command, OpenVersion):
        return replace(command, directory="", model=bool(command.model) * _SOME_MODEL)
    if isinstance(command, OpenTrainer):
        checkpoint = None if command.checkpoint is None else ""
        return replace(command, checkpoint=checkpoint, model=bool(command.model) * _SOME_MODEL)
    return command
