// Product y = (x W^T) s + b of few rows in bfloat16, on processors whose instructions for sums of
// products of pairs are faster than those for float32 (AMD's). The weight is read once, as it lies.
// W is bfloat16, without s, or int8 with a scale per output channel: its whole numbers are exact in
// bfloat16.
//
// Sums are float32, in an order that does not depend on how many rows there are. Numbers below
// 2^-126 count as zero.

#include <type_traits>

#include "tiles/tiles.h"
#include "common/vector_products.h"

#ifdef HAS_PAIRS

namespace {

using vectors::Floats;

// Elements of a row that one instruction multiplies.
const i64 WIDTH = 32;
// Rows of a group. More rows are divided into groups of nearly equal sizes.
const i64 MAX_ROWS = 8;
// Rows of x with which a weight that is converted stays in registers.
const i64 MAX_IN_REGISTERS = 4;

thread_local Scratch own_scratch;

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

inline __m512bh load(const bf16* x, __mmask32 mask) {
    return (__m512bh)_mm512_maskz_loadu_epi16(mask, x);
}

inline __m512bh load(const int8_t* x, __mmask32 mask) {
    const __m256i bytes = _mm256_maskz_loadu_epi8(mask, x);
    const __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_castsi256_si128(bytes)));
    const __m512 high =
        _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_extracti128_si256(bytes, 1)));
    return _mm512_cvtne2ps_pbh(high, low);
}

inline __mmask32 mask_of(i64 elements) {
    return elements >= WIDTH ? ~__mmask32(0) : (__mmask32(1) << elements) - 1;
}

template <typename W>
struct Problem {
    const bf16* x;
    i64 x_step;
    const W* weight;
    const float* scales;  // or null
    const bf16* bias;     // or null
    bf16* y;
    i64 n, inner, outer;

    // Meanwhile fetches what follows the channels in the weight, line by line in the order of
    // memory: many rows at once, each from its own place, arrive at half the speed.
    template <int ROWS, int COUNT, bool FETCHES, typename From>
    void run(i64 row, i64 channel, const From* from, i64 from_step) const {
        const i64 step_bytes = COUNT * WIDTH * sizeof(W), line_bytes = 64;
        Floats totals[ROWS * COUNT] = {};
        const bf16* own = x + row * x_step;
        const char* next = reinterpret_cast<const char*>(weight + (channel + COUNT) * inner);
        auto add = [&](i64 k, __mmask32 mask) __attribute__((always_inline)) {
            __m512bh weights[COUNT];
#pragma GCC unroll 8
            for (int c = 0; c < COUNT; c++) weights[c] = load(from + c * from_step + k, mask);
            if (FETCHES) {
#pragma GCC unroll 8
                for (i64 at = 0; at < step_bytes; at += line_bytes)
                    _mm_prefetch(next + at, _MM_HINT_T1);
                next += step_bytes;
            }
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; r++) {
                const __m512bh values = load(own + r * x_step + k, mask);
#pragma GCC unroll 8
                for (int c = 0; c < COUNT; c++) {
                    Floats& total = totals[r * COUNT + c];
                    total = (Floats)_mm512_dpbf16_ps((__m512)total, weights[c], values);
                }
            }
        };
        i64 k = 0;
        for (; k + WIDTH <= inner; k += WIDTH) add(k, ~__mmask32(0));
        if (k < inner) add(k, mask_of(inner - k));
        // A copy, since variables whose address is taken are not kept in registers.
        Floats ended[ROWS * COUNT];
#pragma GCC unroll 32
        for (int i = 0; i < ROWS * COUNT; i++) ended[i] = totals[i];
        float sums[ROWS * COUNT];
        add_up<ROWS * COUNT>(ended, sums);
        for (int r = 0; r < ROWS; r++)
            for (int c = 0; c < COUNT; c++) {
                float sum = sums[r * COUNT + c];
                if (scales) sum *= scales[channel + c];
                if (bias) sum += widen(bias[channel + c]);
                narrow(sum, y[(row + r) * outer + channel + c]);
            }
    }

    template <int COUNT, int ROWS = MAX_ROWS, typename From>
    void run_rows(i64 rows, i64 row, i64 channel, const From* from, i64 from_step) const {
        if constexpr (ROWS > 1)
            if (rows < ROWS) return run_rows<COUNT, ROWS - 1>(rows, row, channel, from, from_step);
        row ? run<ROWS, COUNT, false>(row, channel, from, from_step)
            : run<ROWS, COUNT, true>(row, channel, from, from_step);
    }

    // Multiplies all rows, in groups, with the same channels.
    template <int COUNT, typename From>
    void run_groups(i64 channel, const From* from, i64 from_step) const {
        const i64 groups = (n + MAX_ROWS - 1) / MAX_ROWS;
        for (i64 group = 0; group < groups; group++) {
            const i64 row = n * group / groups;
            run_rows<COUNT>(n * (group + 1) / groups - row, row, channel, from, from_step);
        }
    }

    // Whole numbers are converted to bfloat16 in registers for few rows, and once for all groups of
    // more.
    template <int COUNT>
    void run_at(i64 channel) const {
        const W* own = weight + channel * inner;
        if constexpr (std::is_same_v<W, bf16>) return run_groups<COUNT>(channel, own, inner);
        if (n <= MAX_IN_REGISTERS) return run_groups<COUNT>(channel, own, inner);
        const i64 step = round_up(inner, WIDTH);
        bf16* made = reinterpret_cast<bf16*>(own_scratch.take(COUNT * step * sizeof(bf16)));
        for (int c = 0; c < COUNT; c++)
            for (i64 k = 0; k < inner; k += WIDTH)
                _mm512_storeu_si512(made + c * step + k,
                                    (__m512i)load(own + c * inner + k, mask_of(inner - k)));
        run_groups<COUNT>(channel, static_cast<const bf16*>(made), step);
    }

    template <int COUNT>
    void run_channels(i64 first, i64 last) const {
        i64 channel = first;
        for (; channel + COUNT <= last; channel += COUNT) run_at<COUNT>(channel);
        for (; channel < last; channel++) run_at<1>(channel);
    }

    void run_all(i64 num_threads) const {
#pragma omp parallel num_threads(num_threads)
        {
            const i64 thread = omp_get_thread_num(), threads = omp_get_num_threads();
            const i64 first = outer * thread / threads, last = outer * (thread + 1) / threads;
            // One channel alone arrives as fast as memory allows; several channels share the loads
            // of more rows of x.
            if (n <= 2)
                run_channels<1>(first, last);
            else if (n <= MAX_IN_REGISTERS)
                run_channels<4>(first, last);
            else
                run_channels<3>(first, last);
        }
    }
};

}  // namespace

// Writes y [n, outer] from x [n, inner] with a step from row to row, weight [outer, inner] and bias
// [outer] or null.
extern "C" void pair_product(const bf16* x, i64 x_step, const bf16* weight, const bf16* bias,
                             bf16* y, i64 n, i64 inner, i64 outer, i64 num_threads) {
    Problem<bf16>{x, x_step, weight, nullptr, bias, y, n, inner, outer}.run_all(num_threads);
}

// The same with int8 weights and scales [outer].
extern "C" void int8_pair_product(const bf16* x, i64 x_step, const int8_t* weight,
                                  const float* scales, const bf16* bias, bf16* y, i64 n, i64 inner,
                                  i64 outer, i64 num_threads) {
    Problem<int8_t>{x, x_step, weight, scales, bias, y, n, inner, outer}.run_all(num_threads);
}

#endif
