// Parts that products y = x W^T of few rows share on processors without tiles: a weight that is
// converted to float32 in registers, so that it is read once, as it lies.
//
// Sums are float32, in an order that does not depend on how many rows there are.
#pragma once

#include "kernels.h"

#if defined(__AVX__)
#include <immintrin.h>
#endif

namespace vectors {

#if defined(__AVX512F__)
const int LANES = 16;
#else
const int LANES = 8;
#endif
// Number of vectors of sums that stay in registers, beside the factors: AVX-512 has 32 registers,
// AVX2 16.
const int MAX_SUMS = LANES;
// Elements of a weight's row that become two vectors.
const int PAIR = 2 * LANES;

typedef float Floats __attribute__((vector_size(LANES * 4)));
typedef int32_t Ints __attribute__((vector_size(LANES * 4)));
typedef uint32_t Words __attribute__((vector_size(LANES * 4)));
typedef int8_t Bytes __attribute__((vector_size(LANES)));

inline Floats load(const float* x) {
    Floats values;
    std::memcpy(&values, x, sizeof values);
    return values;
}

inline Floats load(const int8_t* x) {
#if defined(__AVX512F__)
    return (Floats)_mm512_cvtepi32_ps(
        _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x))));
#elif defined(__AVX2__)
    return (Floats)_mm256_cvtepi32_ps(
        _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(x))));
#else
    Bytes bytes;
    std::memcpy(&bytes, x, sizeof bytes);
    return __builtin_convertvector(__builtin_convertvector(bytes, Ints), Floats);
#endif
}

// Loads PAIR elements as two vectors, in the order in which they lie.
inline void load_pair(const int8_t* x, Floats& first, Floats& second) {
    first = load(x);
    second = load(x + LANES);
}

// Loads the even elements, then the odd ones: that takes no shuffle.
inline void load_pair(const bf16* x, Floats& first, Floats& second) {
    Words words;
    std::memcpy(&words, x, sizeof words);
    first = (Floats)(words << 16);
    second = (Floats)(words & 0xffff0000u);
}

inline void load_pair(const float* x, Floats& first, Floats& second) {
    first = load(x);
    second = load(x + LANES);
}

// Loads one of the two: at once they would take registers that the sums need.
inline Floats load_half(const bf16* x, int half) {
    Words words;
    std::memcpy(&words, x, sizeof words);
    return (Floats)(half ? words & 0xffff0000u : words << 16);
}

template <typename W>
inline Floats load_half(const W* x, int half) {
    return load(x + half * LANES);
}

// Stores what `load_pair` gives, rounded.
inline void store_pair(Floats even, Floats odd, bf16* out) {
    auto rounded = [](Floats x) {
        const Words bits = (Words)x, number = bits + 0x7fff + ((bits >> 16) & 1);
        return ((Words)(x == x) & number) | (~(Words)(x == x) & 0x7fc00000u);
    };
    const Words words = (rounded(even) >> 16) | (rounded(odd) & 0xffff0000u);
    std::memcpy(out, &words, sizeof words);
}

inline void store_pair(Floats first, Floats second, float* out) {
    std::memcpy(out, &first, sizeof first);
    std::memcpy(out + LANES, &second, sizeof second);
}

// Writes a row of x in float32, up to whole pairs, with its elements in the order in which
// `load_pair` gives those of a weight.
template <typename T>
void arrange(const T* x, i64 n, const int8_t*, float* out) {
    for (i64 i = 0; i < n; i++) out[i] = widen(x[i]);
    std::fill(out + n, out + round_up(n, PAIR), 0.0f);
}

template <typename T>
void arrange(const T* x, i64 n, const T*, float* out) {
    for (i64 i = 0; i < n; i += PAIR) {
        T part[PAIR] = {};
        Floats pair[2];
        const T* from = x + i;
        if (i + PAIR > n) from = static_cast<T*>(std::memcpy(part, from, (n - i) * sizeof(T)));
        load_pair(from, pair[0], pair[1]);
        std::memcpy(out + i, pair, sizeof pair);
    }
}

