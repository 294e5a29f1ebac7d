// Products with a factor of low rank (a LoRA's) and its gradient in bfloat16, on processors without tiles: in float32,
// as in `vector_products.h`. Every one goes along the rows of the wide tensor, which the processor fetches ahead; the
// factor, in float32, stays in the second cache.

#include "vector_products.h"

namespace {

using vectors::Floats;
using vectors::LANES;
using vectors::PAIR;

thread_local Scratch shared_scratch;

// The factor as [rank, width] in float32, its elements arranged as `load_pair` gives those of rows; each thread makes a
// part of it. matrix [width, rank], or [rank, width] if it is transposed.
void arrange_factor(const bf16* matrix, bool is_transposed, i64 width, i64 rank, float* out) {
    const i64 thread = omp_get_thread_num(), threads = omp_get_num_threads(), pairs = width / PAIR;
    for (i64 pair = pairs * thread / threads; pair < pairs * (thread + 1) / threads; pair++)
        for (i64 r = 0; r < rank; r++) {
            const i64 first = pair * PAIR;
            bf16 part[PAIR];
            for (i64 i = 0; i < PAIR; i++)
                part[i] = matrix[is_transposed ? r * width + first + i : (first + i) * rank + r];
            vectors::arrange(part, PAIR, part, out + r * width + first);
        }
}

// y += x M of ROWS rows and PAIR columns; x [n, rank] in float32, factor [rank, width].
template <int ROWS>
inline void add_pair(const float* x, const float* factor, i64 rank, i64 width, bf16* y, i64 y_step) {
    Floats sums[ROWS][2];
#pragma GCC unroll 8
    for (int row = 0; row < ROWS; row++) vectors::load_pair(y + row * y_step, sums[row][0], sums[row][1]);
    for (i64 r = 0; r < rank; r++) {
        const Floats even = vectors::load(factor + r * width), odd = vectors::load(factor + r * width + LANES);
#pragma GCC unroll 8
        for (int row = 0; row < ROWS; row++) {
            const Floats own = Floats{} + x[row * rank + r];
            sums[row][0] = vectors::multiply_add(own, even, sums[row][0]);
            sums[row][1] = vectors::multiply_add(own, odd, sums[row][1]);
        }
    }
#pragma GCC unroll 8
    for (int row = 0; row < ROWS; row++) vectors::store_pair(sums[row][0], sums[row][1], y + row * y_step);
}

// grad += narrow^T wide of ROWS rows and PAIR columns; narrow [n, rank] and grad [rank, width] in float32.
template <int ROWS>
inline void add_gradient_pair(const float* narrow, i64 rank, const bf16* wide, i64 step, float* grad, i64 width) {
    Floats rows[ROWS][2];
#pragma GCC unroll 8
    for (int row = 0; row < ROWS; row++) vectors::load_pair(wide + row * step, rows[row][0], rows[row][1]);
    for (i64 r = 0; r < rank; r++) {
        float* place = grad + r * width;
        Floats even = vectors::load(place), odd = vectors::load(place + LANES);
#pragma GCC unroll 8
        for (int row = 0; row < ROWS; row++) {
            const Floats own = Floats{} + narrow[row * rank + r];
            even = vectors::multiply_add(own, rows[row][0], even);
            odd = vectors::multiply_add(own, rows[row][1], odd);
        }
        std::memcpy(place, &even, sizeof even);
        std::memcpy(place + LANES, &odd, sizeof odd);
    }
}

template <int ROWS, int COLUMNS>
void to_low_rank_rows(const bf16* x, i64 x_step, const float* factor, i64 width, i64 rank, bf16* y) {
    float sums[ROWS * COLUMNS];
    vectors::multiply<ROWS, COLUMNS>(factor, x, width, x_step, COLUMNS, 0, 1, sums);
    for (int r = 0; r < ROWS; r++)
        for (int c = 0; c < COLUMNS; c++) narrow(sums[r * COLUMNS + c], y[c * rank + r]);
}

}  // namespace

