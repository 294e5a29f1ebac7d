// Products of rows with the factors of LoRAs, a piece at a time: vectors of float32, for elements
// of any type. `adapter_pairs.h` has those for bfloat16, where there are instructions for it.
#pragma once

#include "common/vector_products.h"

namespace {

using vectors::Floats;
using vectors::Ints;
using vectors::LANES;
using vectors::load;
typedef uint16_t Halves __attribute__((vector_size(LANES * 2)));

inline Floats load(const bf16* x) {
    Halves bits;
    std::memcpy(&bits, x, sizeof bits);
    return (Floats)(__builtin_convertvector(bits, vectors::Words) << 16);
}

// Loads the first elements, and zeros.
template <typename T>
inline Floats load_first(const T* x, i64 count) {
    if (count >= LANES) return load(x);
    T values[LANES] = {};
    for (i64 i = 0; i < count; i++) values[i] = x[i];
    return load(values);
}

#if defined(__AVX512F__)
inline Floats load_first(const float* x, i64 count) {
    return (Floats)_mm512_maskz_loadu_ps(count >= LANES ? 0xffff : (1u << count) - 1, x);
}
#endif

#if defined(__AVX512BW__) && defined(__AVX512VL__)
inline Floats load_first(const bf16* x, i64 count) {
    const __m256i bits = _mm256_maskz_loadu_epi16(count >= LANES ? 0xffff : (1u << count) - 1, x);
    return (Floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16);
}
#endif

// Adds in one order, wherever the compiler puts it.
inline float sum_of(Floats x) {
#pragma GCC unroll 4
    for (int half = LANES / 2; half; half /= 2) {
        Ints other;
        for (int i = 0; i < LANES; i++) other[i] = i ^ half;
        x += __builtin_shuffle(x, other);
    }
    return x[0];
}

// Transposes rows: halves of the square change places, then halves of these, and so on.
inline void transpose(Floats (&square)[LANES]) {
#pragma GCC unroll 4
    for (int half = LANES / 2; half; half /= 2) {
        Ints upper, lower;
        for (int i = 0; i < LANES; i++) {
            upper[i] = i & half ? LANES + i - half : i;
            lower[i] = i & half ? LANES + i : i + half;
        }
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++)
            if (!(i & half)) {
                const Floats one = square[i], other = square[i + half];
                square[i] = __builtin_shuffle(one, other, upper);
                square[i + half] = __builtin_shuffle(one, other, lower);
            }
    }
}

// An adapter at a site, as Python writes it; rank 0: it adds nothing.
template <typename T>
struct Factors {
    const T* a;  // [rank, inner]
    const T* b;  // [outer, rank]
    i64 rank;
    double scale;
    T* narrow;  // where what B multiplies is kept [rows of the adapter, rank], or null
    // Dropout of x: keys of the adapter's rows, the number of the part of the model, a salt, and
    // the probability of dropping a feature.
    const i64* row_ids;
    i64 part, salt;
    double p;

    i64 padded() const { return round_up(rank, LANES); }
};

template <typename T>
struct Site {
    T* y;  // [.., outer]
    i64 step, outer;
};

// Rows of A, and columns of y, whose results one thread computes.
const i64 STRIP = 8, COLUMNS = 4 * LANES;

// What all pieces of a call share.
template <typename T>
struct Rows {
    const T* x;  // [.., inner]
    i64 x_step, inner;
    const i64* rows;  // which of x and y each is
    T* narrow;        // A x * scale, rounded, and zeros up to whole vectors: [n, width]
    i64 width;
};

// Rows first to last of an adapter, in the order of `rows`; rows of A or columns of y from `start`
// on; the place of the site's sums in a row of `narrow`; and the factors that the same thread reads
// next.
template <typename T>
struct Piece {
    const Factors<T>* factors;
    const Site<T>* site;
    i64 first, last, start, place;
    const T* next;
};

thread_local Scratch own_scratch;

