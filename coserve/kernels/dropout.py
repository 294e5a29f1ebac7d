"""Dropout whose mask is a pure function of (row key, feature): nothing is saved, and windows or
suspensions cannot change it.
"""

import torch
from torch import Tensor

_MASK_32 = 0xFFFFFFFF
# A mask is made in pieces that stay in the cache.
_CHUNK_ELEMENTS = 1 << 17


def _mix(x: Tensor) -> Tensor:
    """Apply the 32-bit finalizer of MurmurHash3 to the low 32 bits of an int64 tensor
    (https://github.com/aappleby/smhasher).
    """
    x = x & _MASK_32
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & _MASK_32
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & _MASK_32
    return x ^ (x >> 16)


def dropout_row_ids(seed: int, rows: Tensor) -> Tensor:
    """Return one random key per row, int64 [n] in [0, 2^32), from a seed and row numbers [n] that
    are never used twice.
    """
    low, high = _mix(rows), _mix(rows >> 32)
    # 64 bits of the row number and 64 of the seed, mixed so that neighbours have unrelated keys.
    return _mix(low ^ _mix(high + (seed & _MASK_32)) ^ ((seed >> 32) & _MASK_32))


def dropout_ids_of_part(keys: Tensor, part: int) -> Tensor:
    """Return the rows' keys (int64 [n]) for one part of a model, so that its parts drop
    independently of each other.
    """
    # About 2^32 divided by the golden ratio: keys of neighbouring parts land far apart.
    return _mix(keys + part * 0x9E3779B1)


def dropout_mask(keys: Tensor, width: int, *, p: float, salt: int) -> Tensor:
    """Return the features that stay: bool [n, width], each true with probability 1 - p.

    Args:
        keys: int64 [n] from `dropout_row_ids`.
        salt: distinguishes the places of a model that drop features of the same row.
    """
    # [width], the same for all rows; a row's key is mixed in below.
    features = _as_int32(_mix(torch.arange(width, device=keys.device) + (salt & _MASK_32)))
    rows = _as_int32(keys)
    kept = torch.empty(keys.shape[0], width, dtype=torch.bool, device=keys.device)
    # int32 cannot say "at least p × 2^32", but with the highest bit flipped it orders as unsigned
    # numbers do.
    threshold = int(p * 2**32) - 2**31
    size = max(1, _CHUNK_ELEMENTS // width)
    for start in range(0, keys.shape[0], size):
        bits = _mix_int32_(rows[start : start + size, None] ^ features[None, :])
        torch.ge(bits.bitwise_xor_(-(2**31)), threshold, out=kept[start : start + size])
    return kept


def dropped(x: Tensor, keys: Tensor, *, p: float, salt: int) -> Tensor:
    """Return x [n, width] without the features that its rows drop, scaled up for them."""
    scale: float = 1 / (1 - p)
    return x * dropout_mask(keys, x.shape[1], p=p, salt=salt) * scale


def _as_int32(x: Tensor) -> Tensor:
    """Return the low 32 bits of an int64 tensor, as int32."""
    return torch.where(x >= 2**31, x - 2**32, x).to(torch.int32)


def _mix_int32_(x: Tensor) -> Tensor:
    """Apply `_mix` on int32, in place: multiplication wraps, and shifts are made logical by masking
    the sign's copies.
    """
    x ^= (x >> 16).bitwise_and_(0xFFFF)
    x *= 0x85EBCA6B - 2**32
    x ^= (x >> 13).bitwise_and_(0x7FFFF)
    x *= 0xC2B2AE35 - 2**32
    x ^= (x >> 16).bitwise_and_(0xFFFF)
    return x
