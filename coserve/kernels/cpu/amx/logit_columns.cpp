// Next-token loss of logits that lie as [vocabulary, n]: so leaves them a product with the weights
// of the head as its left factor, which is the faster way for many rows (`products.py`).
//
// All vectors hold 16 rows. The gradient is [n, vocabulary] again, as the product after it reads
// it: it is transposed while it is in registers. That product is computed here, too, with the
// gradient of some hundred words at a time.

#include "tiles/tiles.h"

#ifdef HAS_AMX

#include <cmath>
#include <limits>

#include "tiles/attention_tiles.h"

namespace {

// Words of the vocabulary that are processed at once. With some hundred rows they stay in the inner
// caches.
const i64 CHUNK = 128;

// Words whose gradient and whose rows of the head's weight are multiplied at once. 32 columns of
// both stay in the inner cache, and all of them in the outer one beside the sums.
const i64 WORDS = 256;
// Distance between rows of the gradient and between panels of the weight: not whole pages, whose
// lines would share few places of the inner cache.
const i64 STEP = WORDS + 32, PANEL = 32 * WORDS + 64;

thread_local Scratch shared_scratch, own_scratch;

// Below any logit but minus infinity, and finite, so that two of these have a difference.
const float LEAST = -std::numeric_limits<float>::max();

inline __mmask16 first_of(i64 count) { return count >= 16 ? 0xffff : (1u << count) - 1; }

inline __m512 load(const bf16* x, __mmask16 mask) {
    __m256i bits = _mm256_maskz_loadu_epi16(mask, x);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}

inline __m512 exponential(__m512 x) { return exp2(_mm512_mul_ps(x, _mm512_set1_ps(LOG2_E))); }

// The larger; a NaN, once there is one.
inline __m512 larger(__m512 x, __m512 most) {
    __mmask16 is_x =
        _mm512_cmp_ps_mask(x, most, _CMP_GT_OQ) | _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    return _mm512_mask_blend_ps(is_x, most, x);
}

// Writes the gradients of 32 words' logits for up to 16 rows, row after row, 0 from `end` on. The
// target's comes from `of_target`. Fetches what is read next meanwhile.
inline void gradients(const bf16* logits, const float* log_sum, const float* loss_grad, i64 row,
                      i64 n, i64 word, i64 end, __m512i (&found)[16]) {
    const __mmask16 mask = first_of(n - row);
    const __m512 norm = _mm512_maskz_loadu_ps(mask, log_sum + row);
    const __m512 factor = _mm512_maskz_loadu_ps(mask, loss_grad + row);
    auto of = [=](i64 word) {
        if (word >= end) return _mm512_setzero_ps();
        const bf16* some = logits + word * n + row;
        _mm_prefetch(some + 32 * n, _MM_HINT_T0);
        return _mm512_mul_ps(exponential(_mm512_sub_ps(load(some, mask), norm)), factor);
    };
    for (i64 k = 0; k < 16; k++)
        found[k] =
            interleaved((__m512i)_mm512_cvtne2ps_pbh(of(word + 2 * k + 1), of(word + 2 * k)));
    ::transpose(found);
}

inline void of_target(bf16 logit, float log_sum, float loss_grad, bf16& grad) {
    narrow((std::exp(widen(logit) - log_sum) - 1.0f) * loss_grad, grad);
}

// Arranges rows of the weight [num_words, width] as panels [width / 32, WORDS / 2, 32, 2], a right
// factor of which these rows are the inner dimension; zeros from num_words up to `padded`.
void panels(const bf16* weight, i64 num_words, i64 padded, i64 width, bf16* out) {
    for (i64 word = 0; word < padded; word += 2) {
        const __mmask16 first = word < num_words ? 0xffff : 0,
                        second = word + 1 < num_words ? 0xffff : 0;
        const bf16* row = weight + word * width;
        for (i64 i = 0; i < width; i += 16) {
            const __m256i one = _mm256_maskz_loadu_epi16(first, row + i);
            const __m256i other = _mm256_maskz_loadu_epi16(second, row + width + i);
            const __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512(one), other, 1);
            _mm512_storeu_si512(out + i / 32 * PANEL + word * 32 + i % 32 * 2, interleaved(both));
        }
    }
}

}  // namespace

// Writes loss, correct and log_sum as in rows.cpp, from logits [vocabulary, n] without gaps and
// targets [n].
extern "C" void cross_entropy_of_columns(const bf16* logits, const i64* targets, float* loss,
                                         bool* correct, float* log_sum, i64 n, i64 vocabulary,
                                         i64 num_threads) {
    const i64 padded = round_up(n, 16);
    // For each thread: the largest logit of each row, the sum of its exponentials relative to that,
    // and the largest of a chunk.
    float* scratch =
        reinterpret_cast<float*>(shared_scratch.take(3 * num_threads * padded * sizeof(float)));
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
                    _mm512_storeu_ps(high + i, larger(load(logits + word * n + i, first_of(n - i)),
                                                      _mm512_loadu_ps(high + i)));
            for (i64 i = 0; i < n; i += 16) {
                const __mmask16 mask = first_of(n - i);
                const __m512 now = _mm512_loadu_ps(high + i);
                __m512 sum = _mm512_setzero_ps();
                for (i64 word = first; word < last; word++)
                    sum = _mm512_add_ps(
                        sum, exponential(_mm512_sub_ps(load(logits + word * n + i, mask), now)));
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
            if (largest == LEAST)
                largest =
                    -std::numeric_limits<float>::infinity();  // of such logits alone: no number
            for (i64 part = 0; part < threads; part++)
                sum += all_sums[part * padded + row] *
                       std::exp(all_most[part * padded + row] - largest);
            const float target = widen(logits[targets[row] * n + row]);
            log_sum[row] = std::log(sum) + largest;
            loss[row] = log_sum[row] - target;
            correct[row] = target == largest;
        }
    }
}