// Computes the sums of ROWS rows of x with RANKS rows of A.
template <int ROWS, int RANKS, typename T>
void multiply(const Rows<T>& all, const Piece<T>& piece, i64 row, i64 rank) {
    Floats totals[RANKS][ROWS] = {};
    const i64 inner = all.inner, whole = inner / LANES * LANES;
    const T *a = piece.factors->a + rank * inner, *x[ROWS];
    for (int r = 0; r < ROWS; r++) x[r] = all.x + all.rows[row + r] * all.x_step;
    auto add = [&](i64 k, auto load) {
        Floats values[ROWS];
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) values[r] = load(x[r] + k);
#pragma GCC unroll 8
        for (int j = 0; j < RANKS; j++) {
            const Floats factor = load(a + j * inner + k);
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; r++)
                totals[j][r] = vectors::multiply_add(factor, values[r], totals[j][r]);
        }
    };
    for (i64 k = 0; k < whole; k += LANES) add(k, [](const T* from) { return load(from); });
    if (whole < inner) add(whole, [&](const T* from) { return load_first(from, inner - whole); });
    for (int j = 0; j < RANKS; j++)
        for (int r = 0; r < ROWS; r++)
            narrow(rounded<T>(sum_of(totals[j][r])) * float(piece.factors->scale),
                   all.narrow[(row + r) * all.width + piece.place + rank + j]);
}

template <int ROWS, typename T>
void multiply_rows(const Rows<T>& all, const Piece<T>& piece, i64 row) {
    const int most = ROWS == 4 ? 4 : 8;
    const i64 end = std::min(piece.start + STRIP, piece.factors->rank);
    i64 rank = piece.start;
    for (; rank + most <= end; rank += most) multiply<ROWS, most>(all, piece, row, rank);
    for (; rank < end; rank++) multiply<ROWS, 1>(all, piece, row, rank);
}

// Computes a piece of the sums A x.
template <typename T>
void to_narrow(const Rows<T>& all, const Piece<T>& piece) {
    i64 row = piece.first;
    for (; row + 4 <= piece.last; row += 4) multiply_rows<4>(all, piece, row);
    for (; row < piece.last; row++) multiply_rows<1>(all, piece, row);
}

// Columns of y += B (A x).
template <typename T>
void from_narrow(const Rows<T>& all, const Piece<T>& piece) {
    const Factors<T>& factors = *piece.factors;
    const Site<T>& site = *piece.site;
    const i64 rank = factors.rank, columns = std::min(COLUMNS, site.outer - piece.start);
    // B's rows as columns [padded, COLUMNS].
    float* right =
        reinterpret_cast<float*>(own_scratch.take(factors.padded() * COLUMNS * sizeof(float)));
    for (i64 column = 0; column < columns; column += LANES)
        for (i64 j = 0; j < factors.padded(); j += LANES) {
            Floats square[LANES];
            const T* b = factors.b + (piece.start + column) * rank + j;
#pragma GCC unroll 16
            for (int i = 0; i < LANES; i++)
                square[i] = column + i < columns ? load_first(b + i * rank, rank - j) : Floats{};
            transpose(square);
#pragma GCC unroll 16
            for (int i = 0; i < LANES; i++)
                std::memcpy(right + (j + i) * COLUMNS + column, &square[i], sizeof(Floats));
        }
    for (i64 row = piece.first; row < piece.last; row++) {
        const T* left = all.narrow + row * all.width + piece.place;
        Floats totals[COLUMNS / LANES] = {};
        for (i64 j = 0; j < rank; j++)
#pragma GCC unroll 4
            for (int i = 0; i < COLUMNS / LANES; i++)
                totals[i] += load(right + j * COLUMNS + i * LANES) * widen(left[j]);
        float sums[COLUMNS];
        std::memcpy(sums, totals, sizeof sums);
        T* y = site.y + all.rows[row] * site.step + piece.start;
        if (columns == COLUMNS)
            for (i64 i = 0; i < COLUMNS; i++) narrow(widen(y[i]) + sums[i], y[i]);
        else
            for (i64 i = 0; i < columns; i++) narrow(widen(y[i]) + sums[i], y[i]);
    }
}

}  // namespace
