// Input gradients of many rows in bfloat16 with AMX: dx = dy W, with sums in float32 that are
// rounded once. The weight's rows are the inner dimension. They are arranged in pairs, a panel
// while the one before it is multiplied.

#include "amx/wide_tiles.h"

#ifdef HAS_AMX

namespace {

// Number of the weight's blocks of columns that are arranged at once, for INNER rows: a panel.
const i64 COLUMNS = 14;

thread_local Scratch scratch;

// Arranges rows of a weight [depth, 32 * blocks] with a step as right factors [depth / 2, 32, 2] of
// each block, some elements apart, of which these rows are the inner dimension. depth is even. The
// work is done in small steps while other blocks are multiplied.
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

    // Arranges two rows, 32 columns each, this many times.
    void some(i64 count) {
        const __m512i low = places_from(0), high = places_from(16);
        for (count = std::min(count, left_), left_ -= count; count; count--) {
            const bf16* place = weight_ + block_ * BLOCK;
            for (int i = 0; i < 2; i++)
                _mm_prefetch(reinterpret_cast<const char*>(place + (AHEAD + i) * step_),
                             _MM_HINT_T0);
            const __m512i one = _mm512_loadu_si512(place),
                          other = _mm512_loadu_si512(place + step_);
            bf16* out = out_ + block_ * block_step_;
            _mm512_storeu_si512(out, _mm512_permutex2var_epi16(one, low, other));
            _mm512_storeu_si512(out + BLOCK, _mm512_permutex2var_epi16(one, high, other));
            if (++block_ == blocks_) block_ = 0, weight_ += 2 * step_, out_ += 2 * BLOCK;
        }
    }

  private:
    // Distance in rows between a fetch and its use.
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
    FetchAndPair(Fetch fetch, Pairing& pairing, i64 count)
        : fetch_(fetch), pairing_(pairing), count_(count) {}
    void step() {
        fetch_.step();
        pairing_.some(count_);
    }

  private:
    Fetch fetch_;
    Pairing& pairing_;
    i64 count_;
};

// Returns whether rows this many elements apart share so few places of the inner cache that 32 of
// them, of INNER elements, evict each other: of its 64 places, they use four if they are a multiple
// of 1 KB apart.
inline bool crowd(i64 step) { return step % 512 == 0; }

// Addition to a product: narrow A, with narrow [n, rank] with a step from row to row and A [rank,
// columns of the weight].
struct LowRank {
    const bf16* narrow;
    i64 narrow_step;
    const bf16* a;
    i64 rank;

    i64 depth() const { return round_up(rank, DEPTH); }

    // Arranges some rows of narrow as a left factor [rows, depth].
    void left(i64 first, i64 rows, i64 padded, bf16* out) const {
        for (i64 i = 0; i < padded; i++)
            for (i64 k = 0; k < depth(); k += DEPTH) {
                const i64 some = std::min<i64>(DEPTH, rank - k);
                const __mmask32 mask = i < rows ? some < DEPTH ? (1u << some) - 1 : ~0u : 0;
                _mm512_storeu_si512(
                    out + i * depth() + k,
                    _mm512_maskz_loadu_epi16(mask, narrow + (first + i) * narrow_step + k));
            }
    }

    // Arranges some blocks of columns of A as right factors [depth / 2, 32, 2].
    void right(i64 step, Part columns, bf16* out) const {
        for (i64 column = columns.start; column < columns.end; column++)
            for (i64 k = 0; k < depth(); k += 2, out += 2 * BLOCK)
                for (i64 i = 0; i < BLOCK; i += 16) {
                    const bf16* place = a + k * step + column * BLOCK + i;
                    const __m256i one = _mm256_maskz_loadu_epi16(k < rank ? 0xffff : 0, place);
                    const __m256i other =
                        _mm256_maskz_loadu_epi16(k + 1 < rank ? 0xffff : 0, place + step);
                    const __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512(one), other, 1);
                    _mm512_storeu_si512(out + 2 * i, interleaved(both));
                }
    }
};

// Product dx = dy W with the addition, or dx += these, for some blocks of 32 columns of the weight,
// panel by panel: while one is multiplied, the next is arranged. dy is the left factor as it lies.
struct InputGradient {
    const bf16* grad;
    i64 grad_step;
    const bf16* weight;
    bf16* x_grad;
    i64 x_grad_step;
    bool is_added;
    i64 n, inner, outer;
    Lines lines;
    LowRank low_rank;
    i64 first_row;  // of what is added

