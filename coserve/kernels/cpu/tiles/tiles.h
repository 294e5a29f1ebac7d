// Products of tiles of bfloat16, on AMX or, where there is none, by AVX-512's instructions for
// pairs; and what they need: the tile registers, right factors in their order, transposition.
#pragma once

#include "kernels.h"

#ifdef HAS_TILES

#include <immintrin.h>

#ifdef HAS_AMX

const int DEPTH = 32;

// Makes earlier writes visible to tile loads: the compiler does not see that these read the same
// memory.
inline void settle() { asm volatile("" ::: "memory"); }

// All eight tile registers as 16 rows of 64 bytes, for the life of this object. Afterwards oneDNN
// finds its own configuration again.
class Tiles {
  public:
    Tiles() {
        _tile_storeconfig(before_);
        settle();
        alignas(64) struct {
            uint8_t palette = 1, start_row = 0, reserved[14] = {};
            uint16_t row_bytes[16] = {};
            uint8_t num_rows[16] = {};
        } ours;
        for (int i = 0; i < 8; i++) ours.row_bytes[i] = 64, ours.num_rows[i] = 16;
        settle();
        _tile_loadconfig(&ours);
        settle();
    }
    ~Tiles() {
        settle();
        _tile_loadconfig(before_);
    }

  private:
    alignas(64) uint8_t before_[64];
};

#else

const int DEPTH = 2;

inline void settle() {}

// Vectors have no state to prepare.
struct Tiles {
    Tiles() {}
    ~Tiles() {}
};

#endif

// C = A B, or C += A B: A [ROWS, inner] by rows, B [inner / 2, COLUMNS, 2] by pairs of rows, C
// [ROWS, COLUMNS] float32. ROWS and COLUMNS are 32 or 16, inner is a multiple of DEPTH. The steps
// lead from one row of A, one pair of rows of B, one row of C to the next, in elements of each (in
// pairs for B).
#ifdef HAS_AMX

template <int ROWS, int COLUMNS, bool ADD>
inline void multiply(int inner, const bf16* a, i64 a_step, const bf16* b, i64 b_step, float* c,
                     i64 c_step) {
    const bool low = ROWS == 32, right = COLUMNS == 32;
    float* lower = c + 16 * c_step;
    if (ADD) {
        _tile_loadd(0, c, c_step * 4);
        if (right) _tile_loadd(1, c + 16, c_step * 4);
        if (low) _tile_loadd(2, lower, c_step * 4);
        if (low && right) _tile_loadd(3, lower + 16, c_step * 4);
    } else {
        _tile_zero(0);
        if (right) _tile_zero(1);
        if (low) _tile_zero(2);
        if (low && right) _tile_zero(3);
    }
    for (int k = 0; k < inner; k += 32, a += 32, b += 32 * b_step) {
        _tile_loadd(4, a, a_step * 2);
        _tile_loadd(6, b, b_step * 4);
        _tile_dpbf16ps(0, 4, 6);
        if (right) {
            _tile_loadd(7, b + 32, b_step * 4);
            _tile_dpbf16ps(1, 4, 7);
        }
        if (low) {
            _tile_loadd(5, a + 16 * a_step, a_step * 2);
            _tile_dpbf16ps(2, 5, 6);
            if (right) _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, c, c_step * 4);
    if (right) _tile_stored(1, c + 16, c_step * 4);
    if (low) _tile_stored(2, lower, c_step * 4);
    if (low && right) _tile_stored(3, lower + 16, c_step * 4);
}

#else

// Multiplies as many of the rows as leave their sums in registers.
template <int ROWS, int VECTORS, bool ADD>
inline void multiply_rows(int inner, const bf16* a, i64 a_step, const bf16* b, i64 b_step, float* c,
                          i64 c_step) {
    __m512 sums[ROWS][VECTORS];
#pragma GCC unroll 16
    for (int row = 0; row < ROWS; row++)
#pragma GCC unroll 2
        for (int v = 0; v < VECTORS; v++)
            sums[row][v] = ADD ? _mm512_loadu_ps(c + row * c_step + 16 * v) : _mm512_setzero_ps();
    for (int k = 0; k < inner; k += 2, a += 2, b += 2 * b_step) {
        __m512bh right[VECTORS];
#pragma GCC unroll 2
        for (int v = 0; v < VECTORS; v++) right[v] = (__m512bh)_mm512_loadu_si512(b + 32 * v);
#pragma GCC unroll 16
        for (int row = 0; row < ROWS; row++) {
            int32_t pair;
            std::memcpy(&pair, a + row * a_step, sizeof pair);
            const __m512bh left = (__m512bh)_mm512_set1_epi32(pair);
#pragma GCC unroll 2
            for (int v = 0; v < VECTORS; v++)
                sums[row][v] = _mm512_dpbf16_ps(sums[row][v], left, right[v]);
        }
    }
#pragma GCC unroll 16
    for (int row = 0; row < ROWS; row++)
#pragma GCC unroll 2
        for (int v = 0; v < VECTORS; v++) _mm512_storeu_ps(c + row * c_step + 16 * v, sums[row][v]);
}

template <int ROWS, int COLUMNS, bool ADD>
inline void multiply(int inner, const bf16* a, i64 a_step, const bf16* b, i64 b_step, float* c,
                     i64 c_step) {
    const int at_once = 8;
    for (int row = 0; row < ROWS; row += at_once)
        multiply_rows<at_once, COLUMNS / 16, ADD>(inner, a + row * a_step, a_step, b, b_step,
                                                  c + row * c_step, c_step);
}

#endif

inline __m512 load(const bf16* x) {
    __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}

// Interleaves two vectors of 16: the first of each, the second of each, and so on.
inline __m512i interleaved(__m512i both) {
    const __m512i order =
        _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                         21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return _mm512_permutexvar_epi16(order, both);
}

// Transposes 16 rows of 16 elements of 32 bits.
inline void transpose(__m512i (&rows)[16]) {
    __m512i t[16];
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 2; j++) {
            rows[i + 2 * j] = _mm512_unpacklo_epi64(t[i + j], t[i + j + 2]);
            rows[i + 2 * j + 1] = _mm512_unpackhi_epi64(t[i + j], t[i + j + 2]);
        }
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 2; j++) {
            t[8 * j + i] = _mm512_shuffle_i32x4(rows[8 * j + i], rows[8 * j + i + 4], 0x88);
            t[8 * j + i + 4] = _mm512_shuffle_i32x4(rows[8 * j + i], rows[8 * j + i + 4], 0xdd);
        }
    for (int i = 0; i < 8; i++) {
        rows[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
        rows[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
    }
}

#endif
