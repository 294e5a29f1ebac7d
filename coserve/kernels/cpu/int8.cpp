// y = (x W^T) s + b of few rows, with W in int8 and a scale s per output channel: the time is that of reading W once.
//
// Sums are float32, in an order that does not depend on how many rows there are. Many rows are better multiplied by a
// library with a dense weight, which `int8_to_bfloat16` makes, a tile at a time.

#include "kernels.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512F__)
const int LANES = 16;
#else
const int LANES = 8;
#endif

typedef float Floats __attribute__((vector_size(LANES * 4)));
typedef int32_t Ints __attribute__((vector_size(LANES * 4)));
typedef int8_t Bytes __attribute__((vector_size(LANES)));

inline Floats load(const float* x) {
    Floats values;
    std::memcpy(&values, x, sizeof values);
    return values;
}

inline Floats load(const int8_t* x) {
#if defined(__AVX512F__)
    return (Floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x))));
#elif defined(__AVX2__)
    return (Floats)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(x))));
#else
    Bytes bytes;
    std::memcpy(&bytes, x, sizeof bytes);
    return __builtin_convertvector(__builtin_convertvector(bytes, Ints), Floats);
#endif
}

inline float sum_of(Floats x) {
    float total = 0;
    for (int lane = 0; lane < LANES; lane++) total += x[lane];
    return total;
}

// Sums of ROWS rows of x [n, inner] with CHANNELS rows of the weight.
template <int ROWS, int CHANNELS>
inline void multiply(const float* x, const int8_t* weight, i64 inner, float (&sums)[CHANNELS][ROWS]) {
    Floats totals[CHANNELS][ROWS] = {};
    const i64 whole = inner / LANES * LANES;
    for (i64 k = 0; k < whole; k += LANES) {
        Floats rows[ROWS];
#pragma GCC unroll 8
        for (int row = 0; row < ROWS; row++) rows[row] = load(x + row * inner + k);
#pragma GCC unroll 8
        for (int channel = 0; channel < CHANNELS; channel++) {
            const Floats values = load(weight + channel * inner + k);
#pragma GCC unroll 8
            for (int row = 0; row < ROWS; row++) totals[channel][row] += values * rows[row];
        }
    }
    for (int channel = 0; channel < CHANNELS; channel++)
        for (int row = 0; row < ROWS; row++) {
            float total = sum_of(totals[channel][row]);
            for (i64 k = whole; k < inner; k++) total += x[row * inner + k] * float(weight[channel * inner + k]);
            sums[channel][row] = total;
        }
}

template <typename T>
struct Problem {
    const float* x;  // [n, inner]
    const int8_t* weight;
    const float* scales;
    const T* bias;
    T* y;
    i64 inner, outer;

    template <int ROWS, int CHANNELS>
    void run(i64 row, i64 channel) const {
        float sums[CHANNELS][ROWS];
        multiply<ROWS, CHANNELS>(x + row * inner, weight + channel * inner, inner, sums);
        for (int c = 0; c < CHANNELS; c++)
            for (int r = 0; r < ROWS; r++) {
                const float value = sums[c][r] * scales[channel + c];
                narrow(bias ? value + widen(bias[channel + c]) : value, y[(row + r) * outer + channel + c]);
            }
    }

    // As many channels at once as leave the sums in registers.
    template <int ROWS>
    void run_rows(i64 row, i64 first, i64 last) const {
        const int most = 8 / ROWS;
        i64 channel = first;
        for (; channel + most <= last; channel += most) run<ROWS, most>(row, channel);
        for (; channel < last; channel++) run<ROWS, 1>(row, channel);
    }
};

thread_local Scratch shared_scratch;

// Channels whose weights stay in a core's cache while all rows are multiplied with them.
const i64 STRIP = 16;

template <typename T>
void product_of(const T* x, i64 x_step, const int8_t* weight, const float* scales, const T* bias, T* y, i64 n,
                i64 inner, i64 outer, i64 num_threads) {
    float* wide = reinterpret_cast<float*>(shared_scratch.take(n * inner * sizeof(float)));
    for (i64 row = 0; row < n; row++)
        for (i64 k = 0; k < inner; k++) wide[row * inner + k] = widen(x[row * x_step + k]);
    const Problem<T> problem{wide, weight, scales, bias, y, inner, outer};
#pragma omp parallel num_threads(num_threads)
    {
        const i64 thread = omp_get_thread_num(), threads = omp_get_num_threads();
        const i64 end = outer * (thread + 1) / threads;
        for (i64 first = outer * thread / threads; first < end; first += STRIP) {
            const i64 last = std::min(first + STRIP, end);
            i64 row = 0;
            for (; row + 8 <= n; row += 8) problem.template run_rows<8>(row, first, last);
            for (; row + 4 <= n; row += 4) problem.template run_rows<4>(row, first, last);
            for (; row + 2 <= n; row += 2) problem.template run_rows<2>(row, first, last);
            if (row < n) problem.template run_rows<1>(row, first, last);
        }
    }
}

}  // namespace

// x [n, inner] with a step from row to row, weight [outer, inner], scales [outer], bias [outer] or null, y [n, outer].
extern "C" void int8_product(const void* x, i64 x_step, const int8_t* weight, const float* scales, const void* bias,
                             void* y, i64 n, i64 inner, i64 outer, i64 is_bfloat16, i64 num_threads) {
    auto run = [=](auto type) {
        using T = decltype(type);
        product_of(static_cast<const T*>(x), x_step, weight, scales, static_cast<const T*>(bias), static_cast<T*>(y), n,
                   inner, outer, num_threads);
    };
    is_bfloat16 ? run(bf16{}) : run(float{});
}

// values [rows, columns], scales [rows] -> values * scales, rounded, as rows of out.
extern "C" void int8_to_bfloat16(const int8_t* values, const float* scales, bf16* out, i64 rows, i64 columns,
                                 i64 num_threads) {
#pragma omp parallel for num_threads(num_threads)
    for (i64 row = 0; row < rows; row++)
        for (i64 i = 0; i < columns; i++)
            narrow(float(values[row * columns + i]) * scales[row], out[row * columns + i]);
}
