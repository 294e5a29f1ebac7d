"""Operations that this machine's processor does fast."""

from functools import cache

import torch


@cache
def multiplies_bfloat16() -> bool:
    """Return whether this CPU's instructions for sums of products of bfloat16 are faster than those
    for float32.

    Intel's of AVX-512 are not: 168 GFLOP/s by PyTorch's bfloat16 and 306 by its float32 on two
    cores of a Xeon (model 207) whose virtual machine hides AMX. AMD's are, twice as fast.
    """
    found = torch.cpu.get_capabilities()
    if found.get("amx_bf16"):
        return True
    is_slow = "Intel" in str(found.get("cpu_name"))
    return not is_slow and any(bool(found.get(name)) for name in ("avx512_bf16", "bf16"))
