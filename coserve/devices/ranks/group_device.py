"""A torch device that several processes hold together, its ranks; see `rank_device.py` for how they
end calls alike.

    engine's process ── GroupDevice ══ socket pairs ══ ranks 0 … N-1
                                                            ╚═ shared memory or torch.distributed

Each call is encoded once and written to all ranks, which carry out all calls in one order. Rank 0
answers for all where all have done it; a call that has failed is answered by each. The processes
end together: where one has ended, or does not come in time, the others are ended, too, and every
call raises DeviceGoneError.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import chain, count
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Lock
from typing import NamedTuple

from coserve.devices.base import WallClock
from coserve.devices.messages.commands import (
    BESIDE_STEPS_OF_RANKS,
    Command,
    DeviceInfo,
    RanksDescribed,
    Reply,
    SaveAdapter,
)
from coserve.devices.messages.jobs import WriteCheckpoint
from coserve.devices.messages.steps import StepBatch, StepResult
from coserve.devices.process.child import Answer, DeviceProcess, StartProcess, start_program
from coserve.devices.process.wire import (
    Call,
    FromDevice,
    KernelsPrepared,
    LoadingProgress,
    Raised,
    Started,
    framed,
)
from coserve.devices.ranks.inverses import inverses_of
from coserve.devices.ranks.places import kind_of
from coserve.devices.ranks.seats import seat_ranks
from coserve.devices.settings import DeviceSettings, LoadProgress
from coserve.errors import DeviceGoneError, RankError, RankGoneError, RequestError
from coserve.models.shared_files import named_when_written

_SAME = (
    "num_pages",
    "page_bytes",
    "num_host_pages",
    "num_state_pages",
    "block_tokens",
    "dtype",
    "weights",
    "kernels",
)
"""Fields of `DeviceInfo` that all ranks must have alike."""


# How long a rank may take to end once it has closed its socket, as the system does for one that is
# killed.
_END_S = 0.5


class GroupDevice:
    """Device in several processes; see `coserve.devices.base.Device`."""

    def __init__(
        self,
        settings: DeviceSettings,
        progress: LoadProgress | None = None,
        *,
        start: StartProcess = start_program,
    ) -> None:
        """Start the processes of `settings.num_ranks` ranks, and wait until they have loaded the
        model.

        Args:
            settings: Settings of all ranks.
            progress: Called with the progress of rank 0.
            start: Starts the process of a rank.

        Raises:
            DeviceGoneError: A process has ended without saying why.
            RankError: The ranks do not fit together.
            Exception: As `coserve.devices.loading.open_device`.
        """
        self.clock = WallClock()
        self._size, self._timeout_s = settings.num_ranks, settings.rank_timeout_s
        self._seats = seat_ranks(settings.rank_transport, self._size, kind_of(settings.device))
        self._numbers, self._lock, self._sending = count(), Lock(), Lock()
        self._gone = ""
        """Why the group has ended; "" while it has not."""
        self._returncode: int | None = None
        """Exit code of the rank that ended the group, negative for a signal; None if it is not
        known."""
        self._has_ended = Event()
        self._has_started = self._is_closed = False
        self._step: _SentCall | None = None  # under way
        self._messages: SimpleQueue[tuple[int, FromDevice | None]] = SimpleQueue()
        self._ranks: list[DeviceProcess] = []
        try:
            for rank in range(self._size):
                self._ranks.append(self._new_process(rank, start))
            self.info = self._start(settings, progress)
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> tuple[int, ...]:
        """Return the numbers of the ranks' processes."""
        return tuple(each.pid for each in self._ranks)

    def execute(self, command: Command) -> Reply:
        """Have all ranks carry out a command, or none.

        The error of the lowest rank that failed is raised, which names the rank unless all have
        failed alike, or a request is refused. Files that the command writes are there once all
        ranks have written them.

        Raises:
            DeviceGoneError: A process ends before it has answered.
        """
        with _files_of(command):
            reply = self._reply(self._call(command))
        assert not isinstance(reply, StepResult)
        return reply

    def submit(self, batch: StepBatch) -> None:
        # Each step has a number of its own: the result of one that was forgotten is nobody's when
        # it comes.
        self._step = None
        try:
            self._step = self._call(batch)
        except DeviceGoneError:  # `collect` will say so
            self._step = _SentCall(-1, batch, ())

    def collect(self) -> StepResult:
        """Wait for the step, and return its result.

        Raises:
            DeviceGoneError: A process has ended.
        """
        step, self._step = self._step, None
        assert step is not None, "no step was submitted"
        result = self._reply(step)
        assert isinstance(result, StepResult)
        return result

    def close(self) -> None:
        self._end("the device is closed")
        for each in self._ranks:
            each.close()
        if not self._is_closed:
            self._is_closed = True
            self._seats.close()

    # -- start and end ----------------------------------------------------------------

    def _new_process(self, rank: int, start: StartProcess) -> DeviceProcess:
        return DeviceProcess(
            lambda message: self._messages.put((rank, message)),
            partial(self._note_end, rank),
            arguments=[*self._seats.arguments, str(rank), str(self._size)],
            inherited=self._seats.inherited,
            start=start,
        )

    def _start(self, settings: DeviceSettings, progress: LoadProgress | None) -> DeviceInfo:
        """Have rank 0 prepare the kernels alone, then all ranks load the model together."""
        infos, errors = dict[int, DeviceInfo](), dict[int, Exception]()
        asked = self._ranks[:1]
        # Rank 0 alone compiles: several ranks would compile the same kernels at once.
        asked[0].send(settings)
        while len(infos) + len(errors) < len(asked):
            rank, message = self._messages.get()
            if isinstance(message, KernelsPrepared):
                asked = self._ranks
                for each in asked[1:]:
                    each.send(settings)
            elif isinstance(message, Started):
                infos[rank] = message.info
            elif isinstance(message, Raised):
                errors[rank] = message.error()
            # None: nothing can come any more. After an error that is the expected end.
            elif message is None and rank not in errors:
                raise DeviceGoneError(f"{self._named(rank)} has ended before it was ready")
            elif isinstance(message, LoadingProgress) and rank == 0 and progress is not None:
                progress(message.stage, message.done, message.total)
        if errors:
            raise _error_of(errors, len(asked))
        _check_alike(infos)
        with self._lock:
            self._has_started = True
        # One may have ended between its `Started` and this, when `_note_end` did nothing yet.
        for rank, each in enumerate(self._ranks):
            if each.has_ended:
                raise DeviceGoneError(f"{self._named(rank)} has ended")
        return infos[0]

    def _note_end(self, rank: int) -> None:
        """End the group, since a rank has ended."""
        with self._lock:
            # Before that, the other ranks may still say why.
            if not self._has_started:
                return
        # A rank that notices the end of another one ends, too, and may be heard of first.
        codes = [
            each.returncode(_END_S if each is self._ranks[rank] else 0.0) for each in self._ranks
        ]
        # Signals are negative: a rank that was killed is the cause, those that ended later are not.
        returncode = min((code for code in codes if code), default=None)
        self._end(self._ranks[rank].why_group_ends or f"{self._named(rank)} has ended", returncode)

    def _end(self, reason: str, returncode: int | None = None) -> None:
        with self._lock:
            if self._gone:
                return
            self._gone, self._returncode = reason, returncode
            self._has_ended.set()
        # Ranks that wait in a collective learn the reason before they are killed.
        self._seats.end(reason)
        for each in self._ranks:
            each.kill()

    def _named(self, rank: int) -> str:
        return f"rank {rank} (process {self._ranks[rank].pid})"

    # -- calls ------------------------------------------------------------------------

    def _call(self, command: Command | StepBatch) -> "_SentCall":
        """Send a call to all ranks, after those that came before on all of them."""
        # Held until all ranks have the call: on every rank calls come in the same order.
        with self._sending:
            if self._gone:
                raise DeviceGoneError(self._gone, self._returncode)
            number = next(self._numbers)
            # Encoded once; all ranks get the same bytes and the same number.
            frame = framed(Call(number, command))
            try:
                return _SentCall(
                    number, command, tuple([each.call(number, frame) for each in self._ranks])
                )
            except DeviceGoneError as error:
                raise self._gone_error(error) from None
            except BaseException:
                self._end("a call was interrupted when some of the ranks had it")
                raise

    def _reply(self, sent: "_SentCall") -> Reply | StepResult:
        """Wait for the answers to a call, and return that of rank 0."""
        # `submit` found that the group had ended.
        if not sent.answers:
            raise self._gone_error(DeviceGoneError("a rank has ended"))
        first, is_beside = sent.answers[0], isinstance(sent.command, BESIDE_STEPS_OF_RANKS)
        # Ranks have met after the call (`RankDevice`), so rank 0's success is that of all, and only
        # rank 0 answers.
        if not is_beside and first.exception() is None and not _has_failed(reply := first.result()):
            for each in self._ranks[1:]:
                each.forget(sent.number)
            return reply
        errors = dict[int, BaseException]()
        self._wait_for_all(sent)
        for rank, answer in enumerate(sent.answers):
            error = answer.exception()
            if isinstance(error, DeviceGoneError | RankGoneError):
                raise self._gone_error(error)
            if error is not None:
                errors[rank] = error
        if not errors:
            return _joined([answer.result() for answer in sent.answers])
        if is_beside and len(errors) < self._size and not isinstance(sent.command, StepBatch):
            # On all ranks: closing or dropping what a rank does not have is no error.
            for inverse in inverses_of(sent.command):
                self.execute(inverse)
        raise _error_of(errors, self._size)

    def _wait_for_all(self, sent: "_SentCall") -> None:
        """Wait until all ranks have answered, and end the group if one stands still.

        A command that ranks carry out beside steps has no collective in which another rank could
        notice that.
        """
        wait(sent.answers, return_when=FIRST_COMPLETED)
        # The limit begins with the first answer, since a call itself may take any time.
        late = wait(sent.answers, timeout=self._timeout_s).not_done
        for rank, answer in enumerate(sent.answers):
            if answer in late:
                self._end(
                    f"{self._named(rank)} did not answer within {self._timeout_s:g} s of another "
                    "one"
                )

    def _gone_error(self, error: BaseException) -> DeviceGoneError:
        """Return why the group has ended, of which this error may be a consequence: another rank
        may have noticed the end of one before it is known here how that has ended.
        """
        # `_note_end` waits up to `_END_S` for the exit code before it sets the reason.
        self._has_ended.wait(2 * _END_S)
        return DeviceGoneError(self._gone or str(error), self._returncode)


