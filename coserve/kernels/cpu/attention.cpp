// Causal attention, backward, on AMX: the algorithm of FlashAttention-2 (arXiv 2307.08691, section 3) on tiles of 128
// queries × 128 keys, which with all that belongs to them stay in a core's cache.
//
// Everything is computed with keys along the rows, so that the scores of a tile, once rounded, are factors of the next
// products as they lie: S^T = K Q^T and dP^T = V dO^T give P^T and dS^T, and dV += P^T dO, dK += dS^T Q, and
// dQ^T += K^T dS^T.

#include "amx.h"

#ifdef HAS_TILES

#include <sys/syscall.h>
#include <unistd.h>

#include <vector>

namespace {

const int TILE = 128;
const float LOG2_E = 1.44269504f;

// C = A B, or C += A B, as `multiply` does for any multiples of 32.
template <bool ADD>
void product(int rows, int columns, int inner, const bf16* a, i64 a_step, const bf16* b, i64 b_step, float* c,
             i64 c_step) {
    settle();
    for (int i = 0; i < rows; i += 32)
        for (int j = 0; j < columns; j += 32)
            multiply<32, 32, ADD>(inner, a + i * a_step, a_step, b + j * 2, b_step, c + i * c_step + j, c_step);
    settle();
}

// 2^x, to 2e-7 of it; 0 or nearly for x below -150.
inline __m512 exp2(__m512 x) {
    x = _mm512_max_ps(x, _mm512_set1_ps(-150.0f));
    __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m512 rest = _mm512_sub_ps(x, whole);
    __m512 power = _mm512_set1_ps(1.3333558e-3f);
    for (float factor : {9.6181291e-3f, 5.5504109e-2f, 2.4022651e-1f, 6.9314718e-1f, 1.0f})
        power = _mm512_fmadd_ps(power, rest, _mm512_set1_ps(factor));
    return _mm512_scalef_ps(power, whole);
}

inline __m512i count_by(int step) {
    return _mm512_mullo_epi32(_mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0),
                              _mm512_set1_epi32(step));
}

inline void store(bf16* x, __m256bh values) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(x), (__m256i)values); }

// x [n, width] -> [padded / 2, width, 2], zeros behind n: a right factor of which x's rows are the inner dimension.
void by_row_pairs(const bf16* x, i64 step, int n, int padded, int width, bf16* out) {
    for (int row = 0; row < padded; row += 2)
        for (int i = 0; i < width; i += 16) {
            __m256i pair[2] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
            for (int e = 0; e < 2; e++)
                if (row + e < n)
                    pair[e] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + (row + e) * step + i));
            __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512(pair[0]), pair[1], 1);
            _mm512_storeu_si512(out + (row / 2 * width + i) * 2, interleaved(both));
        }
}

// 16 rows' pairs of elements; none of those behind n.
inline __m512i pairs_of_rows(const bf16* x, i64 step, i64 row, i64 n, int i) {
    __mmask16 there = row + 16 <= n ? 0xffff : row >= n ? 0 : (1u << (n - row)) - 1;
    return _mm512_mask_i32gather_epi32(_mm512_setzero_si512(), there, count_by(int(step * 2)), x + row * step + i, 1);
}

// x [n, width] -> [width / 2, padded, 2], zeros behind n: a right factor x^T.
void by_column_pairs(const bf16* x, i64 step, int n, int padded, int width, bf16* out, i64 out_step) {
    for (int row = 0; row < padded; row += 16)
        for (int i = 0; i < width; i += 2)
            _mm512_storeu_si512(out + (i / 2 * out_step + row) * 2, pairs_of_rows(x, step, row, n, i));
}

// x [n, width] -> x^T [width, padded], zeros behind n.
void transpose(const bf16* x, i64 step, i64 n, i64 padded, int width, bf16* out) {
    for (i64 row = 0; row < padded; row += 16)
        for (int i = 0; i < width; i += 2) {
            __m512i pairs = pairs_of_rows(x, step, row, n, i);
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i * padded + row), _mm512_cvtepi32_epi16(pairs));
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + (i + 1) * padded + row),
                                _mm512_cvtepi32_epi16(_mm512_srli_epi32(pairs, 16)));
        }
}

