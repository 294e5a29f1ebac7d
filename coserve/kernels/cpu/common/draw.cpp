// Draws a place of each row of scores: among all, or among the likeliest. Nothing is sorted: the
// smallest weight that is kept is found by bisection over the bits of a float, on ever fewer
// weights.

// As written: sums have an order.
#pragma GCC optimize("no-associative-math", "signed-zeros", "fp-contract=off")
#ifdef __AVX512F__  // GCC would use half of each register
#pragma GCC target("prefer-vector-width=512")
#endif

#include "kernels.h"
#include "common/row_formulas.h"

#include <algorithm>

namespace {

// Number of weights whose sum is float32; these sums are added up as doubles.
const i64 CHUNK = 1024;

thread_local Scratch scratch;

struct Part {
    i64 number;
    double sum;
};

inline int32_t bits_of(float x) {
    int32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits;
}

inline float of_bits(int32_t bits) {
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

// Sum of the weights from `least` on, and below `end`.
Part between(float least, float end, const float* weights, i64 n) {
    Part all = {0, 0};
    for (i64 start = 0; start < n; start += CHUNK) {
        const float* x = weights + start;
        const i64 count = std::min(CHUNK, n - start);
        all.sum += sum_of<float>(
            count, [=](i64 i) { return (x[i] >= least) & (x[i] < end) ? x[i] : 0.0f; });
        int32_t number = 0;
        for (i64 i = 0; i < count; i++) number += (x[i] >= least) & (x[i] < end);
        all.number += number;
    }
    return all;
}

// The kept part of a row: all weights above `least`, and the first `num_ties` that are equal to it.
struct Kept {
    float least;
    i64 num_ties;
    double sum;
};

// Returns the likeliest weights, up to the first with which `is_enough(number, sum)`. Overwrites
// `others` [n].
template <typename IsEnough>
Kept likeliest(const float* weights, i64 n, float* others, i64& num_equal, Part& above,
               IsEnough is_enough) {
    const float* left =
        weights;  // some, and all of those whose bits are from `low` on and below `high`
    i64 num_left = n;
    int32_t low = 0, high = bits_of(1.5f);  // the largest are 1, to rounding
    num_equal = n;
    above = {0, 0};
    while (high - low > 1) {
        const int32_t middle = low + (high - low) / 2;
        const Part part = between(of_bits(middle), of_bits(high), left, num_left);
        const Part more = {above.number + part.number, above.sum + part.sum};
        if (is_enough(more.number, more.sum)) {
            low = middle;
            num_equal = part.number;
        } else {
            high = middle;
            above = more;
            num_equal -= part.number;
        }
        if (2 * num_equal <= num_left) {
            const float least = of_bits(low), end = of_bits(high);
            i64 place = 0;
            for (i64 i = 0; i < num_left; i++) {
                const float x = left[i];
                others[place] = x;
                place += (x >= least) & (x < end);
            }
            left = others;
            num_left = place;
        }
    }
    return {of_bits(low), 0, 0};
}

i64 draw_from(const float* scores, i64 n, double uniform, i64 top_k, double top_p) {
    float* weights = reinterpret_cast<float*>(scratch.take((2 * n + 1) * sizeof(float)));
    float* others =
        weights + n;  // and one more, which is written before it is known not to be of them
    const float most = maximum(scores, n);
#pragma GCC ivdep
    for (i64 i = 0; i < n; i++) weights[i] = exponential(scores[i] - most);
    const double total = between(0, 2, weights, n).sum;
    if (!(total > 0.5)) return n - 1;  // no numbers
    Kept kept = {-1, 0, total};
    i64 num_equal = 0;
    Part above = {0, 0};
    if (0 < top_k && top_k < n) {
        kept = likeliest(weights, n, others, num_equal, above,
                         [=](i64 number, double) { return number >= top_k; });
        kept.num_ties = top_k - above.number;
        kept.sum = above.sum + double(kept.num_ties) * kept.least;
    }
    if (top_p < 1) {
        const double enough = top_p * kept.sum;
        Kept fewer = likeliest(weights, n, others, num_equal, above,
                               [=](i64 number, double sum) { return number > 0 && sum >= enough; });
        const double ties =
            fewer.least > 0 ? std::ceil((enough - above.sum) / fewer.least) : double(num_equal);
        fewer.num_ties = i64(std::min(std::max(ties, 1.0), double(num_equal)));
        if (fewer.least == kept.least) fewer.num_ties = std::min(fewer.num_ties, kept.num_ties);
        fewer.sum = above.sum + double(fewer.num_ties) * fewer.least;
        kept = fewer;
    }
    const double target = uniform * kept.sum;
    double sum = 0;
    i64 num_ties = kept.num_ties;
    for (i64 start = 0; start < n; start += CHUNK) {
        const float *x = weights + start, least = kept.least;
        const i64 count = std::min(CHUNK, n - start);
        i64 equal = 0;
        for (i64 i = 0; i < count; i++) equal += x[i] == least;
        equal = std::min(equal, num_ties);
        const double more =
            sum_of<float>(count, [=](i64 i) { return x[i] > least ? x[i] : 0.0f; }) +
            double(equal) * least;
        if (sum + more <= target) {
            sum += more;
            num_ties -= equal;
            continue;
        }
        for (i64 i = 0; i < count; i++) {
            if (x[i] < least || (x[i] == least && num_ties-- <= 0) || x[i] == 0) continue;
            sum += x[i];
            if (sum > target) return start + i;
        }
    }
    // These sums were rounded in another order: it is the last place.
    for (i64 i = n - 1; i >= 0; i--)
        if (weights[i] > std::max(kept.least, 0.0f)) return i;
    return std::find(weights, weights + n, kept.least) - weights;
}

}  // namespace

// Writes tokens [n], from scores [n, vocabulary] with a step from row to row and uniform, top_k,
// top_p [n]: the first place at which the cumulative probability of the kept places exceeds its
// share of uniform. top_k: number of the likeliest that are kept, all if not above 0; top_p:
// probability of which the fewest of these are kept.
extern "C" void draw(const float* scores, i64 step, const double* uniform, const i64* top_k,
                     const double* top_p, i64* tokens, i64 n, i64 vocabulary, i64 num_threads) {
#pragma omp parallel for schedule(dynamic) num_threads(int(std::min(n, num_threads)))
    for (i64 row = 0; row < n; row++)
        tokens[row] =
            draw_from(scores + row * step, vocabulary, uniform[row], top_k[row], top_p[row]);
}