// Returns a b + c, rounded once. As an expression, the compiler would turn two of them into a
// product, a product and a sum, and a sum.
inline Floats multiply_add(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
    return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

// Returns the sum of each of COUNT vectors, at most as many as a vector has lanes, each in the same
// order whatever their number.
#if defined(__AVX512F__)
template <int COUNT>
inline void add_up(const Floats (&totals)[COUNT], float (&sums)[COUNT]) {
    static_assert(COUNT <= 16);
    __m512 x[16] = {}, pairs[8], fours[4];
    for (int i = 0; i < COUNT; i++) x[i] = (__m512)totals[i];
    // Each of four steps leaves half as many vectors, with the sums of twice as many.
    auto two = [](__m512 a, __m512 b) {
        return _mm512_unpacklo_ps(a, b) + _mm512_unpackhi_ps(a, b);
    };
    for (int i = 0; i < 8; i++) pairs[i] = two(x[i], x[i + 8]);
    for (int i = 0; i < 4; i++) fours[i] = two(pairs[i], pairs[i + 4]);
    // Each quarter now has a part of the sums of vectors i, i + 4, i + 8 and i + 12.
    auto half = [](__m512 a, __m512 b) {
        return _mm512_shuffle_f32x4(a, b, 0x88) + _mm512_shuffle_f32x4(a, b, 0xdd);
    };
    const __m512 all = half(half(fours[0], fours[1]), half(fours[2], fours[3]));
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const __m512 found = _mm512_permutexvar_ps(order, all);
    std::memcpy(sums, &found, sizeof sums);
}
#elif defined(__AVX2__)
template <int COUNT>
inline void add_up(const Floats (&totals)[COUNT], float (&sums)[COUNT]) {
    static_assert(COUNT <= 8);
    __m256 x[8] = {}, pairs[4], fours[2];
    for (int i = 0; i < COUNT; i++) x[i] = (__m256)totals[i];
    // Each of three steps leaves half as many vectors, with the sums of twice as many.
    auto two = [](__m256 a, __m256 b) {
        return _mm256_unpacklo_ps(a, b) + _mm256_unpackhi_ps(a, b);
    };
    for (int i = 0; i < 4; i++) pairs[i] = two(x[i], x[i + 4]);
    for (int i = 0; i < 2; i++) fours[i] = two(pairs[i], pairs[i + 2]);
    // Each half now has a part of the sums of vectors i, i + 2, i + 4 and i + 6.
    const __m256 all = _mm256_permute2f128_ps(fours[0], fours[1], 0x20) +
                       _mm256_permute2f128_ps(fours[0], fours[1], 0x31);
    const __m256 found = _mm256_permutevar8x32_ps(all, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    std::memcpy(sums, &found, sizeof sums);
}
#else
template <int COUNT>
inline void add_up(const Floats (&totals)[COUNT], float (&sums)[COUNT]) {
    for (int i = 0; i < COUNT; i++) {
        Floats x = totals[i];
        for (int half = LANES / 2; half; half /= 2) {
            Ints others;
            for (int lane = 0; lane < LANES; lane++) others[lane] = (lane + half) % LANES;
            x += __builtin_shuffle(x, others);
        }
        sums[i] = x[0];
    }
}
#endif

// Computes the sums of ROWS rows of x with CHANNELS rows of a weight; x [n, inner rounded up to
// pairs], arranged. step: from one row of the weight to the next. ahead: how many rows further on
// lies what is fetched meanwhile; each of `turns` calls with the same rows of the weight fetches a
// part of that.
template <int ROWS, int CHANNELS, typename W>
inline void multiply(const float* x, const W* weight, i64 inner, i64 step, i64 ahead, i64 turn,
                     i64 turns, float (&sums)[ROWS * CHANNELS]) {
    Floats totals[ROWS * CHANNELS] = {};
    const i64 x_step = round_up(inner, PAIR);
    auto add = [&](const W*(&from)[CHANNELS], i64 k) {
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
            Floats values[CHANNELS];
#pragma GCC unroll 16
            for (int channel = 0; channel < CHANNELS; channel++)
                values[channel] = load_half(from[channel], half);
#pragma GCC unroll 4
            for (int row = 0; row < ROWS; row++) {
                const Floats own = load(x + row * x_step + k + half * LANES);
#pragma GCC unroll 16
                for (int channel = 0; channel < CHANNELS; channel++) {
                    Floats& total = totals[row * CHANNELS + channel];
                    total = multiply_add(values[channel], own, total);
                }
            }
        }
    };
    const W* from[CHANNELS];
    const i64 whole = inner / PAIR * PAIR;
    for (i64 k = 0; k < whole; k += PAIR) {
#pragma GCC unroll 16
        for (int channel = 0; channel < CHANNELS; channel++) {
            from[channel] = weight + channel * step + k;
            __builtin_prefetch(from[channel] + (channel % turns == turn ? ahead * step : 0));
        }
        add(from, k);
    }
    if (whole < inner) {
        W rest[CHANNELS][PAIR] = {};
        for (int channel = 0; channel < CHANNELS; channel++)
            from[channel] = static_cast<W*>(std::memcpy(
                rest[channel], weight + channel * step + whole, (inner - whole) * sizeof(W)));
        add(from, whole);
    }
    add_up(totals, sums);
}

// y = (x W^T) s + b, with a scale s per output channel, or none.
template <typename T, typename W>
struct Problem {
    const float* x;  // [n, inner rounded up to pairs], arranged
    const W* weight;
    const float* scales;  // or null
    const T* bias;        // or null
    T* y;
    i64 inner, outer, turns;

    template <int ROWS, int CHANNELS>
    void run(i64 row, i64 channel) const {
        float sums[ROWS * CHANNELS];
        const i64 ahead = std::min<i64>(CHANNELS, outer - CHANNELS - channel);
        multiply<ROWS, CHANNELS>(x + row * round_up(inner, PAIR), weight + channel * inner, inner,
                                 inner, ahead, row / ROWS, turns, sums);
        for (int r = 0; r < ROWS; r++)
            for (int c = 0; c < CHANNELS; c++) {
                float& sum = sums[r * CHANNELS + c];
                if (scales) sum *= scales[channel + c];
                if (bias) sum += widen(bias[channel + c]);
            }
        T rounded[ROWS * CHANNELS];
        for (int i = 0; i < ROWS * CHANNELS; i++) narrow(sums[i], rounded[i]);
        for (int r = 0; r < ROWS; r++)
            std::memcpy(y + (row + r) * outer + channel, rounded + r * CHANNELS,
                        CHANNELS * sizeof(T));
    }

    // As many channels at once as leave the sums in registers. At most four of rows and of
    // channels: with two channels of eight rows the loads of x, not the arithmetic, take the time
    // (80 in place of 130 GFLOP/s a core).
    template <int ROWS>
    void run_rows(i64 row, i64 first, i64 last) const {
        const int most = std::min(MAX_SUMS / 2, MAX_SUMS / (ROWS == 3 ? 4 : ROWS)),
                  some = std::min(most, 4);
        i64 channel = first;
        for (; channel + most <= last; channel += most) run<ROWS, most>(row, channel);
        for (; channel + some <= last; channel += some) run<ROWS, some>(row, channel);
        for (; channel < last; channel++) run<ROWS, 1>(row, channel);
    }
};

// scratch: a thread's, for x in float32.
template <typename T, typename W>
void product_of(Scratch& scratch, const T* x, i64 x_step, const W* weight, const float* scales,
                const T* bias, T* y, i64 n, i64 inner, i64 outer, i64 num_threads) {
    // Channels whose weights stay in a core's cache while all rows are multiplied with them. Few
    // rows take little longer than reading. There each channel's rows take turns at fetching what
    // comes next, so that none waits for all of it.
    const bool takes_turns = 4 < n && n <= 16;
    const i64 strip = takes_turns ? 4 : 16, turns = takes_turns ? n / 4 : 1;
    float* wide = reinterpret_cast<float*>(scratch.take(n * round_up(inner, PAIR) * sizeof(float)));
    const Problem<T, W> problem{wide, weight, scales, bias, y, inner, outer, turns};
#pragma omp parallel num_threads(num_threads)
    {
        const i64 thread = omp_get_thread_num(), threads = omp_get_num_threads();
        for (i64 row = n * thread / threads; row < n * (thread + 1) / threads; row++)
            arrange(x + row * x_step, inner, weight, wide + row * round_up(inner, PAIR));
#pragma omp barrier
        const i64 end = outer * (thread + 1) / threads;
        for (i64 first = outer * thread / threads; first < end; first += strip) {
            const i64 last = std::min(first + strip, end);
            i64 row = 0;
            for (; row + 4 <= n; row += 4) problem.template run_rows<4>(row, first, last);
            if (row + 3 == n) problem.template run_rows<3>(row, first, last);
            if (row + 2 == n) problem.template run_rows<2>(row, first, last);
            if (row + 1 == n) problem.template run_rows<1>(row, first, last);
        }
    }
}

}  // namespace vectors