    void run_for(Part columns) const {
        const i64 blocks = (n + BLOCK - 1) / BLOCK, turns = (outer + INNER - 1) / INNER;
        const i64 groups = (columns.size() + COLUMNS - 1) / COLUMNS, panels = groups * turns;
        if (!panels) return;
        const i64 widest = (columns.size() + groups - 1) / groups,
                  deepest = (outer / DEPTH + turns - 1) / turns * DEPTH;
        const i64 panel_size = widest * BLOCK * deepest;
        const i64 more = low_rank.depth();
        float* sums = reinterpret_cast<float*>(scratch.take(
            blocks * widest * SUMS * sizeof(float) +
            (2 * panel_size + BLOCK * deepest + (blocks + columns.size()) * BLOCK * more) *
                sizeof(bf16)));
        bf16* rights = reinterpret_cast<bf16*>(sums + blocks * widest * SUMS);
        bf16* copied = rights + 2 * panel_size;
        bf16* const left_of_more = copied + BLOCK * deepest;
        bf16* const right_of_more = left_of_more + blocks * BLOCK * more;
        low_rank.left(first_row, n, blocks * BLOCK, left_of_more);
        low_rank.right(inner, columns, right_of_more);
        auto group_of = [&](i64 panel) {
            return Part(columns.size(), panel / turns, groups).from(columns.start);
        };
        auto deep_of = [&](i64 panel) { return Part(outer / DEPTH, panel % turns, turns); };
        auto pairing_of = [&](i64 panel) {
            if (panel == panels) return Pairing();
            const Part group = group_of(panel), deep = deep_of(panel);
            return Pairing(weight + deep.start * DEPTH * inner + group.start * BLOCK, inner,
                           deep.size() * DEPTH, group.size(), rights + panel % 2 * panel_size,
                           deep.size() * DEPTH * BLOCK);
        };
        Pairing first = pairing_of(0);
        first.some(first.left());
        for (i64 panel = 0; panel < panels; panel++) {
            const Part group = group_of(panel), deep = deep_of(panel);
            const i64 start = deep.start * DEPTH, depth = deep.size() * DEPTH, width = group.size();
            const bool is_first = panel % turns == 0, is_last = panel % turns == turns - 1;
            const bf16* right = rights + panel % 2 * panel_size;
            Pairing pairing = pairing_of(panel + 1);
            const i64 steps = blocks * width * deep.size(),
                      count = (pairing.left() + steps - 1) / steps;
            for (i64 block = 0; block < blocks; block++) {
                const i64 rows = std::min<i64>(BLOCK, n - block * BLOCK);
                const bf16* left = grad + block * BLOCK * grad_step + start;
                const bf16* next =
                    block + 1 < blocks
                        ? left + BLOCK * grad_step
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
                    const Fetch fetch = Fetch::of_rows(next, grad_step, column, width);
                    const i64 place = group.start - columns.start + column;
                    run(!is_first, depth, left, left_step, right + column * BLOCK * depth, own,
                        FetchAndPair(fetch, pairing, count),
                        {left_of_more + block * BLOCK * more, right_of_more + place * BLOCK * more,
                         is_last ? more : 0});
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
            if (is_added)
                low = _mm512_add_ps(low, load(line)), high = _mm512_add_ps(high, load(line + 16));
            lines.put(line, (__m512i)_mm512_cvtne2ps_pbh(high, low));
        }
    }
};

}  // namespace

// Writes dx = dy W + narrow A (null: no addition), or adds that to x_grad if is_added: grad [n,
// outer], x_grad [n, inner] and narrow [n, rank] with steps from row to row, weight [outer, inner],
// A [rank, inner]. inner and outer are multiples of 32. A row's sums are the same in any company.
extern "C" void tile_input_gradient(const bf16* grad, i64 grad_step, const bf16* weight,
                                    bf16* x_grad, i64 x_grad_step, i64 is_added, const bf16* narrow,
                                    i64 narrow_step, const bf16* a, i64 rank, i64 n, i64 inner,
                                    i64 outer, i64 num_threads) {
    const Lines lines(x_grad, x_grad_step, n * inner * 2);
    const LowRank low_rank{narrow, narrow_step, a, narrow ? rank : 0};
#pragma omp parallel num_threads(num_threads)
    {
        const i64 thread = omp_get_thread_num(), threads = omp_get_num_threads();
        const Part columns(inner / BLOCK, thread, threads);
        const i64 chunks = (n + MAX_ROWS - 1) / MAX_ROWS;
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
                                         lines,
                                         low_rank,
                                         first};
            gradient.run_for(columns);
        }
        _mm_sfence();
    }
}

#endif
