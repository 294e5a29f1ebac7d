// Products with a matrix of low rank (at most 64) in bfloat16, in tiles: what a LoRA adds to a site (arXiv 2106.09685),
// and the gradients of that. Each is one pass over its wide tensor.
//
// The wide tensor is [n, width], width a multiple of 32; the narrow one [n, rank]. The matrix is given as it is stored:
// [rank, width] (LoRA's A), or [width, rank] (LoRA's B).

#include "tiles.h"

#ifdef HAS_TILES

namespace {

thread_local Scratch shared_scratch, own_scratch;

inline __mmask16 first_of_16(i64 count) { return count >= 16 ? 0xffff : count <= 0 ? 0 : (1u << count) - 1; }

inline __mmask32 first_of_32(i64 count) { return count >= 32 ? 0xffffffffu : count <= 0 ? 0 : (1u << count) - 1; }

inline __m256i load_16(const bf16* x, i64 count) { return _mm256_maskz_loadu_epi16(first_of_16(count), x); }

// Two rows' elements by turns, zeros for a row that is not there.
inline __m512i row_pair(const bf16* x, i64 step, i64 num_rows, i64 count) {
    __m256i upper = num_rows > 0 ? load_16(x, count) : _mm256_setzero_si256();
    __m256i lower = num_rows > 1 ? load_16(x + step, count) : _mm256_setzero_si256();
    return interleaved(_mm512_inserti64x4(_mm512_castsi256_si512(upper), lower, 1));
}

// 16 rows of 32 elements -> [16, 16, 2]: pairs of neighbours in a row, by column. Zeros where there are no rows or
// elements.
inline void column_pairs(const bf16* x, i64 step, i64 num_rows, i64 count, bf16* out, i64 out_step) {
    __m512i rows[16];
    for (int i = 0; i < 16; i++)
        rows[i] = i < num_rows ? _mm512_maskz_loadu_epi16(first_of_32(count), x + i * step) : _mm512_setzero_si512();
    transpose(rows);
    for (int i = 0; i < 16; i++) _mm512_storeu_si512(out + i * out_step * 2, rows[i]);
}

// This thread's part of this many things.
struct Part {
    i64 start, end;
    explicit Part(i64 count) {
        const i64 thread = omp_get_thread_num(), threads = omp_get_num_threads();
        start = count * thread / threads, end = count * (thread + 1) / threads;
    }
};

inline void store_16(bf16* out, __m512 values, i64 count) {
    _mm256_mask_storeu_epi16(out, first_of_16(count), (__m256i)_mm512_cvtneps_pbh(values));
}

}  // namespace

// y = x M, narrow from wide: x [n, width] with a step from row to row, y [n, rank].
extern "C" void to_low_rank(const bf16* x, i64 x_step, const bf16* matrix, i64 is_transposed, bf16* y, i64 n, i64 width,
                            i64 rank, i64 num_threads) {
    const i64 padded = round_up(rank, 16);
    bf16* right = reinterpret_cast<bf16*>(shared_scratch.take(width * padded * sizeof(bf16)));
#pragma omp parallel num_threads(num_threads)
    {
        const Part steps(width / 32), strips((n + 15) / 16);
        for (i64 k = steps.start * 32; k < steps.end * 32; k += 32)
            for (i64 i = 0; i < padded; i += 16) {
                bf16* out = right + (k / 2 * padded + i) * 2;
                if (is_transposed)
                    column_pairs(matrix + i * width + k, width, rank - i, 32, out, padded);
                else
                    for (i64 row = 0; row < 32; row += 2)
                        _mm512_storeu_si512(out + row * padded,
                                            row_pair(matrix + (k + row) * rank + i, rank, 2, rank - i));
            }
        float* sums =
            reinterpret_cast<float*>(own_scratch.take(16 * padded * sizeof(float) + 16 * width * sizeof(bf16)));
        bf16* last = reinterpret_cast<bf16*>(sums + 16 * padded);
        Tiles registers;
#pragma omp barrier
        for (i64 row = strips.start * 16; row < std::min(n, strips.end * 16); row += 16) {
            const bf16* left = x + row * x_step;
            i64 step = x_step;
            if (row + 16 > n) {  // rows that are not there must not be read
                for (i64 i = 0; i < n - row; i++)
                    std::memcpy(static_cast<void*>(last + i * width), left + i * x_step, width * sizeof(bf16));
                left = last, step = width;
            }
            settle();
            for (i64 i = 0; i < padded; i += 32) {
                auto run = i + 32 <= padded ? multiply<16, 32, false> : multiply<16, 16, false>;
                run(int(width), left, step, right + i * 2, padded, sums + i, padded);
            }
            settle();
            for (i64 i = 0; i < std::min<i64>(16, n - row); i++)
                for (i64 j = 0; j < rank; j += 16)
                    store_16(y + (row + i) * rank + j, _mm512_loadu_ps(sums + i * padded + j), rank - j);
        }
    }
}

// Rows that are read through one after another: their next elements are fetched ahead by the processor, which knows as
// many streams.
const i64 STRIP = 32;

