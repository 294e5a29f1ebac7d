"""Messages between the engine and a device: frozen, serialisable values of ids and numbers.

The engine sends commands and steps in one ordered stream; a device answers each. Requests, jobs,
adapter versions and pages are ids that the engine gives out; what they stand for (tensors,
trainers, copies of adapters) is the device's own. Pages count from 0; times are in seconds. All
messages can be encoded by msgspec, written to a file and replayed.

This file has the description of a device, and the commands on requests, pages and adapters. Those
on jobs are in `jobs.py`, those on host memory in `pages.py`, a step in `steps.py`.
"""

import msgspec

from coserve.devices.grammars.grammar import MAX_STATES, Grammar
from coserve.devices.grammars.matching import Vocabulary
from coserve.devices.messages.jobs import (
    BeginPack,
    CloseTrainer,
    CombineContributions,
    DropCheckpoint,
    DropPack,
    DropTrainer,
    OpenTrainer,
    PlaceOptimizer,
    PublishVersion,
    ReadContributions,
    ResizeWindow,
    TakeCheckpoint,
    TakeContribution,
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
from coserve.devices.sampling_params import SamplingParams
from coserve.scheduling.profile import Profile


class ModelOnDevice(msgspec.Struct, frozen=True, kw_only=True):
    """A model on a device with a page pool, as an engine and its server see it."""

    model: str
    """Name of the model, as it was asked for."""
    dtype: str
    """Dtype that is computed with, such as "bfloat16"."""
    device: str
    """Name of the device, such as "cpu" or "cuda:0"."""
    threads: int
    """Threads of the CPU."""
    vocab_size: int
    """Number of the model's tokens."""
    max_positions: int
    """Length of the longest sequence."""
    weight_bytes: int
    """Bytes of the backbone's weights."""
    num_pages: int
    """Number of pages."""
    page_bytes: int
    """Bytes of a page, which holds the keys and values of `block_tokens` tokens in all blocks."""
    block_tokens: int
    """Tokens of a page."""
    num_state_pages: int = 0
    """Pages that each request has before those of its keys and values, for the states of its
    sequence.
    """
    fingerprint: str = ""
    """Fingerprint of the weights, equal on devices that hold the same model; "": there is none."""
    num_ranks: int = 1
    """Number of processes that hold the model together; sizes in bytes and pages are those of
    each."""
    kernels: str = ""
    """Name of the kernel backend."""
    kernels_warning: str = ""
    """Why a faster kernel backend does not run, as one line; "" if none is missing."""


class DeviceInfo(ModelOnDevice, frozen=True, kw_only=True):
    """Description of a device with a model on it, and of its page pool."""

    weights: str = "dense"
    """Storage of the weights of linear layers: "dense" or "int8"."""
    num_layers: int
    """Number of blocks."""
    profile: Profile
    """Measured times of the pieces of a step."""
    profile_path: str = ""
    """File that the profile comes from; "" if it is not kept."""
    deterministic: bool = False
    """Whether tokens and gradients are the same bit for bit, whatever runs beside them."""
    num_units: int = 1
    """Units among which the sides of a step can be divided (`Partition`): threads of a CPU, shares
    of a GPU's multiprocessors. 1: it cannot be divided.
    """
    num_host_pages: int = 0
    """Slots of a page's size in host memory, for pages that give way (`SwapOut`)."""
    whole_page_bytes: int = 0
    """Bytes that a page would have if one rank held the model: those of a place of a page file. 0
    in recordings from before there were ranks."""
    is_provisional: bool = False
    """Whether the profile is a quick and cautious one, which `MeasureDevice` replaces."""

    @property
    def place_bytes(self) -> int:
        """Return the bytes of a place of a page file."""
        return self.whole_page_bytes or self.page_bytes


class OpenRequest(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Command to make a handle for a request that has its pages."""

    request: str
    """Id of the request."""
    params: SamplingParams
    """Settings of its sampling."""
    seed: int
    """Seed of its draws."""
    version: str = ""
    """Adapter version that its rows run with; "": the bare model."""
    pages: tuple[int, ...] = ()
    """Pages that it shares with earlier requests, in order."""
    prompt: tuple[int, ...] = ()
    """Tokens of the prompt, if the request penalizes used tokens."""
    output: tuple[int, ...] = ()
    """Tokens that were chosen so far, if the request penalizes used tokens or has a grammar."""


class CloseRequest(msgspec.Struct, tag=True, frozen=True):
    """Command to drop the handle of a request that has ended or was preempted; no error if it is
    not open.
    """

    request: str
    """Id of the request."""


class ExportPages(msgspec.Struct, tag=True, frozen=True):
    """Command to copy pages to places of a page file (`coserve.memory.tensors.page_files`), one to
    one.

    Another instance may read them there as soon as the command is done.

    Raises:
        OSError: The file is not there.
    """

    path: str
    """Path of the page file."""
    pages: tuple[int, ...]
    """Pages to copy."""
    places: tuple[int, ...]
    """Place for each page."""


class ImportPages(msgspec.Struct, tag=True, frozen=True):
    """Command to copy places of a page file to pages, one to one."""

    path: str
    """Path of the page file."""
    pages: tuple[int, ...]
    """Page for each place."""
    places: tuple[int, ...]
    """Places to copy."""
    data: bytes = b""
    """Content of the places, page after page; only in recordings, which are replayed when the file
    is gone.
    """


class SetVocabulary(msgspec.Struct, tag=True, frozen=True):
    """Command to set the texts that the model's tokens stand for; it comes before the first
    grammar.

    It may come from any thread, and is done beside steps.

    Raises:
        RequestError: The device has no library for grammars.
    """

    vocabulary: Vocabulary
    """The texts."""


class OpenGrammar(msgspec.Struct, tag=True, frozen=True):
    """Command to compile a grammar and keep it for requests. Reply: `GrammarOpened`.

    It may come from any thread, and is done beside steps.

    Raises:
        RequestError: The grammar cannot be used.
    """

    grammar: Grammar
    """The grammar."""
    max_states: int = MAX_STATES
    """States that its lexer may make while texts follow it, each of at most `STATE_BYTES`."""


class CloseGrammar(msgspec.Struct, tag=True, frozen=True):
    """Command to forget a compiled grammar; requests that follow it keep it. No error if it is not
    open.

    It may come from any thread, and is done beside steps.
    """

    grammar: Grammar
    """The grammar."""


class OpenVersion(msgspec.Struct, tag=True, frozen=True):
    """Command to load an adapter in PEFT's format, to be served as a version. Reply:
    `VersionOpened`.

    It may come from any thread, and is done beside steps; no step names the version yet.

    Raises:
        AdapterError: The adapter's files cannot be used.
        DeviceMemoryError: There is too little memory.
    """

    version: str
    """Id of the version."""
    directory: str
    """Directory of the adapter."""
    model: str = ""
    """Model of the adapter, if that is not the one on the device (see `OpenTrainer`): such a
    version can be trained further, not served.
    """
    changed_by: str = ""
    """Job whose full fine-tuning has made what is in the directory, a model and no adapter. The
    device, which holds no version yet, serves its weights from then on, and the version names them.
    """


class SaveAdapter(msgspec.Struct, tag=True, frozen=True):
    """Command to write a version in PEFT's format.

    Raises:
        AdapterError: It cannot be written.
    """

    version: str
    """Id of the version."""
    directory: str
    """Directory for the files."""


class DropVersion(msgspec.Struct, tag=True, frozen=True):
    """Command to drop a version that no request reads; no error if it is not there."""

    version: str
    """Id of the version."""


class MeasureDevice(msgspec.Struct, tag=True, frozen=True):
    """Command to run one more piece of the measurement of a device whose profile is provisional.

    No step is under way. A piece takes as long as a forward pass of some hundred rows at most.
    Reply: `DeviceMeasured`.
    """


class CountCommands(msgspec.Struct, tag=True, frozen=True):
    """Command to count the commands of the ordered stream that the device has answered since its
    start.

    Commands within steps count; this command and those of `BESIDE_STEPS` do not. Reply:
    `CommandsCounted`.
    """


class DescribeRanks(msgspec.Struct, tag=True, frozen=True):
    """Command to describe each rank of the device as it is now. Reply: `RanksDescribed`.

    It may come from any thread, and is done beside steps.
    """


BESIDE_STEPS = (
    *(OpenVersion, WriteCheckpoint, ReadContributions, SetVocabulary, OpenGrammar, CloseGrammar),
    DescribeRanks,
)
"""Commands that may come from any thread and are done beside steps; all others stand in one ordered
stream."""

BESIDE_STEPS_OF_RANKS = (
    WriteCheckpoint,
    ReadContributions,
    SetVocabulary,
    OpenGrammar,
    CloseGrammar,
    DescribeRanks,
)
"""Commands of `BESIDE_STEPS` that ranks of a group do beside steps, each for itself: none of them
uses a collective."""

Command = (
    MeasureDevice
    | CountCommands
    | DescribeRanks
    | ResizeWindow
    | PlaceOptimizer
    | OpenRequest
    | CloseRequest
    | SwapOut
    | SwapIn
    | MovePages
    | ExportPages
    | ImportPages
    | SwapOutTensors
    | SwapInTensors
    | SetVocabulary
    | OpenGrammar
    | CloseGrammar
    | OpenVersion
    | SaveAdapter
    | DropVersion
    | OpenTrainer
    | CloseTrainer
    | DropTrainer
    | BeginPack
    | MovePack
    | DropPack
    | PublishVersion
    | TakeCheckpoint
    | WriteCheckpoint
    | DropCheckpoint
    | TakeContribution
    | ReadContributions
    | CombineContributions
)


# -- replies to commands (None where none is named) ---------------------------------------


class VersionOpened(msgspec.Struct, tag=True, frozen=True):
    """Reply to `OpenVersion`."""

    num_bypasses: int
    """Number of the adapter's sites."""
    num_bytes: int = 0
    """Bytes of its parameters, as they go to the host."""
    num_virtual_tokens: int = 0
    """Rows that stand before every prompt, with the ids -1, -2, …."""
    vocab_size: int = 0
    """Number of tokens of the adapter's model, if it is another than the device's; 0: the same."""


class DeviceMeasured(msgspec.Struct, tag=True, frozen=True):
    """Reply to `MeasureDevice`: progress of the measurement."""

    done: int
    """Finished measurements."""
    total: int
    """About how many there are."""
    profile: Profile | None = None
    """The measured profile; None until the last piece has run."""


class GrammarOpened(msgspec.Struct, tag=True, frozen=True):
    """Reply to `OpenGrammar`."""

    num_bytes: int
    """Bytes that the compiled grammar takes, as measured in a sandbox."""


class CommandsCounted(msgspec.Struct, tag=True, frozen=True):
    """Reply to `CountCommands`."""

    num_answered: int
    """Commands that were done, or failed and changed nothing."""


class RankReport(msgspec.Struct, frozen=True, kw_only=True):
    """Report on one rank of a device."""

    pid: int
    """Number of its process."""
    device: str
    """Name of its device, such as "cpu" or "cuda:1"."""
    memory_bytes: int
    """Bytes that its process holds on that device; on a CPU, its resident memory."""
    waited_s: float = 0.0
    """Seconds for which it has waited for other ranks in collectives, since its start."""


class RanksDescribed(msgspec.Struct, tag=True, frozen=True):
    """Reply to `DescribeRanks`."""

    ranks: tuple[RankReport, ...]
    """The reports on all ranks, in their order."""


Reply = (
    VersionOpened
    | TrainerOpened
    | DeviceMeasured
    | GrammarOpened
    | CommandsCounted
    | RanksDescribed
    | None
)