struct Problem {
    const bf16 *grad, *q, *k, *v, *out;
    const float* lse;
    bf16* q_grad;
    float *k_grad, *v_grad;
    i64 num_rows, num_keys, num_heads, num_key_heads, width, window;
    float scale;

    i64 earlier() const { return num_keys - num_rows; }
    i64 group() const { return num_heads / num_key_heads; }
    i64 num_blocks() const { return (num_rows + TILE - 1) / TILE; }
    i64 padded_keys() const { return round_up(num_keys, TILE); }

    // The tiles of keys that a block of queries sees: from this key on, and how many.
    i64 first_key(i64 block) const {
        return window ? std::max<i64>(0, earlier() + block * TILE - window + 1) / TILE * TILE : 0;
    }
    i64 num_tiles(i64 block) const {
        i64 end = std::min(earlier() + (block + 1) * TILE, num_keys);
        return (end - first_key(block) + TILE - 1) / TILE;
    }

    void add_key_grads(i64 head, const float* k_sum, const float* v_sum) const {
        for (i64 key = 0; key < num_keys; key++) {
            i64 at = (key * num_key_heads + head) * width;
            for (i64 i = 0; i < width; i++) {
                k_grad[at + i] += k_sum[key * width + i];
                v_grad[at + i] += v_sum[key * width + i];
            }
        }
    }
};

thread_local Scratch scratch;

// One thread's part: some blocks of queries of some heads, one after another.
class Worker {
  public:
    explicit Worker(const Problem& problem) : p_(problem), width_(int(problem.width)) {
        const size_t keys = p_.padded_keys() * width_, block = TILE * width_, tile = TILE * TILE;
        size_t num_bytes = 0;
        auto count = [&](size_t elements, size_t size) { return num_bytes += elements * size, num_bytes; };
        count(3 * keys + 4 * block + 3 * tile, sizeof(bf16));
        count(2 * keys + block + 2 * tile + 2 * TILE, sizeof(float));
        char* at = scratch.take(num_bytes);
        auto floats = [&](size_t n) { return take<float>(at, n); };
        auto halves = [&](size_t n) { return take<bf16>(at, n); };
        k_sum_ = floats(keys), v_sum_ = floats(keys);
        q_grad_ = floats(block), scores_ = floats(tile), p_grads_ = floats(tile);
        norm_ = floats(TILE), delta_ = floats(TILE);
        k_ = halves(keys), v_ = halves(keys), k_columns_ = halves(keys);
        q_columns_ = halves(block), q_rows_ = halves(block), grad_columns_ = halves(block), grad_rows_ = halves(block);
        weights_ = halves(tile), score_grads_ = halves(tile), score_grad_pairs_ = halves(tile);
    }

    // A key head whose sums another thread begins: what this one adds to them.
    i64 shared_head = -1;
    std::vector<float> shared_sums;

    // Units are blocks of queries, by head; `is_shared`: whether the first one's key head is another thread's.
    void run(i64 first_unit, i64 end_unit, bool is_shared) {
        i64 head = -1;
        auto finish = [&] {
            if (head < 0) return;
            if (is_shared) {
                shared_head = head;
                shared_sums.assign(k_sum_, k_sum_ + p_.padded_keys() * width_);
                shared_sums.insert(shared_sums.end(), v_sum_, v_sum_ + p_.padded_keys() * width_);
                is_shared = false;
            } else {
                p_.add_key_grads(head, k_sum_, v_sum_);
            }
        };
        for (i64 unit = first_unit; unit < end_unit; unit++) {
            i64 query_head = unit / p_.num_blocks();
            if (query_head / p_.group() != head) {
                finish();
                begin(head = query_head / p_.group());
            }
            reverse(query_head, unit % p_.num_blocks());
        }
        finish();
    }

  private:
    template <typename T>
    static T* take(char*& at, size_t elements) {
        T* start = reinterpret_cast<T*>(at);
        at += elements * sizeof(T);
        return start;
    }

