"""Attention on a GPU, forward and backward: FlashAttention-2 (arXiv 2307.08691, sections 3.1 and
3.2) over pages.

A program takes a tile of queries: some rows of one segment, with all query heads of one key head
side by side, so that their keys are read once. Rows that are alone in their segment (decoding) are
too few for that to fill a GPU: there each row's keys are divided among SPLITS programs, whose sums
`merge_splits` adds up, as in Flash-Decoding.

Tables are int64: a segment is (first row of the batch, rows, keys, first key, place of its first
page), a tile (segment, first row or key of it). Sums are float32; probabilities are rounded to the
dtype of values, as products of matrix units have them.
"""

import triton
import triton.language as tl

from coserve.kernels.triton.products import product

# Numbers of a segment.
SEGMENT = tl.constexpr(5)


@triton.jit
def _places(
    entry,
    is_seen,
    pages,
    first_page,
    page_step,
    token_step,
    TOKENS: tl.constexpr,
    IS_PAGED: tl.constexpr,
):
    """Return the places of keys in their store: elements from its start."""
    if IS_PAGED:
        # Keys beyond the end have no entry in the page table: page 0 stands in, and is not loaded
        # from.
        page = tl.load(pages + first_page + entry // TOKENS, mask=is_seen, other=0)
        place = page * page_step + (entry % TOKENS) * token_step
    else:
        place = entry * token_step
    return place


@triton.jit
def _scores(
    products, position, key, slopes, scale, soft_cap, window,
    HAS_CAP: tl.constexpr, HAS_SLOPES: tl.constexpr, HAS_WINDOW: tl.constexpr,
):  # fmt: skip
    """Return the scores of a tile [rows, keys], hidden ones minus infinity; and the tangent that a
    soft cap made of them.
    """
    scores = products * scale
    tangent = scores
    if HAS_CAP:
        # tanh(scores / soft_cap), which Triton has only by way of the sigmoid.
        tangent = 2 * tl.sigmoid(2 * scores / soft_cap) - 1
        scores = tangent * soft_cap
    distance = position[:, None] - key[None, :]
    if HAS_SLOPES:
        scores -= slopes[:, None] * distance.to(tl.float32)
    is_hidden = distance < 0
    if HAS_WINDOW:
        is_hidden = is_hidden | (distance >= window)
    return tl.where(is_hidden, float("-inf"), scores), tangent


@triton.jit
def attend(
    q, k, v, out, lse, sums, segments, tiles, pages, slopes, sinks,
    q_step, page_step, token_step, scale, soft_cap, window,
    NUM_HEADS: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr, WIDTH_BLOCK: tl.constexpr,
    TOKENS: tl.constexpr, IS_PAGED: tl.constexpr, IS_SINGLE: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, EXACT: tl.constexpr,
    HAS_CAP: tl.constexpr, HAS_SLOPES: tl.constexpr, HAS_SINKS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
):  # fmt: skip
    """Attend with a tile of queries.

    With SPLITS above 1, which is for segments of one row, `sums` gets the largest score, the sum of
    exponentials, and the weighted sum of values of each segment, head and split: float32 [segments,
    NUM_HEADS, SPLITS, 2 + WIDTH]. Grid: (tiles, key heads, SPLITS).
    """
    ROWS: tl.constexpr = BLOCK_M // GROUPS
    tile, key_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    # One row per segment: the tile's number is the segment's, and no table of tiles is needed.
    if IS_SINGLE:
        segment, first = tile.to(tl.int64), tl.zeros((), tl.int64)
    else:
        segment, first = tl.load(tiles + 2 * tile), tl.load(tiles + 2 * tile + 1)
    at = segments + SEGMENT * segment
    first_row, num_rows, num_keys = tl.load(at), tl.load(at + 1), tl.load(at + 2)
    first_key, first_page = tl.load(at + 3), tl.load(at + 4)
    # A segment's rows are the last of its keys; this many keys come before the first row.
    before = num_keys - num_rows

    m, d = tl.arange(0, BLOCK_M), tl.arange(0, WIDTH_BLOCK)
    # A tile's queries [BLOCK_M]: the heads of one row side by side, then the next row's.
    row, head = first + m // GROUPS, key_head * GROUPS + m % GROUPS
    # Where GROUPS does not divide BLOCK_M, the last queries of a tile are no row's.
    is_row, is_feature = (m < ROWS * GROUPS) & (row < num_rows), d < WIDTH
    position = before + row
    place = (first_row + row) * NUM_HEADS + head  # of a row's head among those of the batch
    query = tl.load(
        q + ((first_row + row) * q_step + head * WIDTH)[:, None] + d[None, :],
        mask=is_row[:, None] & is_feature[None, :],
        other=0.0,
    )
    slope = tl.zeros((BLOCK_M,), tl.float32)
    if HAS_SLOPES:
        slope = tl.load(slopes + head, mask=is_row, other=0.0)

    # The first key that the tile's first row sees, rounded down to a block of keys.
    low = tl.zeros((), tl.int64)
    if HAS_WINDOW:
        low = tl.maximum(before + first - window + 1, 0) // BLOCK_N * BLOCK_N
    # One beyond the last key that the tile's last row sees (causal).
    high = before + tl.minimum(first + ROWS, num_rows)
    # Not minus infinity: of rows that see nothing yet, exp(-inf - -inf) would be NaN.
    largest = tl.full((BLOCK_M,), -1e30, tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    weighed = tl.zeros((BLOCK_M, WIDTH_BLOCK), tl.float32)
    # Blocks of keys in turn among the splits, so that short sequences occupy several, too.
    for start in range(low + split * BLOCK_N, high, BLOCK_N * SPLITS):
        key = start + tl.arange(0, BLOCK_N)
        is_seen = key < high
        at_key = key_head * WIDTH + _places(
            first_key + key, is_seen, pages, first_page, page_step, token_step, TOKENS, IS_PAGED
        )
        keys = tl.load(
            k + at_key[None, :] + d[:, None], mask=is_seen[None, :] & is_feature[:, None], other=0.0
        )
        values = tl.load(
            v + at_key[:, None] + d[None, :], mask=is_seen[:, None] & is_feature[None, :], other=0.0
        )
        products = product(query, keys, EXACT)
        scores, _ = _scores(
            products, position, key, slope, scale, soft_cap, window, HAS_CAP, HAS_SLOPES, HAS_WINDOW
        )
        # Online softmax: rescale what was summed so far to the new largest score.
        most = tl.maximum(largest, tl.max(scores, 1))
        shares = tl.exp(scores - most[:, None])
        factor = tl.exp(largest - most)
        total = total * factor + tl.sum(shares, 1)
        weighed = weighed * factor[:, None] + product(shares.to(values.dtype), values, EXACT)
        largest = most

    if SPLITS == 1:
        if HAS_SINKS:
            # One more key without a value: it counts in the total alone.
            sink = tl.load(sinks + head, mask=is_row, other=0.0).to(tl.float32)
            most = tl.maximum(largest, sink)
            factor = tl.exp(largest - most)
            total = total * factor + tl.exp(sink - most)
            weighed = weighed * factor[:, None]
            largest = most
        # Queries of no row have seen nothing: no division by zero.
        norm = tl.where(total > 0, total, 1.0)
        tl.store(
            out + (place * WIDTH)[:, None] + d[None, :],
            (weighed / norm[:, None]).to(out.dtype.element_ty),
            mask=is_row[:, None] & is_feature[None, :],
        )
        tl.store(lse + place, largest + tl.log(norm), mask=is_row)
    else:
        # Not normalised yet: a split has seen only its own keys.
        at_sum = sums + ((segment * NUM_HEADS + head) * SPLITS + split) * (2 + WIDTH)
        tl.store(at_sum, largest, mask=is_row)
        tl.store(at_sum + 1, total, mask=is_row)
        tl.store(
            at_sum[:, None] + 2 + d[None, :], weighed, mask=is_row[:, None] & is_feature[None, :]
        )


@triton.jit
def merge_splits(
    sums, out, lse, segments, sinks,
    NUM_HEADS: tl.constexpr, WIDTH: tl.constexpr, WIDTH_BLOCK: tl.constexpr, SPLITS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """Add up what `attend` left in `sums`.

    Grid: (segments of one row, heads).
    """
    segment, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    s, d = tl.arange(0, SPLITS), tl.arange(0, WIDTH_BLOCK)
    at = segments + SEGMENT * segment
    # Static tables (`StaticSingleRows`) end in segments without rows.
    if tl.load(at + 1) > 0:
        place = tl.load(at) * NUM_HEADS + head
        at_sum = sums + ((segment * NUM_HEADS + head) * SPLITS + s) * (2 + WIDTH)
        largest, totals = tl.load(at_sum), tl.load(at_sum + 1)
        weighed = tl.load(at_sum[:, None] + 2 + d[None, :], mask=(d < WIDTH)[None, :], other=0.0)
        # Splits without keys have -1e30 here, so their factor below is 0.
        most = tl.max(largest, 0)
        if HAS_SINKS:
            sink = tl.load(sinks + head).to(tl.float32)
            most = tl.maximum(most, sink)
        factors = tl.exp(largest - most)
        total = tl.sum(totals * factors, 0)
        if HAS_SINKS:
            total += tl.exp(sink - most)
        found = tl.sum(weighed * factors[:, None], 0) / total
        tl.store(out + place * WIDTH + d, found.to(out.dtype.element_ty), mask=d < WIDTH)
        tl.store(lse + place, most + tl.log(total))


@triton.jit
def row_products(
    grad, out, delta, grad_step, out_step, WIDTH: tl.constexpr, WIDTH_BLOCK: tl.constexpr
):
    """Compute delta, the sum over the width of grad * out.

    Grid: (rows, heads).
    """
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    d = tl.arange(0, WIDTH_BLOCK)
    one = tl.load(grad + row * grad_step + head * WIDTH + d, mask=d < WIDTH, other=0.0).to(
        tl.float32
    )
    other = tl.load(out + row * out_step + head * WIDTH + d, mask=d < WIDTH, other=0.0).to(
        tl.float32
    )
    tl.store(delta + row * tl.num_programs(1) + head, tl.sum(one * other, 0))


@triton.jit
def query_gradients(
    grad, q, k, v, lse, delta, dq, segments, tiles, slopes,
    grad_step, q_step, token_step, scale, soft_cap, window,
    NUM_HEADS: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr, WIDTH_BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, EXACT: tl.constexpr,
    HAS_CAP: tl.constexpr, HAS_SLOPES: tl.constexpr, HAS_WINDOW: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of queries.

    Grid: (tiles of queries, key heads).
    """
    ROWS: tl.constexpr = BLOCK_M // GROUPS
    tile, key_head = tl.program_id(0), tl.program_id(1)
    segment, first = tl.load(tiles + 2 * tile), tl.load(tiles + 2 * tile + 1)
    at = segments + SEGMENT * segment
    first_row, num_rows, num_keys, first_key = (
        tl.load(at),
        tl.load(at + 1),
        tl.load(at + 2),
        tl.load(at + 3),
    )
    before = num_keys - num_rows

    m, d = tl.arange(0, BLOCK_M), tl.arange(0, WIDTH_BLOCK)
    row, head = first + m // GROUPS, key_head * GROUPS + m % GROUPS
    is_row, is_feature = (m < ROWS * GROUPS) & (row < num_rows), d < WIDTH
    position, is_there = before + row, is_row[:, None] & is_feature[None, :]
    batch_row = first_row + row
    query = tl.load(
        q + (batch_row * q_step + head * WIDTH)[:, None] + d[None, :], mask=is_there, other=0.0
    )
    # With P the shares and delta = sum(dy * y): dS = P * (dy V^T - delta), dQ = scale * dS K
    # (FlashAttention-2, algorithm 2).
    dy = tl.load(
        grad + (batch_row * grad_step + head * WIDTH)[:, None] + d[None, :],
        mask=is_there,
        other=0.0,
    )
    # Infinity for missing rows: their shares are exp(-inf) = 0.
    norm = tl.load(lse + batch_row * NUM_HEADS + head, mask=is_row, other=float("inf"))
    own_delta = tl.load(delta + batch_row * NUM_HEADS + head, mask=is_row, other=0.0)
    slope = tl.zeros((BLOCK_M,), tl.float32)
    if HAS_SLOPES:
        slope = tl.load(slopes + head, mask=is_row, other=0.0)

    low = tl.zeros((), tl.int64)
    if HAS_WINDOW:
        low = tl.maximum(before + first - window + 1, 0) // BLOCK_N * BLOCK_N
    high = before + tl.minimum(first + ROWS, num_rows)
    total = tl.zeros((BLOCK_M, WIDTH_BLOCK), tl.float32)
    for start in range(low, high, BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        is_seen = key < high
        at_key = key_head * WIDTH + (first_key + key) * token_step
        keys = tl.load(
            k + at_key[:, None] + d[None, :], mask=is_seen[:, None] & is_feature[None, :], other=0.0
        )
        values = tl.load(
            v + at_key[None, :] + d[:, None], mask=is_seen[None, :] & is_feature[:, None], other=0.0
        )
        products = product(query, tl.trans(keys), EXACT)
        scores, tangent = _scores(
            products, position, key, slope, scale, soft_cap, window, HAS_CAP, HAS_SLOPES, HAS_WINDOW
        )
        shares = tl.exp(scores - norm[:, None])
        found = shares * (product(dy, values, EXACT) - own_delta[:, None])
        if HAS_CAP:
            # The slope of the soft cap, from the tangent that the scores were made with.
            found *= 1 - tangent * tangent
        total += product((found * scale).to(keys.dtype), keys, EXACT)
    at_row = dq + ((batch_row * NUM_HEADS + head) * WIDTH)[:, None] + d[None, :]
    tl.store(at_row, total.to(dq.dtype.element_ty), mask=is_there)


@triton.jit
def key_gradients(
    grad, q, k, v, lse, delta, dk, dv, segments, tiles, slopes,
    grad_step, q_step, token_step, scale, soft_cap, window,
    NUM_HEADS: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr, WIDTH_BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, EXACT: tl.constexpr,
    HAS_CAP: tl.constexpr, HAS_SLOPES: tl.constexpr, HAS_WINDOW: tl.constexpr,
):  # fmt: skip
    """Add the gradients of keys and values to float32 sums that lie as the store does.

    Each key belongs to one tile alone. Grid: (tiles of keys, key heads).
    """
    ROWS: tl.constexpr = BLOCK_M // GROUPS
    tile, key_head = tl.program_id(0), tl.program_id(1)
    segment, first = tl.load(tiles + 2 * tile), tl.load(tiles + 2 * tile + 1)
    at = segments + SEGMENT * segment
    first_row, num_rows, num_keys, first_key = (
        tl.load(at),
        tl.load(at + 1),
        tl.load(at + 2),
        tl.load(at + 3),
    )
    before = num_keys - num_rows

    m, d = tl.arange(0, BLOCK_M), tl.arange(0, WIDTH_BLOCK)
    head, is_feature = key_head * GROUPS + m % GROUPS, d < WIDTH
    key = first + tl.arange(0, BLOCK_N)
    is_key = key < num_keys
    at_key = (key_head * WIDTH + (first_key + key) * token_step)[:, None] + d[None, :]
    is_there = is_key[:, None] & is_feature[None, :]
    keys, values = (
        tl.load(k + at_key, mask=is_there, other=0.0),
        tl.load(v + at_key, mask=is_there, other=0.0),
    )
    slope = tl.zeros((BLOCK_M,), tl.float32)
    if HAS_SLOPES:
        slope = tl.load(slopes + head)

    # Rows before the tile's first key do not see it (causal).
    low, high = tl.maximum(first - before, 0), num_rows
    if HAS_WINDOW:
        # One beyond the last row within whose window the tile's last key lies.
        high = tl.minimum(high, first + BLOCK_N - 1 + window - before)
    key_total = tl.zeros((BLOCK_N, WIDTH_BLOCK), tl.float32)
    value_total = tl.zeros((BLOCK_N, WIDTH_BLOCK), tl.float32)
    for start in range(low, high, ROWS):
        row = start + m // GROUPS
        is_row = (m < ROWS * GROUPS) & (row < high)
        batch_row, is_query = first_row + row, is_row[:, None] & is_feature[None, :]
        query = tl.load(
            q + (batch_row * q_step + head * WIDTH)[:, None] + d[None, :], mask=is_query, other=0.0
        )
        dy = tl.load(
            grad + (batch_row * grad_step + head * WIDTH)[:, None] + d[None, :],
            mask=is_query,
            other=0.0,
        )
        norm = tl.load(lse + batch_row * NUM_HEADS + head, mask=is_row, other=float("inf"))
        own_delta = tl.load(delta + batch_row * NUM_HEADS + head, mask=is_row, other=0.0)
        products = product(query, tl.trans(keys), EXACT)
        scores, tangent = _scores(
            products,
            before + row,
            key,
            slope,
            scale,
            soft_cap,
            window,
            HAS_CAP,
            HAS_SLOPES,
            HAS_WINDOW,
        )
        shares = tl.exp(scores - norm[:, None])
        value_total += product(tl.trans(shares.to(dy.dtype)), dy, EXACT)
        found = shares * (product(dy, tl.trans(values), EXACT) - own_delta[:, None])
        if HAS_CAP:
            found *= 1 - tangent * tangent
        key_total += product(tl.trans((found * scale).to(query.dtype)), query, EXACT)
    # No atomics: no other program of this launch writes these keys.
    tl.store(dk + at_key, tl.load(dk + at_key, mask=is_there, other=0.0) + key_total, mask=is_there)
    tl.store(
        dv + at_key, tl.load(dv + at_key, mask=is_there, other=0.0) + value_total, mask=is_there
    )
