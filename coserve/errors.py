"""Everything that coserve raises on purpose.

CoserveError
├── GraphError          a graph or an operator rule is inconsistent: a bug in a model family or a PEFT method
├── PolicyError         a plan that cannot be run: a bug in a policy
├── KernelError         kernels that cannot be compiled on this machine
├── BudgetError         a budget that nothing can meet
├── ModelError          a model that cannot be used
│   ├── UnknownModelError       no such preset, directory or hub id
│   ├── UnsupportedModelError   a family or a configuration that coserve does not run
│   └── WeightsError            weights that are missing, extra, misshapen, damaged or of the wrong type
├── AdapterError        an adapter that cannot be used with this model
│   └── AdapterTooLargeError    one that needs more memory than there is for it now
├── DataError           training data that cannot be used
│   └── NothingToTrainError     a record that is read, and of which nothing is left to train on
├── RequestError        a request that cannot be served as it was asked
│   └── GrammarMemoryError      its grammar finds no room now beside those of other requests
├── LimitError          more than a tenant may have, or more than it may have now
├── JobError            a fine-tuning job that cannot be run as it was asked, or that is not there
│   └── JobOverError            the engine does not have the job: it has ended there, or never was
├── StoreError          the database of files and jobs cannot be used now
│   └── DiskFullError           a file or the database cannot be written: there is no room on its disk
├── DeviceMemoryError   the device ran out of memory within a step
├── DeviceGoneError     the device's process is not there any more
├── RankError           a collective that was not completed, since a rank of the group failed
│   └── RankGoneError           a rank that has ended, or that does not answer: the group cannot continue
├── EngineGoneError     the engine's process is not there: it starts, or has died and is started again
├── SandboxError        a call that crashed in its sandbox, or went past the limits there
├── ClusterError        a cluster that cannot be reached, or used as it was asked
│   └── FrontSilentError        no front answers now; another one may take over
└── ServerError         a server that cannot be reached, or that answered with an error

Every message is one line that says what is wrong and what would be right. Broken invariants inside coserve are plain
``assert`` statements: no input should ever reach them.
"""


class CoserveError(Exception):
    """Base of every error that coserve raises on purpose; the message is fit to show to a user."""


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
    """An adapter that needs more memory than there is for it now; the message gives both in bytes."""


class DataError(CoserveError):
    """Training data that cannot be used; the message names lines and reasons."""


class NothingToTrainError(DataError):
    """A record that can be read but has nothing to train on; a job that is not strict leaves it out."""


class RequestError(CoserveError):
    """A request that cannot be served as it was asked."""


class GrammarMemoryError(RequestError):
    """A request whose compiled grammar finds no room now beside those of requests under way."""


class LimitError(CoserveError):
    """More than a tenant may have. what: "requests", "tokens", "jobs" or "files". retry_after_s: when it may be had;
    None: what was asked for never.
    """

    def __init__(self, message: str, *, what: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.what, self.retry_after_s = what, retry_after_s


class JobError(CoserveError):
    """A fine-tuning job that cannot be run as it was asked, or that is not there. param: the setting that is wrong."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class JobOverError(JobError):
    """The engine does not have the job: it has ended there, or never was."""


class StoreError(CoserveError):
    """The database of files and jobs cannot be opened, read or written now."""


class DiskFullError(StoreError):
    """A file or the database cannot be written, since there is no room on its disk; nothing of it has been kept."""


class DeviceMemoryError(CoserveError):
    """The device ran out of memory."""


class DeviceGoneError(CoserveError):
    """The device's process has ended; what was asked of it has not been done, or not to its end.

    returncode: how it ended, as `subprocess` has it: negative for a signal; None if that is not known.
    """

    def __init__(self, message: str = "", returncode: int | None = None) -> None:
        super().__init__(message)
        self.returncode = returncode


class RankError(CoserveError):
    """A collective that a group of ranks did not complete: a rank failed, or ranks called different collectives.

    The group can be used again once every rank has called `RankGroup.reset`.
    """


class RankGoneError(RankError):
    """A rank's process has ended, or did not answer in time: the group cannot be used any more."""


class EngineGoneError(CoserveError):
    """The engine's process is not there now; what was asked of it has not been done, or not to its end."""


class SandboxError(CoserveError):
    """A call that has no result, since its process ended.

    failure: "crashed"; "memory" or "time" for a limit of its own; "late" where a busy machine held it up; "killed" or
    "unstarted" where its process ended for no reason of the call's.
    """

    def __init__(self, message: str, *, failure: str) -> None:
        super().__init__(message)
        self.failure = failure


class ClusterError(CoserveError):
    """A cluster that cannot be reached, started or used as it was asked."""


class FrontSilentError(ClusterError):
    """The cluster has a front that does not answer now: it starts, or another one takes over."""


class ServerError(CoserveError):
    """A server that cannot be reached, or that answered with an error; status: of HTTP, None if there was no answer."""

    def __init__(self, message: str, *, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


_BY_NAME = {
    name: kind
    for name, kind in vars().items()
    if isinstance(kind, type) and issubclass(kind, CoserveError)
}


def error_of_kind(kind: str) -> type[CoserveError] | None:
    """Return the class of one of these errors by its name, as messages between processes have it; None for others."""
    return _BY_NAME.get(kind)
