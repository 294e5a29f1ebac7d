// Products with a factor of low rank (a LoRA's) and its gradient in bfloat16, on processors without
// tiles: in float32, as in `vector_products.h`. Each goes along the rows of the wide tensor, which
// the processor fetches ahead; the factor, in float32, stays in the second cache.

#include "common/low_rank_jobs.h"
#include "common/vector_products.h"

namespace {

using low_rank::Job;
using low_rank::Part;
using vectors::Floats;
using vectors::LANES;
using vectors::PAIR;

thread_local Scratch own_scratch;

// Rows that are multiplied at once.
const int STRIP = 8;

// Arranges some pairs of columns of the factor as [rank, width] in float32, in the order of
// `load_pair`. matrix [width, rank], or [rank, width] if it is transposed.
void arrange_factor(const bf16* matrix, bool is_transposed, i64 width, i64 rank, Part pairs,
                    float* out) {
    for (i64 pair = pairs.start; pair < pairs.end; pair++)
        for (i64 r = 0; r < rank; r++) {
            const i64 first = pair * PAIR;
            bf16 part[PAIR];
            for (i64 i = 0; i < PAIR; i++)
                part[i] = matrix[is_transposed ? r * width + first + i : (first + i) * rank + r];
            vectors::arrange(part, PAIR, part, out + r * width + first);
        }
}

// Computes y = x M, or y += x M, of ROWS rows and PAIR columns; x [n, rank] in float32, factor
// [rank, width].
template <int ROWS>
inline void from_pair(bool adds, const float* x, const float* factor, i64 rank, i64 width, bf16* y,
                      i64 y_step) {
    Floats sums[ROWS][2] = {};
    if (adds)
#pragma GCC unroll 8
        for (int row = 0; row < ROWS; row++)
            vectors::load_pair(y + row * y_step, sums[row][0], sums[row][1]);
    for (i64 r = 0; r < rank; r++) {
        const Floats even = vectors::load(factor + r * width),
                     odd = vectors::load(factor + r * width + LANES);
#pragma GCC unroll 8
        for (int row = 0; row < ROWS; row++) {
            const Floats own = Floats{} + x[row * rank + r];
            sums[row][0] = vectors::multiply_add(own, even, sums[row][0]);
            sums[row][1] = vectors::multiply_add(own, odd, sums[row][1]);
        }
    }
#pragma GCC unroll 8
    for (int row = 0; row < ROWS; row++)
        vectors::store_pair(sums[row][0], sums[row][1], y + row * y_step);
}

// Adds narrow^T wide of ROWS rows and PAIR columns to grad; narrow [n, rank] and grad [rank, width]
// in float32.
template <int ROWS>
inline void add_gradient_pair(const float* narrow, i64 rank, const bf16* wide, i64 step,
                              float* grad, i64 width) {
    Floats rows[ROWS][2];
#pragma GCC unroll 8
    for (int row = 0; row < ROWS; row++)
        vectors::load_pair(wide + row * step, rows[row][0], rows[row][1]);
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

// Rows of x at once, with four of the rank.
const int ROWS_AT_ONCE = vectors::MAX_SUMS / 4;

template <int ROWS, int COLUMNS>
void to_low_rank_rows(const bf16* x, i64 x_step, const float* factor, i64 width, i64 y_step,
                      bf16* y) {
    float sums[ROWS * COLUMNS];
    vectors::multiply<ROWS, COLUMNS>(factor, x, width, x_step, COLUMNS, 0, 1, sums);
    for (int r = 0; r < ROWS; r++)
        for (int c = 0; c < COLUMNS; c++) narrow(sums[r * COLUMNS + c], y[c * y_step + r]);
}

}  // namespace

// y = x M, narrow from wide; M [width, rank], or [rank, width] if it is transposed. width is a
// multiple of 32.
extern "C" void vector_to_low_rank(const i64* table, i64 num_jobs, i64 is_transposed, i64 width,
                                   i64 rank, i64 num_threads) {
    auto arrange = [=](const Job& job, Part pairs, float* factor) {
        arrange_factor(job.matrix(), is_transposed, width, rank, pairs, factor);
    };
    auto run = [=](const Job& job, Part rows, const float* factor) {
        for (i64 row = rows.start; row < rows.end; row += ROWS_AT_ONCE)
            for (i64 r = 0; r < rank; r += 4) {
                const bool is_whole = row + ROWS_AT_ONCE <= rows.end && r + 4 <= rank;
                for (i64 i = row; i < (is_whole ? row + 1 : std::min(row + ROWS_AT_ONCE, rows.end));
                     i++)
                    for (i64 j = r; j < (is_whole ? r + 1 : std::min(r + 4, rank)); j++) {
                        auto run =
                            is_whole ? to_low_rank_rows<4, ROWS_AT_ONCE> : to_low_rank_rows<1, 1>;
                        run(job.wide + i * job.wide_step, job.wide_step, factor + j * width, width,
                            job.narrow_step, job.narrow + i * job.narrow_step + j);
                    }
            }
    };
    low_rank::for_strips<float>(low_rank::jobs_of(table), num_jobs, 4, width / PAIR, rank * width,
                                num_threads, arrange, run);
}

// y = x M, or y += x M, wide from narrow, rounded once; M [rank, width], or [width, rank] if it is
// transposed.
extern "C" void vector_from_low_rank(const i64* table, i64 num_jobs, i64 is_transposed, i64 adds,
                                     i64 width, i64 rank, i64 num_threads) {
    auto arrange = [=](const Job& job, Part pairs, float* factor) {
        arrange_factor(job.matrix(), !is_transposed, width, rank, pairs, factor);
    };
    auto run = [=](const Job& job, Part rows, const float* factor) {
        float* narrow_rows =
            reinterpret_cast<float*>(own_scratch.take(STRIP * rank * sizeof(float)));
        for (i64 row = rows.start; row < rows.end;) {
            const bool is_whole = row + STRIP <= rows.end;
            const i64 count = is_whole ? STRIP : 1;
            for (i64 i = 0; i < count; i++)
                for (i64 r = 0; r < rank; r++)
                    narrow_rows[i * rank + r] = widen(job.narrow[(row + i) * job.narrow_step + r]);
            auto run = is_whole ? from_pair<STRIP> : from_pair<1>;
            for (i64 column = 0; column < width; column += PAIR)
                run(adds, narrow_rows, factor + column, rank, width,
                    job.wide + row * job.wide_step + column, job.wide_step);
            row += count;
        }
    };
    low_rank::for_strips<float>(low_rank::jobs_of(table), num_jobs, STRIP, width / PAIR,
                                rank * width, num_threads, arrange, run);
}

// grad += narrow^T wide, float32 [rank, width], or its transpose [width, rank].
extern "C" void vector_low_rank_gradient(const i64* table, i64 num_jobs, i64 is_transposed,
                                         i64 width, i64 rank, i64 num_threads) {
    const Job* jobs = low_rank::jobs_of(table);
    i64 most_rows = 0;
    for (i64 i = 0; i < num_jobs; i++) most_rows = std::max(most_rows, jobs[i].n);
#pragma omp parallel num_threads(num_threads)
    {
        const Part pairs = Part::own(width / PAIR);
        const i64 begin = pairs.start * PAIR, columns = pairs.end * PAIR - begin;
        float* sums = reinterpret_cast<float*>(
            own_scratch.take(rank * (columns + most_rows) * sizeof(float)));
        float* narrow_rows = sums + rank * columns;
        for (const Job* job = jobs; job < jobs + num_jobs; job++) {
            for (i64 row = 0; row < job->n; row++)
                for (i64 r = 0; r < rank; r++)
                    narrow_rows[row * rank + r] = widen(job->narrow[row * job->narrow_step + r]);
            std::fill(sums, sums + rank * columns, 0.0f);
            for (i64 row = 0; row < job->n;) {
                const bool is_whole = row + STRIP <= job->n;
                auto run = is_whole ? add_gradient_pair<STRIP> : add_gradient_pair<1>;
                for (i64 column = 0; column < columns; column += PAIR)
                    run(narrow_rows + row * rank, rank,
                        job->wide + row * job->wide_step + begin + column, job->wide_step,
                        sums + column, columns);
                row += is_whole ? STRIP : 1;
            }
            float* grad = job->sums();
            for (i64 first = 0; first < columns; first += PAIR)
                for (i64 i = 0; i < PAIR; i++) {
                    // Even elements come first, then odd ones.
                    const i64 column = begin + first + (i < LANES ? 2 * i : 2 * (i - LANES) + 1);
                    for (i64 r = 0; r < rank; r++)
                        grad[is_transposed ? column * rank + r : r * width + column] +=
                            sums[r * columns + first + i];
                }
        }
    }
}
