// Products with a matrix of low rank (at most 64) in bfloat16, in tiles: the addition of a LoRA to
// a site (arXiv 2106.09685), and its gradients. Each is one pass over its wide tensor, for the rows
// of any number of adapters.
//
// The wide tensor is [n, width], width a multiple of 32; the narrow one [n, rank]. The matrix is
// given as it is stored: [rank, width] (LoRA's A), or [width, rank] (LoRA's B).

#include "common/low_rank_jobs.h"
#include "tiles/tiles.h"

#ifdef HAS_TILES

namespace {

using low_rank::Job;
using low_rank::Part;

thread_local Scratch shared_scratch, own_scratch;

inline __mmask16 first_of_16(i64 count) {
    return count >= 16 ? 0xffff : count <= 0 ? 0 : (1u << count) - 1;
}

inline __mmask32 first_of_32(i64 count) {
    return count >= 32 ? 0xffffffffu : count <= 0 ? 0 : (1u << count) - 1;
}

inline __m256i load_16(const bf16* x, i64 count) {
    return _mm256_maskz_loadu_epi16(first_of_16(count), x);
}

// Interleaves two rows' elements, with zeros for a missing row.
inline __m512i row_pair(const bf16* x, i64 step, i64 num_rows, i64 count) {
    __m256i upper = num_rows > 0 ? load_16(x, count) : _mm256_setzero_si256();
    __m256i lower = num_rows > 1 ? load_16(x + step, count) : _mm256_setzero_si256();
    return interleaved(_mm512_inserti64x4(_mm512_castsi256_si512(upper), lower, 1));
}

// Arranges 16 rows of 32 elements as [16, 16, 2]: pairs of neighbours in a row, by column. Zeros
// where there are no rows or elements.
inline void column_pairs(const bf16* x, i64 step, i64 num_rows, i64 count, bf16* out,
                         i64 out_step) {
    __m512i rows[16];
    for (int i = 0; i < 16; i++)
        rows[i] = i < num_rows ? _mm512_maskz_loadu_epi16(first_of_32(count), x + i * step)
                               : _mm512_setzero_si512();
    transpose(rows);
    for (int i = 0; i < 16; i++) _mm512_storeu_si512(out + i * out_step * 2, rows[i]);
}

inline void store_16(bf16* out, __m512 values, i64 count) {
    _mm256_mask_storeu_epi16(out, first_of_16(count), (__m256i)_mm512_cvtneps_pbh(values));
}

}  // namespace

// y = x M, narrow from wide.
extern "C" void to_low_rank(const i64* table, i64 num_jobs, i64 is_transposed, i64 width, i64 rank,
                            i64 num_threads) {
    const i64 padded = round_up(rank, 16), STRIP = 16;
    auto arrange = [=](const Job& job, Part steps, bf16* right) {
        const bf16* matrix = job.matrix();
        for (i64 k = steps.start * 32; k < steps.end * 32; k += 32)
            for (i64 i = 0; i < padded; i += 16) {
                bf16* out = right + (k / 2 * padded + i) * 2;
                if (is_transposed)
                    column_pairs(matrix + i * width + k, width, rank - i, 32, out, padded);
                else
                    for (i64 row = 0; row < 32; row += 2)
                        _mm512_storeu_si512(
                            out + row * padded,
                            row_pair(matrix + (k + row) * rank + i, rank, 2, rank - i));
            }
    };
    auto run = [=](const Job& job, Part rows, const bf16* right) {
        float* sums = reinterpret_cast<float*>(
            own_scratch.take(STRIP * padded * sizeof(float) + STRIP * width * sizeof(bf16)));
        bf16* last = reinterpret_cast<bf16*>(sums + STRIP * padded);
        Tiles registers;
        for (i64 row = rows.start; row < rows.end; row += STRIP) {
            const bf16* left = job.wide + row * job.wide_step;
            i64 step = job.wide_step;
            if (row + STRIP > job.n) {  // rows that are not there must not be read
                for (i64 i = 0; i < job.n - row; i++)
                    std::memcpy(static_cast<void*>(last + i * width), left + i * step,
                                width * sizeof(bf16));
                left = last, step = width;
            }
            settle();
            for (i64 i = 0; i < padded; i += 32) {
                auto run = i + 32 <= padded ? multiply<16, 32, false> : multiply<16, 16, false>;
                run(int(width), left, step, right + i * 2, padded, sums + i, padded);
            }
            settle();
            for (i64 i = 0; i < std::min(STRIP, rows.end - row); i++)
                for (i64 j = 0; j < rank; j += 16)
                    store_16(job.narrow + (row + i) * job.narrow_step + j,
                             _mm512_loadu_ps(sums + i * padded + j), rank - j);
        }
    };
    low_rank::for_strips<bf16>(low_rank::jobs_of(table), num_jobs, STRIP, width / 32,
                               width * padded, num_threads, arrange, run);
}

