// Operators whose rows are independent: RMSNorm, gated units, rotary positions, the loss of logits, their largest. Each
// goes through a row while it is in the cache, computes in float32 and rounds where the plain twin rounds.
//
// Matrices are of float32 or bfloat16; their rows lie any distance apart (`step`, in elements), so that a column slice
// of a wider one will do. What is returned lies without gaps.

// As written: twins round after every operation, sums have an order, and infinity times zero is no number.
#pragma GCC optimize("no-associative-math", "signed-zeros", "fp-contract=off")
#ifdef __AVX512F__  // GCC would use half of each register
#pragma GCC target("prefer-vector-width=512")
#endif

#include "kernels.h"

#include <cmath>
#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif
#include <limits>
#include <type_traits>
#include <vector>

namespace {

// A sum is made of this many partial ones: a few registers of any CPU, to hide how long an addition takes.
const int LANES = 32;

// Elements below which one thread does them all: 5 to 20 microseconds' work, of which another's help saves a third at
// best, and which it may take far longer to wake where others want the cores, too. PyTorch's own operators do the same.
const i64 MIN_SHARED_ELEMENTS = 32768;

// The chunks of a row in which `argmax` looks for the largest; it then searches one.
const i64 CHUNK = 2048;

// Else GCC calls some of what formulas use, with vectors in memory: ten times slower.
#define INLINED [[gnu::always_inline]] inline

inline float multiply_add(float a, float b, float c) {
#ifdef FP_FAST_FMAF
    return std::fma(a, b, c);
#else
    return a * b + c;
#endif
}

// A NaN stays one.
inline float at_least(float least, float x) { return x < least ? least : x; }
inline float at_most(float most, float x) { return x > most ? most : x; }

// Of a number whose last bits are a float's biased exponent.
inline float power_of_last_bits(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    bits <<= 23;
    float power;
    std::memcpy(&power, &bits, sizeof power);
    return power;
}

inline float reciprocal(float x) { return 1.0f / x; }

// Formulas say x(i) as at(x, i), and put a result at y(i): `i` is a place, or several.
template <typename T>
inline float at(const T* x, i64 i) {
    return widen(x[i]);
}

template <typename T>
inline void put(float value, T* y, i64 i) {
    narrow(value, y[i]);
}

#if defined(__AVX512BF16__)
// The same for 32 places of bfloat16 at once: GCC does not find the instruction that rounds, which stands for eight
// others. It takes float32 below 2^-126 for 0. Of each pair of places the second one's float32 is the pair without its
// lower half.
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
INLINED void put(Floats values, bf16* y, Places i) { _mm512_storeu_si512(y + i.first, values.pairs()); }

using ::rounded;
template <typename T>
INLINED Floats rounded(Floats x) {
    static_assert(std::is_same<T, bf16>::value, "places are of bfloat16");
    return Floats(x.pairs());
}

INLINED Floats multiply_add(Floats a, Floats b, Floats c) {
    return {_mm512_fmadd_ps(a.even, b.even, c.even), _mm512_fmadd_ps(a.odd, b.odd, c.odd)};
}

// Of a number and a NaN, these instructions give the second.
INLINED Floats at_least(float least, Floats x) {
    return {_mm512_max_ps(_mm512_set1_ps(least), x.even), _mm512_max_ps(_mm512_set1_ps(least), x.odd)};
}

INLINED Floats at_most(float most, Floats x) {
    return {_mm512_min_ps(_mm512_set1_ps(most), x.even), _mm512_min_ps(_mm512_set1_ps(most), x.odd)};
}

INLINED Floats power_of_last_bits(Floats x) {
    return {(__m512)_mm512_slli_epi32((__m512i)x.even, 23), (__m512)_mm512_slli_epi32((__m512i)x.odd, 23)};
}

// An estimate to 14 bits and a Newton step, which leaves a unit in the last place; not where it would make infinity
// times 0 of the reciprocal of infinity. Of positive numbers that are not tiny.
INLINED __m512 reciprocal(__m512 x) {
    const __m512 estimate = _mm512_rcp14_ps(x), missing = _mm512_fnmadd_ps(x, estimate, _mm512_set1_ps(1.0f));
    const __mmask16 is_finite = _mm512_cmp_ps_mask(x, _mm512_set1_ps(1e38f), _CMP_LT_OQ);
    return _mm512_mask_fmadd_ps(estimate, is_finite, missing, estimate);
}

INLINED Floats reciprocal(Floats x) { return {reciprocal(x.even), reciprocal(x.odd)}; }
#endif

// formula(0) to formula(n - 1), which must not depend on each other, on matrices of T.
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

// e^x to 2 units in the last place, 0 where it is below 2^-125; infinities and NaN included. Loops that call it become
// vectors.
template <typename Real>
INLINED Real exponential(Real x) {
    x = at_most(89.0f, at_least(-87.3f, x));
    // So large a number has no fraction. So x / ln 2 is rounded, and stands in the last bits, biased as the exponent of
    // a float is; less one, since 2^128 is none.
    const float large = 12582912.0f + 126.0f;
    const Real sum = multiply_add(x, 1.44269504f, large), whole = sum - large;
    // ln 2 in two parts, of which the first times `whole` is exact.
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

// The sum of term(0) to term(n - 1), of matrices of T, in an order that depends on n alone.
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

// NaN if there is one.
template <typename T>
inline float maximum(const T* x, i64 n) {
    float most[LANES];
    for (float& lane : most) lane = -std::numeric_limits<float>::infinity();
    auto larger = [](float a, float b) { return (a > b) | (a != a) ? a : b; };
    i64 i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int lane = 0; lane < LANES; lane++) most[lane] = larger(widen(x[i + lane]), most[lane]);
    for (int lane = 0; i + lane < n; lane++) most[lane] = larger(widen(x[i + lane]), most[lane]);
    for (int half = LANES / 2; half; half /= 2)
        for (int lane = 0; lane < half; lane++) most[lane] = larger(most[lane], most[lane + half]);
    return most[0];
}

template <typename Row>
void for_rows(i64 num_rows, i64 width, i64 num_threads, Row row) {
    const bool shared = num_rows > 1 && num_threads > 1 && num_rows * width >= MIN_SHARED_ELEMENTS;
    if (!shared) {
        for (i64 i = 0; i < num_rows; i++) row(i);
        return;
    }
#pragma omp parallel for schedule(static) num_threads(int(num_threads))
    for (i64 i = 0; i < num_rows; i++) row(i);
}

template <typename T>
void normalize(const T* x, const T* weight, T* y, i64 features, float scale) {
    for_places<T>(features, [=](auto i) { put(rounded<T>(at(x, i) * scale) * at(weight, i), y, i); });
}

inline float rms_scale(float sum_of_squares, i64 features, float eps) {
    return 1.0f / std::sqrt(sum_of_squares / float(features) + eps);
}

template <typename T>
void rms_norm_of(const T* x, i64 x_step, const T* weight, T* y, i64 num_rows, i64 width, i64 features, float eps,
                 i64 num_threads) {
    for_rows(num_rows, width, num_threads, [=](i64 row) {
        for (i64 start = 0; start < width; start += features) {
            const T* in = x + row * x_step + start;
            const float squares = sum_of<T>(features, [=](auto i) { return at(in, i) * at(in, i); });
            normalize(in, weight, y + row * width + start, features, rms_scale(squares, features, eps));
        }
    });
}

template <typename T>
void rms_norm_gradient_of(const T* grad, i64 grad_step, const T* x, i64 x_step, const T* weight, T* x_grad, T* y,
                          i64 num_rows, i64 width, i64 features, float eps, i64 num_threads) {
    for_rows(num_rows, width, num_threads, [=](i64 row) {
        for (i64 start = 0; start < width; start += features) {
            const T *in = x + row * x_step + start, *out_grad = grad + row * grad_step + start;
            const float squares = sum_of<T>(features, [=](auto i) { return at(in, i) * at(in, i); });
            const float scale = rms_scale(squares, features, eps);
            const float along =
                sum_of<T>(features, [=](auto i) { return at(out_grad, i) * at(weight, i) * (at(in, i) * scale); });
            const float mean = along / float(features);
            T* in_grad = x_grad + row * width + start;
            for_places<T>(features, [=](auto i) {
                const auto weighted = at(out_grad, i) * at(weight, i);
                put((weighted - at(in, i) * scale * mean) * scale, in_grad, i);
            });
            if (y) normalize(in, weight, y + row * width + start, features, scale);
        }
    });
}

template <typename Real>
INLINED Real sigmoid(Real x) {
    return reciprocal(1.0f + exponential(-x));
}

template <typename T>
void silu_mul_row(const T* gate, const T* up, T* y, i64 width) {
    for_places<T>(width, [=](auto i) {
        const auto x = at(gate, i);
        put(rounded<T>(x * sigmoid(x)) * at(up, i), y, i);
    });
}

template <typename T, bool WITH_Y>
void silu_mul_gradient_row(const T* grad, const T* gate, const T* up, T* gate_grad, T* up_grad, T* y, i64 width) {
    for_places<T>(width, [=](auto i) {
        const auto x = at(gate, i), other = at(up, i), out_grad = at(grad, i);
        const auto slope = sigmoid(x), activated = rounded<T>(x * slope);
        put(rounded<T>(out_grad * other) * slope * (1.0f + x * (1.0f - slope)), gate_grad, i);
        put(out_grad * activated, up_grad, i);
        if (WITH_Y) put(activated * other, y, i);
    });
}

// Each head's halves (a, b) -> (a cos - b sin, b cos + a sin); REVERSE, the same by the opposite angle, with each sine
// at the place where the forward pass used it.
template <typename T, bool REVERSE>
void rope_row(const T* x, const T* cos, const T* sin, T* y, i64 width, i64 head_width) {
    const i64 half = head_width / 2;
    for (i64 start = 0; start < width; start += head_width) {
        const T *first = x + start, *second = first + half;
        T *first_out = y + start, *second_out = first_out + half;
        for_places<T>(half, [=](auto i) {
            const auto a = at(first, i), b = at(second, i);
            const auto sin_a = at(sin, i), sin_b = at(sin + half, i);
            const auto of_b = rounded<T>(b * (REVERSE ? sin_b : sin_a));
            const auto of_a = rounded<T>(a * (REVERSE ? sin_a : sin_b));
            const auto kept_a = rounded<T>(a * at(cos, i)), kept_b = rounded<T>(b * at(cos + half, i));
            put(REVERSE ? kept_a + of_b : kept_a - of_b, first_out, i);
            put(REVERSE ? kept_b - of_a : kept_b + of_a, second_out, i);
        });
    }
}

template <typename T>
void cross_entropy_of(const T* logits, i64 step, const i64* targets, float* loss, bool* correct, float* log_sum,
                      i64 num_rows, i64 vocabulary, i64 num_threads) {
    for_rows(num_rows, vocabulary, num_threads, [=](i64 row) {
        const T* in = logits + row * step;
        const float most = maximum(in, vocabulary), target = widen(in[targets[row]]);
        const float sum = sum_of<T>(vocabulary, [=](auto i) { return exponential(at(in, i) - most); });
        log_sum[row] = std::log(sum) + most;
        loss[row] = log_sum[row] - target;
        correct[row] = target == most;
    });
}

template <typename T>
void cross_entropy_gradient_of(const T* logits, i64 step, const i64* targets, const float* log_sum,
                               const float* loss_grad, T* grad, i64 num_rows, i64 vocabulary, i64 num_threads) {
    for_rows(num_rows, vocabulary, num_threads, [=](i64 row) {
        const T* in = logits + row * step;
        const float norm = log_sum[row], factor = loss_grad[row];
        T* out = grad + row * vocabulary;
        for_places<T>(vocabulary, [=](auto i) { put(exponential(at(in, i) - norm) * factor, out, i); });
        const i64 target = targets[row];
        narrow((exponential(widen(in[target]) - norm) - 1.0f) * factor, out[target]);
    });
}

// Threads share a row's chunks, too: there may be one row. The largest of a row and of a chunk of it tell which chunk
// to search.
template <typename T>
void argmax_of(const T* x, i64 step, i64* places, i64 num_rows, i64 width, i64 num_threads) {
    const i64 num_chunks = round_up(width, CHUNK) / CHUNK;
    std::vector<float> found(num_rows * num_chunks);
    float* most = found.data();
    for_rows(num_rows * num_chunks, std::min(width, CHUNK), num_threads, [=](i64 i) {
        const i64 start = i % num_chunks * CHUNK;
        most[i] = maximum(x + i / num_chunks * step + start, std::min(CHUNK, width - start));
    });
    for (i64 row = 0; row < num_rows; row++, most += num_chunks) {
        const float largest = maximum(most, num_chunks);
        auto is_it = [=](float value) { return value == largest || (value != value && largest != largest); };
        const i64 chunk = std::find_if(most, most + num_chunks, is_it) - most;
        const T *start = x + row * step, *end = start + width;
        places[row] = std::find_if(start + chunk * CHUNK, end, [=](T it) { return is_it(widen(it)); }) - start;
    }
}

}  // namespace

