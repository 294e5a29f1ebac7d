"""Errors that coserve raises on purpose.

CoserveError
├── GraphError          an inconsistent graph or operator rule: a bug in a family or a PEFT method
├── PolicyError         a plan that cannot be run: a bug in a policy
├── KernelError         kernels that cannot be compiled on this machine
├── BudgetError         a budget that nothing can meet
├── ModelError          a model that cannot be used
│   ├── UnknownModelError       no such preset, directory or hub id
│   ├── UnsupportedModelError   a family or a configuration that coserve does not run
│   └── WeightsError            missing, extra, misshapen, damaged or wrongly typed weights
├── AdapterError        an adapter that cannot be used with this model
│   └── AdapterTooLargeError    an adapter for which there is not enough memory now
├── DataError           training data that cannot be used
│   └── NothingToTrainError     a readable record without anything to train on
├── RequestError        a request that cannot be served as it stands
│   └── GrammarMemoryError      no room now for the request's compiled grammar
├── LimitError          more than a tenant may have, ever or now
├── JobError            a fine-tuning job that cannot be run as it stands, or is not there
│   └── JobOverError            a job that the engine does not have, or no longer has
├── StoreError          the database of files and jobs cannot be used now
│   └── DiskFullError           no room on the disk for a file or the database
├── DeviceMemoryError   the device ran out of memory within a step
├── DeviceGoneError     the device's process has ended
├── RankError           a collective that was not completed because a rank failed
│   └── RankGoneError           a rank that has ended or does not answer
├── EngineGoneError     the engine's process is not running: it starts, or is restarted
├── SandboxError        a call that crashed in its sandbox or exceeded its limits
├── ClusterError        a cluster that cannot be reached, or used as it was asked
│   └── FrontSilentError        no front answers now; another one may take over
└── ServerError         a server that cannot be reached, or that answered with an error

Every message is one line that says what is wrong and what would be right. Broken invariants inside
coserve are plain `assert` statements: no input should ever reach them.
"""


class CoserveError(Exception):
    """Base of all errors that coserve raises on purpose; the message can be shown to a user."""


class GraphError(CoserveError):
    """A graph or an operator rule is inconsistent."""


class PolicyError(CoserveError):
    """A plan that cannot be run; the message names the policy and the item."""


class KernelError(CoserveError):
    """The CPU kernels cannot be compiled; the message has the compiler's first error."""


class BudgetError(CoserveError):
    """A budget (bytes, rows, seconds) that no choice can meet."""


class ModelError(CoserveError):
    """A model that cannot be used."""


class UnknownModelError(ModelError):
    """No preset, directory or hub id of this name."""


class UnsupportedModelError(ModelError):
    """A model family, or a setting in its configuration, that coserve does not run."""


class WeightsError(ModelError):
    """Weights that are missing, extra, misshapen, damaged or of the wrong type."""


class AdapterError(CoserveError):
    """An adapter that cannot be used with this model."""


class AdapterTooLargeError(AdapterError):
    """An adapter that needs more memory than is free now; the message gives both in bytes."""


class DataError(CoserveError):
    """Training data that cannot be used; the message names lines and reasons."""


class NothingToTrainError(DataError):
    """A readable record without anything to train on; a job that is not strict leaves it out."""


class RequestError(CoserveError):
    """A request that cannot be served as it stands."""


class GrammarMemoryError(RequestError):
    """A request whose compiled grammar has no room now beside those of running requests."""


class LimitError(CoserveError):
    """More than a tenant may have.

    Args:
        message: the message.
        what: kind of limit: "requests", "tokens", "jobs" or "files".
        retry_after_s: seconds after which a retry can succeed; None if it never can.
    """

    def __init__(self, message: str, *, what: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.what, self.retry_after_s = what, retry_after_s


class JobError(CoserveError):
    """A fine-tuning job that cannot be run as it stands, or is not there.

    Args:
        message: the message.
        param: name of the wrong setting, if it is one.
    """

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class JobOverError(JobError):
    """A job that the engine does not have: it has ended there, or never was."""


class StoreError(CoserveError):
    """The database of files and jobs cannot be opened, read or written now."""


class DiskFullError(StoreError):
    """No room on the disk for a file or the database; nothing of it has been kept."""


class DeviceMemoryError(CoserveError):
    """The device ran out of memory."""


class DeviceGoneError(CoserveError):
    """The device's process has ended, so a command was not executed, or only in part.

    Args:
        message: the message.
        returncode: exit status as `subprocess` has it, negative for a signal; None if unknown.
    """

    def __init__(self, message: str = "", returncode: int | None = None) -> None:
        super().__init__(message)
        self.returncode = returncode


class RankError(CoserveError):
    """A collective that ranks did not complete: one failed, or they called different collectives.

    The group can be used again once every rank has called `RankGroup.reset`.
    """


class RankGoneError(RankError):
    """A rank's process has ended or did not answer in time; the group can no longer be used."""


class EngineGoneError(CoserveError):
    """The engine's process is not running, so a command was not executed, or only in part."""


class SandboxError(CoserveError):
    """A call without a result, because its process ended.

    Args:
        message: the message.
        failure: "crashed"; "memory" or "time" for a limit of its own; "late" where a busy machine
            held it up; "killed" or "unstarted" where its process ended for a reason outside the
            call.
    """

    def __init__(self, message: str, *, failure: str) -> None:
        super().__init__(message)
        self.failure = failure


class ClusterError(CoserveError):
    """A cluster that cannot be reached, started or used as it was asked."""


class FrontSilentError(ClusterError):
    """A cluster whose front does not answer now: it starts, or another one takes over."""


class ServerError(CoserveError):
    """A server that cannot be reached, or that answered with an error.

    Args:
        message: the message.
        status: HTTP status; None if there was no answer.
    """

    def __init__(self, message: str, *, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


_BY_NAME = {
    name: kind
    for name, kind in vars().items()
    if isinstance(kind, type) and issubclass(kind, CoserveError)
}


def error_of_kind(kind: str) -> type[CoserveError] | None:
    """Return the class of an error by its name, as messages between processes have it; None if
    there is none.
    """
    return _BY_NAME.get(kind)
