"""Commands on jobs (their trainers, packs and copies), and the reply that says what a job costs.

See `commands.py` for the rest.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from coserve.scheduling.counts import JobCounts
from coserve.tuning.config import TuningConfig
from coserve.tuning.shard import Shard

# The optimizer's state, beside an adapter's files in a checkpoint.
OPTIMIZER_FILE = "optimizer.safetensors"


class OpenTrainer(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Command to make the tensors of a job. Reply: `TrainerOpened`.

    One of `adapter`, `version` and `checkpoint` says where the adapter comes from.

    Raises:
        AdapterError: The adapter fits nowhere on this model, or the checkpoint is damaged.
        ModelError: There is no such model.
        DeviceMemoryError: There is too little memory.
    """

    job: str
    """Id of the job."""
    config: TuningConfig
    """Settings of the job's training."""
    mean_context_len: float
    """Mean number of tokens that a row attends to, for choosing what to recompute."""
    adapter: dict[str, Any] | None = None
    """Fields of PEFT's adapter_config.json, for a fresh adapter; with a checkpoint, what the job
    began with, if that is known.
    """
    version: str | None = None
    """Served version to train a copy of."""
    checkpoint: str | None = None
    """Directory that `WriteCheckpoint` has written, with the optimizer's state."""
    model: str = ""
    """Directory or hub id (`find_model`) of the model to train, if that is not the one on the
    device: its weights pass through the pages of `ResizeWindow`. "": the model on the device.
    """
    shard: Shard | None = None
    """This node's part of a job that runs on several nodes."""


class ResizeWindow(msgspec.Struct, tag=True, frozen=True):
    """Command to set the run of pages that weights of other models than the device's pass through.

    Weights outside of the run are dropped before anything is written to their pages.
    """

    first_page: int
    """Number of the run's first page."""
    num_pages: int
    """Length of the run."""


class PlaceOptimizer(msgspec.Struct, tag=True, frozen=True):
    """Command to keep the moments of a job's optimizer in a run of pages, or beside the pool.

    It holds for the moments that exist, and for those that come after the first step or back from
    the host. It does nothing if they lie there, or the job is gone. Too little memory beside the
    pool is no error here: the optimizer step that needs the moments fails.
    """

    job: str
    """Id of the job."""
    first_page: int
    """Number of the run's first page."""
    num_pages: int
    """Length of the run; 0: beside the pool."""


class CloseTrainer(msgspec.Struct, tag=True, frozen=True):
    """Command to end a job: its pack, gradients and optimizer state are dropped; the adapter stays
    until `DropTrainer`.
    """

    job: str
    """Id of the job."""


class DropTrainer(msgspec.Struct, tag=True, frozen=True):
    """Command to drop all that is left of a job; no error if it is not there."""

    job: str
    """Id of the job."""


