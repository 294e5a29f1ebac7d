"""Kernels that work row by row on a GPU, one launch each. Results are rounded where the plain
backend rounds.
"""

import triton
import triton.language as tl


@triton.jit
def _normalized(x, eps, FEATURES: tl.constexpr):
    """Return x / rms(x) and 1 / rms(x), float32; x padded with zeros."""
    scale = tl.rsqrt(tl.sum(x * x, 0) / FEATURES + eps)
    return x * scale, scale


@triton.jit
def rms_norm(x, weight, y, x_step, eps, FEATURES: tl.constexpr, BLOCK: tl.constexpr):
    """Normalise rows. Grid: (rows, groups of FEATURES)."""
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i = tl.arange(0, BLOCK)
    is_feature, first = i < FEATURES, group * FEATURES
    own = tl.load(x + row * x_step + first + i, mask=is_feature, other=0.0).to(tl.float32)
    normalized, _ = _normalized(own, eps, FEATURES)
    dtype = y.dtype.element_ty
    factors = tl.load(weight + i, mask=is_feature, other=0.0).to(tl.float32)
    # Rounded before the weight, as the plain backend does.
    found = normalized.to(dtype).to(tl.float32) * factors
    tl.store(
        y + row * (tl.num_programs(1) * FEATURES) + first + i, found.to(dtype), mask=is_feature
    )


@triton.jit
def rms_norm_gradient(
    grad,
    x,
    weight,
    dx,
    y,
    grad_step,
    x_step,
    eps,
    FEATURES: tl.constexpr,
    BLOCK: tl.constexpr,
    WITH_Y: tl.constexpr,
):
    """Compute the gradient of `rms_norm`, and its result again (WITH_Y).

    Grid: (rows, groups of FEATURES).
    """
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i = tl.arange(0, BLOCK)
    is_feature, first = i < FEATURES, group * FEATURES
    own = tl.load(x + row * x_step + first + i, mask=is_feature, other=0.0).to(tl.float32)
    dy = tl.load(grad + row * grad_step + first + i, mask=is_feature, other=0.0).to(tl.float32)
    factors = tl.load(weight + i, mask=is_feature, other=0.0).to(tl.float32)
    normalized, scale = _normalized(own, eps, FEATURES)
    # dx = (w dy - n * mean(w dy n)) / rms, with n = x / rms.
    weighted = dy * factors
    mean = tl.sum(weighted * normalized, 0) / FEATURES
    place = row * (tl.num_programs(1) * FEATURES) + first + i
    dtype = dx.dtype.element_ty
    tl.store(dx + place, ((weighted - normalized * mean) * scale).to(dtype), mask=is_feature)
    if WITH_Y:
        tl.store(
            y + place, (normalized.to(dtype).to(tl.float32) * factors).to(dtype), mask=is_feature
        )


