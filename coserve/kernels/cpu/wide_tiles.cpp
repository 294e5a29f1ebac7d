// Products of many rows in bfloat16 with AMX, with sums in float32 that are rounded once: y = x W^T, what a LoRA adds
// to it within the same sums, and dx = dy W. The weight is read as it lies, and what is multiplied next is fetched from
// memory while tiles are multiplied.

#include "skinny.h"

#ifdef HAS_AMX

namespace {

// Rows and columns of the sums that stay in tile registers.
const int BLOCK = 32;
// Elements of a block's sums.
const int SUMS = BLOCK * BLOCK;
// Most of the inner dimension for which rows of x are arranged at once, and whose sums are then put aside; and of it,
// what a block takes of both factors beside its sums from the inner cache, which keeps the one that is used again.
const i64 DEEP = 1024, INNER = 256;
// Most rows of x that a thread has arranged, and most blocks of sums that are put aside: they stay in the outer cache.
const i64 MOST_ROWS = 512, MOST_BLOCKS = 256;
// From how many rows for each thread on threads have rows of their own, not rows of the weight.
const i64 ROWS_OF_A_THREAD = 256;
// Of the weight in dx = dy W: how many of its blocks of columns become pairs at once, of INNER rows: a panel.
const i64 COLUMNS = 14;
// From how many bytes on a result is not kept in the caches: it would be gone before it is read.
const i64 STREAMED_BYTES = 2 << 20;

thread_local Scratch scratch;

// The part that a thread or a turn has of a number of things: [start, end).
struct Part {
    i64 start, end;
    Part(i64 count, i64 which, i64 parts) : start(count * which / parts), end(count * (which + 1) / parts) {}
    i64 size() const { return end - start; }
    Part from(i64 first) const {
        Part part = *this;
        part.start += first, part.end += first;
        return part;
    }
};

// More of the inner dimension of a block, from other factors: left [32, depth], right [depth / 2, 32, 2].
struct More {
    const bf16 *left, *right;
    i64 depth;
};

// What a thread does while tiles are multiplied, a step for each 32 of the inner dimension: nothing waits for it. Here:
// of four rows from `ahead` on, elements are fetched into the outer cache.
class Fetch {
  public:
    Fetch(const bf16* ahead, i64 step) : ahead_(ahead), step_(step) {}
    void step() {
        for (int i = 0; i < 4; i++) _mm_prefetch(reinterpret_cast<const char*>(ahead_ + i * step_), _MM_HINT_T1);
        ahead_ += DEPTH;
    }

