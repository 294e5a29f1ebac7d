"""What the engine tells a device of jobs: trainers, their packs, copies of them; and what it hears
of a new one.

See `messages.py`.
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
    """Make the tensors of a job. Reply: `TrainerOpened`. One of three says where the adapter comes
    from.

    adapter: the fields of PEFT's adapter_config.json, for a fresh one. version: a copy of a served
    one. checkpoint: a directory that `WriteCheckpoint` made; then the optimizer's state comes from
    there, too, and `adapter` says what the job began with, if it is known. mean_context_len: mean
    number of tokens that a row attends to, for choosing what to recompute.

    model: that it trains, where that is not the one on the device: a directory or hub id
    (`find_model`), whose weights pass through the pages of `ResizeWindow`; "" for the one on the
    device. shard: this is one node's part of the job.

    AdapterError: it fits nowhere on this model, or the checkpoint is damaged. ModelError: there is
    no such model. DeviceMemoryError.
    """

    job: str
    config: TuningConfig
    mean_context_len: float
    adapter: dict[str, Any] | None = None
    version: str | None = None
    checkpoint: str | None = None
    model: str = ""
    shard: Shard | None = None


class ResizeWindow(msgspec.Struct, tag=True, frozen=True):
    """The run of pages that weights of models other than the device's own pass through, from now
    on. What lies in others is let go of before anything is written to them.
    """

    first_page: int
    num_pages: int


class PlaceOptimizer(msgspec.Struct, tag=True, frozen=True):
    """The moments of a job's optimizer lie in this run of pages from now on, or beside the pool (0
    pages): those that there are, or will be after its first step, or come back from the host.
    Nothing if they do, or are gone. No error if there is no memory beside the pool: then the
    optimizer step that needs them fails of it.
    """

    job: str
    first_page: int
    num_pages: int


class CloseTrainer(msgspec.Struct, tag=True, frozen=True):
    """The job has ended: pack, gradients and the optimizer's state go; the adapter itself stays
    until `DropTrainer`.
    """

    job: str


class DropTrainer(msgspec.Struct, tag=True, frozen=True):
    """Let go of all that there is of a job; no error if it is not there."""

    job: str


class BeginPack(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Lay a pack out on the pages that it was given; DeviceMemoryError begins nothing. It takes the
    place of one that was begun and never done, of which the engine does not know.

    sequences: token ids, and for each whether it is trained on. first_row: its first row among all
    that the job ever trains on. runs: (first page, number of pages) of each group of tensors, in
    the order of `TrainerOpened`. evaluate: measure the loss alone. is_reference: of the model
    without the adapter, for the pack that comes next, which is the same. values, labels: what
    examples bring for the objective (see `Example`).
    """

    job: str
    sequences: tuple[tuple[tuple[int, ...], tuple[bool, ...]], ...]
    first_row: int
    runs: tuple[tuple[int, int], ...]
    evaluate: bool = False
    is_reference: bool = False
    values: tuple[tuple[float, ...], ...] = ()
    labels: tuple[float, ...] = ()


class DropPack(msgspec.Struct, tag=True, frozen=True):
    """Forget the pack that was begun last, at any moment, also if it was done in a step whose
    result nobody took.

    Gradients of earlier packs stay.
    """

    job: str


class PublishVersion(msgspec.Struct, tag=True, frozen=True):
    """Keep a copy of a job's adapter as it is, to be served as `version`; DeviceMemoryError keeps
    none.
    """

    job: str
    version: str


class TakeCheckpoint(msgspec.Struct, tag=True, frozen=True):
    """Copy a job's adapter, and its optimizer's state unless the trainer is closed;
    DeviceMemoryError takes none.
    """

    job: str
    checkpoint: str


class WriteCheckpoint(msgspec.Struct, tag=True, frozen=True):
    """Write a copy to files in a directory that exists; AdapterError or OSError if it cannot be
    written.

    May come from any thread, and is done beside steps.
    """

    checkpoint: str
    directory: str


class DropCheckpoint(msgspec.Struct, tag=True, frozen=True):
    """Let go of a copy; no error if it is not there."""

    checkpoint: str


class TakeContribution(msgspec.Struct, tag=True, frozen=True):
    """Take what a job's other nodes are to have of it (`coserve.tuning.shard`): the gradients since
    the last optimizer step, which are then the trainer's no more; or its progress. A copy as of
    `TakeCheckpoint`, with the same commands. Nothing if there is a copy of this name already.
    """

    job: str
    checkpoint: str


class ReadContributions(msgspec.Struct, tag=True, frozen=True):
    """Read what nodes have written, for `CombineContributions`, in place of what was read before
    and not combined; AdapterError for their files.

    May come from any thread, and is done beside steps; no error if the job is not there any more.
    """

    job: str
    directories: tuple[str, ...]


class CombineContributions(msgspec.Struct, tag=True, frozen=True):
    """Take in those that were read, up to the `up_to`th since the trainer was opened; nothing if
    that has been done. meets: with them, all nodes hold the same.
    """

    job: str
    up_to: int
    meets: bool = False


class TensorBytes(msgspec.Struct, frozen=True, array_like=True):
    """Of a tensor that a pack takes: for each row, for each chunk of as many rows that is begun,
    and in any case.
    """

    row: int
    chunk: int = 0
    chunk_rows: int = 1
    fixed: int = 0

    def of(self, num_rows: int) -> int:
        """A pack of this many rows."""
        return self.row * num_rows + self.chunk * -(-num_rows // self.chunk_rows) + self.fixed


class TrainerOpened(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """What a job costs. training, evaluation: the groups of tensors that a pack takes: first the
    workspace, then what is saved of every part before the head, in forward order.
    (`coserve.memory.pages.pack_pages` says when each goes back.) trained_parts: how many of these parts,
    from the last one down, run backward. version_bytes, optimizer_bytes: of the parameters, and of
    the optimizer's moments after its first step, as they go to the host. num_virtual_tokens: rows
    that stand before every example (see `VersionOpened`). other: of a job on a model of its own.
    changes_model: each of its steps changes the weights that serve. moments_need_pages: the device
    has no memory for the moments beside the pool, and keeps them in the host's while they have no
    pages: then no step can be made.
    """

    counts: JobCounts
    training: tuple[tuple[TensorBytes, ...], ...]
    evaluation: tuple[tuple[TensorBytes, ...], ...]
    trained_parts: int
    version_bytes: int = 0
    optimizer_bytes: int = 0
    num_virtual_tokens: int = 0
    changes_model: bool = False
    moments_need_pages: bool = False
    vocab_size: int = 0
    other: "OtherModel | None" = None


class OtherModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model that a job trains beside the one on the device; all that its packs run are tasklets,
    part by part.

    forward_turns, loss_turns: of these, before the first part goes backward; evaluation_loss_turns:
    of a pack that only measures the loss. least_bytes, all_bytes: of a window in which the next
    part can come while one computes, and of one in which all of them stay.
    """

    vocab_size: int
    max_positions: int
    forward_turns: int
    loss_turns: int
    evaluation_loss_turns: int
    least_bytes: int
    all_bytes: int


def group_bytes(tensors: Sequence[TensorBytes], num_rows: int) -> int:
    """Bytes that a group of tensors takes in the pool, each tensor aligned to 64 bytes."""
    return sum(-(-each.of(num_rows) // 64) * 64 for each in tensors)
