"""What a decode instance and a prefill instance say to each other: ids and numbers, as msgpack.

The decode instance says `Hello` first. Pages do not cross here: the prefill instance copies them to
a page file, which the decode instance makes and removes, and names in `ComputePrompt`. Where there
is a network between the two, that path is an address to write to, and everything else stays as it
is.
"""

from typing import Any

import msgspec

from coserve.devices.messages.commands import DeviceInfo
from coserve.version import VERSION


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """What must be the same on both sides, so that pages of one mean the same on the other; see
    `DeviceInfo`.

    page_bytes: of a place of a page file, which does not depend on how many ranks either side has.
    """

    version: str
    dtype: str
    weights: str
    vocab_size: int
    block_tokens: int
    page_bytes: int
    deterministic: bool
    fingerprint: str


def identity_of(info: DeviceInfo) -> Identity:
    """Of this instance."""
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
    """Why pages cannot go from one to the other; None if they can."""
    for name in own.__struct_fields__:
        mine, theirs = getattr(own, name), getattr(other, name)
        if mine != theirs:
            if name == "fingerprint":
                return "the prefill instance has a model with other weights"
            return f"the prefill instance has {name} {mine}, the decode instance {theirs}"
    return None


# -- decode to prefill --------------------------------------------------------------------


class Hello(msgspec.Struct, tag=True, frozen=True):
    """Answered by `Welcome` or `Rejected`."""

    identity: Identity


class AdapterFiles(msgspec.Struct, frozen=True):
    """An adapter version: a directory in PEFT's format, and the digest of what is in there."""

    directory: str
    digest: str


class ComputePrompt(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Compute K and V of tokens, which are whole blocks, and copy those from `first_block` on to a
    page file, the first of them to its first place. Answered by `Computed`, as blocks are there,
    and perhaps `PromptRefused`. ttft_s: time left to the request's first token. num_public_tokens: see
    `SamplingParams`.
    """

    id: int
    tokens: tuple[int, ...]
    path: str
    first_block: int
    ttft_s: float
    num_public_tokens: int = 0
    adapter: AdapterFiles | None = None
    tenant: str = ""


class Forget(msgspec.Struct, tag=True, frozen=True):
    """A prompt is not wanted any more; no error if it is done already."""

    id: int


# -- prefill to decode --------------------------------------------------------------------


class Welcome(msgspec.Struct, tag=True, frozen=True):
    """Prompts may come."""


class Rejected(msgspec.Struct, tag=True, frozen=True):
    """None will be computed; the connection ends."""

    reason: str


class Computed(msgspec.Struct, tag=True, frozen=True):
    """The first blocks of a prompt are there; those of them that were asked for lie in the file."""

    id: int
    num_blocks: int


class PromptRefused(msgspec.Struct, tag=True, frozen=True):
    """No more of a prompt will come."""

    id: int
    reason: str


Message = Hello | ComputePrompt | Forget | Welcome | Rejected | Computed | PromptRefused

encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(Message)


def decode(frame: bytes | bytearray) -> Any:
    """A `Message`; msgspec.DecodeError if it is none."""
    return _decoder.decode(frame)