class BeginPack(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Command to lay a pack out on its pages.

    It takes the place of a pack that was begun and never done, which the engine has forgotten.

    Raises:
        DeviceMemoryError: There is too little memory; no pack is begun.
    """

    job: str
    """Id of the job."""
    sequences: tuple[tuple[tuple[int, ...], tuple[bool, ...]], ...]
    """Token ids of each sequence, and for each token whether it is trained on."""
    first_row: int
    """Number of the pack's first row among all rows that the job ever trains on."""
    runs: tuple[tuple[int, int], ...]
    """First page and number of pages of each group of tensors, in the order of `TrainerOpened`."""
    evaluate: bool = False
    """Whether the pack only measures the loss."""
    is_reference: bool = False
    """Whether the pack runs without the adapter, as the reference of the next pack, which has the
    same sequences.
    """
    values: tuple[tuple[float, ...], ...] = ()
    """Numbers of each sequence's tokens for the objective (see `Example`)."""
    labels: tuple[float, ...] = ()
    """Label of each sequence for the objective (see `Example`)."""


class DropPack(msgspec.Struct, tag=True, frozen=True):
    """Command to forget the pack that was begun last; gradients of earlier packs stay.

    It may come at any time, also after the pack was done in a step whose result nobody has
    collected.
    """

    job: str
    """Id of the job."""


class PublishVersion(msgspec.Struct, tag=True, frozen=True):
    """Command to keep a copy of a job's adapter as it is now, to be served as a version.

    Raises:
        DeviceMemoryError: There is too little memory; no copy is kept.
    """

    job: str
    """Id of the job."""
    version: str
    """Id of the new version."""


class TakeCheckpoint(msgspec.Struct, tag=True, frozen=True):
    """Command to copy a job's adapter, and its optimizer's state unless the trainer is closed.

    Raises:
        DeviceMemoryError: There is too little memory; no copy is taken.
    """

    job: str
    """Id of the job."""
    checkpoint: str
    """Id of the copy."""


class WriteCheckpoint(msgspec.Struct, tag=True, frozen=True):
    """Command to write a copy to files.

    It may come from any thread, and is done beside steps.

    Raises:
        AdapterError, OSError: The files cannot be written.
    """

    checkpoint: str
    """Id of the copy."""
    directory: str
    """Directory for the files, which exists."""


class DropCheckpoint(msgspec.Struct, tag=True, frozen=True):
    """Command to drop a copy; no error if it is not there."""

    checkpoint: str
    """Id of the copy."""


class TakeContribution(msgspec.Struct, tag=True, frozen=True):
    """Command to copy what a job's other nodes are to have of it (`coserve.tuning.shard`).

    That is its progress, or the gradients since the last optimizer step, which the trainer then no
    longer has. The copy is one as of `TakeCheckpoint`, with the same commands. Nothing happens if a
    copy of this name exists.
    """

    job: str
    """Id of the job."""
    checkpoint: str
    """Id of the copy."""


class ReadContributions(msgspec.Struct, tag=True, frozen=True):
    """Command to read what nodes have written, for `CombineContributions`.

    It replaces what was read before and not combined. It may come from any thread, and is done
    beside steps. No error if the job is gone.

    Raises:
        AdapterError: A file is missing, damaged, or of another job.
    """

    job: str
    """Id of the job."""
    directories: tuple[str, ...]
    """Directories of the contributions, in the order in which all nodes combine them."""


class CombineContributions(msgspec.Struct, tag=True, frozen=True):
    """Command to take in contributions that were read; nothing happens if that has been done."""

    job: str
    """Id of the job."""
    up_to: int
    """Number of contributions since the trainer was opened that are taken in then."""
    meets: bool = False
    """Whether all nodes hold the same values after these contributions."""


class TensorBytes(msgspec.Struct, frozen=True, array_like=True):
    """Number of bytes that a tensor of a pack takes, by the pack's number of rows."""

    row: int
    """Bytes for each row."""
    chunk: int = 0
    """Bytes for each chunk of rows, whole or not."""
    chunk_rows: int = 1
    """Rows of a chunk."""
    fixed: int = 0
    """Bytes in any case."""

    def of(self, num_rows: int) -> int:
        """Return the bytes for a pack of this many rows."""
        return self.row * num_rows + self.chunk * -(-num_rows // self.chunk_rows) + self.fixed


class TrainerOpened(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Reply to `OpenTrainer`: what the job costs."""

    counts: JobCounts
    """Work of its rows, counted from the graphs."""
    training: tuple[tuple[TensorBytes, ...], ...]
    """Groups of tensors that a pack takes: the workspace, then what is saved of every part before
    the head, in forward order. `coserve.memory.pages.pack_pages` says when each is freed.
    """
    evaluation: tuple[tuple[TensorBytes, ...], ...]
    """The same of a pack that only measures the loss."""
    trained_parts: int
    """Number of these parts, from the last one down, that run backward."""
    version_bytes: int = 0
    """Bytes of the parameters, as they go to the host."""
    optimizer_bytes: int = 0
    """Bytes of the optimizer's moments after its first step, as they go to the host."""
    num_virtual_tokens: int = 0
    """Rows that stand before every example (see `VersionOpened`)."""
    changes_model: bool = False
    """Whether each of its steps changes the weights that serve."""
    moments_need_pages: bool = False
    """Whether the device has no memory for the moments beside the pool. Without pages they stay in
    the host's memory, and no optimizer step can run.
    """
    vocab_size: int = 0
    """Number of tokens of the adapter's model, if it is another than the device's; 0: the same."""
    other: "OtherModel | None" = None
    """The model of a job that does not train the one on the device."""


class OtherModel(msgspec.Struct, frozen=True, kw_only=True):
    """Model that a job trains beside the one on the device; its packs run as tasklets alone, part
    by part.
    """

    vocab_size: int
    """Number of the model's tokens."""
    max_positions: int
    """Length of the longest sequence."""
    forward_turns: int
    """Tasklets of a pack's forward pass, before the loss."""
    loss_turns: int
    """Tasklets of the loss, before the first part runs backward."""
    evaluation_loss_turns: int
    """Tasklets of the loss of a pack that only measures it."""
    least_bytes: int
    """Smallest window that lets the next part be prefetched while one is in use."""
    all_bytes: int
    """Window in which all parts stay."""


def group_bytes(tensors: Sequence[TensorBytes], num_rows: int) -> int:
    """Return the bytes of a group of tensors in the pool, each aligned to 64 bytes."""
    return sum(-(-each.of(num_rows) // 64) * 64 for each in tensors)
