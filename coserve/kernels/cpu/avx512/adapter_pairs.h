// Products of rows with the factors of LoRAs in bfloat16, by instructions that multiply pairs: the
// counterpart of `adapter_vectors.h`, which is for elements of any type. While a piece is
// multiplied the next one is fetched: a factor is too short for the processor to fetch ahead by
// itself.
#pragma once

#include "common/adapter_vectors.h"

#if defined(__AVX512BF16__)

namespace {

// Pairs in a vector.
const int PAIRS = 16;

// Loads the first elements, and zeros.
inline __m512i load_elements(const bf16* x, i64 count) {
    return _mm512_maskz_loadu_epi16(count >= 32  ? 0xffffffffu
                                    : count <= 0 ? 0
                                                 : (1u << count) - 1,
                                    x);
}

inline __m512 add_products(__m512 total, __m512i a, __m512i b) {
    return _mm512_dpbf16_ps(total, (__m512bh)a, (__m512bh)b);
}

// Returns every second element of 32 bits of two vectors, one after the other.
inline __m512i evens(__m512i a, __m512i b) {
    const __m512i places =
        _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
    return _mm512_permutex2var_epi32(a, places, b);
}

inline __m512i odds(__m512i a, __m512i b) {
    const __m512i places =
        _mm512_set_epi32(31, 29, 27, 25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
    return _mm512_permutex2var_epi32(a, places, b);
}

// Returns the sum of vector i in lane i, in an order that does not depend on i.
inline __m512 sums_of(const __m512 (&vectors)[16]) {
    __m512i sums[16];
    std::memcpy(sums, vectors, sizeof sums);
#pragma GCC unroll 4
    for (int count = 8; count; count /= 2)
#pragma GCC unroll 8
        for (int i = 0; i < count; i++) {
            const __m512i a = sums[2 * i], b = sums[2 * i + 1];
            sums[i] = (__m512i)_mm512_add_ps((__m512)evens(a, b), (__m512)odds(a, b));
        }
    return (__m512)sums[0];
}

// Transposes 16 rows of COUNT elements of 32 bits, one after another.
template <int COUNT>
inline void transpose(__m512i* rows) {
    if constexpr (COUNT > 1) {
        __m512i even[COUNT / 2], odd[COUNT / 2];
#pragma GCC unroll 8
        for (int i = 0; i < COUNT / 2; i++) {
            even[i] = evens(rows[2 * i], rows[2 * i + 1]);
            odd[i] = odds(rows[2 * i], rows[2 * i + 1]);
        }
        transpose<COUNT / 2>(even);
        transpose<COUNT / 2>(odd);
#pragma GCC unroll 8
        for (int i = 0; i < COUNT / 2; i++) rows[2 * i] = even[i], rows[2 * i + 1] = odd[i];
    }
}

// Computes the sums of ROWS rows of x with up to RANKS rows of A. next: is fetched meanwhile.
template <int ROWS, int RANKS>
void multiply(const Rows<bf16>& all, const Piece<bf16>& piece, i64 row, i64 rank, i64 count,
              const bf16* next) {
    __m512 totals[16];
    for (auto& total : totals) total = _mm512_setzero_ps();
    const bf16 *a[RANKS], *x[ROWS];
    for (int j = 0; j < RANKS; j++)
        a[j] = piece.factors->a + (rank + std::min<i64>(j, count - 1)) * all.inner;
    for (int r = 0; r < ROWS; r++) x[r] = all.x + all.rows[row + r] * all.x_step;
    auto add = [&](i64 k, auto load) {
        __m512i values[ROWS];
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; r++) values[r] = load(x[r] + k);
#pragma GCC unroll 8
        for (int j = 0; j < RANKS; j++, next += 32) {
            const __m512i factors = load(a[j] + k);
            _mm_prefetch(next, _MM_HINT_T0);
#pragma GCC unroll 4
            for (int r = 0; r < ROWS; r++)
                totals[r * RANKS + j] = add_products(totals[r * RANKS + j], factors, values[r]);
        }
    };
    const i64 whole = all.inner / 32 * 32;
    for (i64 k = 0; k < whole; k += 32)
        add(k, [](const bf16* from) { return _mm512_loadu_si512(from); });
    if (whole < all.inner)
        add(whole, [&](const bf16* from) { return load_elements(from, all.inner - whole); });
    float sums[16];
    _mm512_storeu_ps(sums, sums_of(totals));
    for (int r = 0; r < ROWS; r++)
        for (int j = 0; j < count; j++)
            narrow(rounded<bf16>(sums[r * RANKS + j]) * float(piece.factors->scale),
                   all.narrow[(row + r) * all.width + piece.place + rank + j]);
}

inline void to_narrow(const Rows<bf16>& all, const Piece<bf16>& piece) {
    const i64 end = std::min(piece.start + STRIP, piece.factors->rank);
    const bf16* next = piece.next;
    i64 row = piece.first;
    for (; row + 4 <= piece.last; row += 4, next = piece.factors->a)
        for (i64 rank = piece.start; rank < end; rank += 4, next += 4 * all.inner)
            multiply<4, 4>(all, piece, row, rank, std::min<i64>(4, end - rank), next);
    for (; row < piece.last; row++, next = piece.factors->a)
        multiply<1, STRIP>(all, piece, row, piece.start, end - piece.start, next);
}

// Arranges B's rows of up to 16 columns of y, COUNT pairs each, as [COUNT, 16 columns].
template <int COUNT>
inline void pairs_by_column(const bf16* b, i64 columns, __m512i* out) {
    __m512i pairs[COUNT];
#pragma GCC unroll 16
    for (int i = 0; i < COUNT; i++)
        pairs[i] = load_elements(b + 32 * i, 2 * COUNT * columns - 32 * i);
    transpose<COUNT>(pairs);
    std::memcpy(out, pairs, sizeof pairs);
}

// The same for any rank: up to 32 elements of a row at once.
inline void pairs_by_column(const bf16* b, i64 rank, i64 columns, __m512i* out) {
    for (i64 j = 0; j < rank; j += 32, out += PAIRS) {
        __m512i pairs[PAIRS];
        for (int i = 0; i < PAIRS; i++)
            pairs[i] =
                i < columns ? load_elements(b + i * rank + j, rank - j) : _mm512_setzero_si512();
        transpose<PAIRS>(pairs);
        std::memcpy(out, pairs, sizeof pairs);
    }
}

// Adds two vectors in the written order. For `+`, and for the intrinsic that stands for it, GCC may
// choose another order (-fassociative-math), and one row of an adapter would get other results than
// several.
inline __m512 sum_of_two(__m512 a, __m512 b) {
    return _mm512_add_round_ps(a, b, _MM_FROUND_CUR_DIRECTION);
}

// Returns the sum of several vectors, neighbours first.
template <int COUNT>
inline __m512 sum_of(const __m512* x) {
    if constexpr (COUNT == 1)
        return *x;
    else
        return sum_of_two(sum_of<COUNT / 2>(x), sum_of<COUNT / 2>(x + COUNT / 2));
}

// Adds neighbouring lanes, neighbours first, until one vector is left of COUNT.
template <int COUNT>
inline __m512 sum_of_lanes(__m512* x) {
    if constexpr (COUNT == 1) {
        return *x;
    } else {
#pragma GCC unroll 8
        for (int i = 0; i < COUNT / 2; i++) {
            const __m512i a = (__m512i)x[2 * i], b = (__m512i)x[2 * i + 1];
            x[i] = sum_of_two((__m512)evens(a, b), (__m512)odds(a, b));
        }
        return sum_of_lanes<COUNT / 2>(x);
    }
}

// Repeats COUNT pairs as often as they fit into a vector.
template <int COUNT>
inline __m512i repeated(const bf16* pairs) {
    if constexpr (COUNT == 16) return _mm512_loadu_si512(pairs);
    if constexpr (COUNT == 8)
        return _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i*)pairs));
    if constexpr (COUNT == 4) return _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)pairs));
    if constexpr (COUNT == 2)
        return _mm512_broadcastq_epi64(_mm_loadl_epi64((const __m128i*)pairs));
}

