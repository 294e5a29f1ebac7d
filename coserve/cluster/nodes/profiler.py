"""The offline profiler (LeMix section IV-A): from what the engine measures of a device to what
placements plan with.

An engine has its device's `Profile` already: seconds of the pieces of a step by their rows. Passes
of whole sequences follow from these, and lines through them are what a placement can add up for
every node and task. There is one file for each kind of device, model, dtype and size of the pool,
with κ and T_max, which nodes of a kind share.

LeMix finds κ and T_max by trying loads on a device. Here they follow from its profile. κ leaves the
memory that a pack of a job keeps, so that training finds room beside requests. T_max is how long a
full node takes at most, nineteen times of twenty, until one of its requests ends and leaves memory:
a task that has waited longer waits for none to come.
"""

import logging
import os
from collections.abc import Callable, Sequence
from math import log
from pathlib import Path

import msgspec
from msgspec.structs import replace

from coserve.cluster.view import Latency, NodeProfile
from coserve.home import home_directory, is_trusted, make_private
from coserve.protocol.messages import Ready
from coserve.scheduling.latency import LatencyModel
from coserve.scheduling.plan import whole_pack
from coserve.scheduling.profile import Profile

_log = logging.getLogger(__name__)
# Lengths of sequences, in tokens, that the lines go through.
LENGTHS = (16, 32, 64, 128, 256, 512, 1024, 2048)
# Rows of a pack; tokens of a prompt and of an answer.
_PACK_ROWS, _PROMPT, _ANSWER = 1024, 512, 512
# Bounds of κ and of T_max, whatever the profile says.
_SHARES, _WAITS_S = (0.5, 0.95), (0.05, 60.0)
_UNITS = (("GB", 10**9), ("MB", 10**6), ("kB", 10**3), ("B", 1))
# Requests that decode at once, and the context of each, of which decode steps are taken.
_DECODES, _CONTEXT = (1, 33), 512


def node_profile(
    profile: Profile,
    *,
    block_tokens: int = 16,
    page_bytes: int = 0,
    num_pages: int = 0,
    num_state_pages: int = 0,
    num_stages: int = 1,
    training_yields: bool = False,
) -> NodeProfile:
    """What a placement knows of a node with this profile.

    Args:
        page_bytes, num_pages: of the node's pool; 0: not known, so that training is placed whatever
            memory there is, and κ and T_max are the usual ones.
        num_state_pages: of each request, for its states.
        num_stages: equal parts that the model is divided into; what crosses between them is not
            counted.
        training_yields: see `NodeProfile`.
    """
    latency = LatencyModel(profile)

    def backward_s(length: int) -> float:
        pack = whole_pack(profile.job, length, length / 2)
        return latency.pack_s(pack) - latency.prompt_s(length)

    few, many = _DECODES
    decode_s = latency.decode_s(num_requests=few, context=_CONTEXT)
    more_s = (latency.decode_s(num_requests=many, context=_CONTEXT) - decode_s) / (many - few)
    made = NodeProfile(
        forward=fit_latency(
            LENGTHS, [latency.prompt_s(length) for length in LENGTHS], num_stages=num_stages
        ),
        backward=fit_latency(
            LENGTHS, [backward_s(length) for length in LENGTHS], num_stages=num_stages
        ),
        decode_s=decode_s,
        decode_request_s=more_s,
        block_tokens=block_tokens,
        pages_per_request=num_state_pages,
        training_yields=training_yields,
        pages_per_trained_token=profile.saved_bytes_per_token / page_bytes if page_bytes else 0.0,
    )
    return with_limits(made, num_pages) if num_pages else made


def with_limits(made: NodeProfile, num_pages: int) -> NodeProfile:
    """With κ and T_max of a pool of this size; see the module."""
    share = _within(_SHARES, 1 - _PACK_ROWS * made.pages_per_trained_token / num_pages)
    num_requests = max(1, int(share * num_pages / made.num_pages(_PROMPT + _ANSWER)))
    answer_s = _ANSWER * (made.decode_s + (num_requests - 1) * made.decode_request_s)
    # Of ends that come by chance, the longest gap but one of twenty.
    wait_s = log(20) * answer_s / num_requests
    return replace(made, memory_share=share, longest_wait_s=_within(_WAITS_S, wait_s))


def _within(bounds: tuple[float, float], value: float) -> float:
    least, most = bounds
    return min(most, max(least, value))


def profile_of(ready: Ready, home: Path | None = None) -> NodeProfile:
    """Of a node whose engine is ready: what it has measured, with κ and T_max of its kind.

    home: where the latter are kept, for all nodes of the kind; None: nowhere.
    """
    assert ready.profile is not None, "an engine has measured its device before it is ready"
    made = node_profile(
        ready.profile,
        block_tokens=ready.block_tokens,
        page_bytes=ready.page_bytes,
        num_pages=ready.num_pages,
        num_state_pages=ready.num_state_pages,
        training_yields=True,
    )
    if home is None:
        return made
    pool_bytes = ready.num_pages * ready.page_bytes
    return with_stored_limits(
        node_profile_path(ready.hardware, ready.model, ready.dtype, pool_bytes, home), made
    )