// Writes grad [n, vocabulary], from log_sum and loss_grad [n], too.
extern "C" void cross_entropy_gradient_of_columns(const bf16* logits, const i64* targets,
                                                  const float* log_sum, const float* loss_grad,
                                                  bf16* grad, i64 n, i64 vocabulary,
                                                  i64 num_threads) {
    const i64 num_chunks = (vocabulary + CHUNK - 1) / CHUNK;
#pragma omp parallel num_threads(num_threads)
    {
#pragma omp for schedule(static)
        for (i64 chunk = 0; chunk < num_chunks; chunk++) {
            const i64 start = chunk * CHUNK, end = std::min(vocabulary, start + CHUNK);
            for (i64 row = 0; row < n; row += 16)
                for (i64 word = start; word < end; word += 32) {
                    const __mmask32 words =
                        end - word >= 32 ? 0xffffffffu : (1u << (end - word)) - 1;
                    __m512i found[16];
                    gradients(logits, log_sum, loss_grad, row, n, word, end, found);
                    for (i64 k = 0; k < std::min<i64>(16, n - row); k++)
                        _mm512_mask_storeu_epi16(grad + (row + k) * vocabulary + word, words,
                                                 found[k]);
                }
        }
#pragma omp for
        for (i64 row = 0; row < n; row++) {
            const i64 target = targets[row];
            of_target(logits[target * n + row], log_sum[row], loss_grad[row],
                      grad[row * vocabulary + target]);
        }
    }
}

// Writes x_grad [n, width], the rounded gradient of the logits times the weight [vocabulary,
// width]; width is a multiple of 32. Each thread has the sums of a part of the vocabulary, and they
// are added up at the end. The gradient of a block of words is the left factor. The weight's rows
// are read once as they lie, and are arranged in pairs, 32 columns side by side.
extern "C" void cross_entropy_input_gradient_of_columns(const bf16* logits, const i64* targets,
                                                        const float* log_sum,
                                                        const float* loss_grad, const bf16* weight,
                                                        bf16* x_grad, i64 n, i64 vocabulary,
                                                        i64 width, i64 num_threads) {
    const i64 padded = round_up(n, 16), num_panels = width / 32;
    float* all_sums =
        reinterpret_cast<float*>(shared_scratch.take(num_threads * padded * width * sizeof(float)));
#pragma omp parallel num_threads(num_threads)
    {
        const i64 thread = omp_get_thread_num(), threads = omp_get_num_threads(),
                  groups = (vocabulary + 31) / 32;
        const i64 start = groups * thread / threads * 32;
        const i64 end = std::min(vocabulary, groups * (thread + 1) / threads * 32);
        float* sums = all_sums + thread * padded * width;  // [width / 32, padded, 32]
        std::fill_n(sums, padded * width, 0.0f);
        bf16* left = reinterpret_cast<bf16*>(
            own_scratch.take((padded * STEP + num_panels * PANEL) * sizeof(bf16)));
        bf16* right = left + padded * STEP;
        Tiles registers;
        for (i64 first = start; first < end; first += WORDS) {
            const i64 last = std::min(end, first + WORDS), inner = round_up(last - first, 32);
            for (i64 word = 0; word < inner; word += 32)
                for (i64 row = 0; row < n; row += 16) {
                    __m512i found[16];
                    gradients(logits, log_sum, loss_grad, row, n, first + word, last, found);
                    for (i64 k = 0; k < 16; k++)
                        _mm512_storeu_si512(left + (row + k) * STEP + word, found[k]);
                }
            for (i64 row = 0; row < n; row++) {
                const i64 target = targets[row];
                if (first <= target && target < last)
                    of_target(logits[target * n + row], log_sum[row], loss_grad[row],
                              left[row * STEP + target - first]);
            }
            panels(weight + first * width, last - first, inner, width, right);
            settle();
            for (i64 column = 0; column < num_panels; column++)
                for (i64 row = 0; row < padded; row += 32) {
                    auto run = row + 32 <= padded ? multiply<32, 32, true> : multiply<16, 32, true>;
                    run(int(inner), left + row * STEP, STEP, right + column * PANEL, 32,
                        sums + (column * padded + row) * 32, 32);
                }
            settle();
        }
#pragma omp barrier
#pragma omp for
        for (i64 row = 0; row < n; row++)
            for (i64 column = 0; column < num_panels; column++) {
                __m512 total[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
                for (i64 part = 0; part < threads; part++)
                    for (i64 half = 0; half < 2; half++)
                        total[half] = _mm512_add_ps(
                            total[half], _mm512_loadu_ps(all_sums + part * padded * width +
                                                         (column * padded + row) * 32 + half * 16));
                _mm512_storeu_si512(x_grad + row * width + column * 32,
                                    (__m512i)_mm512_cvtne2ps_pbh(total[1], total[0]));
            }
    }
}

#endif
