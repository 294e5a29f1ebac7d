// Operators whose rows are independent: RMSNorm, gated units, rotary positions, the loss of logits,
// their largest. Each goes through a row while it is in the cache, computes in float32 and rounds
// where the plain twin rounds.
//
// Matrices are of float32 or bfloat16. Their rows lie any distance apart (`step`, in elements), so
// that they may be a column slice of a wider matrix. Results lie without gaps.

// No reordering: twins round after every operation, sums have an order, and infinity times zero is
// NaN.
#pragma GCC optimize("no-associative-math", "signed-zeros", "fp-contract=off")
#ifdef __AVX512F__  // GCC would use half of each register
#pragma GCC target("prefer-vector-width=512")
#endif

#include "kernels.h"
#include "common/row_formulas.h"

#include <cmath>
#include <limits>
#include <vector>

namespace {

// Number of elements below which one thread is used. They take 5 to 20 microseconds, of which
// another thread saves a third at best, and waking it may take far longer where others use the
// cores, too. PyTorch's own operators do the same.
const i64 MIN_SHARED_ELEMENTS = 32768;

// Chunks of a row in which `argmax` looks for the largest; it then searches one.
const i64 CHUNK = 2048;

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
    for_places<T>(features,
                  [=](auto i) { put(rounded<T>(at(x, i) * scale) * at(weight, i), y, i); });
}

inline float rms_scale(float sum_of_squares, i64 features, float eps) {
    return 1.0f / std::sqrt(sum_of_squares / float(features) + eps);
}

template <typename T>
void rms_norm_of(const T* x, i64 x_step, const T* weight, T* y, i64 num_rows, i64 width,
                 i64 features, float eps, i64 num_threads) {
    for_rows(num_rows, width, num_threads, [=](i64 row) {
        for (i64 start = 0; start < width; start += features) {
            const T* in = x + row * x_step + start;
            const float squares =
                sum_of<T>(features, [=](auto i) { return at(in, i) * at(in, i); });
            normalize(in, weight, y + row * width + start, features,
                      rms_scale(squares, features, eps));
        }
    });
}

template <typename T>
void rms_norm_gradient_of(const T* grad, i64 grad_step, const T* x, i64 x_step, const T* weight,
                          T* x_grad, T* y, i64 num_rows, i64 width, i64 features, float eps,
                          i64 num_threads) {
    for_rows(num_rows, width, num_threads, [=](i64 row) {
        for (i64 start = 0; start < width; start += features) {
            const T *in = x + row * x_step + start, *out_grad = grad + row * grad_step + start;
            const float squares =
                sum_of<T>(features, [=](auto i) { return at(in, i) * at(in, i); });
            const float scale = rms_scale(squares, features, eps);
            const float along = sum_of<T>(features, [=](auto i) {
                return at(out_grad, i) * at(weight, i) * (at(in, i) * scale);
            });
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

template <typename T>
void silu_mul_row(const T* gate, const T* up, T* y, i64 width) {
    for_places<T>(width, [=](auto i) { put(silu_times<T>(at(gate, i), at(up, i)), y, i); });
}

template <typename T, bool WITH_Y>
void silu_mul_gradient_row(const T* grad, const T* gate, const T* up, T* gate_grad, T* up_grad,
                           T* y, i64 width) {
    for_places<T>(width, [=](auto i) {
        const auto x = at(gate, i), other = at(up, i), out_grad = at(grad, i);
        const auto slope = sigmoid(x), activated = rounded<T>(x * slope);
        put(rounded<T>(out_grad * other) * slope * (1.0f + x * (1.0f - slope)), gate_grad, i);
        put(out_grad * activated, up_grad, i);
        if (WITH_Y) put(activated * other, y, i);
    });
}

// Turns each head's halves (a, b) into (a cos - b sin, b cos + a sin). REVERSE: by the opposite
// angle, with each sine at the place where the forward pass used it.
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
            const auto kept_a = rounded<T>(a * at(cos, i)),
                       kept_b = rounded<T>(b * at(cos + half, i));
            put(REVERSE ? kept_a + of_b : kept_a - of_b, first_out, i);
            put(REVERSE ? kept_b - of_a : kept_b + of_a, second_out, i);
        });
    }
}

