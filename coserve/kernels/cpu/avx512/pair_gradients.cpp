// Gradient dx = dy W of some rows in bfloat16, on processors whose instructions for sums of
// products of pairs are faster than those for float32 (AMD's): pairs of rows of the weight are
// arranged as a right factor, a block at a time, which stays in the second cache while all rows are
// multiplied with it.
//
// Sums are float32, in an order that does not depend on how many rows there are.

#include "tiles/tiles.h"

#ifdef HAS_PAIRS

namespace {

// Rows of the weight that are arranged at once, columns of it that are multiplied at once, and
// rows.
const i64 BLOCK = 64, COLUMNS = 32, MAX_ROWS = 12;

thread_local Scratch scratch;

// Interleaves two rows of 32 columns: the first 16 columns, then the others.
inline void interleave(const bf16* upper, const bf16* lower, bf16* out) {
    const __m512i one = _mm512_loadu_si512(upper), other = _mm512_loadu_si512(lower);
    const __m512i left = _mm512_inserti64x4(one, _mm512_castsi512_si256(other), 1);
    const __m512i right = _mm512_inserti64x4(other, _mm512_extracti64x4_epi64(one, 1), 0);
    _mm512_storeu_si512(out, interleaved(left));
    _mm512_storeu_si512(out + COLUMNS, interleaved(right));
}

typedef void (*Multiply)(int, const bf16*, i64, const bf16*, i64, float*, i64);

template <bool ADD, int ROWS = MAX_ROWS>
inline Multiply multiply_of(i64 rows) {
    if constexpr (ROWS > 1)
        if (rows < ROWS) return multiply_of<ADD, ROWS - 1>(rows);
    return multiply_rows<ROWS, 2, ADD>;
}

}  // namespace

// Writes x_grad [n, inner] from grad [n, outer], with steps from row to row, and weight [outer,
// inner]; outer and inner are multiples of 32. adds: adds to x_grad; rounded once.
extern "C" void pair_input_gradient(const bf16* grad, i64 grad_step, const bf16* weight,
                                    bf16* x_grad, i64 x_step, i64 adds, i64 n, i64 inner, i64 outer,
                                    i64 num_threads) {
#pragma omp parallel num_threads(num_threads)
    {
        const i64 thread = omp_get_thread_num(), threads = omp_get_num_threads(),
                  strips = inner / COLUMNS;
        const i64 first = strips * thread / threads * COLUMNS,
                  last = strips * (thread + 1) / threads * COLUMNS;
        const i64 columns = last - first, groups = (n + MAX_ROWS - 1) / MAX_ROWS;
        float* sums = reinterpret_cast<float*>(
            scratch.take(n * columns * sizeof(float) + BLOCK * columns * sizeof(bf16)));
        bf16* right =
            reinterpret_cast<bf16*>(sums + n * columns);  // [strips, BLOCK / 2, COLUMNS, 2]
        for (i64 row = 0; row < outer && columns; row += BLOCK) {
            const i64 depth = std::min(BLOCK, outer - row);
            for (i64 k = 0; k < depth; k += 2)
                for (i64 column = 0; column < columns; column += COLUMNS) {
                    const bf16* from = weight + (row + k) * inner + first + column;
                    interleave(from, from + inner, right + column * BLOCK + k * COLUMNS);
                }
            // The next block is fetched while this one is multiplied: some lines before each call,
            // row by row.
            const i64 lines = columns / COLUMNS, num_calls = lines * groups;
            i64 next_row = row + BLOCK, line = 0, call = 0;
            auto fetch = [&](i64 until) {
                while ((next_row - row - BLOCK) * lines + line < until) {
                    _mm_prefetch(weight + next_row * inner + first + line * COLUMNS, _MM_HINT_T1);
                    if (++line == lines) line = 0, next_row++;
                }
            };
            for (i64 column = 0; column < columns; column += COLUMNS)
                for (i64 group = 0; group < groups; group++) {
                    fetch(BLOCK * lines * ++call / num_calls);
                    const i64 top = n * group / groups, count = n * (group + 1) / groups - top;
                    auto run = row ? multiply_of<true>(count) : multiply_of<false>(count);
                    run(int(depth), grad + top * grad_step + row, grad_step, right + column * BLOCK,
                        COLUMNS, sums + top * columns + column, columns);
                }
        }
        for (i64 row = 0; row < n; row++)
            for (i64 column = 0; column < columns; column += COLUMNS) {
                const float* sum = sums + row * columns + column;
                bf16* out = x_grad + row * x_step + first + column;
                __m512 left = _mm512_loadu_ps(sum), right = _mm512_loadu_ps(sum + 16);
                if (adds) left += load(out), right += load(out + 16);
                _mm512_storeu_si512(out, (__m512i)_mm512_cvtne2ps_pbh(right, left));
            }
    }
}

#endif