// Loads up to 16 columns of a row of y.
inline void add_to_columns(bf16* y, __m512 sums, i64 columns) {
    sums = _mm512_add_ps(sums, (__m512)load_first(y, columns));
    _mm256_mask_storeu_epi16(y, (1u << columns) - 1, (__m256i)_mm512_cvtneps_pbh(sums));
}

// Columns of y += B (A x), of rank 2 COUNT. Sums are of pairs, neighbours first, for one row as for
// several.
template <int COUNT>
void from_narrow_pairs(const Rows<bf16>& all, const Piece<bf16>& piece) {
    const Site<bf16>& site = *piece.site;
    const i64 rank = 2 * COUNT, end = std::min(piece.start + COLUMNS, site.outer);
    const bf16* next = piece.next;
    const __m512i own = repeated<COUNT>(all.narrow + piece.first * all.width + piece.place);
    for (i64 column = piece.start; column < end; column += 16, next += 16 * rank) {
        const bf16* b = piece.factors->b + column * rank;
        const i64 columns = std::min<i64>(16, end - column);
#pragma GCC unroll 16
        for (int i = 0; i < COUNT; i++) _mm_prefetch(next + 32 * i, _MM_HINT_T0);
        if (piece.last - piece.first == 1) {  // lanes are added up sooner than turned
            __m512 sums[COUNT];
#pragma GCC unroll 16
            for (int i = 0; i < COUNT; i++)
                sums[i] = add_products(_mm512_setzero_ps(),
                                       load_elements(b + 32 * i, rank * columns - 32 * i), own);
            add_to_columns(site.y + all.rows[piece.first] * site.step + column,
                           sum_of_lanes<COUNT>(sums), columns);
            continue;
        }
        __m512i right[COUNT];
        pairs_by_column<COUNT>(b, columns, right);
        for (i64 row = piece.first; row < piece.last; row++) {
            const bf16* left = all.narrow + row * all.width + piece.place;
            __m512 sums[COUNT];
#pragma GCC unroll 16
            for (int i = 0; i < COUNT; i++) {
                int32_t pair;
                std::memcpy(&pair, left + 2 * i, sizeof pair);
                sums[i] = add_products(_mm512_setzero_ps(), right[i], _mm512_set1_epi32(pair));
            }
            add_to_columns(site.y + all.rows[row] * site.step + column, sum_of<COUNT>(sums),
                           columns);
        }
    }
}