// Rows that are read one after another, as many as the processor can follow to fetch ahead.
const i64 STRIP = 32;

// y = x M, or y += x M, wide from narrow.
extern "C" void from_low_rank(const i64* table, i64 num_jobs, i64 is_transposed, i64 adds,
                              i64 width, i64 rank, i64 num_threads) {
    const Job* jobs = low_rank::jobs_of(table);
    const i64 inner = round_up(rank, 32), num_blocks = width / 32;
    auto arrange = [=](const Job& job, Part blocks,
                       bf16* right) {  // [width / 32, inner / 2, 32, 2]
        const bf16* matrix = job.matrix();
        for (i64 column = blocks.start * 32; column < blocks.end * 32; column += 32)
            for (i64 k = 0; k < inner; k += 32)
                for (i64 i = 0; i < 32; i += 16) {
                    bf16* out = right + column * inner + (k * 16 + i) * 2;
                    if (is_transposed)
                        column_pairs(matrix + (column + i) * rank + k, rank, 16, rank - k, out, 32);
                    else
                        for (i64 row = 0; row < 32; row += 2)
                            _mm512_storeu_si512(out + row * 32,
                                                row_pair(matrix + (k + row) * width + column + i,
                                                         width, rank - k - row, 16));
                }
    };
    auto run = [=](const Job& job, Part rows, Part blocks, const bf16* right) {
        float* sums = reinterpret_cast<float*>(
            own_scratch.take(STRIP * (32 * sizeof(float) + inner * sizeof(bf16))));
        bf16* left = reinterpret_cast<bf16*>(sums + STRIP * 32);
        Tiles registers;
        for (i64 row = rows.start; row < rows.end; row += STRIP) {
            const i64 count = std::min(STRIP, rows.end - row);
            for (i64 i = 0; i < STRIP; i++)
                for (i64 k = 0; k < inner; k += 16)
                    _mm256_storeu_si256(reinterpret_cast<__m256i*>(left + i * inner + k),
                                        load_16(job.narrow + (row + i) * job.narrow_step + k,
                                                i < count ? rank - k : 0));
            auto run = count > 16 ? multiply<32, 32, false> : multiply<16, 32, false>;
            for (i64 column = blocks.start * 32; column < blocks.end * 32; column += 32) {
                settle();
                run(int(round_up(rank, DEPTH)), left, inner, right + column * inner, 32, sums, 32);
                settle();
                for (i64 i = 0; i < count; i++) {
                    bf16* out = job.wide + (row + i) * job.wide_step + column;
                    __m512 one = _mm512_loadu_ps(sums + i * 32),
                           two = _mm512_loadu_ps(sums + i * 32 + 16);
                    if (adds)
                        one = _mm512_add_ps(one, load(out)),
                        two = _mm512_add_ps(two, load(out + 16));
                    _mm512_storeu_si512(out, (__m512i)_mm512_cvtne2ps_pbh(two, one));
                }
            }
        }
    };
    // Threads that write parts of the same rows of y take its lines from each other, which
    // processors fetch in pairs. So each has rows of its own, if there are some strips for each.
    if (num_jobs > 1 || jobs[0].n >= 2 * STRIP * num_threads) {
        low_rank::for_strips<bf16>(jobs, num_jobs, STRIP, num_blocks, width * inner, num_threads,
                                   arrange, [=](const Job& job, Part rows, const bf16* right) {
                                       run(job, rows, Part::all(num_blocks), right);
                                   });
        return;
    }
    bf16* right = reinterpret_cast<bf16*>(shared_scratch.take(width * inner * sizeof(bf16)));
#pragma omp parallel num_threads(num_threads)
    {
        const Part blocks = Part::own(num_blocks);
        arrange(jobs[0], blocks, right);
        run(jobs[0], Part::all(jobs[0].n), blocks, right);
    }
}

