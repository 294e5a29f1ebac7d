"""Messages between a decode instance and a prefill instance: ids and numbers, as msgpack.

The decode instance sends `Hello` first. Pages do not cross here: the prefill instance copies them
to a page file, which the decode instance creates and removes, and names in `ComputePrompt`. With a
network between the two, that path would be an address to write to, and everything else would stay
the same.
"""

from typing import Any

import msgspec

from coserve.devices.messages.commands import DeviceInfo
from coserve.version import VERSION


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """Properties that must be the same on both sides, so that pages of one mean the same on the
    other; see `DeviceInfo`.
    """

    version: str
    """Version of coserve."""
    dtype: str
    """Data type of the model."""
    weights: str
    """Storage of the weights of linear layers: "dense" or "int8"."""
    vocab_size: int
    """Vocabulary size of the model."""
    block_tokens: int
    """Number of tokens of a KV block."""
    page_bytes: int
    """Size of a place of a page file, which does not depend on the number of ranks of either side.
    """
    deterministic: bool
    """Whether tokens are the same bit for bit, whatever runs beside them."""
    fingerprint: str
    """Digest of the model's weights."""


def identity_of(info: DeviceInfo) -> Identity:
    """Return the identity of an instance with this device."""
    return Identity(
        version=VERSION,
        dtype=info.dtype,
        weights=info.weights,
        vocab_size=info.vocab_size,
        block_tokens=info.block_tokens,
        page_bytes=info.place_bytes,
        deterministic=info.deterministic,
        fingerprint=info.fingerprint,
    )


def difference(own: Identity, other: Identity) -> str | None:
    """Return why pages of one instance are of no use to the other; None if they are."""
    for name in own.__struct_fields__:
        mine, theirs = getattr(own, name), getattr(other, name)
        if mine != theirs:
            if name == "fingerprint":
                return "the prefill instance has a model with other weights"
            return f"the prefill instance has {name} {mine}, the decode instance {theirs}"
    return None


# -- decode to prefill --------------------------------------------------------------------


class Hello(msgspec.Struct, tag=True, frozen=True):
    """The first message of a decode instance, answered by `Welcome` or `Rejected`."""

    identity: Identity
    """Identity of the decode instance."""


class AdapterFiles(msgspec.Struct, frozen=True):
    """An adapter version as files."""

    directory: str
    """Directory in PEFT's format."""
    digest: str
    """Digest of the files in it."""


class ComputePrompt(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Request to compute K and V of tokens, and to copy them to a page file.

    It is answered by `Computed`, as blocks become ready, and perhaps by `PromptRefused`.
    """

    id: int
    """Id of the prompt, chosen by the decode instance."""
    tokens: tuple[int, ...]
    """Token ids; a whole number of blocks."""
    path: str
    """Page file."""
    first_block: int
    """First block to copy, which goes to the first place of the file."""
    ttft_s: float
    """Time left until the request's first token is due."""
    num_public_tokens: int = 0
    """See `SamplingParams`."""
    adapter: AdapterFiles | None = None
    """Adapter of the request, if any."""
    tenant: str = ""
    """Owner of the request."""


class ForgetPrompt(msgspec.Struct, tag=True, frozen=True):
    """Notice that a prompt is not wanted any more; no error if it is done."""

    id: int
    """Id of the prompt."""


# -- prefill to decode --------------------------------------------------------------------


class Welcome(msgspec.Struct, tag=True, frozen=True):
    """Answer to `Hello`: prompts may be sent."""


class Rejected(msgspec.Struct, tag=True, frozen=True):
    """Answer to `Hello`: no prompt will be computed, and the connection ends."""

    reason: str
    """Why the instances do not fit together."""


class Computed(msgspec.Struct, tag=True, frozen=True):
    """Notice that the first blocks of a prompt are computed; those that were requested are in the
    file.
    """

    id: int
    """Id of the prompt."""
    num_blocks: int
    """Number of computed blocks, from the first one of the prompt."""


class PromptRefused(msgspec.Struct, tag=True, frozen=True):
    """Notice that no more blocks of a prompt will be computed."""

    id: int
    """Id of the prompt."""
    reason: str
    """Why not, in one line."""


Message = Hello | ComputePrompt | ForgetPrompt | Welcome | Rejected | Computed | PromptRefused

encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(Message)


def decode(frame: bytes | bytearray) -> Any:
    """Decode a `Message`.

    Raises:
        msgspec.DecodeError: The frame is not a message.
    """
    return _decoder.decode(frame)
