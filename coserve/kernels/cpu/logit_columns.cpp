// The next-token loss of logits whose columns are rows, [vocabulary, n]: as a product leaves them that takes the
// weights of the head as its left factor, which is the faster way for many rows (`products.py`). All vectors hold 16
// rows. The gradient is [n, vocabulary] again, as the product after it reads it: it is turned while it is in registers.

#include "amx.h"

#ifdef HAS_AMX

#include <cmath>
#include <limits>

#include "attention_tiles.h"

namespace {

// Words of the vocabulary that are worked on at once: with some hundred rows they stay in the inner caches.
const i64 CHUNK = 128;

thread_local Scratch shared_scratch;

// Less than any logit but minus infinity, and a number: a difference of two of these is one.
const float LEAST = -std::numeric_limits<float>::max();

inline __mmask16 first_of(i64 count) { return count >= 16 ? 0xffff : (1u << count) - 1; }

inline __m512 load(const bf16* x, __mmask16 mask) {
    __m256i bits = _mm256_maskz_loadu_epi16(mask, x);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}

inline __m512 exponential(__m512 x) { return exp2(_mm512_mul_ps(x, _mm512_set1_ps(LOG2_E))); }

// The larger; a NaN, once there is one.
inline __m512 larger(__m512 x, __m512 most) {
    __mmask16 is_x = _mm512_cmp_ps_mask(x, most, _CMP_GT_OQ) | _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    return _mm512_mask_blend_ps(is_x, most, x);
}

}  // namespace

// logits [vocabulary, n] without gaps, targets [n] -> loss, correct and log_sum as in rows.cpp.
extern "C" void cross_entropy_of_columns(const bf16* logits, const i64* targets, float* loss, bool* correct,
                                         float* log_sum, i64 n, i64 vocabulary, i64 num_threads) {
    const i64 padded = round_up(n, 16);
    // Of each thread: the largest of each row, the sum of its exponentials beside that, and the largest of a chunk.
    float* scratch = reinterpret_cast<float*>(shared_scratch.take(3 * num_threads * padded * sizeof(float)));
    float *all_most = scratch, *all_sums = scratch + num_threads * padded;
#pragma omp parallel num_threads(num_threads)
    {
        const i64 thread = omp_get_thread_num(), threads = omp_get_num_threads();
        const i64 start = vocabulary * thread / threads, end = vocabulary * (thread + 1) / threads;
        float *most = all_most + thread * padded, *sums = all_sums + thread * padded;
        float* high = scratch + (2 * num_threads + thread) * padded;
        std::fill_n(most, padded, LEAST);
        std::fill_n(sums, padded, 0.0f);
        for (i64 first = start; first < end; first += CHUNK) {
            const i64 last = std::min(first + CHUNK, end);
            std::copy_n(most, padded, high);
            for (i64 word = first; word < last; word++)
                for (i64 i = 0; i < n; i += 16)
                    _mm512_storeu_ps(high + i,
                                     larger(load(logits + word * n + i, first_of(n - i)), _mm512_loadu_ps(high + i)));
            for (i64 i = 0; i < n; i += 16) {
                const __mmask16 mask = first_of(n - i);
                const __m512 now = _mm512_loadu_ps(high + i);
                __m512 sum = _mm512_setzero_ps();
                for (i64 word = first; word < last; word++)
                    sum = _mm512_add_ps(sum, exponential(_mm512_sub_ps(load(logits + word * n + i, mask), now)));
                const __m512 scale = exponential(_mm512_sub_ps(_mm512_loadu_ps(most + i), now));
                _mm512_storeu_ps(sums + i, _mm512_fmadd_ps(_mm512_loadu_ps(sums + i), scale, sum));
                _mm512_storeu_ps(most + i, now);
            }
        }
#pragma omp barrier
#pragma omp for
        for (i64 row = 0; row < n; row++) {
            float largest = LEAST, sum = 0.0f;
            for (i64 part = 0; part < threads; part++) {
                const float x = all_most[part * padded + row];
                largest = (x > largest) | (x != x) ? x : largest;
            }
            if (largest == LEAST) largest = -std::numeric_limits<float>::infinity();  // of such logits alone: no number
            for (i64 part = 0; part < threads; part++)
                sum += all_sums[part * padded + row] * std::exp(all_most[part * padded + row] - largest);
            const float target = widen(logits[targets[row] * n + row]);
            log_sum[row] = std::log(sum) + largest;
            loss[row] = log_sum[row] - target;
            correct[row] = target == largest;
        }
    }
}

// And log_sum, loss_grad [n] -> grad [n, vocabulary].
extern "C" void cross_entropy_gradient_of_columns(const bf16* logits, const i64* targets, const float* log_sum,
                                                  const float* loss_grad, bf16* grad, i64 n, i64 vocabulary,
                                                  i64 num_threads) {
    const i64 num_chunks = (vocabulary + CHUNK - 1) / CHUNK;
#pragma omp parallel num_threads(num_threads)
    {
#pragma omp for schedule(static)
        for (i64 chunk = 0; chunk < num_chunks; chunk++) {
            const i64 start = chunk * CHUNK, end = std::min(vocabulary, start + CHUNK);
            const bf16* next = logits + end * n;
            const i64 num_next = std::min(CHUNK, vocabulary - end) * n;
            for (i64 i = 0; i < num_next; i += 32) _mm_prefetch(next + i, _MM_HINT_T1);
            for (i64 i = 0; i < n; i += 16) {
                const __mmask16 mask = first_of(n - i);
                const __m512 norm = _mm512_maskz_loadu_ps(mask, log_sum + i);
                const __m512 factor = _mm512_maskz_loadu_ps(mask, loss_grad + i);
                auto of = [=](i64 word) {
                    if (word >= end) return _mm512_setzero_ps();
                    const __m512 x = load(logits + word * n + i, mask);
                    return _mm512_mul_ps(exponential(_mm512_sub_ps(x, norm)), factor);
                };
                for (i64 first = start; first < end; first += 32) {
                    const __mmask32 words = end - first >= 32 ? 0xffffffffu : (1u << (end - first)) - 1;
                    __m512i pairs[16];
                    for (i64 k = 0; k < 16; k++)
                        pairs[k] = interleaved((__m512i)_mm512_cvtne2ps_pbh(of(first + 2 * k + 1), of(first + 2 * k)));
                    transpose(pairs);
                    for (i64 k = 0; k < std::min<i64>(16, n - i); k++)
                        _mm512_mask_storeu_epi16(grad + (i + k) * vocabulary + first, words, pairs[k]);
                }
            }
        }
#pragma omp for
        for (i64 row = 0; row < n; row++) {
            const float x = widen(logits[targets[row] * n + row]) - log_sum[row];
            narrow((std::exp(x) - 1.0f) * loss_grad[row], grad[row * vocabulary + targets[row]]);
        }
    }
}

#endif