// y += x M, wide from narrow: x [n, rank] and y [n, width], both with a step from row to row.
extern "C" void from_low_rank(const bf16* x, i64 x_step, const bf16* matrix, i64 is_transposed, bf16* y, i64 y_step,
                              i64 n, i64 width, i64 rank, i64 num_threads) {
    const i64 padded = round_up(n, 16), inner = round_up(rank, 32);
    bf16* left = reinterpret_cast<bf16*>(shared_scratch.take((padded + width) * inner * sizeof(bf16)));
    bf16* right = left + padded * inner;  // [width / 32, inner / 2, 32, 2]
#pragma omp parallel num_threads(num_threads)
    {
        const Part rows(padded), blocks(width / 32), strips((n + STRIP - 1) / STRIP);
        for (i64 row = rows.start; row < rows.end; row++)
            for (i64 i = 0; i < inner; i += 16)
                _mm256_storeu_si256(reinterpret_cast<__m256i*>(left + row * inner + i),
                                    row < n ? load_16(x + row * x_step + i, rank - i) : _mm256_setzero_si256());
        for (i64 column = blocks.start * 32; column < blocks.end * 32; column += 32)
            for (i64 k = 0; k < inner; k += 32)
                for (i64 i = 0; i < 32; i += 16) {
                    bf16* out = right + column * inner + (k * 16 + i) * 2;
                    if (is_transposed)
                        column_pairs(matrix + (column + i) * rank + k, rank, 16, rank - k, out, 32);
                    else
                        for (i64 row = 0; row < 32; row += 2)
                            _mm512_storeu_si512(out + row * 32, row_pair(matrix + (k + row) * width + column + i, width,
                                                                         rank - k - row, 16));
                }
        float* sums = reinterpret_cast<float*>(own_scratch.take(STRIP * 32 * sizeof(float)));
        // Threads that write parts of the same rows of y take its lines from each other, which processors fetch in
        // pairs: so each has rows of its own, if there are some strips for each.
        const bool has_rows = n >= 2 * STRIP * omp_get_num_threads();
        const i64 first = has_rows ? 0 : blocks.start * 32, last = has_rows ? width : blocks.end * 32;
        const i64 top = has_rows ? strips.start * STRIP : 0, bottom = has_rows ? std::min(n, strips.end * STRIP) : n;
        Tiles registers;
#pragma omp barrier
        for (i64 row = top; row < bottom; row += STRIP) {
            auto run = row + STRIP <= padded ? multiply<32, 32, false> : multiply<16, 32, false>;
            for (i64 column = first; column < last; column += 32) {
                settle();
                run(int(round_up(rank, DEPTH)), left + row * inner, inner, right + column * inner, 32, sums, 32);
                settle();
                for (i64 i = 0; i < std::min(STRIP, n - row); i++) {
                    bf16* out = y + (row + i) * y_step + column;
                    __m512 one = _mm512_add_ps(_mm512_loadu_ps(sums + i * 32), load(out));
                    __m512 two = _mm512_add_ps(_mm512_loadu_ps(sums + i * 32 + 16), load(out + 16));
                    _mm512_storeu_si512(out, (__m512i)_mm512_cvtne2ps_pbh(two, one));
                }
            }
        }
    }
}

// Adds the gradient of the matrix, the sum over rows of x [n, rank] times y [n, width], to float32 sums that are
// stored as it is.
extern "C" void add_low_rank_gradient(const bf16* x, i64 x_step, const bf16* y, i64 y_step, float* grad,
                                      i64 is_transposed, i64 n, i64 width, i64 rank, i64 num_threads) {
    const i64 padded = round_up(rank, 16), inner = round_up(n, STRIP);
    bf16* left = reinterpret_cast<bf16*>(shared_scratch.take(padded * inner * sizeof(bf16)));
#pragma omp parallel num_threads(num_threads)
    {
        const Part rows(inner), blocks(width / 32);
        for (i64 row = rows.start; row < rows.end; row++)
            for (i64 i = 0; i < padded; i++)
                left[i * inner + row] = row < n && i < rank ? x[row * x_step + i] : bf16{0};
        const i64 first = blocks.start * 32, last = blocks.end * 32, num_sums = padded * (last - first);
        float* sums = reinterpret_cast<float*>(
            own_scratch.take(num_sums * sizeof(float) + STRIP * 32 * sizeof(bf16)));  // [blocks, padded, 32]
        bf16* right = reinterpret_cast<bf16*>(sums + num_sums);
        Tiles registers;
#pragma omp barrier
        for (i64 row = 0; row < inner; row += STRIP)
            for (i64 column = first; column < last; column += 32) {
                for (i64 k = 0; k < STRIP; k += 2)
                    for (i64 i = 0; i < 32; i += 16)
                        _mm512_storeu_si512(right + k * 32 + i * 2,
                                            row_pair(y + (row + k) * y_step + column + i, y_step, n - row - k, 16));
                settle();
                for (i64 i = 0; i < padded; i += 32) {
                    auto run = i + 32 <= padded ? (row ? multiply<32, 32, true> : multiply<32, 32, false>)
                                                : (row ? multiply<16, 32, true> : multiply<16, 32, false>);
                    run(STRIP, left + i * inner + row, inner, right, 32, sums + (column - first) * padded + i * 32, 32);
                }
                settle();
            }
        for (i64 column = first; column < last; column += 32) {
            const float* found = sums + (column - first) * padded;
            auto add = [](float* out, __m512 values, __mmask16 mask) {
                _mm512_mask_storeu_ps(out, mask, _mm512_add_ps(_mm512_maskz_loadu_ps(mask, out), values));
            };
            for (i64 j = 0; j < 32; j += 16)
                if (!is_transposed)
                    for (i64 i = 0; i < rank; i++)
                        add(grad + i * width + column + j, _mm512_loadu_ps(found + i * 32 + j), 0xffff);
                else
                    for (i64 i = 0; i < rank; i += 16) {
                        __m512i square[16];
                        for (int k = 0; k < 16; k++) square[k] = _mm512_loadu_si512(found + (i + k) * 32 + j);
                        transpose(square);
                        for (int k = 0; k < 16; k++)
                            add(grad + (column + j + k) * rank + i, (__m512)square[k], first_of_16(rank - i));
                    }
        }
    }
}

#endif
