"""The ordered log of all commands to the device.

**The rule.** Every command is appended to one list at the moment at which the engine's books
change, and the device carries the list out in that order, each command once. So a part that sends a
command need not know which others are still to come: what leaves a page stands before what comes
into it, because the books had it in that order.

- `send` appends a command that has no reply. It reaches the device with the next step, or before
  it.
- A step takes all of the list (`head`, `submit`), and acknowledges it when it has ended
  (`collect`), also if it ran out of memory.
- `execute` carries out the list, then its own command, and returns the reply. `flush` carries out
  the list.
- After an interruption (Ctrl-C in a call, an error of a step) it is not known how much of what was
  handed to the device was done. The device is asked (`CountCommands`), and what `send` has appended
  of the rest is replayed before anything else. What was done, however its caller ended, is not done
  again: what steps have written to pages since is never read as if it were older. A command of
  `execute` whose caller was interrupted has been done by then, or never will be.
- An error of a command is its answer: it has changed nothing, and is not replayed. One of `execute`
  is raised to its caller. One of `send` has no caller, so it ends as a failed step does: requests
  that run, which may read what is not there, are closed and opened again (`on_lost`), and
  `LostCommandError` is raised, which is not mistaken for an answer; in a replay it is only logged.
  An interruption among commands of `send` closes them, too: one of them may have failed.
- A device that is gone is owed nothing.

A caller that is interrupted in `execute` gives up what may have come of it by a further command
(`DropTrainer` after `OpenTrainer`), or asks again where that changes nothing.

The commands of `messages.BESIDE_STEPS` go to the device beside this list: they may come from any
thread, and their order with the others does not matter. All else comes through here: with a group
of devices, each of them gets this list.
"""

import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

from coserve.devices.base import Device
from coserve.devices.messages.commands import (
    BESIDE_STEPS,
    CloseRequest,
    Command,
    CommandsCounted,
    CountCommands,
    ImportPages,
    OpenRequest,
    Reply,
)
from coserve.devices.messages.jobs import BeginPack, PlaceOptimizer, ResizeWindow
from coserve.devices.messages.pages import MovePack, MovePages, SwapIn
from coserve.devices.messages.steps import StepBatch, StepResult
from coserve.errors import CoserveError, DeviceGoneError

_log = logging.getLogger(__name__)

_WRITE_PAGES = (SwapIn, ImportPages, MovePages, MovePack, BeginPack, PlaceOptimizer)


class LostCommandError(Exception):
    """An error of a command for which nobody waits; the command's own error is the cause.

    It is not a `CoserveError`: a caller that meets it was doing something else, and may not handle
    it as its own.
    """


class _Entry:
    """A command in the log, until the device has answered it."""

    __slots__ = ("command", "is_awaited", "is_done", "is_replayed")

    def __init__(self, command: Command, *, is_awaited: bool = False) -> None:
        self.command = command
        self.is_awaited = is_awaited
        """Whether a caller waits for it, or did."""
        self.is_replayed = False
        """Whether it is what was left when the device was interrupted."""
        self.is_done = False


class _Sent(NamedTuple):
    """Entries that were handed to the device; which of them are done is not known."""

    entries: Sequence[_Entry]
    """First entries of the log."""
    num_answered: int
    """Number of commands that the device had answered before the first of them."""