template <typename T>
void cross_entropy_of(const T* logits, i64 step, const i64* targets, float* loss, bool* correct,
                      float* log_sum, i64 num_rows, i64 vocabulary, i64 num_threads) {
    for_rows(num_rows, vocabulary, num_threads, [=](i64 row) {
        const T* in = logits + row * step;
        const float most = maximum(in, vocabulary), target = widen(in[targets[row]]);
        const float sum =
            sum_of<T>(vocabulary, [=](auto i) { return exponential(at(in, i) - most); });
        log_sum[row] = std::log(sum) + most;
        loss[row] = log_sum[row] - target;
        correct[row] = target == most;
    });
}

template <typename T>
void cross_entropy_gradient_of(const T* logits, i64 step, const i64* targets, const float* log_sum,
                               const float* loss_grad, T* grad, i64 num_rows, i64 vocabulary,
                               i64 num_threads) {
    for_rows(num_rows, vocabulary, num_threads, [=](i64 row) {
        const T* in = logits + row * step;
        const i64 target = targets[row];
        const float norm = log_sum[row], factor = loss_grad[row], of_target = widen(in[target]);
        T* out = grad + row * vocabulary;
        for_places<T>(vocabulary,
                      [=](auto i) { put(exponential(at(in, i) - norm) * factor, out, i); });
        narrow((exponential(of_target - norm) - 1.0f) * factor, out[target]);
    });
}

// Threads share a row's chunks, too, since there may be one row. The largest of a row and of its
// chunks say which chunk to search.
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
        auto is_it = [=](float value) {
            return value == largest || (value != value && largest != largest);
        };
        const i64 chunk = std::find_if(most, most + num_chunks, is_it) - most;
        const T *start = x + row * step, *end = start + width;
        places[row] =
            std::find_if(start + chunk * CHUNK, end, [=](T it) { return is_it(widen(it)); }) -
            start;
    }
}

}  // namespace

// Runs it with `T` as bfloat16 or float32.
#define FOR_DTYPE(is_bfloat16, ...)                                                                \
    do {                                                                                           \
        if (is_bfloat16) {                                                                         \
            using T = bf16;                                                                        \
            __VA_ARGS__;                                                                           \
        } else {                                                                                   \
            using T = float;                                                                       \
            __VA_ARGS__;                                                                           \
        }                                                                                          \
    } while (0)

template <typename T>
static const T* in(const void* x) {
    return static_cast<const T*>(x);
}

template <typename T>
static T* out(void* x) {
    return static_cast<T*>(x);
}

// Writes y [n, width] from x [n, width] and weight [features]: each run of `features` of a row by
// itself.
extern "C" void rms_norm(const void* x, i64 x_step, const void* weight, void* y, i64 num_rows,
                         i64 width, i64 features, double eps, i64 is_bfloat16, i64 num_threads) {
    FOR_DTYPE(is_bfloat16, rms_norm_of(in<T>(x), x_step, in<T>(weight), out<T>(y), num_rows, width,
                                       features, float(eps), num_threads));
}

// Writes x_grad and, unless it is null, y [n, width], from grad, x [n, width] and weight
// [features].
extern "C" void rms_norm_gradient(const void* grad, i64 grad_step, const void* x, i64 x_step,
                                  const void* weight, void* x_grad, void* y, i64 num_rows,
                                  i64 width, i64 features, double eps, i64 is_bfloat16,
                                  i64 num_threads) {
    FOR_DTYPE(is_bfloat16, rms_norm_gradient_of(in<T>(grad), grad_step, in<T>(x), x_step,
                                                in<T>(weight), out<T>(x_grad), out<T>(y), num_rows,
                                                width, features, float(eps), num_threads));
}

// Writes y [n, width] from gate, up [n, width].
extern "C" void silu_mul(const void* gate, i64 gate_step, const void* up, i64 up_step, void* y,
                         i64 num_rows, i64 width, i64 is_bfloat16, i64 num_threads) {
    FOR_DTYPE(is_bfloat16, for_rows(num_rows, width, num_threads, [=](i64 i) {
                  silu_mul_row(in<T>(gate) + i * gate_step, in<T>(up) + i * up_step,
                               out<T>(y) + i * width, width);
              }));
}