    // Keys and values of a head in one piece, zeros behind them.
    void begin(i64 head) {
        const size_t row = width_ * sizeof(bf16), keys = p_.padded_keys();
        std::memset(static_cast<void*>(k_ + p_.num_keys * width_), 0, (keys - p_.num_keys) * row);
        std::memset(static_cast<void*>(v_ + p_.num_keys * width_), 0, (keys - p_.num_keys) * row);
        for (i64 key = 0; key < p_.num_keys; key++) {
            std::memcpy(k_ + key * width_, p_.k + (key * p_.num_key_heads + head) * width_, row);
            std::memcpy(v_ + key * width_, p_.v + (key * p_.num_key_heads + head) * width_, row);
        }
        transpose(k_, width_, keys, keys, width_, k_columns_);
        std::memset(k_sum_, 0, keys * width_ * sizeof(float));
        std::memset(v_sum_, 0, keys * width_ * sizeof(float));
    }

    void reverse(i64 head, i64 block) {
        const i64 first = block * TILE, step = p_.num_heads * width_, at = (first * p_.num_heads + head) * width_;
        const int n = int(std::min<i64>(TILE, p_.num_rows - first)), padded = int(round_up(n, 32));
        by_column_pairs(p_.q + at, step, n, padded, width_, q_columns_, TILE);
        by_row_pairs(p_.q + at, step, n, padded, width_, q_rows_);
        by_column_pairs(p_.grad + at, step, n, padded, width_, grad_columns_, TILE);
        by_row_pairs(p_.grad + at, step, n, padded, width_, grad_rows_);
        for (int i = 0; i < padded; i++) {
            // A query that is not there has no probabilities.
            norm_[i] = i < n ? p_.lse[(first + i) * p_.num_heads + head] * LOG2_E : 1e30f;
            __m512 sum = _mm512_setzero_ps();
            for (int d = 0; i < n && d < width_; d += 16)
                sum = _mm512_fmadd_ps(load(p_.grad + at + i * step + d), load(p_.out + at + i * step + d), sum);
            delta_[i] = _mm512_reduce_add_ps(sum) * p_.scale;
        }
        const i64 position = p_.earlier() + first, end = position + n;
        bool is_first = true;
        for (i64 key = p_.first_key(block); key < end; key += TILE, is_first = false) {
            const int m = int(round_up(std::min<i64>(TILE, end - key), 32));
            product<false>(m, padded, width_, k_ + key * width_, width_, q_columns_, TILE, scores_, TILE);
            product<false>(m, padded, width_, v_ + key * width_, width_, grad_columns_, TILE, p_grads_, TILE);
            bool is_masked = key + m - 1 > position || (p_.window && key <= position + padded - 1 - p_.window);
            is_masked ? differentiate<true>(m, padded, key, position) : differentiate<false>(m, padded, key, position);
            product<true>(m, width_, padded, weights_, TILE, grad_rows_, width_, v_sum_ + key * width_, width_);
            product<true>(m, width_, padded, score_grads_, TILE, q_rows_, width_, k_sum_ + key * width_, width_);
            auto add = is_first ? product<false> : product<true>;
            add(width_, padded, m, k_columns_ + key, p_.padded_keys(), score_grad_pairs_, TILE, q_grad_, TILE);
        }
        const __m512i columns = count_by(TILE * 4);
        for (int i = 0; i < n; i++)
            for (int d = 0; d < width_; d += 16) {
                __m512 row = _mm512_i32gather_ps(columns, q_grad_ + d * TILE + i, 1);
                store(p_.q_grad + at + i * step + d, _mm512_cvtneps_pbh(row));
            }
    }

