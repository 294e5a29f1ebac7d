"""What crosses between the engine and a device: frozen, serialisable values that hold ids and
numbers only.

The engine sends commands and steps in one ordered stream; a device answers each. Requests, jobs,
adapter versions and pages are ids that the engine gives out; what they stand for (tensors,
trainers, copies of adapters) is the device's own. Pages count from 0; times are seconds. Everything
here can be encoded by msgspec, written to a file and replayed.

Here are what a device says of itself, and the commands on requests, pages and adapters; those on
jobs are in `jobs.py`, those on host memory in `pages.py`, a step in
`steps.py`.
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


class DeviceInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A device with a model on it, and its page pool.

    weights: how those of linear layers are stored, "dense" or "int8". device: such as "cpu" or
    "cuda:0". num_layers: blocks. weight_bytes: of the backbone. threads: of the CPU. page_bytes: of
    one page, which holds K and V of `block_tokens` tokens in all blocks. profile: what pieces of a
    step take here. num_state_pages: of each request, before those of its keys and values, for what
    it carries from row to row. profile_path: the file that it comes from; "" if it is not kept.
    deterministic: whether tokens and gradients are the same bit for bit, whatever runs beside them.
    num_units: among which sides of a step it can be divided (`Partition`): threads of a CPU, shares
    of a GPU's multiprocessors; 1: it cannot. num_host_pages: slots of a page's size in host memory,
    for pages that give way (`SwapOut`). fingerprint: of the weights, so that two devices can be
    told to hold the same model; "" if there are none.
    """

    model: str
    dtype: str
    weights: str = "dense"
    device: str
    threads: int
    vocab_size: int
    max_positions: int
    num_layers: int
    weight_bytes: int
    num_pages: int
    page_bytes: int
    block_tokens: int
    profile: Profile
    profile_path: str = ""
    deterministic: bool = False
    num_units: int = 1
    num_host_pages: int = 0
    num_state_pages: int = 0
    fingerprint: str = ""
    kernels: str = ""
    """Name of the kernel backend."""
    kernels_warning: str = ""
    """Why a faster kernel backend does not run, as one line; "" if none is missing."""
    num_ranks: int = 1
    """Number of processes that hold the model together; sizes in bytes and pages are those of
    each."""
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
    """A request has its pages: a handle for it. pages: those that it shares with earlier requests,
    in order.

    prompt, output: the tokens so far, for requests whose params penalize used tokens; empty for all
    others, but that those with a grammar have their output, too.
    """

    request: str
    params: SamplingParams
    seed: int
    version: str = ""
    pages: tuple[int, ...] = ()
    prompt: tuple[int, ...] = ()
    output: tuple[int, ...] = ()


class CloseRequest(msgspec.Struct, tag=True, frozen=True):
    """The request has ended, or was preempted: its pages are no longer its own. No error if it was
    not open.
    """

    request: str


class ExportPages(msgspec.Struct, tag=True, frozen=True):
    """Copy pages to places of a page file (`coserve.memory.tensors.page_files`), one to one: another
    instance reads them there as soon as this is done. OSError if the file is not there.
    """

    path: str
    pages: tuple[int, ...]
    places: tuple[int, ...]


class ImportPages(msgspec.Struct, tag=True, frozen=True):
    """Copy places of a page file to pages. data: what lay there, page after page; only in
    recordings, which are run again when the file has gone.
    """

    path: str
    pages: tuple[int, ...]
    places: tuple[int, ...]
    data: bytes = b""


class SetVocabulary(msgspec.Struct, tag=True, frozen=True):
    """What the model's tokens stand for; before the first grammar.

    May come from any thread, and is done beside steps. RequestError if the device has no library
    for grammars.
    """

    vocabulary: Vocabulary


class OpenGrammar(msgspec.Struct, tag=True, frozen=True):
    """Compile a grammar, and keep it for requests. Reply: `GrammarOpened`. RequestError if it
    cannot be used.

    May come from any thread, and is done beside steps.
    """

    grammar: Grammar
    # States that its lexer may make while texts follow it, each of at most `STATE_BYTES`.
    max_states: int = MAX_STATES


