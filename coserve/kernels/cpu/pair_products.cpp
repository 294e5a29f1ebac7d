// y = x W^T + b of few rows in bfloat16, on processors whose instructions for sums of products of pairs are faster than
// those for float32 (AMD's): the weight is read once, as it lies, and nothing is converted.
//
// Sums are float32, in an order that does not depend on how many rows there are. Numbers below 2^-126 count as zero.

#include "vector_products.h"

#if defined(__AVX512BF16__)

namespace {

using vectors::Floats;

const i64 STEP = 32;
const i64 LINE_BYTES = 64;
// More rows go in groups of as nearly equal sizes as can be.
const i64 MOST_ROWS = 8;

// Rows of the weight that are multiplied at once with so many rows of x. One alone is read as fast as memory gives it,
// and several share what is loaded of x.
constexpr int channels_at_once(int rows) { return rows <= 2 ? 1 : rows <= 4 ? 4 : 3; }

template <int COUNT>
inline void add_up(const Floats* totals, float* sums) {
    if constexpr (COUNT > 16) {
        add_up<COUNT / 2>(totals, sums);
        add_up<COUNT - COUNT / 2>(totals + COUNT / 2, sums + COUNT / 2);
    } else {
        Floats own[COUNT];
        float found[COUNT];
        std::copy(totals, totals + COUNT, own);
        vectors::add_up(own, found);
        std::copy(found, found + COUNT, sums);
    }
}

struct Problem {
    const bf16* x;
    i64 x_step;
    const bf16* weight;
    const bf16* bias;  // or null
    bf16* y;
    i64 inner, outer;

    // Elements [column, channel) of ROWS rows. What follows these rows of the weight is fetched meanwhile, line by line
    // in the order of memory: many rows at once, each from its own place, come at half the speed.
    template <int ROWS, int CHANNELS, bool IS_FIRST>
    void run(i64 row, i64 channel) const {
        Floats totals[ROWS * CHANNELS] = {};
        const bf16 *own = x + row * x_step, *from = weight + channel * inner;
        const char* next = reinterpret_cast<const char*>(from + CHANNELS * inner);
        auto add = [&](i64 k, __mmask32 mask) {
            __m512bh weights[CHANNELS];
#pragma GCC unroll 8
            for (int c = 0; c < CHANNELS; c++) {
                weights[c] = (__m512bh)_mm512_maskz_loadu_epi16(mask, from + c * inner + k);
                if (IS_FIRST) _mm_prefetch(next + c * LINE_BYTES, _MM_HINT_T1);
            }
            next += CHANNELS * LINE_BYTES;
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; r++) {
                const __m512bh values = (__m512bh)_mm512_maskz_loadu_epi16(mask, own + r * x_step + k);
#pragma GCC unroll 8
                for (int c = 0; c < CHANNELS; c++) {
                    Floats& total = totals[r * CHANNELS + c];
                    total = (Floats)_mm512_dpbf16_ps((__m512)total, weights[c], values);
                }
            }
        };
        i64 k = 0;
        for (; k + STEP <= inner; k += STEP) add(k, ~__mmask32(0));
        if (k < inner) add(k, (__mmask32(1) << (inner - k)) - 1);
        float sums[ROWS * CHANNELS];
        add_up<ROWS * CHANNELS>(totals, sums);
        for (int r = 0; r < ROWS; r++)
            for (int c = 0; c < CHANNELS; c++)
                narrow(sums[r * CHANNELS + c] + (bias ? widen(bias[channel + c]) : 0.0f),
                       y[(row + r) * outer + channel + c]);
    }

    template <int CHANNELS, int ROWS = MOST_ROWS>
    void run_rows(i64 rows, i64 row, i64 channel) const {
        if constexpr (ROWS > 1)
            if (rows < ROWS) return run_rows<CHANNELS, ROWS - 1>(rows, row, channel);
        row ? run<ROWS, CHANNELS, false>(row, channel) : run<ROWS, CHANNELS, true>(row, channel);
    }

    // Rows of x in groups, with the same rows of the weight.
    template <int CHANNELS>
    void run_groups(i64 n, i64 channel) const {
        const i64 groups = (n + MOST_ROWS - 1) / MOST_ROWS;
        for (i64 group = 0; group < groups; group++) {
            const i64 row = n * group / groups;
            run_rows<CHANNELS>(n * (group + 1) / groups - row, row, channel);
        }
    }

    template <int CHANNELS>
    void run_channels(i64 n, i64 first, i64 last) const {
        i64 channel = first;
        for (; channel + CHANNELS <= last; channel += CHANNELS) run_groups<CHANNELS>(n, channel);
        for (; channel < last; channel++) run_groups<1>(n, channel);
    }
};

}  // namespace

// x [n, inner] with a step from row to row, weight [outer, inner], bias [outer] or null, y [n, outer].
extern "C" void pair_product(const bf16* x, i64 x_step, const bf16* weight, const bf16* bias, bf16* y, i64 n, i64 inner,
                             i64 outer, i64 num_threads) {
    const Problem problem{x, x_step, weight, bias, y, inner, outer};
#pragma omp parallel num_threads(num_threads)
    {
        const i64 thread = omp_get_thread_num(), threads = omp_get_num_threads();
        const i64 first = outer * thread / threads, last = outer * (thread + 1) / threads;
        if (n <= 2) problem.run_channels<channels_at_once(1)>(n, first, last);
        else if (n <= 4) problem.run_channels<channels_at_once(4)>(n, first, last);
        else problem.run_channels<channels_at_once(8)>(n, first, last);
    }
}

#endif