    // Scores and gradients of probabilities -> probabilities, and gradients of scores times the scale; [keys, queries].
    template <bool MASKED>
    void differentiate(int num_keys, int num_queries, i64 key, i64 position) {
        const __m512 to_log2 = _mm512_set1_ps(p_.scale * LOG2_E), scale = _mm512_set1_ps(p_.scale);
        for (int i = 0; i < num_queries; i += 16) {
            const __m512 norm = _mm512_load_ps(norm_ + i), delta = _mm512_load_ps(delta_ + i);
            const __m512i last = _mm512_add_epi32(count_by(1), _mm512_set1_epi32(int(position + i)));
            const __m512i before = _mm512_sub_epi32(last, _mm512_set1_epi32(int(p_.window)));
            for (int j = 0; j < num_keys; j += 2) {
                __m512 grads[2];
                for (int e = 0; e < 2; e++) {
                    const int at = (j + e) * TILE + i;
                    __m512 weight = exp2(_mm512_fmsub_ps(_mm512_load_ps(scores_ + at), to_log2, norm));
                    if (MASKED) {
                        const __m512i own = _mm512_set1_epi32(int(key + j + e));
                        __mmask16 seen = _mm512_cmple_epi32_mask(own, last);
                        if (p_.window) seen &= _mm512_cmpgt_epi32_mask(own, before);
                        weight = _mm512_maskz_mov_ps(seen, weight);
                    }
                    store(weights_ + at, _mm512_cvtneps_pbh(weight));
                    grads[e] = _mm512_mul_ps(weight, _mm512_fmsub_ps(_mm512_load_ps(p_grads_ + at), scale, delta));
                }
                const __m512i both = (__m512i)_mm512_cvtne2ps_pbh(grads[1], grads[0]);
                store(score_grads_ + j * TILE + i, (__m256bh)_mm512_castsi512_si256(both));
                store(score_grads_ + (j + 1) * TILE + i, (__m256bh)_mm512_extracti64x4_epi64(both, 1));
                _mm512_storeu_si512(score_grad_pairs_ + (j / 2 * TILE + i) * 2, interleaved(both));
            }
        }
    }

    const Problem& p_;
    const int width_;
    // By key: the head's keys and values by rows, the keys by columns, and the sums of both gradients.
    bf16 *k_, *v_, *k_columns_;
    float *k_sum_, *v_sum_;
    // By query of a block, in the orders that products want.
    bf16 *q_columns_, *q_rows_, *grad_columns_, *grad_rows_;
    float *q_grad_, *norm_, *delta_;
    // A tile.
    float *scores_, *p_grads_;
    bf16 *weights_, *score_grads_, *score_grad_pairs_;
};

}  // namespace

// Ask the system for the tile registers (Linux: arch_prctl, ARCH_REQ_XCOMP_PERM, XTILEDATA); whether it gives them.
extern "C" int request_tiles() { return syscall(SYS_arch_prctl, 0x1023, 18) == 0; }

// grad, q, out and q_grad [n, heads, width], k and v [m, key heads, width], lse [n, heads]; k_grad and v_grad
// [m, key heads, width] are added to. width: a multiple of 32. window: 0, or how many keys a query sees.
//
// The sums are made in an order that depends on the number of threads, and on nothing else.
extern "C" void attention_backward(const bf16* grad, const bf16* q, const bf16* k, const bf16* v, const bf16* out,
                                   const float* lse, bf16* q_grad, float* k_grad, float* v_grad, i64 num_rows,
                                   i64 num_keys, i64 num_heads, i64 num_key_heads, i64 width, i64 window, double scale,
                                   i64 num_threads) {
    const Problem problem{grad,     q,        k,         v,             out,   lse,    q_grad,      k_grad, v_grad,
                          num_rows, num_keys, num_heads, num_key_heads, width, window, float(scale)};
    const i64 blocks = problem.num_blocks(), units = num_heads * blocks;
    // Each thread has a run of units, of as many tiles as the others'.
    const int threads = int(std::min(num_threads, units));
    i64 tiles = 0, done = 0;
    for (i64 block = 0; block < blocks; block++) tiles += num_heads * problem.num_tiles(block);
    std::vector<i64> starts{0};
    for (i64 unit = 0; unit < units; unit++) {
        while (i64(starts.size()) < threads && done * threads >= tiles * i64(starts.size())) starts.push_back(unit);
        done += problem.num_tiles(unit % blocks);
    }
    starts.resize(threads + 1, units);
    // A key head's sums belong to the thread that begins it; what the next ones add to it waits until that is done.
    const i64 units_of_key_head = problem.group() * blocks;
    std::vector<std::pair<i64, std::vector<float>>> shared(threads);
#pragma omp parallel num_threads(threads)
    {
        const int thread = omp_get_thread_num();
        Tiles registers;
        Worker worker(problem);
        worker.run(starts[thread], starts[thread + 1], starts[thread] % units_of_key_head != 0);
        shared[thread] = {worker.shared_head, std::move(worker.shared_sums)};
    }
    for (auto& [head, sums] : shared)
        if (!sums.empty()) problem.add_key_grads(head, sums.data(), sums.data() + sums.size() / 2);
}

#else

extern "C" int request_tiles() { return 0; }

extern "C" void attention_backward() {}

#endif