class _SentCall(NamedTuple):
    """Call that the ranks were sent."""

    number: int
    """Number of the call."""
    command: Command | StepBatch
    """Content of the call."""
    answers: tuple[Answer, ...]
    """Answer of each rank; none if the group had ended."""


def _files_of(command: Command) -> AbstractContextManager[None]:
    """Return what names the files that ranks have written when the context ends; of other commands,
    nothing.
    """
    if isinstance(command, WriteCheckpoint | SaveAdapter):
        return named_when_written(Path(command.directory))
    return nullcontext()


def _joined(replies: Sequence[Reply | StepResult]) -> Reply | StepResult:
    """Return the reply of a group: rank 0's, or what each rank says of itself."""
    described = [each.ranks for each in replies if isinstance(each, RanksDescribed)]
    return RanksDescribed(tuple(chain(*described))) if described else replies[0]


def _has_failed(reply: Reply | StepResult) -> bool:
    return isinstance(reply, StepResult) and reply.failure is not None


def _error_of(errors: Mapping[int, BaseException], num_ranks: int) -> BaseException:
    """Return the error of the lowest rank that failed by itself, rather than since another had."""
    own = {rank: error for rank, error in errors.items() if not isinstance(error, RankError)}
    own = own or dict(errors)
    rank = min(own)
    kinds = {(type(error), str(error)) for error in own.values()}
    # A request is refused for what it is, though rank 0 alone may know, as of grammars.
    if (len(kinds) == 1 and len(own) == num_ranks) or isinstance(own[rank], RequestError):
        return own[rank]
    return type(own[rank])(f"{own[rank]} (on rank {rank})")


def _check_alike(infos: Mapping[int, DeviceInfo]) -> None:
    """Raise RankError if ranks do not have the same pages, or compute differently."""
    for rank, info in infos.items():
        for name in _SAME:
            mine, its = getattr(infos[0], name), getattr(info, name)
            if mine != its:
                raise RankError(
                    f"ranks 0 and {rank} differ: {name} is {mine} and {its}; all ranks must have "
                    "the same"
                )