// Run it with `T` as bfloat16 or float32.
#define FOR_DTYPE(is_bfloat16, ...)                                                                                    \
    do {                                                                                                               \
        if (is_bfloat16) {                                                                                             \
            using T = bf16;                                                                                            \
            __VA_ARGS__;                                                                                               \
        } else {                                                                                                       \
            using T = float;                                                                                           \
            __VA_ARGS__;                                                                                               \
        }                                                                                                              \
    } while (0)

template <typename T>
static const T* in(const void* x) {
    return static_cast<const T*>(x);
}

template <typename T>
static T* out(void* x) {
    return static_cast<T*>(x);
}

// x [n, width], weight [features] -> y [n, width]: each run of `features` of a row by itself.
extern "C" void rms_norm(const void* x, i64 x_step, const void* weight, void* y, i64 num_rows, i64 width, i64 features,
                         double eps, i64 is_bfloat16, i64 num_threads) {
    FOR_DTYPE(is_bfloat16, rms_norm_of(in<T>(x), x_step, in<T>(weight), out<T>(y), num_rows, width, features,
                                       float(eps), num_threads));
}

// grad, x [n, width], weight [features] -> x_grad and, unless it is null, y [n, width].
extern "C" void rms_norm_gradient(const void* grad, i64 grad_step, const void* x, i64 x_step, const void* weight,
                                  void* x_grad, void* y, i64 num_rows, i64 width, i64 features, double eps,
                                  i64 is_bfloat16, i64 num_threads) {
    FOR_DTYPE(is_bfloat16, rms_norm_gradient_of(in<T>(grad), grad_step, in<T>(x), x_step, in<T>(weight), out<T>(x_grad),
                                                out<T>(y), num_rows, width, features, float(eps), num_threads));
}