class CloseGrammar(msgspec.Struct, tag=True, frozen=True):
    """Forget a compiled grammar; those who follow it keep it. No error if it was not open.

    May come from any thread, and is done beside steps.
    """

    grammar: Grammar


class OpenVersion(msgspec.Struct, tag=True, frozen=True):
    """Put an adapter in PEFT's format on the device, to be served as `version`. Reply:
    `VersionOpened`.

    May come from any thread, and is done beside steps; none of them names the version yet.
    AdapterError for its files; DeviceMemoryError. model: that it is of, if that is not the one on
    the device (see `OpenTrainer`): it can be trained further, not served. changed_by: the job whose
    full fine-tuning has made what is there, a model and no adapter: the device, on which there is
    nothing yet, serves its weights from now on, and the version names them.
    """

    version: str
    directory: str
    model: str = ""
    changed_by: str = ""


class SaveAdapter(msgspec.Struct, tag=True, frozen=True):
    """Write a version in PEFT's format; AdapterError if it cannot be written."""

    version: str
    directory: str


class DropVersion(msgspec.Struct, tag=True, frozen=True):
    """Let go of a version that no request reads; no error if it is not there."""

    version: str


class MeasureDevice(msgspec.Struct, tag=True, frozen=True):
    """Run one more piece of the measurement of a device whose profile is provisional; no step is
    under way.

    Reply: `DeviceMeasured`. A piece takes as long as a forward pass of some hundred rows at most.
    """


class CountCommands(msgspec.Struct, tag=True, frozen=True):
    """Count the commands of the ordered stream that the device has answered since its start, within
    steps and without.

    Reply: `CommandsCounted`. Neither this command is counted, nor are those of `BESIDE_STEPS`.
    """


class DescribeRanks(msgspec.Struct, tag=True, frozen=True):
    """Describe each rank of the device as it is now. Reply: `RanksDescribed`.

    May come from any thread, and is done beside steps.
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
"""Those of them that ranks of a group do beside steps, each for itself: none of them uses a
collective."""

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
    """num_bypasses: sites of the adapter. num_bytes: of its parameters, as they go to the host.
    num_virtual_tokens: rows that stand before every prompt, with the ids -1, -2, …. vocab_size: of
    the adapter's model, where that is another than the device's; 0: the same.
    """

    num_bypasses: int
    num_bytes: int = 0
    num_virtual_tokens: int = 0
    vocab_size: int = 0


class DeviceMeasured(msgspec.Struct, tag=True, frozen=True):
    """Progress of the measurement of a device."""

    done: int
    """Finished measurements."""
    total: int
    """About how many there are."""
    profile: Profile | None = None
    """The measured profile; None until the last piece has run."""


class GrammarOpened(msgspec.Struct, tag=True, frozen=True):
    """The reply to `OpenGrammar`."""

    # Bytes that the compiled grammar takes, as measured in a sandbox.
    num_bytes: int


class CommandsCounted(msgspec.Struct, tag=True, frozen=True):
    """The reply to `CountCommands`."""

    num_answered: int
    """Commands that were done, or failed and changed nothing."""


class RankState(msgspec.Struct, frozen=True, kw_only=True):
    """One rank of a device."""

    pid: int
    """Number of its process."""
    device: str
    """Name of its device, such as "cpu" or "cuda:1"."""
    memory_bytes: int
    """Bytes that its process holds on that device; on a CPU, its resident memory."""
    waited_s: float = 0.0
    """Seconds for which it has waited for other ranks in collectives, since its start."""


class RanksDescribed(msgspec.Struct, tag=True, frozen=True):
    """The reply to `DescribeRanks`."""

    ranks: tuple[RankState, ...]
    """The states of all ranks, in their order."""


Reply = (
    VersionOpened
    | TrainerOpened
    | DeviceMeasured
    | GrammarOpened
    | CommandsCounted
    | RanksDescribed
    | None
)