  private:
    const bf16* ahead_;
    i64 step_;
};

// c = a b + more, or c += a b + more, blocks of 32 x 32: a [32, inner] with a step from row to row, b [inner / 2, 32,
// 2], c without gaps.
template <bool ADD, class Aside>
void multiply_aside(i64 inner, const bf16* a, i64 a_step, const bf16* b, float* c, Aside aside, const More& more) {
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
inline void run(bool adds, i64 inner, const bf16* a, i64 a_step, const bf16* b, float* c, Aside aside,
                const More& more = {nullptr, nullptr, 0}) {
    settle();
    adds ? multiply_aside<true>(inner, a, a_step, b, c, aside, more)
         : multiply_aside<false>(inner, a, a_step, b, c, aside, more);
    settle();
}

// The first of the four rows of the next block that are fetched in a turn.
inline i64 fetched(i64 turn, i64 turns) { return std::min<i64>(BLOCK - 4, BLOCK * turn / turns); }

// A line of a result.
class Lines {
  public:
    Lines(bf16* first, i64 step, i64 num_bytes)
        : streams_(num_bytes >= STREAMED_BYTES && !((reinterpret_cast<uintptr_t>(first) | step * 2) & 63)) {}
    void put(bf16* y, __m512i line) const {
        if (streams_)
            _mm512_stream_si512(reinterpret_cast<__m512i*>(y), line);
        else
            _mm512_storeu_si512(y, line);
    }

  private:
    bool streams_;
};

// Up to 32 elements of a row, and zeros.
inline __m512i load_some(const bf16* x, i64 count) {
    return _mm512_maskz_loadu_epi16(count < DEPTH ? (1u << count) - 1 : ~0u, x);
}

// Rows of x as columns of right factors: [blocks, depth / 2, 32, 2], zeros after the last row, and after the last
// column where depth is `columns` and some.
void arrange(const bf16* x, i64 step, i64 rows, i64 depth, i64 columns, bf16* out) {
    for (i64 row = 0; row < round_up(rows, BLOCK); row += 16) {
        bf16* block = out + row / BLOCK * BLOCK * depth + row % BLOCK * 2;
        for (i64 k = 0; k < depth; k += DEPTH) {
            __m512i pairs[16];
            for (int i = 0; i < 16; i++)
                pairs[i] = row + i < rows ? load_some(x + (row + i) * step + k, columns - k) : _mm512_setzero_si512();
            transpose(pairs);
            for (int i = 0; i < 16; i++) _mm512_storeu_si512(block + (k / 2 + i) * 2 * BLOCK, pairs[i]);
        }
    }
}

// Sums of a block, 32 outputs x 32 rows -> rounded, with the bias (or null), as a line of each of up to 32 rows of y.
void round_block(const float* sums, const bf16* bias, i64 rows, const Lines& lines, bf16* y, i64 y_step) {
    for (i64 row = 0; row < rows; row += 16) {
        __m512i pairs[16];
        for (int i = 0; i < 16; i++) {
            __m512 two[2];
            for (int e = 0; e < 2; e++) {
                two[e] = _mm512_loadu_ps(sums + (2 * i + e) * BLOCK + row);
                if (bias) two[e] = _mm512_add_ps(two[e], _mm512_set1_ps(widen(bias[2 * i + e])));
            }
            pairs[i] = interleaved((__m512i)_mm512_cvtne2ps_pbh(two[1], two[0]));
        }
        transpose(pairs);
        for (int i = 0; i < std::min<i64>(16, rows - row); i++) lines.put(y + (row + i) * y_step, pairs[i]);
    }
}

// What is added to some columns of y: narrow B^T, as Python has it. narrow [n, rank] with a step from row to row, B
// [end - start, rank].
struct Added {
    const bf16* narrow;
    i64 narrow_step;
    const bf16* b;
    i64 rank, start, end;

    i64 depth() const { return round_up(rank, DEPTH); }
};
static_assert(sizeof(Added) == 6 * sizeof(i64), "as Python has them");

// y = x W^T + b, and what is added to it, for some rows of x and strips of 32 rows of the weight. The weight is the
// left factor.
struct Product {
    const bf16* x;
    i64 x_step;
    const bf16 *weight, *bias;
    bf16* y;
    i64 inner, outer;
    Lines lines;
    const Added* added;
    i64 num_added;

    void run_for(i64 first, i64 rows, Part strips) const {
        const i64 blocks = (rows + BLOCK - 1) / BLOCK, turns = (inner + DEEP - 1) / DEEP;
        const i64 groups = turns > 1 ? (strips.size() * blocks + MOST_BLOCKS - 1) / MOST_BLOCKS : 1;
        for (i64 group = 0; group < groups; group++)
            run_for(first, rows, blocks, turns, Part(strips.size(), group, groups).from(strips.start));
    }

    void run_for(i64 first, i64 rows, i64 blocks, i64 turns, Part strips) const {
        // Sums of all strips, if they are put aside; else of this one and of the one before, which is written
        // meanwhile.
        const i64 kept = turns > 1 ? strips.size() : 2;
        i64 depths = 0, deepest = 0;
        for (i64 i = 0; i < num_added; i++) depths += added[i].depth(), deepest = std::max(deepest, added[i].depth());
        float* sums = reinterpret_cast<float*>(
            scratch.take(blocks * (kept * SUMS * sizeof(float) + BLOCK * (DEEP + depths) * sizeof(bf16)) +
                         BLOCK * deepest * sizeof(bf16)));
        bf16* arranged = reinterpret_cast<bf16*>(sums + kept * blocks * SUMS);
        bf16* const narrow = arranged + blocks * BLOCK * DEEP;  // of one after the other
        bf16* const left_of_added = narrow + blocks * BLOCK * depths;
        bf16* place = narrow;
        for (i64 i = 0; i < num_added; place += blocks * BLOCK * added[i++].depth())
            arrange(added[i].narrow + first * added[i].narrow_step, added[i].narrow_step, rows, added[i].depth(),
                    added[i].rank, place);
        auto more_of = [&](i64 strip) {
            const bf16* right = narrow;
            for (i64 i = 0; i < num_added; right += blocks * BLOCK * added[i++].depth()) {
                const i64 row = strip * BLOCK - added[i].start, depth = added[i].depth(), rank = added[i].rank;
                if (row < 0 || strip * BLOCK >= added[i].end) continue;
                for (i64 j = 0; j < BLOCK; j++)
                    for (i64 k = 0; k < depth; k += DEPTH)
                        _mm512_storeu_si512(left_of_added + j * depth + k,
                                            load_some(added[i].b + (row + j) * rank + k, rank - k));
                return More{left_of_added, right, depth};
            }
            return More{nullptr, nullptr, 0};
        };
        auto write = [&](i64 strip, i64 block) {
            const i64 row = block * BLOCK, column = strip * BLOCK;
            round_block(sums + ((strip - strips.start) % kept * blocks + block) * SUMS, bias ? bias + column : nullptr,
                        std::min<i64>(BLOCK, rows - row), lines, y + (first + row) * outer + column, outer);
        };
        for (i64 turn = 0; turn < turns; turn++) {
            const Part deep(inner / DEPTH, turn, turns);
            const i64 start = deep.start * DEPTH, depth = deep.size() * DEPTH, parts = (depth + INNER - 1) / INNER;
            const bool is_last = turn == turns - 1;
            arrange(x + first * x_step + start, x_step, rows, depth, depth, arranged);
            for (i64 strip = strips.start; strip < strips.end; strip++) {
                const bf16* left = weight + strip * BLOCK * inner + start;
                const bf16* next = strip + 1 < strips.end ? left + BLOCK * inner
                                   : is_last              ? left
                                                          : weight + strips.start * BLOCK * inner + start + depth;
                float* own = sums + (strip - strips.start) % kept * blocks * SUMS;
                for (i64 part = 0; part < parts; part++) {
                    const Part within(depth / DEPTH, part, parts);
                    const i64 k = within.start * DEPTH;
                    const More all = is_last && part == parts - 1 ? more_of(strip) : More{nullptr, nullptr, 0};
                    for (i64 block = 0; block < blocks; block++) {
                        const More more{all.left, all.right + block * BLOCK * all.depth, all.depth};
                        run(turn || part, within.size() * DEPTH, left + k, inner,
                            arranged + (block * depth + k) * BLOCK, own + block * SUMS,
                            Fetch(next + fetched(block, blocks) * inner + k, inner), more);
                        if (turns > 1 && is_last && part == parts - 1) write(strip, block);
                        if (turns == 1 && !part && strip > strips.start) write(strip - 1, block);
                    }
                }
            }
        }
        for (i64 block = 0; turns == 1 && strips.size() && block < blocks; block++) write(strips.end - 1, block);
    }
};

// Rows of a weight [depth, 32 * blocks] with a step -> right factors [depth / 2, 32, 2] of each block, some elements
// apart, of which these rows are the inner dimension. depth is even. Bit by bit, while others are multiplied.
class Pairing {
  public:
    Pairing() = default;
    Pairing(const bf16* weight, i64 step, i64 depth, i64 blocks, bf16* out, i64 block_step)
        : weight_(weight),
          out_(out),
          step_(step),
          blocks_(blocks),
          block_step_(block_step),
          left_(depth / 2 * blocks) {}
    i64 left() const { return left_; }

    // Two rows, 32 columns each, this many times.
    void some(i64 count) {
        const __m512i low = places_from(0), high = places_from(16);
        for (count = std::min(count, left_), left_ -= count; count; count--) {
            const bf16* place = weight_ + block_ * BLOCK;
            for (int i = 0; i < 2; i++)
                _mm_prefetch(reinterpret_cast<const char*>(place + (AHEAD + i) * step_), _MM_HINT_T0);
            const __m512i one = _mm512_loadu_si512(place), other = _mm512_loadu_si512(place + step_);
            bf16* out = out_ + block_ * block_step_;
            _mm512_storeu_si512(out, _mm512_permutex2var_epi16(one, low, other));
            _mm512_storeu_si512(out + BLOCK, _mm512_permutex2var_epi16(one, high, other));
            if (++block_ == blocks_) block_ = 0, weight_ += 2 * step_, out_ += 2 * BLOCK;
        }
    }

  private:
    // Rows until one that is fetched is read.
    static const i64 AHEAD = 16;

    static __m512i places_from(int first) {
        alignas(64) uint16_t places[32];
        for (int i = 0; i < 16; i++) places[2 * i] = first + i, places[2 * i + 1] = 32 + first + i;
        return _mm512_load_si512(places);
    }

    const bf16* weight_ = nullptr;
    bf16* out_ = nullptr;
    i64 step_ = 0, blocks_ = 0, block_step_ = 0, left_ = 0, block_ = 0;
};

class FetchAndPair {
  public:
    FetchAndPair(Fetch fetch, Pairing& pairing, i64 count) : fetch_(fetch), pairing_(pairing), count_(count) {}
    void step() {
        fetch_.step();
        pairing_.some(count_);
    }

  private:
    Fetch fetch_;
    Pairing& pairing_;
    i64 count_;
};

// Whether rows that are as many elements apart stand in so few places of the inner cache that 32 of them, of INNER
// elements, drive each other out of it.
inline bool crowd(i64 step) { return step % 512 == 0; }

// dx = dy W, or dx += dy W, for some blocks of 32 columns of the weight, panel by panel: while one is multiplied, the
// next becomes pairs. dy is the left factor as it lies.
struct InputGradient {
    const bf16* grad;
    i64 grad_step;
    const bf16* weight;
    bf16* x_grad;
    i64 x_grad_step;
    bool is_added;
    i64 n, inner, outer;
    Lines lines;

    void run_for(Part columns) const {
        const i64 blocks = (n + BLOCK - 1) / BLOCK, turns = (outer + INNER - 1) / INNER;
        const i64 groups = (columns.size() + COLUMNS - 1) / COLUMNS, panels = groups * turns;
        if (!panels) return;
        const i64 widest = (columns.size() + groups - 1) / groups,
                  deepest = (outer / DEPTH + turns - 1) / turns * DEPTH;
        const i64 panel_size = widest * BLOCK * deepest;
        float* sums = reinterpret_cast<float*>(
            scratch.take(blocks * widest * SUMS * sizeof(float) + (2 * panel_size + BLOCK * deepest) * sizeof(bf16)));
        bf16* rights = reinterpret_cast<bf16*>(sums + blocks * widest * SUMS);
        bf16* copied = rights + 2 * panel_size;
        auto group_of = [&](i64 panel) { return Part(columns.size(), panel / turns, groups).from(columns.start); };
        auto deep_of = [&](i64 panel) { return Part(outer / DEPTH, panel % turns, turns); };
        auto pairing_of = [&](i64 panel) {
            if (panel == panels) return Pairing();
            const Part group = group_of(panel), deep = deep_of(panel);
            return Pairing(weight + deep.start * DEPTH * inner + group.start * BLOCK, inner, deep.size() * DEPTH,
                           group.size(), rights + panel % 2 * panel_size, deep.size() * DEPTH * BLOCK);
        };
        Pairing first = pairing_of(0);
        first.some(first.left());
        for (i64 panel = 0; panel < panels; panel++) {
            const Part group = group_of(panel), deep = deep_of(panel);
            const i64 start = deep.start * DEPTH, depth = deep.size() * DEPTH, width = group.size();
            const bool is_first = panel % turns == 0, is_last = panel % turns == turns - 1;
            const bf16* right = rights + panel % 2 * panel_size;
            Pairing pairing = pairing_of(panel + 1);
            const i64 steps = blocks * width * deep.size(), count = (pairing.left() + steps - 1) / steps;
            for (i64 block = 0; block < blocks; block++) {
                const i64 rows = std::min<i64>(BLOCK, n - block * BLOCK);
                const bf16* left = grad + block * BLOCK * grad_step + start;
                const bf16* next = block + 1 < blocks ? left + BLOCK * grad_step
                                                      : grad + deep_of(std::min(panel + 1, panels - 1)).start * DEPTH;
                i64 left_step = grad_step;
                if (rows < BLOCK || crowd(grad_step)) {
                    for (i64 i = 0; i < rows; i++)
                        std::memcpy(copied + i * depth, left + i * grad_step, depth * sizeof(bf16));
                    std::memset(copied + rows * depth, 0, (BLOCK - rows) * depth * sizeof(bf16));
                    left = copied, left_step = depth;
                }
                for (i64 column = 0; column < width; column++) {
                    float* own = sums + (block * width + column) * SUMS;
                    const Fetch fetch(next + fetched(column, width) * grad_step, grad_step);
                    run(!is_first, depth, left, left_step, right + column * BLOCK * depth, own,
                        FetchAndPair(fetch, pairing, count));
                    if (is_last) write(own, block * BLOCK, rows, (group.start + column) * BLOCK);
                }
            }
            pairing.some(pairing.left());
        }
    }

    void write(const float* sums, i64 first, i64 rows, i64 column) const {
        for (i64 i = 0; i < rows; i++, sums += BLOCK) {
            bf16* line = x_grad + (first + i) * x_grad_step + column;
            __m512 low = _mm512_loadu_ps(sums), high = _mm512_loadu_ps(sums + 16);
            if (is_added) low = _mm512_add_ps(low, load(line)), high = _mm512_add_ps(high, load(line + 16));
            lines.put(line, (__m512i)_mm512_cvtne2ps_pbh(high, low));
        }
    }
};

}  // namespace

// y = x W^T + b, and to some of its columns narrow B^T: x [n, inner] with a step from row to row, weight [outer,
// inner], bias [outer] or null, y [n, outer]. added: Added, of columns that begin and end with whole blocks of 32 and
// of which none is in two. inner and outer are multiples of 32. A row's sums are the same whatever other rows are
// there.
extern "C" void wide_product_and_low_rank(const bf16* x, i64 x_step, const bf16* weight, const bf16* bias, bf16* y,
                                          const i64* added, i64 num_added, i64 n, i64 inner, i64 outer,
                                          i64 num_threads) {
    const Product product{x,
                          x_step,
                          weight,
                          bias,
                          y,
                          inner,
                          outer,
                          Lines(y, outer, n * outer * 2),
                          reinterpret_cast<const Added*>(added),
                          num_added};
    const bool by_rows = n >= num_threads * ROWS_OF_A_THREAD;
    const i64 blocks = (n + BLOCK - 1) / BLOCK, strips = outer / BLOCK;
#pragma omp parallel num_threads(num_threads)
    {
        const i64 thread = omp_get_thread_num(), threads = omp_get_num_threads();
        const Part all = by_rows ? Part(blocks, thread, threads) : Part(blocks, 0, 1);
        const Part own = by_rows ? Part(strips, 0, 1) : Part(strips, thread, threads);
        const i64 groups = (all.size() * BLOCK + MOST_ROWS - 1) / MOST_ROWS;
        Tiles registers;
        for (i64 group = 0; group < groups; group++) {
            const Part part(all.size(), group, groups);
            const i64 first = (all.start + part.start) * BLOCK, end = std::min(n, (all.start + part.end) * BLOCK);
            product.run_for(first, end - first, own);
        }
        _mm_sfence();
    }
}

// The same with nothing added.
extern "C" void wide_product(const bf16* x, i64 x_step, const bf16* weight, const bf16* bias, bf16* y, i64 n, i64 inner,
                             i64 outer, i64 num_threads) {
    wide_product_and_low_rank(x, x_step, weight, bias, y, nullptr, 0, n, inner, outer, num_threads);
}

// dx = dy W: grad [n, outer] and x_grad [n, inner] with steps from row to row, weight [outer, inner]; added to what
// x_grad has, if is_added. inner and outer are multiples of 32. A row's sums are the same whatever other rows are
// there.
extern "C" void tile_input_gradient(const bf16* grad, i64 grad_step, const bf16* weight, bf16* x_grad, i64 x_grad_step,
                                    i64 is_added, i64 n, i64 inner, i64 outer, i64 num_threads) {
    const Lines lines(x_grad, x_grad_step, n * inner * 2);
#pragma omp parallel num_threads(num_threads)
    {
        const i64 thread = omp_get_thread_num(), threads = omp_get_num_threads();
        const Part columns(inner / BLOCK, thread, threads);
        const i64 chunks = (n + MOST_ROWS - 1) / MOST_ROWS;
        Tiles registers;
        for (i64 chunk = 0; chunk < chunks; chunk++) {
            const Part rows((n + BLOCK - 1) / BLOCK, chunk, chunks);
            const i64 first = rows.start * BLOCK, end = std::min(n, rows.end * BLOCK);
            const InputGradient gradient{grad + first * grad_step,
                                         grad_step,
                                         weight,
                                         x_grad + first * x_grad_step,
                                         x_grad_step,
                                         is_added != 0,
                                         end - first,
                                         inner,
                                         outer,
                                         lines};
            gradient.run_for(columns);
        }
        _mm_sfence();
    }
}

#endif
