"""Kernels that add LoRAs of any ranks to rows of any owners (SGMV of Punica, arXiv 2310.18547): a
program takes some rows of one adapter, and reads its factors by their addresses.

A block of rows is (adapter, row, row, ...), int64; -1 for no adapter, and for missing rows. `table`
has the numbers of `LowRankAdapter.addresses`, NUMBERS of each place.
"""

import triton
import triton.language as tl

from coserve.kernels.triton.products import product


@triton.jit
def narrow(
    x, sums, blocks, table, x_step, inner, adapter_step,
    NUMBERS: tl.constexpr, ROWS: tl.constexpr, RANK: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Compute A x of each place -> float32 [blocks, places, SPLITS, ROWS, RANK].

    Grid: (blocks of rows, places, SPLITS of the inner width).
    """
    block, place, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    adapter = tl.load(blocks + block * (1 + ROWS))
    if adapter >= 0:
        numbers = table + adapter * adapter_step + place * NUMBERS
        address, rank = tl.load(numbers), tl.load(numbers + 2)
        # 0: this adapter adds nothing at this place. Its sums stay unwritten, and `widen` skips it,
        # too.
        if address != 0:
            factor = address.to(tl.pointer_type(x.dtype.element_ty))
            i, r = tl.arange(0, ROWS), tl.arange(0, RANK)
            row = tl.load(blocks + block * (1 + ROWS) + 1 + i)
            total = tl.zeros((ROWS, RANK), tl.float32)
            for start in range(split * BLOCK, inner, BLOCK * SPLITS):
                k = start + tl.arange(0, BLOCK)
                own = tl.load(
                    x + (row * x_step)[:, None] + k[None, :],
                    mask=(row >= 0)[:, None] & (k < inner)[None, :],
                    other=0.0,
                )
                a = tl.load(
                    factor + (r * inner)[None, :] + k[:, None],
                    mask=(r < rank)[None, :] & (k < inner)[:, None],
                    other=0.0,
                )
                total += product(own, a, EXACT)
            at = ((block * tl.num_programs(1) + place) * SPLITS + split) * ROWS * RANK
            tl.store(sums + at + (i * RANK)[:, None] + r[None, :], total)


@triton.jit
def widen(
    sums, y, blocks, table, y_step, outer, adapter_step, place, num_places,
    NUMBERS: tl.constexpr, ROWS: tl.constexpr, RANK: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Add B times that, scaled, to the rows of one place.

    Grid: (blocks of rows, blocks of the outer width).
    """
    block = tl.program_id(0).to(tl.int64)
    adapter = tl.load(blocks + block * (1 + ROWS))
    if adapter >= 0:
        numbers = table + adapter * adapter_step + place * NUMBERS
        address, rank = tl.load(numbers + 1), tl.load(numbers + 2)
        if address != 0:
            dtype = y.dtype.element_ty
            # The table is int64: the scale is the bits of a float64.
            scale = tl.load(numbers + 3).to(tl.float64, bitcast=True).to(tl.float32)
            i, r = tl.arange(0, ROWS), tl.arange(0, RANK)
            k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
            row = tl.load(blocks + block * (1 + ROWS) + 1 + i)
            at = (
                (block * num_places + place) * SPLITS * ROWS * RANK
                + (i * RANK)[:, None]
                + r[None, :]
            )
            own = tl.zeros((ROWS, RANK), tl.float32)
            for split in tl.static_range(SPLITS):
                own += tl.load(sums + at + split * ROWS * RANK)
            # Rounded after A x and after the scale, as the operators round one by one.
            own = (own.to(dtype).to(tl.float32) * scale).to(dtype)
            factor = address.to(tl.pointer_type(dtype))
            b = tl.load(
                factor + (k * rank)[None, :] + r[:, None],
                mask=(k < outer)[None, :] & (r < rank)[:, None],
                other=0.0,
            )
            target = y + (row * y_step)[:, None] + k[None, :]
            is_there = (row >= 0)[:, None] & (k < outer)[None, :]
            before = tl.load(target, mask=is_there, other=0.0).to(tl.float32)
            found = before + product(own, b, EXACT)
            tl.store(target, found.to(dtype), mask=is_there)