// gate, up [n, width] -> y [n, width].
extern "C" void silu_mul(const void* gate, i64 gate_step, const void* up, i64 up_step, void* y, i64 num_rows, i64 width,
                         i64 is_bfloat16, i64 num_threads) {
    FOR_DTYPE(is_bfloat16, for_rows(num_rows, width, num_threads, [=](i64 i) {
                  silu_mul_row(in<T>(gate) + i * gate_step, in<T>(up) + i * up_step, out<T>(y) + i * width, width);
              }));
}

// grad, gate, up [n, width] -> gate_grad, up_grad and, unless it is null, y [n, width].
extern "C" void silu_mul_gradient(const void* grad, i64 grad_step, const void* gate, i64 gate_step, const void* up,
                                  i64 up_step, void* gate_grad, void* up_grad, void* y, i64 num_rows, i64 width,
                                  i64 is_bfloat16, i64 num_threads) {
    FOR_DTYPE(is_bfloat16, for_rows(num_rows, width, num_threads, [=](i64 i) {
                  auto reverse = y ? silu_mul_gradient_row<T, true> : silu_mul_gradient_row<T, false>;
                  reverse(in<T>(grad) + i * grad_step, in<T>(gate) + i * gate_step, in<T>(up) + i * up_step,
                          out<T>(gate_grad) + i * width, out<T>(up_grad) + i * width,
                          y ? out<T>(y) + i * width : nullptr, width);
              }));
}