class CommandLog:
    """The ordered log that the module describes.

    All methods but `send` are for the engine's thread and, except for `collect`, for the time
    between two steps. Ctrl-C may come between any two of the statements here. So what is set first
    says that the outcome is not known (`_sent`), and what follows from an answer can be set again.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._entries: list[_Entry] = []
        self._sent: _Sent | None = None
        self._step: _Sent | None = None  # entries of the last step
        # Number of commands that the device has answered; None: not known, as after an error.
        self._num_answered: int | None = None
        # Requests that a command in the log opens; some of the commands may be done already.
        self._openings: set[str] = set()
        self.on_lost: Callable[[], None] = lambda: None
        """Called where a command that nobody waits for has failed, or may have: what it was to
        bring is not there."""
        self._is_gone = False

    def send(self, command: Command) -> None:
        """Append a command without a reply. Any thread may call this."""
        assert not isinstance(command, BESIDE_STEPS)
        if self._is_gone:
            return
        if isinstance(command, CloseRequest):
            self._forget_opening(command)
        elif isinstance(command, ResizeWindow):
            self._forget_resize()
        elif isinstance(command, OpenRequest):
            self._openings.add(command.request)
        self._entries.append(_Entry(command))

    def execute(self, command: Command) -> Reply:
        """Carry out the log and then a command, and return its reply.

        Raises:
            CoserveError: see the command; it has changed nothing.
            LostCommandError: a command before it has failed; this one is never done.
        """
        assert not isinstance(command, BESIDE_STEPS)
        self.flush()
        entry = _Entry(command, is_awaited=True)
        self._entries.append(entry)
        reply: Reply = None
        while not entry.is_done:  # other threads may have sent something before it
            reply = self._do_first()
        return reply

    @property
    def has_commands(self) -> bool:
        """Return whether `flush` has something to carry out."""
        return bool(self._entries)

    def flush(self) -> None:
        """Carry out the log, without a step.

        Raises:
            LostCommandError: a command has failed.
        """
        self.replay()
        while self._entries:
            self._do_first()

    # -- steps ------------------------------------------------------------------------

    def head(self) -> tuple[Command, ...]:
        """Return the commands for the next step: all that are in the log."""
        self.replay()
        return tuple([entry.command for entry in self._entries])

    def submit(self, batch: StepBatch) -> None:
        """Begin a step with the commands of `head`. Raises as `Device.submit` does."""
        assert self._sent is None
        # Other threads may have appended more since `head`.
        entries = self._entries[: len(batch.commands)]
        # Set before the call: if that is interrupted, the outcome counts as unknown.
        self._sent = self._step = _Sent(entries, self._known_count() if entries else 0)
        try:
            self._device.submit(batch)
        except DeviceGoneError:
            self._lose_device()
            raise

    def collect(self) -> StepResult:
        """Wait for the step, whose commands are done then. Raises as `Device.collect` does."""
        try:
            result = self._device.collect()
        except DeviceGoneError:
            self._lose_device()
            raise
        if self._sent is self._step:  # unless a replay has settled the step meanwhile
            self._acknowledge()
        return result

    # -- acknowledgements ---------------------------------------------------------------

    def _do_first(self) -> Reply:
        """Have the device carry out the first command, and return its reply."""
        entry = self._entries[0]
        self._sent = _Sent((entry,), self._known_count())
        try:
            reply = self._device.execute(entry.command)
        except DeviceGoneError:
            self._lose_device()
            raise
        except Exception as error:
            message = f"{type(entry.command).__name__} has failed: {error}"
            self._note_failure(entry)
            if entry.is_awaited:
                raise
            # In a replay, requests that could read what is missing are closed already.
            if not (entry.is_replayed and isinstance(error, CoserveError | OSError)):
                raise LostCommandError(message) from error
            _log.warning("a command that was interrupted and done again has failed: %s", message)
            return None
        self._acknowledge()
        return reply

    def _note_failure(self, entry: _Entry) -> None:
        """Note that a command's answer is an error.

        `_sent` is cleared last, so that an interruption here counts as one of the command.
        """
        if not entry.is_awaited:
            self.on_lost()
        entry.is_done = True
        self._num_answered = None  # it may not have come as far as the device
        self._sent = None
        self._trim()

    def replay(self) -> None:
        """Find out what the device has done of what it was handed last, and carry out the rest,
        except for commands whose callers have given up; nothing happens if there was no
        interruption.

        It may close running requests (`on_lost`), so it is called before a plan is made.
        """
        if self._sent is not None:
            self._settle(self._sent)
        # Their callers were interrupted in `execute` and have given up.
        for entry in [entry for entry in self._entries if entry.is_awaited]:
            self._entries.remove(entry)
        self._trim()  # where a caller was interrupted just before
        # Only what was interrupted; commands sent since then go with the next step.
        while any(entry.is_replayed for entry in self._entries):
            self._do_first()

    def _settle(self, sent: _Sent) -> None:
        """Mark which of the sent entries are done, and which are to be replayed."""
        if sent.entries:
            # The cached count may be older than the entries, so it is read from the device.
            self._num_answered = None
            num_done = self._known_count() - sent.num_answered
            assert 0 <= num_done <= len(sent.entries), "commands came to the device beside the log"
            for place, entry in enumerate(sent.entries):
                entry.is_done = entry.is_done or place < num_done
                # An awaited command is never replayed: its caller decides what to do.
                entry.is_replayed = not entry.is_awaited
            if sent is not self._step and not all(entry.is_awaited for entry in sent.entries):
                self.on_lost()  # after a failed step, `StepLoop` closes requests itself
        self._sent = None

    def _acknowledge(self) -> None:
        """Note that all sent entries are done."""
        if self._sent is not None and self._sent.entries:
            entries, before = self._sent
            for entry in entries:
                entry.is_done = True
            self._num_answered = before + len(entries)
        self._sent = None
        self._trim()

    def _trim(self) -> None:
        while self._entries and self._entries[0].is_done:
            del self._entries[0]
        if not self._entries:
            # No opening is left in the log.
            self._openings.clear()

    def _known_count(self) -> int:
        """Return how many commands the device has answered, from the device only if it is not
        known.
        """
        if self._num_answered is None:
            try:
                reply = self._device.execute(CountCommands())
            except DeviceGoneError:
                self._lose_device()
                raise
            assert isinstance(reply, CommandsCounted)
            self._num_answered = reply.num_answered
        return self._num_answered

    def _lose_device(self) -> None:
        self._is_gone = True
        self._sent = None
        self._entries.clear()

    # -- what later commands make needless ------------------------------------------------

    def _forget_opening(self, closed: CloseRequest) -> None:
        """Replace commands that open a request by the one that closes it: its grammar may be gone
        by now.
        """
        if closed.request not in self._openings:
            return
        for entry in self._entries:
            if isinstance(entry.command, OpenRequest) and entry.command.request == closed.request:
                entry.command = closed

    def _forget_resize(self) -> None:
        """Drop the last size of the window if nothing is written to pages between it and the next
        one.

        A request takes pages one by one, and a window that is replaced shrinks to nothing first:
        weights that have room in the last size stay where they are.
        """
        # Entries that were handed to the device can no longer be dropped.
        num_sent = 0 if self._sent is None else len(self._sent.entries)
        for place in range(len(self._entries) - 1, num_sent - 1, -1):
            command = self._entries[place].command
            if isinstance(command, ResizeWindow):
                del self._entries[place]
                return
            # These pages were written under the last size, so that size must reach the device.
            if isinstance(command, _WRITE_PAGES):
                return