// Adds the gradient of the matrix, the sum over rows of x [n, rank] times y [n, width], to float32
// sums that are stored like the matrix.
extern "C" void add_low_rank_gradient(const i64* table, i64 num_jobs, i64 is_transposed, i64 width,
                                      i64 rank, i64 num_threads) {
    const Job* jobs = low_rank::jobs_of(table);
    const i64 padded = round_up(rank, 16),
              num_strips = low_rank::count_strips(jobs, num_jobs, STRIP);
    // For each job [padded, n, up to a whole strip].
    bf16* lefts =
        reinterpret_cast<bf16*>(shared_scratch.take(padded * num_strips * STRIP * sizeof(bf16)));
#pragma omp parallel num_threads(num_threads)
    {
        const Part own = Part::own(num_strips), blocks = Part::own(width / 32);
        bf16* left = lefts;
        for (i64 job = 0, strip = 0; job < num_jobs; job++) {
            const i64 n = jobs[job].n, inner = round_up(n, STRIP);
            for (i64 row = 0; row < inner; row++) {
                const i64 at = strip + row / STRIP;
                if (at < own.start || at >= own.end) continue;
                for (i64 i = 0; i < padded; i++)
                    left[i * inner + row] = row < n && i < rank
                                                ? jobs[job].narrow[row * jobs[job].narrow_step + i]
                                                : bf16{0};
            }
            left += padded * inner, strip += inner / STRIP;
        }
        const i64 first = blocks.start * 32, last = blocks.end * 32,
                  num_sums = padded * (last - first);
        float* sums = reinterpret_cast<float*>(own_scratch.take(
            num_sums * sizeof(float) + STRIP * 32 * sizeof(bf16)));  // [blocks, padded, 32]
        bf16* right = reinterpret_cast<bf16*>(sums + num_sums);
        Tiles registers;
#pragma omp barrier
        left = lefts;
        for (i64 job = 0; job < num_jobs; job++) {
            const i64 n = jobs[job].n, inner = round_up(n, STRIP), y_step = jobs[job].wide_step;
            const bf16* y = jobs[job].wide;
            float* grad = jobs[job].sums();
            for (i64 row = 0; row < inner; row += STRIP)
                for (i64 column = first; column < last; column += 32) {
                    for (i64 k = 0; k < STRIP; k += 2)
                        for (i64 i = 0; i < 32; i += 16)
                            _mm512_storeu_si512(right + k * 32 + i * 2,
                                                row_pair(y + (row + k) * y_step + column + i,
                                                         y_step, n - row - k, 16));
                    settle();
                    for (i64 i = 0; i < padded; i += 32) {
                        auto run = i + 32 <= padded
                                       ? (row ? multiply<32, 32, true> : multiply<32, 32, false>)
                                       : (row ? multiply<16, 32, true> : multiply<16, 32, false>);
                        run(STRIP, left + i * inner + row, inner, right, 32,
                            sums + (column - first) * padded + i * 32, 32);
                    }
                    settle();
                }
            left += padded * inner;
            for (i64 column = first; inner && column < last; column += 32) {
                const float* found = sums + (column - first) * padded;
                auto add = [](float* out, __m512 values, __mmask16 mask) {
                    _mm512_mask_storeu_ps(out, mask,
                                          _mm512_add_ps(_mm512_maskz_loadu_ps(mask, out), values));
                };
                for (i64 j = 0; j < 32; j += 16)
                    if (!is_transposed)
                        for (i64 i = 0; i < rank; i++)
                            add(grad + i * width + column + j, _mm512_loadu_ps(found + i * 32 + j),
                                0xffff);
                    else
                        for (i64 i = 0; i < rank; i += 16) {
                            __m512i square[16];
                            for (int k = 0; k < 16; k++)
                                square[k] = _mm512_loadu_si512(found + (i + k) * 32 + j);
                            transpose(square);
                            for (int k = 0; k < 16; k++)
                                add(grad + (column + j + k) * rank + i, (__m512)square[k],
                                    first_of_16(rank - i));
                        }
            }
        }
    }
}

#endif
