// Formulas on each place of a row, sums and maxima of a row, in float32: one place after the other,
// or 32 of bfloat16 at once. A file that includes this first sets what GCC may do with float32 (see
// `rows.cpp`).
#pragma once

#include "common/common.h"

#include <cmath>
#include <cstring>
#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif
#include <limits>
#include <type_traits>

namespace {

// Number of partial sums of a sum: a few registers of any CPU, to hide how long an addition takes.
const int LANES = 32;

// Otherwise GCC calls functions that formulas use, with vectors in memory: ten times slower.
#define INLINED [[gnu::always_inline]] inline

inline float multiply_add(float a, float b, float c) {
#ifdef FP_FAST_FMAF
    return std::fma(a, b, c);
#else
    return a * b + c;
#endif
}

// The maximum; a NaN stays one.
inline float at_least(float least, float x) { return x < least ? least : x; }
inline float at_most(float most, float x) { return x > most ? most : x; }

// A float from a number whose last bits are its biased exponent.
inline float power_of_last_bits(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    bits <<= 23;
    float power;
    std::memcpy(&power, &bits, sizeof power);
    return power;
}

inline float reciprocal(float x) { return 1.0f / x; }

// Formulas read x(i) as at(x, i), and put a result at y(i): `i` is a place, or several.
template <typename T>
inline float at(const T* x, i64 i) {
    return widen(x[i]);
}

template <typename T>
inline void put(float value, T* y, i64 i) {
    narrow(value, y[i]);
}

#if defined(__AVX512BF16__)
// The same for 32 places of bfloat16 at once: GCC does not find the instruction that rounds, which
// replaces eight others. It takes float32 below 2^-126 for 0. The float32 of the second place of a
// pair is the pair without its lower half.
struct Places {
    i64 first;
};

struct Floats {
    __m512 even, odd;

    INLINED Floats(__m512 even, __m512 odd) : even(even), odd(odd) {}
    INLINED Floats(float x) : Floats(_mm512_set1_ps(x), _mm512_set1_ps(x)) {}
    INLINED explicit Floats(__m512i pairs)
        : Floats((__m512)_mm512_slli_epi32(pairs, 16),
                 (__m512)_mm512_and_si512(pairs, _mm512_set1_epi32(int(0xffff0000)))) {}

    // Rounded.
    INLINED __m512i pairs() const {
        typedef uint16_t Halves __attribute__((vector_size(64)));
        const Halves in_turns = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
        return _mm512_permutexvar_epi16((__m512i)in_turns, (__m512i)_mm512_cvtne2ps_pbh(odd, even));
    }

