"""Commands of the server, run by the engine at once, or when the files that a command needs have
been read.
"""

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

from coserve.devices.grammars.matching import Vocabulary
from coserve.devices.messages.commands import SetVocabulary
from coserve.engine.commands import (
    NO_CALL,
    AdapterRef,
    AddRequest,
    CancelRequest,
    CombineJob,
    LoadAdapter,
    StartJob,
    StopSequence,
    UnloadAdapter,
    UseVocabulary,
)
from coserve.engine.engine import Engine
from coserve.engine.served_adapters import AdapterLoad
from coserve.errors import AdapterError, CoserveError
from coserve.handover.base import HandoverEnd, NoHandover
from coserve.protocol.messages import CallReply, RequestRefused
from coserve.worker.activity import Activity
from coserve.worker.command_queue import CommandQueue, Reading
from coserve.worker.job_commands import JobCommands

_log = logging.getLogger(__name__)

_VOCABULARY = "vocabulary"


class Commands:
    """Dispatcher of commands, called between steps; no call waits for a disk."""

    def __init__(
        self,
        engine: Engine,
        jobs: JobCommands,
        send: Callable[[Any], None],
        activity: Activity | None = None,
        handover: HandoverEnd | None = None,
    ) -> None:
        """Connect the commands with an engine.

        Args:
            engine: Engine that runs them.
            jobs: Commands about jobs.
            send: Sends an immediate answer; other answers come from `JobCommands.take_pending`.
            activity: Records whose command is running.
            handover: Is notified of new requests.
        """
        self._engine, self._jobs, self._send = engine, jobs, send
        self._handover = handover or NoHandover()
        self._activity = activity or Activity(None)
        self._queue = CommandQueue(self._do)

    @property
    def is_waiting(self) -> bool:
        """Return whether a command is waiting."""
        return self._queue.is_waiting

    def poll(self) -> None:
        """Run all commands that can run now."""
        self._queue.poll()

    def close(self) -> None:
        """Drop waiting commands."""
        self._queue.close()

    # -- what each command waits for ------------------------------------------------

    def take(self, command: Any) -> None:
        """Take any command except `Ping` and `Shutdown`; it runs when its turn has come and its
        files have been read.
        """
        match command:
            case AddRequest() if command.params.grammar is not None:
                # Concurrent with other grammars, but after the vocabulary; then it continues as
                # any other request.
                is_known = self._engine.vocabulary is not None
                key = f"grammar {hash(command.params.grammar)}" if is_known else _VOCABULARY
                self._queue.put(
                    _CompiledRequest(command),
                    (key,),
                    partial(self._grammar_reading, command),
                    label=command.id,
                )
            case AddRequest():
                self._take_request(command)
            case CancelRequest():
                # A request that still waits here has not reached the engine.
                if not self._queue.discard(command.id):
                    self._engine.handle(command)
            case StopSequence():
                self._engine.handle(command)
            case UseVocabulary():
                self._queue.put(
                    command, (_VOCABULARY,), lambda: partial(self._give_vocabulary, command)
                )
            case LoadAdapter():
                self._queue.put(
                    command, (_adapter_key(command.adapter.name),), self._adapter_reading(command)
                )
            case UnloadAdapter():
                self._queue.put(command, (_adapter_key(command.name),))
            case StartJob():
                self._take_start(command)
            case CombineJob():
                read = partial(
                    self._jobs.read_contributions, command.id, command.combination.directories
                )
                self._queue.put(command, (_job_key(command.id),), lambda: read)
            case _:
                self._queue.put(command, (_job_key(command.id),))

    def _take_request(self, command: AddRequest) -> None:
        """Queue the adapter and the request as two entries: if the request is discarded, later
        commands still find the adapter.
        """
        if command.adapter is None:
            self._do(command, lambda: None)
            return
        # Without a reply: the request itself repeats an error of its adapter (`after`).
        load, keys = LoadAdapter(NO_CALL, command.adapter), (_adapter_key(command.adapter.name),)
        loaded = self._queue.put(load, keys, self._adapter_reading(load))
        self._queue.put(command, keys, label=command.id, after=loaded)

    def _take_start(self, command: StartJob) -> None:
        job = command.job
        keys = [_job_key(job.id)]
        if job.config.live and job.checkpoint is not None:
            # A live job serves as soon as it has resumed: requests for its adapter wait for that.
            keys.append(_adapter_key(job.name))
        if job.start is not None and job.checkpoint is None:
            keys.append(_adapter_key(job.start.name))
            load = LoadAdapter(NO_CALL, job.start)  # the command itself repeats its error
            self._queue.put(load, keys, self._adapter_reading(load))
        self._queue.put(command, keys, lambda: partial(self._jobs.read_files, job), is_slow=True)

    # -- what threads do for them ---------------------------------------------------

    def _adapter_reading(self, command: LoadAdapter) -> Callable[[], Reading]:
        return partial(self._jobs.adapter_reading, command.adapter, command.changed_by)

    def _grammar_reading(self, command: AddRequest) -> Reading:
        """Return a call that compiles a request's grammar; None if the device has it."""
        grammar, engine = command.params.grammar, self._engine
        assert grammar is not None
        # Without a vocabulary there is nothing to compile with, and the engine refuses the request.
        is_ready = engine.vocabulary is None or grammar in engine.grammars
        return None if is_ready else partial(engine.grammars.prepare, grammar, command.tenant)

    def _give_vocabulary(self, command: UseVocabulary) -> None:
        """Set the device's vocabulary, from a thread; the engine repeats this between steps at no
        cost.
        """
        ends = tuple(sorted(self._engine.end_tokens))
        self._engine.device.execute(
            SetVocabulary(Vocabulary(tuple(command.pieces), tuple(command.special), ends))
        )

    # -- each command, when its turn has come ---------------------------------------

    def _do(self, command: Any, read: Callable[[], Any]) -> CoserveError | None:
        """Run a command and answer it; return the error with which it was refused, if any."""
        try:
            match command:
                case AddRequest():
                    read()
                    with self._activity.of_request():
                        self._engine.handle(command)
                    self._handover.added(command.id)
                case _CompiledRequest():
                    read()
                    self._take_request(command.request)
                case UseVocabulary():
                    read()
                    self._engine.handle(command)
                case LoadAdapter():
                    self._engine.handle(command, _what_was_read(command.adapter, read))
                    self._reply(command.call)
                case UnloadAdapter():
                    self._engine.handle(command)
                    self._reply(command.call)
                case _:
                    with self._activity.of(
                        command.job.id if isinstance(command, StartJob) else command.id
                    ):
                        self._jobs.handle(command, read)
        except CoserveError as error:
            self._refuse(command, error)
            return error
        return None

    def _refuse(self, command: Any, error: CoserveError) -> None:
        match command:
            case AddRequest() | _CompiledRequest():
                self._send(RequestRefused(command.id, str(error), type(error).__name__))
            case UseVocabulary():
                pass  # requests with grammars will fail
            case _:
                self._reply(command.call, error)

    def _reply(self, call: int, error: CoserveError | None = None) -> None:
        if call == NO_CALL:
            return
        self._send(
            CallReply(call) if error is None else CallReply(call, str(error), type(error).__name__)
        )


class _CompiledRequest:
    """A request whose grammar is compiled before it is added."""

    def __init__(self, request: AddRequest) -> None:
        self.request, self.id = request, request.id


def _what_was_read(adapter: AdapterRef, read: Callable[[], Any]) -> AdapterLoad | None:
    """Return what was read of an adapter, with every unexpected error as AdapterError: it is the
    fault of the adapter's files, and no reason for the engine to end.
    """
    try:
        load: AdapterLoad | None = read()
    except CoserveError:
        raise
    except Exception as error:
        _log.exception("the adapter %s could not be read", adapter.name)
        raise AdapterError(
            f"{adapter.directory} could not be read as an adapter: {error!r}"
        ) from error
    return load


def _adapter_key(name: str) -> str:
    return f"adapter {name}"


def _job_key(id: str) -> str:
    return f"job {id}"