@triton.jit
def silu_mul(gate, up, y, gate_step, up_step, width, BLOCK: tl.constexpr):
    """Compute silu(gate) * up. Grid: (rows, blocks of the width)."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_there = i < width
    dtype = y.dtype.element_ty
    own = tl.load(gate + row * gate_step + i, mask=is_there, other=0.0).to(tl.float32)
    other = tl.load(up + row * up_step + i, mask=is_there, other=0.0).to(tl.float32)
    # silu(gate) is rounded before the product, as two operators would.
    activated = (own * tl.sigmoid(own)).to(dtype).to(tl.float32)
    tl.store(y + row * width + i, (activated * other).to(dtype), mask=is_there)


@triton.jit
def silu_mul_gradients(
    grad, gate, up, gate_grad, up_grad, y, grad_step, gate_step, up_step, width,
    BLOCK: tl.constexpr, WITH_Y: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of `silu_mul`, and its result again (WITH_Y). Grid: (rows, blocks of
    the width).
    """
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_there = i < width
    dtype = gate_grad.dtype.element_ty
    dy = tl.load(grad + row * grad_step + i, mask=is_there, other=0.0).to(tl.float32)
    own = tl.load(gate + row * gate_step + i, mask=is_there, other=0.0).to(tl.float32)
    other = tl.load(up + row * up_step + i, mask=is_there, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(own)
    activated = (own * sigmoid).to(dtype).to(tl.float32)
    of_activated = (dy * other).to(dtype).to(tl.float32)
    place = row * width + i
    tl.store(
        gate_grad + place,
        (of_activated * sigmoid * (1 + own * (1 - sigmoid))).to(dtype),
        mask=is_there,
    )
    tl.store(up_grad + place, (dy * activated).to(dtype), mask=is_there)
    if WITH_Y:
        tl.store(y + place, (activated * other).to(dtype), mask=is_there)


@triton.jit
def rope(
    x, cos, sin, y, x_step, angle_step,
    HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK_HALF: tl.constexpr,
    REVERSE: tl.constexpr,
):  # fmt: skip
    """Rotate heads of 2 * HALF features, or (REVERSE) compute the gradient of what was rotated.
    Grid: (rows, blocks of heads).
    """
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    i = tl.arange(0, BLOCK_HALF)
    is_half = i < HALF
    dtype = y.dtype.element_ty
    first_cos = tl.load(cos + row * angle_step + i, mask=is_half, other=0.0).to(tl.float32)[None, :]
    first_sin = tl.load(sin + row * angle_step + i, mask=is_half, other=0.0).to(tl.float32)[None, :]
    second_cos = tl.load(cos + row * angle_step + HALF + i, mask=is_half, other=0.0).to(tl.float32)[
        None, :
    ]
    second_sin = tl.load(sin + row * angle_step + HALF + i, mask=is_half, other=0.0).to(tl.float32)[
        None, :
    ]
    is_there = (head < HEADS)[:, None] & is_half[None, :]
    place = (head * 2 * HALF)[:, None] + i[None, :]
    first = tl.load(x + row * x_step + place, mask=is_there, other=0.0).to(tl.float32)
    second = tl.load(x + row * x_step + place + HALF, mask=is_there, other=0.0).to(tl.float32)
    # The transpose of the rotation: each half takes the sine of the other one.
    if REVERSE:
        one, other = second * second_sin, -(first * first_sin)
    else:
        one, other = -(second * first_sin), first * second_sin
    # Each product is rounded before the sum.
    one = (first * first_cos).to(dtype).to(tl.float32) + one.to(dtype).to(tl.float32)
    other = (second * second_cos).to(dtype).to(tl.float32) + other.to(dtype).to(tl.float32)
    target = y + row * (HEADS * 2 * HALF) + place
    tl.store(target, one.to(dtype), mask=is_there)
    tl.store(target + HALF, other.to(dtype), mask=is_there)


@triton.jit
def store_rows(x, store, pages, offsets, x_step, page_step, token_step, width, BLOCK: tl.constexpr):
    """Copy rows to their places of a store in pages; rows of no page (below 0) are dropped. Grid:
    (rows, blocks).
    """
    row = tl.program_id(0).to(tl.int64)
    page = tl.load(pages + row)
    if page >= 0:
        i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        place = page * page_step + tl.load(offsets + row) * token_step
        tl.store(
            store + place + i,
            tl.load(x + row * x_step + i, mask=i < width, other=0.0),
            mask=i < width,
        )


@triton.jit
def copy_rows(
    own,
    others,
    rows,
    LOADS: tl.constexpr,
    IN_PLACE: tl.constexpr,
    WORD_BYTES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copy rows of several tensors to others that lie at addresses, or from there (LOADS), word by
    word.

    - own: the address of each tensor, and the words of a row. Its first row stands for the others'
      first (IN_PLACE), or for the first that is copied.
    - others: addresses of first rows.
    - rows: the first that is copied, and how many are.

    Grid: (tensors, blocks of words).
    """
    tensor = tl.program_id(0)
    width = tl.load(own + tensor * 2 + 1)
    start = tl.load(rows) * width
    num_words = tl.load(rows + 1) * width
    first = tl.program_id(1).to(tl.int64) * BLOCK
    # The grid is for the most rows; the number of rows is on the device.
    if first < num_words:
        # Bits are copied, so the type is only a size.
        if WORD_BYTES == 8:
            kind = tl.int64
        elif WORD_BYTES == 4:
            kind = tl.int32
        elif WORD_BYTES == 2:
            kind = tl.int16
        else:
            kind = tl.int8
        i = first + tl.arange(0, BLOCK)
        mine = tl.load(own + tensor * 2).to(tl.pointer_type(kind)) + i
        if IN_PLACE:
            mine += start
        theirs = tl.load(others + tensor).to(tl.pointer_type(kind)) + start + i
        if LOADS:
            tl.store(mine, tl.load(theirs, mask=i < num_words), mask=i < num_words)
        else:
            tl.store(theirs, tl.load(mine, mask=i < num_words), mask=i < num_words)
