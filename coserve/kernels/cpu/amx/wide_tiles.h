// Parts that products of many rows in bfloat16 with AMX share: blocks of float32 sums, and work
// that is done beside them.
#pragma once

#include "tiles/skinny.h"

#ifdef HAS_AMX

namespace {

// Rows and columns of the sums that stay in tile registers.
const int BLOCK = 32;
// Elements of a block's sums.
const int SUMS = BLOCK * BLOCK;
// Elements of the inner dimension that a block reads of both factors at a time, from the inner
// cache, which keeps the factor that is used again.
const i64 INNER = 256;
// Maximum number of rows that a thread processes at once: its share of them stays in the outer
// cache.
const i64 MAX_ROWS = 512;
// Minimum number of bytes of a result that is not kept in the caches, which it would leave before
// it is read.
const i64 STREAMED_BYTES = 2 << 20;

// The part [start, end) of a number of things that one thread or turn has.
struct Part {
    i64 start, end;
    Part(i64 count, i64 which, i64 parts)
        : start(count * which / parts), end(count * (which + 1) / parts) {}
    i64 size() const { return end - start; }
    Part times(i64 factor) const {
        Part part = *this;
        part.start *= factor, part.end *= factor;
        return part;
    }
    Part from(i64 first) const {
        Part part = *this;
        part.start += first, part.end += first;
        return part;
    }
};

// More of the inner dimension of a block, from other factors: left [32, depth], right [depth / 2,
// 32, 2].
struct More {
    const bf16 *left, *right;
    i64 depth;
};

// Work of a thread while tiles are multiplied, one step for each 32 of the inner dimension; nothing
// waits for it. Here lines are fetched into the outer cache, with fixed distances between the lines
// of a step, and between steps.
class Fetch {
  public:
    Fetch(const bf16* ahead, i64 count, i64 between, i64 onward)
        : ahead_(ahead), count_(count), between_(between), onward_(onward) {}

    // Fetches one line of each of some rows, along these, in the `turn`-th of some turns, which
    // together fetch all 32 rows of the next block.
    static Fetch of_rows(const bf16* block, i64 step, i64 turn, i64 turns) {
        const i64 rows = std::max<i64>(4, (BLOCK + turns - 1) / turns);
        return {block + std::min(BLOCK - rows, BLOCK * turn / turns) * step, rows, step, DEPTH};
    }

    // Fetches rows without gaps in memory order, in which the processor fetches ahead by itself.
    // done: steps before this one, of as many turns for each 32 of the inner dimension.
    static Fetch in_order(const bf16* block, i64 done, i64 turns) {
        const i64 lines = (BLOCK + turns - 1) / turns;
        return {block + done * lines * DEPTH, lines, DEPTH, lines * DEPTH};
    }

    void step() {
        for (i64 i = 0; i < count_; i++)
            _mm_prefetch(reinterpret_cast<const char*>(ahead_ + i * between_), _MM_HINT_T1);
        ahead_ += onward_;
    }

  private:
    const bf16* ahead_;
    i64 count_, between_, onward_;
};

// Computes c = a b + more, or c += a b + more, of blocks of 32 x 32: a [32, inner] with a step from
// row to row, b [inner / 2, 32, 2], c without gaps.
template <bool ADD, class Aside>
void multiply_aside(i64 inner, const bf16* a, i64 a_step, const bf16* b, float* c, Aside aside,
                    const More& more) {
    const i64 row = BLOCK * sizeof(float);
    float* lower = c + SUMS / 2;
    if (ADD) {
        _tile_loadd(0, c, row);
        _tile_loadd(1, c + 16, row);
        _tile_loadd(2, lower, row);
        _tile_loadd(3, lower + 16, row);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    for (i64 k = 0; k < inner; k += DEPTH, a += DEPTH, b += DEPTH * BLOCK) {
        _tile_loadd(4, a, a_step * 2);
        _tile_loadd(6, b, 128);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, b + 32, 128);
        aside.step();
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, a + 16 * a_step, a_step * 2);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    for (i64 k = 0; k < more.depth; k += DEPTH) {
        _tile_loadd(4, more.left + k, more.depth * 2);
        _tile_loadd(6, more.right + k * BLOCK, 128);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, more.right + k * BLOCK + 32, 128);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, more.left + 16 * more.depth + k, more.depth * 2);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, c, row);
    _tile_stored(1, c + 16, row);
    _tile_stored(2, lower, row);
    _tile_stored(3, lower + 16, row);
}

template <class Aside>
inline void run(bool adds, i64 inner, const bf16* a, i64 a_step, const bf16* b, float* c,
                Aside aside, const More& more = {nullptr, nullptr, 0}) {
    settle();
    adds ? multiply_aside<true>(inner, a, a_step, b, c, aside, more)
         : multiply_aside<false>(inner, a, a_step, b, c, aside, more);
    settle();
}

// Writes a line of a result.
class Lines {
  public:
    Lines(bf16* first, i64 step, i64 num_bytes)
        : streams_(num_bytes >= STREAMED_BYTES &&
                   !((reinterpret_cast<uintptr_t>(first) | step * 2) & 63)) {}
    void put(bf16* y, __m512i line) const {
        if (streams_)
            _mm512_stream_si512(reinterpret_cast<__m512i*>(y), line);
        else
            _mm512_storeu_si512(y, line);
    }

  private:
    bool streams_;
};

}  // namespace

#endif