// x [n, width], cos and sin [n, head width] -> y [n, width]; reverse: gradient of y -> gradient of x.
extern "C" void rope(const void* x, i64 x_step, const void* cos, i64 cos_step, const void* sin, i64 sin_step, void* y,
                     i64 num_rows, i64 width, i64 head_width, i64 reverse, i64 is_bfloat16, i64 num_threads) {
    FOR_DTYPE(is_bfloat16, for_rows(num_rows, width, num_threads, [=](i64 i) {
                  auto rotate = reverse ? rope_row<T, true> : rope_row<T, false>;
                  rotate(in<T>(x) + i * x_step, in<T>(cos) + i * cos_step, in<T>(sin) + i * sin_step,
                         out<T>(y) + i * width, width, head_width);
              }));
}

// logits [n, vocabulary], targets [n], each below the vocabulary -> loss, correct, log_sum [n].
extern "C" void cross_entropy(const void* logits, i64 step, const i64* targets, float* loss, bool* correct,
                              float* log_sum, i64 num_rows, i64 vocabulary, i64 is_bfloat16, i64 num_threads) {
    FOR_DTYPE(is_bfloat16, cross_entropy_of(in<T>(logits), step, targets, loss, correct, log_sum, num_rows, vocabulary,
                                            num_threads));
}

// And log_sum, loss_grad [n] -> grad [n, vocabulary].
extern "C" void cross_entropy_gradient(const void* logits, i64 step, const i64* targets, const float* log_sum,
                                       const float* loss_grad, void* grad, i64 num_rows, i64 vocabulary,
                                       i64 is_bfloat16, i64 num_threads) {
    FOR_DTYPE(is_bfloat16, cross_entropy_gradient_of(in<T>(logits), step, targets, log_sum, loss_grad, out<T>(grad),
                                                     num_rows, vocabulary, num_threads));
}

// x [n, width], with width above 0 -> the place of the largest of each row, the first of equal ones; a NaN is larger.
extern "C" void argmax(const void* x, i64 step, i64* places, i64 num_rows, i64 width, i64 is_bfloat16,
                       i64 num_threads) {
    FOR_DTYPE(is_bfloat16, argmax_of(in<T>(x), step, places, num_rows, width, num_threads));
}
