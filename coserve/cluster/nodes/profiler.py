"""The offline profiler (LeMix section IV-A): makes the profile that placements plan with from what
the engine measures of a device.

An engine has its device's `Profile` already: seconds of the pieces of a step by their rows. Passes
of whole sequences follow from these, and lines through them are what a placement can add up for
every node and task. There is one file for each kind of device, model, dtype and size of the pool,
with κ and T_max, which nodes of a kind share.

LeMix finds κ and T_max by trying loads on a device. Here they follow from its profile. κ leaves the
memory that a pack of a job keeps, so that training finds room beside requests. T_max is how long a
full node takes at most, nineteen times of twenty, until one of its requests ends and leaves memory:
a task that has waited longer waits in vain.
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
# Numbers of requests that decode at once, and the context of each, at which decode steps are taken.
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
    """Return the profile with which placements plan a node, from its device's profile.

    Args:
        profile: Profile of the device.
        block_tokens: Tokens of a page.
        page_bytes, num_pages: Of the node's pool; 0: not known, so that training is placed whatever
            memory there is, and κ and T_max are the usual ones.
        num_state_pages: Pages that each request has for its states.
        num_stages: Equal parts that the model is divided into; what crosses between them is not
            counted.
        training_yields: As in `NodeProfile`.
    """
    latency = LatencyModel(profile)

    def backward_s(length: int) -> float:
        # The seconds of a pack include its forward pass, which LeMix plans separately.
        pack = whole_pack(profile.job, length, length / 2)
        return latency.pack_s(pack) - latency.prompt_s(length)

    few, many = _DECODES
    # The slope between two batch sizes is what one more request adds to a decode step.
    decode_s = latency.decode_s(num_requests=few, context=_CONTEXT)
    more_s = (latency.decode_s(num_requests=many, context=_CONTEXT) - decode_s) / (many - few)
    unlimited = NodeProfile(
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
    return with_limits(unlimited, num_pages) if num_pages else unlimited


def with_limits(profile: NodeProfile, num_pages: int) -> NodeProfile:
    """Return a profile with κ and T_max of a pool of this size, as the module says."""
    # κ leaves one pack's pages free of requests.
    share = _within(_SHARES, 1 - _PACK_ROWS * profile.pages_per_trained_token / num_pages)
    num_requests = max(1, int(share * num_pages / profile.num_pages(_PROMPT + _ANSWER)))
    answer_s = _ANSWER * (profile.decode_s + (num_requests - 1) * profile.decode_request_s)
    # Ends of requests come at random: the gap that 19 of 20 do not exceed.
    # An exponential gap of mean answer_s / num_requests exceeds log(20) means once in twenty.
    wait_s = log(20) * answer_s / num_requests
    return replace(profile, memory_share=share, longest_wait_s=_within(_WAITS_S, wait_s))


def _within(bounds: tuple[float, float], value: float) -> float:
    low, high = bounds
    return min(high, max(low, value))


def profile_of(ready: Ready, home: Path | None = None) -> NodeProfile:
    """Return the profile of a node whose engine is ready, with κ and T_max of its kind.

    Args:
        ready: What the engine has measured.
        home: Where κ and T_max are kept, for all nodes of the kind; None: nowhere.
    """
    assert ready.profile is not None, "an engine has measured its device before it is ready"
    profile = node_profile(
        ready.profile,
        block_tokens=ready.block_tokens,
        page_bytes=ready.page_bytes,
        num_pages=ready.num_pages,
        num_state_pages=ready.num_state_pages,
        training_yields=True,
    )
    if home is None:
        return profile
    pool_bytes = ready.num_pages * ready.page_bytes
    return with_stored_limits(
        node_profile_path(ready.hardware, ready.model, ready.dtype, pool_bytes, home), profile
    )


def fit_latency(
    lengths: Sequence[int], seconds: Sequence[float], *, num_stages: int = 1
) -> Latency:
    """Return the Latency with the least squared relative errors at these lengths and no negative
    coefficient.

    Args:
        lengths: Lengths of sequences in tokens.
        seconds: Measured seconds of each, of all stages, one after the other.
        num_stages: Number of these stages.
    """
    columns: tuple[Callable[[int], float], ...] = (
        lambda _: 1.0,
        float,
        lambda length: float(length * length),
    )
    best: tuple[float, list[float]] | None = None
    # Try each subset of the three terms; keep the best whose coefficients are all positive.
    for subset in range(1, 8):
        chosen = [index for index in range(3) if subset >> index & 1]
        # Divided by the seconds, so that errors are relative and every right-hand side is 1.
        rows = [
            [columns[index](n) / s for index in chosen]
            for n, s in zip(lengths, seconds, strict=True)
        ]
        solved = _least_squares(rows)
        if solved is None or min(solved) < 0:
            continue
        error = sum((sum(a * x for a, x in zip(row, solved, strict=True)) - 1) ** 2 for row in rows)
        if best is None or error < best[0] - 1e-12:
            coefficients = [0.0, 0.0, 0.0]
            for index, value in zip(chosen, solved, strict=True):
                coefficients[index] = value / num_stages
            best = error, coefficients
    assert best is not None, "one term alone fits whatever is above 0"
    fixed, token, pair = best[1]
    return Latency(fixed_s=fixed, s_per_token=token, s_per_pair=pair)


def _least_squares(rows: Sequence[Sequence[float]]) -> list[float] | None:
    """Return the x for which every row times x is nearest to 1, by the normal equations; None where
    these have no single solution.
    """
    size = len(rows[0])
    # Columns are scaled, so that lengths and their squares are of one size.
    scale = [max(abs(row[index]) for row in rows) or 1.0 for index in range(size)]
    scaled = [[value / by for value, by in zip(row, scale, strict=True)] for row in rows]
    # The normal equations; the last column is their right-hand side.
    table = []
    for i in range(size):
        products = [sum(row[i] * row[j] for row in scaled) for j in range(size)]
        table.append([*products, sum(row[i] for row in scaled)])
    # Gauss-Jordan elimination.
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
    """Return the path of the profile of a kind of device, with a model and a pool of about this
    size.
    """
    parts = (hardware, model, dtype, _about(pool_bytes))
    name = "-".join(part.replace("/", "_").replace(":", "_").replace(" ", "_") for part in parts)
    return (home or home_directory()) / "profiles" / f"node-{name}.json"


def _about(num_bytes: int) -> str:
    """Return a size rounded to two digits: free memory of two devices of a kind differs by some
    bytes.
    """
    unit, unit_bytes = next(each for each in _UNITS if num_bytes >= each[1] or each[1] == 1)
    return f"{float(f'{num_bytes / unit_bytes:.2g}'):g}{unit}"


def with_stored_limits(path: Path, profile: NodeProfile) -> NodeProfile:
    """Return a profile with κ and T_max as they are kept for this kind of device and pool; the
    first of a kind is kept itself. Operators who have found better values set them in that file.
    """
    stored = read_node_profile(path)
    if stored is None:
        try:
            write_node_profile(path, profile)
        except OSError as error:
            _log.warning("the profile could not be kept in %s: %s", path.parent, error)
        return profile
    return replace(profile, memory_share=stored.memory_share, longest_wait_s=stored.longest_wait_s)


def write_node_profile(path: Path, profile: NodeProfile) -> None:
    """Write a profile whole or not at all.

    Raises:
        OSError: The file cannot be written.
    """
    make_private(path.parent)
    part = path.with_suffix(f".{os.getpid()}.part")
    part.write_bytes(msgspec.json.format(msgspec.json.encode(profile), indent=1))
    part.chmod(0o600)
    part.replace(path)


def read_node_profile(path: Path) -> NodeProfile | None:
    """Return a stored profile; None if there is none, it is damaged, or another user can have
    written it.
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