// y = x M: x [n, width] with a step from row to row, y [n, rank]; M [width, rank], or [rank, width] if it is
// transposed. width is a multiple of 32.
extern "C" void vector_to_low_rank(const bf16* x, i64 x_step, const bf16* matrix, i64 is_transposed, bf16* y, i64 n,
                                   i64 width, i64 rank, i64 num_threads) {
    float* factor = reinterpret_cast<float*>(shared_scratch.take(rank * width * sizeof(float)));
#pragma omp parallel num_threads(num_threads)
    {
        arrange_factor(matrix, is_transposed, width, rank, factor);
#pragma omp barrier
        const i64 thread = omp_get_thread_num(), threads = omp_get_num_threads(), end = n * (thread + 1) / threads;
        for (i64 row = n * thread / threads; row < end; row += 4)
            for (i64 r = 0; r < rank; r += 4) {
                const bool is_whole = row + 4 <= end && r + 4 <= rank;
                for (i64 i = row; i < (is_whole ? row + 1 : std::min(row + 4, end)); i++)
                    for (i64 j = r; j < (is_whole ? r + 1 : std::min(r + 4, rank)); j++) {
                        auto run = is_whole ? to_low_rank_rows<4, 4> : to_low_rank_rows<1, 1>;
                        run(x + i * x_step, x_step, factor + j * width, width, rank, y + i * rank + j);
                    }
            }
    }
}

// y += x M, rounded once: x [n, rank], y [n, width] with a step from row to row; M [rank, width], or [width, rank] if
// it is transposed.
extern "C" void vector_from_low_rank(const bf16* x, i64 x_step, const bf16* matrix, i64 is_transposed, bf16* y,
                                     i64 y_step, i64 n, i64 width, i64 rank, i64 num_threads) {
    float* factor = reinterpret_cast<float*>(shared_scratch.take(rank * (width + n) * sizeof(float)));
    float* narrow_rows = factor + rank * width;
#pragma omp parallel num_threads(num_threads)
    {
        arrange_factor(matrix, !is_transposed, width, rank, factor);
        const i64 thread = omp_get_thread_num(), threads = omp_get_num_threads();
        const i64 begin = n * thread / threads, end = n * (thread + 1) / threads;
        for (i64 row = begin; row < end; row++)
            for (i64 r = 0; r < rank; r++) narrow_rows[row * rank + r] = widen(x[row * x_step + r]);
#pragma omp barrier
        for (i64 row = begin; row < end;) {
            const bool is_whole = row + 8 <= end;
            auto run = is_whole ? add_pair<8> : add_pair<1>;
            for (i64 column = 0; column < width; column += PAIR)
                run(narrow_rows + row * rank, factor + column, rank, width, y + row * y_step + column, y_step);
            row += is_whole ? 8 : 1;
        }
    }
}

// grad += narrow^T wide, float32 [rank, width], or its transpose [width, rank]; narrow [n, rank] and wide [n, width]
// with steps from row to row.
extern "C" void vector_low_rank_gradient(const bf16* x, i64 x_step, const bf16* wide, i64 wide_step, float* grad,
                                         i64 is_transposed, i64 n, i64 width, i64 rank, i64 num_threads) {
    float* sums = reinterpret_cast<float*>(shared_scratch.take(rank * (width + n) * sizeof(float)));
    float* narrow_rows = sums + rank * width;
#pragma omp parallel num_threads(num_threads)
    {
        const i64 thread = omp_get_thread_num(), threads = omp_get_num_threads();
        for (i64 row = n * thread / threads; row < n * (thread + 1) / threads; row++)
            for (i64 r = 0; r < rank; r++) narrow_rows[row * rank + r] = widen(x[row * x_step + r]);
        const i64 pairs = width / PAIR, begin = pairs * thread / threads * PAIR,
                  end = pairs * (thread + 1) / threads * PAIR;
        for (i64 r = 0; r < rank; r++) std::fill(sums + r * width + begin, sums + r * width + end, 0.0f);
#pragma omp barrier
        for (i64 row = 0; row < n;) {
            const bool is_whole = row + 8 <= n;
            auto run = is_whole ? add_gradient_pair<8> : add_gradient_pair<1>;
            for (i64 column = begin; column < end; column += PAIR)
                run(narrow_rows + row * rank, rank, wide + row * wide_step + column, wide_step, sums + column, width);
            row += is_whole ? 8 : 1;
        }
        for (i64 first = begin; first < end; first += PAIR)
            for (i64 i = 0; i < PAIR; i++) {
                // Even elements come first, then odd ones.
                const i64 column = first + (i < LANES ? 2 * i : 2 * (i - LANES) + 1);
                for (i64 r = 0; r < rank; r++)
                    grad[is_transposed ? column * rank + r : r * width + column] += sums[r * width + first + i];
            }
    }
}
