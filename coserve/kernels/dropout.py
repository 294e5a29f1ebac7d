"""Dropout whose mask is a pure function of (row key, feature): nothing is saved, and windows or suspensions cannot
change it.
"""

import torch
from torch import Tensor

_MASK_32 = 0xFFFFFFFF


def _mix(x: Tensor) -> Tensor:
    """The 32-bit finalizer of MurmurHash3 on the low 32 bits of an int64 tensor
    (https://github.com/aappleby/smhasher).
    """
    x = x & _MASK_32
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & _MASK_32
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & _MASK_32
    return x ^ (x >> 16)


def row_keys(seed: int, rows: Tensor) -> Tensor:
    """One random key per row: int64 [n] in [0, 2^32), from a seed and row numbers [n] that are never used twice."""
    low, high = _mix(rows), _mix(rows >> 32)
    return _mix(low ^ _mix(high + (seed & _MASK_32)) ^ ((seed >> 32) & _MASK_32))


def keys_of_part(keys: Tensor, part: int) -> Tensor:
    """The rows' keys (int64 [n]) for one part of a model, so that its parts drop independently of each other."""
    return _mix(keys + part * 0x9E3779B1)


def dropout_mask(keys: Tensor, width: int, *, p: float, salt: int) -> Tensor:
    """Which features stay: bool [n, width], each true with probability 1 - p.

    keys: int64 [n] from `row_keys`; salt: tells apart the places of a model that drop features of the same row.
    """
    features = _mix(torch.arange(width, device=keys.device) + (salt & _MASK_32))
    return _mix(keys[:, None] ^ features[None, :]) >= int(p * 2**32)