inline void from_narrow(const Rows<bf16>& all, const Piece<bf16>& piece) {
    const i64 rank = piece.factors->rank;
    if (rank == 4) return from_narrow_pairs<2>(all, piece);
    if (rank == 8) return from_narrow_pairs<4>(all, piece);
    if (rank == 16) return from_narrow_pairs<8>(all, piece);
    if (rank == 32) return from_narrow_pairs<16>(all, piece);
    const Site<bf16>& site = *piece.site;
    const i64 end = std::min(piece.start + COLUMNS, site.outer);
    __m512i* right = reinterpret_cast<__m512i*>(own_scratch.take(round_up(rank, 32) * 32));
    const bf16* next = piece.next;
    for (i64 column = piece.start; column < end; column += 16, next += 16 * rank) {
        const i64 columns = std::min<i64>(16, end - column);
        for (i64 i = 0; i < 16 * rank; i += 32) _mm_prefetch(next + i, _MM_HINT_T0);
        pairs_by_column(piece.factors->b + column * rank, rank, columns, right);
        for (i64 row = piece.first; row < piece.last; row++) {
            const bf16* left = all.narrow + row * all.width + piece.place;
            __m512 sums = _mm512_setzero_ps();
            for (i64 j = 0; j < rank; j += 2) {
                int32_t pair;
                std::memcpy(&pair, left + j, sizeof pair);
                sums = add_products(sums, right[j / 2], _mm512_set1_epi32(pair));
            }
            add_to_columns(site.y + all.rows[row] * site.step + column, sums, columns);
        }
    }
}

}  // namespace

#endif