    INLINED friend Floats operator+(Floats a, Floats b) { return {a.even + b.even, a.odd + b.odd}; }
    INLINED friend Floats operator-(Floats a, Floats b) { return {a.even - b.even, a.odd - b.odd}; }
    INLINED friend Floats operator*(Floats a, Floats b) { return {a.even * b.even, a.odd * b.odd}; }
    INLINED Floats operator-() const { return {-even, -odd}; }
};

INLINED Floats at(const bf16* x, Places i) { return Floats(_mm512_loadu_si512(x + i.first)); }
INLINED void put(Floats values, bf16* y, Places i) {
    _mm512_storeu_si512(y + i.first, values.pairs());
}

using ::rounded;
template <typename T>
INLINED Floats rounded(Floats x) {
    static_assert(std::is_same<T, bf16>::value, "places are of bfloat16");
    return Floats(x.pairs());
}

INLINED Floats multiply_add(Floats a, Floats b, Floats c) {
    return {_mm512_fmadd_ps(a.even, b.even, c.even), _mm512_fmadd_ps(a.odd, b.odd, c.odd)};
}

// With a number and a NaN, these instructions return the second.
INLINED Floats at_least(float least, Floats x) {
    return {_mm512_max_ps(_mm512_set1_ps(least), x.even),
            _mm512_max_ps(_mm512_set1_ps(least), x.odd)};
}

INLINED Floats at_most(float most, Floats x) {
    return {_mm512_min_ps(_mm512_set1_ps(most), x.even),
            _mm512_min_ps(_mm512_set1_ps(most), x.odd)};
}

INLINED Floats power_of_last_bits(Floats x) {
    return {(__m512)_mm512_slli_epi32((__m512i)x.even, 23),
            (__m512)_mm512_slli_epi32((__m512i)x.odd, 23)};
}

// An estimate to 14 bits and a Newton step, exact to a unit in the last place; the step is left out
// where it would multiply infinity with 0. For positive numbers that are not tiny.
INLINED __m512 reciprocal(__m512 x) {
    const __m512 estimate = _mm512_rcp14_ps(x),
                 missing = _mm512_fnmadd_ps(x, estimate, _mm512_set1_ps(1.0f));
    const __mmask16 is_finite = _mm512_cmp_ps_mask(x, _mm512_set1_ps(1e38f), _CMP_LT_OQ);
    return _mm512_mask_fmadd_ps(estimate, is_finite, missing, estimate);
}

INLINED Floats reciprocal(Floats x) { return {reciprocal(x.even), reciprocal(x.odd)}; }
#endif

// Runs formula(0) to formula(n - 1), which must not depend on each other, on matrices of T.
template <typename T, typename Formula>
inline void for_places(i64 n, Formula formula) {
    i64 i = 0;
#if defined(__AVX512BF16__)
    if constexpr (std::is_same<T, bf16>::value)
        for (; i + 32 <= n; i += 32) formula(Places{i});
#endif
#pragma GCC ivdep
    for (; i < n; i++) formula(i);
}

// Returns e^x to 2 units in the last place, 0 where it is below 2^-125; infinities and NaN
// included. Loops that call it become vectors.
template <typename Real>
INLINED Real exponential(Real x) {
    x = at_most(89.0f, at_least(-87.3f, x));
    // A number this large has no fraction, so x / ln 2 is rounded, and stands in the last bits,
    // biased as the exponent of a float; less one, since 2^128 is not a float.
    const float large = 12582912.0f + 126.0f;
    const Real sum = multiply_add(x, 1.44269504f, large), whole = sum - large;
    // ln 2 in two parts; the first times `whole` is exact.
    const Real rest = multiply_add(whole, 2.12194440e-4f, multiply_add(whole, -0.693359375f, x));
    // 2 e^rest by the polynomial of least relative error, 3e-9.
    Real twice = multiply_add(rest, 2 * 0.00138146093f, 2 * 0.00836873986f);
    twice = multiply_add(twice, rest, 2 * 0.041668389f);
    twice = multiply_add(twice, rest, 2 * 0.166665211f);
    twice = multiply_add(twice, rest, 2 * 0.49999994f);
    twice = multiply_add(twice, rest, 2.0f);
    twice = multiply_add(twice, rest, 2.0f);
    return twice * power_of_last_bits(sum);
}

template <typename Real>
INLINED Real sigmoid(Real x) {
    return reciprocal(1.0f + exponential(-x));
}

// silu(gate) up, of matrices of T.
template <typename T, typename Real>
INLINED Real silu_times(Real gate, Real up) {
    return rounded<T>(gate * sigmoid(gate)) * up;
}

// Returns the sum of term(0) to term(n - 1), of matrices of T, in an order that depends on n alone.
template <typename T, typename Term>
inline float sum_of(i64 n, Term term) {
    float sums[LANES] = {};
    i64 i = 0;
#if defined(__AVX512BF16__)
    if constexpr (std::is_same<T, bf16>::value) {
        static_assert(LANES == 32, "as many as places");
        Floats both = 0.0f;
        for (; i + 32 <= n; i += 32) both = both + term(Places{i});
        _mm512_storeu_ps(sums, both.even);
        _mm512_storeu_ps(sums + 16, both.odd);
    }
#endif
    for (; i + LANES <= n; i += LANES)
        for (int lane = 0; lane < LANES; lane++) sums[lane] += term(i + lane);
    for (int lane = 0; i + lane < n; lane++) sums[lane] += term(i + lane);
    for (int half = LANES / 2; half; half /= 2)
        for (int lane = 0; lane < half; lane++) sums[lane] += sums[lane + half];
    return sums[0];
}

// The maximum of the terms; NaN if there is one.
template <typename T>
inline float maximum(const T* x, i64 n) {
    float most[LANES];
    for (float& lane : most) lane = -std::numeric_limits<float>::infinity();
    auto larger = [](float a, float b) { return (a > b) | (a != a) ? a : b; };
    i64 i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int lane = 0; lane < LANES; lane++)
            most[lane] = larger(widen(x[i + lane]), most[lane]);
    for (int lane = 0; i + lane < n; lane++) most[lane] = larger(widen(x[i + lane]), most[lane]);
    for (int half = LANES / 2; half; half /= 2)
        for (int lane = 0; lane < half; lane++) most[lane] = larger(most[lane], most[lane + half]);
    return most[0];
}

}  // namespace
