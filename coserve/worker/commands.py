"""What the server commands, done by the engine: at once, or when the files that a command needs have been read."""

import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from coserve.devices.matching import Vocabulary
from coserve.devices.messages import SetVocabulary
from coserve.engine.commands import (
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
from coserve.errors import AdapterError, CoserveError
from coserve.handover.base import Alone, HandoverEnd
from coserve.protocol.messages import Refused, Reply
from coserve.worker.activity import Activity
from coserve.worker.command_queue import CommandQueue
from coserve.worker.job_commands import JobCommands

_log = logging.getLogger(__name__)

_VOCABULARY = "vocabulary"


class Commands:
    """Called between steps; no call waits for a disk."""

    def __init__(
        self,
        engine: Engine,
        jobs: JobCommands,
        send: Callable[[Any], None],
        activity: Activity | None = None,
        handover: HandoverEnd | None = None,
    ) -> None:
        """send: takes what answers a command at once; other answers come out of `JobCommands.take_pending`. activity:
        told whose command is being done. handover: told of requests.
        """
        self._engine, self._jobs, self._send = engine, jobs, send
        self._handover = handover or Alone()
        self._activity = activity or Activity(None)
        self._queue = CommandQueue()

    @property
    def is_waiting(self) -> bool:
        """Whether there is a command that could not be done yet."""
        return self._queue.is_waiting

    def poll(self) -> None:
        """Do what can be done now."""
        self._queue.poll()

    def close(self) -> None:
        """Forget what waits."""
        self._queue.close()

    def take(self, command: Any) -> None:
        """Any command but `Shutdown`."""
        if isinstance(command, AddRequest):
            if command.params.grammar is None:
                self._take_request(command)
            else:
                self._with_grammar(command)
        elif isinstance(command, UseVocabulary):
            self._use_vocabulary(command)
        elif isinstance(command, CancelRequest):
            if not self._queue.discard(command.id):
                self._engine.cancel(command.id)
        elif isinstance(command, StopSequence):
            self._engine.stop(command.id, command.index, command.num_tokens)
        elif isinstance(command, LoadAdapter):
            changed_by = command.changed_by
            self._with_adapter(command.adapter, lambda read: self._answer(command.call, read), changed_by=changed_by)
        elif isinstance(command, UnloadAdapter):
            name = command.name
            self._queue.put(
                (_adapter_key(name),), lambda _: self._answer(command.call, lambda: self._jobs.unload_adapter(name))
            )
        else:
            self._take_job(command)

    def _take_request(self, command: AddRequest) -> None:
        if command.adapter is None:
            self._add(command, _nothing)
        else:
            self._with_adapter(command.adapter, lambda read: self._add(command, read), label=command.id)

    def _use_vocabulary(self, command: UseVocabulary) -> None:
        """A thread has the device take it in; between steps it only says so again."""
        engine = self._engine
        vocabulary = Vocabulary(tuple(command.pieces), tuple(command.special), tuple(sorted(engine.end_tokens)))

        def use(read: Callable[[], Any]) -> None:
            with suppress(CoserveError):  # requests will be told
                read()
                engine.use_vocabulary(command.pieces, command.special)

        self._queue.put((_VOCABULARY,), use, prepare=lambda: lambda: engine.device.execute(SetVocabulary(vocabulary)))

    def _with_grammar(self, command: AddRequest) -> None:
        """A thread has the device compile it first."""
        grammar, engine = command.params.grammar, self._engine
        assert grammar is not None

        def add(read: Callable[[], Any]) -> None:
            try:
                read()
            except CoserveError as error:
                self._send(Refused(command.id, str(error), type(error).__name__))
            else:
                self._take_request(command)

        def compiling() -> Callable[[], Any] | None:
            is_ready = engine.vocabulary is None or grammar in engine.grammars
            return None if is_ready else lambda: engine.grammars.prepare(grammar, command.tenant)

        # Beside other grammars, but after the vocabulary.
        key = _VOCABULARY if engine.vocabulary is None else f"grammar {hash(grammar)}"
        self._queue.put((key,), add, prepare=compiling, label=command.id)

    def _add(self, command: AddRequest, read: Callable[[], Any]) -> None:
        try:
            read()
            with self._activity.of_request():
                self._engine.add_tokens(
                    command.prompt,
                    command.params,
                    adapter=command.adapter.name if command.adapter is not None else None,
                    slo=command.slo,
                    request_id=command.id,
                    arrival_s=command.arrival_s,
                    tenant=command.tenant,
                    priority=command.priority,
                    batch_due_s=command.batch_due_s,
                    without_jobs=command.without_jobs,
                )
        except CoserveError as error:
            self._send(Refused(command.id, str(error), type(error).__name__))
            return
        self._handover.added(command.id)

    def _answer(self, call: int, do: Callable[[], Any]) -> None:
        """A command with a reply that follows at once."""
        try:
            do()
        except CoserveError as error:
            self._send(Reply(call, str(error), type(error).__name__))
        else:
            self._send(Reply(call))

    def _take_job(self, command: Any) -> None:
        if isinstance(command, CombineJob):
            id, directories = command.id, command.combination.directories
            self._queue.put(
                (_job_key(id),),
                lambda read: self._handle(command, read),
                prepare=lambda: lambda: self._jobs.read_contributions(id, directories),
            )
            return
        if not isinstance(command, StartJob):
            self._queue.put((_job_key(command.id),), lambda _: self._handle(command))
            return
        job = command.job
        keys = [_job_key(job.id)]
        if job.config.live and job.checkpoint is not None:
            keys.append(_adapter_key(job.name))  # it serves as soon as it has resumed: who asks for it by then waits
        if job.start is not None and job.checkpoint is None:
            keys.append(_adapter_key(job.start.name))
            # Its error comes again, with the command itself.
            self._with_adapter(job.start, lambda read: None, more_keys=keys)
        self._queue.put(
            keys,
            lambda read: self._handle(command, read),
            prepare=lambda: lambda: self._jobs.read_files(job),
            is_slow=True,
        )

    def _handle(self, command: Any, read: Callable[[], Any] | None = None) -> None:
        id = command.job.id if isinstance(command, StartJob) else command.id
        try:
            with self._activity.of(id):
                self._jobs.handle(command, read)
        except CoserveError as error:
            self._send(Reply(command.call, str(error), type(error).__name__))

    def _with_adapter(
        self,
        adapter: AdapterRef,
        do: Callable[[Callable[[], Any]], None],
        *,
        label: str = "",
        more_keys: list[str] | None = None,
        changed_by: str = "",
    ) -> None:
        """Have an adapter on the device, then do something; that takes a call that raises why it could not be loaded.

        Two entries, so that the adapter is there for later commands if this one is discarded.
        """
        keys = [_adapter_key(adapter.name), *(more_keys or ())]
        errors: list[CoserveError] = []

        def finish(read: Callable[[], Any]) -> None:
            try:
                self._jobs.finish_adapter(adapter, _what_was_read(adapter, read))
            except CoserveError as error:
                errors.append(error)

        def check() -> None:
            if errors:
                raise errors[0]

        self._queue.put(keys, finish, prepare=lambda: self._jobs.adapter_reading(adapter, changed_by))
        self._queue.put(keys, lambda _: do(check), label=label)


def _nothing() -> None:
    return None


def _what_was_read(adapter: AdapterRef, read: Callable[[], Any]) -> Any:
    """Whatever an adapter's files do to those who read them is the adapter's fault, and no reason for the engine to
    end: AdapterError.
    """
    try:
        return read()
    except CoserveError:
        raise
    except Exception as error:
        _log.exception("the adapter %s could not be read", adapter.name)
        raise AdapterError(f"{adapter.directory} could not be read as an adapter: {error!r}") from error


def _adapter_key(name: str) -> str:
    return f"adapter {name}"


def _job_key(id: str) -> str:
    return f"job {id}"