def fit_latency(
    lengths: Sequence[int], seconds: Sequence[float], *, num_stages: int = 1
) -> Latency:
    """The Latency with the least squared relative errors at these lengths, with no coefficient
    below 0.

    num_stages: the seconds are those of as many stages, one after the other.
    """
    columns: tuple[Callable[[int], float], ...] = (
        lambda _: 1.0,
        float,
        lambda length: float(length * length),
    )
    best: tuple[float, list[float]] | None = None
    # Each subset of the three terms: the best of those whose coefficients are all above 0.
    for subset in range(1, 8):
        chosen = [index for index in range(3) if subset >> index & 1]
        rows = [
            [columns[index](n) / s for index in chosen]
            for n, s in zip(lengths, seconds, strict=True)
        ]
        solved = _least_squares(rows)
        if solved is None or min(solved) < 0:
            continue
        error = sum((sum(a * x for a, x in zip(row, solved, strict=True)) - 1) ** 2 for row in rows)
        if best is None or error < best[0] - 1e-12:
            found = [0.0, 0.0, 0.0]
            for index, value in zip(chosen, solved, strict=True):
                found[index] = value / num_stages
            best = error, found
    assert best is not None, "one term alone fits whatever is above 0"
    fixed, token, pair = best[1]
    return Latency(fixed_s=fixed, s_per_token=token, s_per_pair=pair)


def _least_squares(rows: Sequence[Sequence[float]]) -> list[float] | None:
    """x for which every row times x is nearest to 1, by the normal equations; None where these have
    no one answer.
    """
    size = len(rows[0])
    # Columns are scaled, so that lengths and their squares are of one size.
    scale = [max(abs(row[index]) for row in rows) or 1.0 for index in range(size)]
    scaled = [[value / by for value, by in zip(row, scale, strict=True)] for row in rows]
    table = [
        [sum(row[i] * row[j] for row in scaled) for j in range(size)]
        + [sum(row[i] for row in scaled)]
        for i in range(size)
    ]
    for i in range(size):
        if abs(table[i][i]) < 1e-12:
            return None
        table[i] = [value / table[i][i] for value in table[i]]
        for k in range(size):
            if k != i:
                table[k] = [a - table[k][i] * b for a, b in zip(table[k], table[i], strict=True)]
    return [row[size] / by for row, by in zip(table, scale, strict=True)]


# -- on disk ----------------------------------------------------------------------------


def node_profile_path(
    hardware: str, model: str, dtype: str, pool_bytes: int, home: Path | None = None
) -> Path:
    """Where the profile of a kind of device lies, with a model and a pool of about this size."""
    parts = (hardware, model, dtype, _about(pool_bytes))
    name = "-".join(part.replace("/", "_").replace(":", "_").replace(" ", "_") for part in parts)
    return (home or home_directory()) / "profiles" / f"node-{name}.json"


def _about(num_bytes: int) -> str:
    """To two digits: what is free of two devices of a kind is not the same to the byte."""
    unit, unit_bytes = next(each for each in _UNITS if num_bytes >= each[1] or each[1] == 1)
    return f"{float(f'{num_bytes / unit_bytes:.2g}'):g}{unit}"


def with_stored_limits(path: Path, made: NodeProfile) -> NodeProfile:
    """A profile with κ and T_max as they are kept for this kind of device and pool; the first of a
    kind is kept itself. What operators find out about their devices, they set in that file.
    """
    stored = read_node_profile(path)
    if stored is None:
        try:
            write_node_profile(path, made)
        except OSError as error:
            _log.warning("the profile could not be kept in %s: %s", path.parent, error)
        return made
    return replace(made, memory_share=stored.memory_share, longest_wait_s=stored.longest_wait_s)


def write_node_profile(path: Path, profile: NodeProfile) -> None:
    """Whole or not at all. OSError if it cannot be written."""
    make_private(path.parent)
    part = path.with_suffix(f".{os.getpid()}.part")
    part.write_bytes(msgspec.json.format(msgspec.json.encode(profile), indent=1))
    part.chmod(0o600)
    part.replace(path)


def read_node_profile(path: Path) -> NodeProfile | None:
    """None if there is none, anything is wrong with it, or another user can have written it: it can
    be made again.
    """
    try:
        if not is_trusted(path):
            _log.warning(
                "another user can write %s, so it is not used: the node is profiled again", path
            )
            return None
        return msgspec.json.decode(path.read_bytes(), type=NodeProfile)
    except (OSError, msgspec.MsgspecError):
        return None