// Writes gate_grad, up_grad and, unless it is null, y [n, width], from grad, gate, up [n, width].
extern "C" void silu_mul_gradient(const void* grad, i64 grad_step, const void* gate, i64 gate_step,
                                  const void* up, i64 up_step, void* gate_grad, void* up_grad,
                                  void* y, i64 num_rows, i64 width, i64 is_bfloat16,
                                  i64 num_threads) {
    FOR_DTYPE(is_bfloat16, for_rows(num_rows, width, num_threads, [=](i64 i) {
                  auto reverse =
                      y ? silu_mul_gradient_row<T, true> : silu_mul_gradient_row<T, false>;
                  reverse(in<T>(grad) + i * grad_step, in<T>(gate) + i * gate_step,
                          in<T>(up) + i * up_step, out<T>(gate_grad) + i * width,
                          out<T>(up_grad) + i * width, y ? out<T>(y) + i * width : nullptr, width);
              }));
}

// Writes y [n, width] = a + b, both [n, width].
extern "C" void add(const void* a, i64 a_step, const void* b, i64 b_step, void* y, i64 num_rows,
                    i64 width, i64 is_bfloat16, i64 num_threads) {
    FOR_DTYPE(is_bfloat16, for_rows(num_rows, width, num_threads, [=](i64 row) {
                  const T *one = in<T>(a) + row * a_step, *other = in<T>(b) + row * b_step;
                  T* sum = out<T>(y) + row * width;
                  for_places<T>(width, [=](auto i) { put(at(one, i) + at(other, i), sum, i); });
              }));
}

// Writes y [n, width] from x [n, width], cos and sin [n, head width]; reverse: the gradient of x
// from that of y.
extern "C" void rope(const void* x, i64 x_step, const void* cos, i64 cos_step, const void* sin,
                     i64 sin_step, void* y, i64 num_rows, i64 width, i64 head_width, i64 reverse,
                     i64 is_bfloat16, i64 num_threads) {
    FOR_DTYPE(is_bfloat16, for_rows(num_rows, width, num_threads, [=](i64 i) {
                  auto rotate = reverse ? rope_row<T, true> : rope_row<T, false>;
                  rotate(in<T>(x) + i * x_step, in<T>(cos) + i * cos_step,
                         in<T>(sin) + i * sin_step, out<T>(y) + i * width, width, head_width);
              }));
}

// Writes loss, correct and log_sum [n] from logits [n, vocabulary] and targets [n], each below the
// vocabulary.
extern "C" void cross_entropy(const void* logits, i64 step, const i64* targets, float* loss,
                              bool* correct, float* log_sum, i64 num_rows, i64 vocabulary,
                              i64 is_bfloat16, i64 num_threads) {
    FOR_DTYPE(is_bfloat16, cross_entropy_of(in<T>(logits), step, targets, loss, correct, log_sum,
                                            num_rows, vocabulary, num_threads));
}

// Writes grad [n, vocabulary], from log_sum and loss_grad [n], too. It may be the logits, if these
// lie without gaps.
extern "C" void cross_entropy_gradient(const void* logits, i64 step, const i64* targets,
                                       const float* log_sum, const float* loss_grad, void* grad,
                                       i64 num_rows, i64 vocabulary, i64 is_bfloat16,
                                       i64 num_threads) {
    FOR_DTYPE(is_bfloat16,
              cross_entropy_gradient_of(in<T>(logits), step, targets, log_sum, loss_grad,
                                        out<T>(grad), num_rows, vocabulary, num_threads));
}

// Writes the place of the largest of each row of x [n, width], the first of equal ones; width is
// above 0. A NaN is larger than any number.
extern "C" void argmax(const void* x, i64 step, i64* places, i64 num_rows, i64 width,
                       i64 is_bfloat16, i64 num_threads) {
    FOR_DTYPE(is_bfloat16, argmax_of(in<T>(x), step, places, num_rows, width, num_threads));
}
