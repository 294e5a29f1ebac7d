// Causal attention, backward: the algorithm of FlashAttention-2 (arXiv 2307.08691, section 3) on
// tiles (`tiles.h`) that stay in a core's cache with everything that belongs to them.
//
// S^T = K Q^T and dP^T = V dO^T give P^T and dS^T; then dV += P^T dO, dK += dS^T Q, and dQ^T += K^T
// dS^T.

#include "tiles/attention_tiles.h"

#ifdef HAS_TILES

namespace {

struct Problem : Shape {
    const bf16 *grad, *q, *k, *v, *out;
    const float* lse;
    bf16* q_grad;
    float *k_grad, *v_grad;
    float scale;

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
        auto count = [&](size_t elements, size_t size) {
            return num_bytes += elements * size, num_bytes;
        };
        count(3 * keys + 4 * block + 3 * tile, sizeof(bf16));
        count(2 * keys + block + 4 * BLOCK * BLOCK + 2 * TILE, sizeof(float));
        char* at = scratch.take(num_bytes);
        auto floats = [&](size_t n) { return take<float>(at, n); };
        auto halves = [&](size_t n) { return take<bf16>(at, n); };
        k_sum_ = floats(keys), v_sum_ = floats(keys);
        q_grad_ = floats(block);
        for (int turn = 0; turn < 2; turn++)
            scores_[turn] = floats(BLOCK * BLOCK), p_grads_[turn] = floats(BLOCK * BLOCK);
        norm_ = floats(TILE), delta_ = floats(TILE);
        k_ = halves(keys), v_ = halves(keys), k_columns_ = halves(keys);
        q_columns_ = halves(block), q_rows_ = halves(block), grad_columns_ = halves(block),
        grad_rows_ = halves(block);
        weights_ = halves(tile), score_grads_ = halves(tile), score_grad_pairs_ = halves(tile);
    }

    // The additions of this thread to a key head whose sums another thread begins.
    i64 shared_head = -1;
    std::vector<float> shared_sums;

    // Runs units, which are blocks of queries, by head. is_shared: whether the first one's key head
    // is another thread's.
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
            const i64 key_head = unit / p_.units_of_key_head();
            if (key_head != head) {
                finish();
                begin(head = key_head);
            }
            reverse(p_.head_of(unit), p_.block_of(unit));
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

    // Arranges keys and values of a head in one piece, zeros after them.
    void begin(i64 head) {
        const i64 keys = p_.padded_keys();
        collect(p_, p_.k, head, k_);
        collect(p_, p_.v, head, v_);
        for (i64 key = 0; key < keys; key += TILE)
            by_columns(k_ + key * width_, width_, TILE, TILE, width_, k_columns_ + key * width_);
        std::memset(k_sum_, 0, keys * width_ * sizeof(float));
        std::memset(v_sum_, 0, keys * width_ * sizeof(float));
    }

    void reverse(i64 head, i64 block) {
        const i64 first = block * TILE, step = p_.num_heads * width_,
                  at = (first * p_.num_heads + head) * width_;
        const int n = int(std::min<i64>(TILE, p_.num_rows - first)), padded = int(round_up(n, 32));
        by_column_pairs(p_.q + at, step, n, padded, width_, q_columns_);
        by_row_pairs(p_.q + at, step, n, padded, width_, q_rows_);
        by_column_pairs(p_.grad + at, step, n, padded, width_, grad_columns_);
        by_row_pairs(p_.grad + at, step, n, padded, width_, grad_rows_);
        // A missing query has no probabilities.
        for (int i = 0; i < padded; i++)
            norm_[i] = i < n ? p_.lse[(first + i) * p_.num_heads + head] * LOG2_E : 1e30f;
        for (int i = 0; i < padded; i += 16) {
            const i64 start = at + i * step;
            const __m512 delta =
                products_of_rows(p_.grad + start, p_.out + start, step, n - i, width_);
            _mm512_store_ps(delta_ + i, delta * _mm512_set1_ps(p_.scale));
        }
        const i64 position = p_.earlier() + first, end = position + n;
        for (i64 key = p_.first_key(block); key < end; key += TILE) {
            const Tile tile{key, position, int(round_up(std::min<i64>(TILE, end - key), BLOCK)),
                            padded};
            differentiate(tile);
            add_products(tile, key > p_.first_key(block));
        }
        rows_of_columns(q_grad_, n, width_, nullptr, p_.q_grad + at, step);
    }

    // Computes the probabilities of a tile, and the gradients of its scores times the scale. While
    // the vectors work on one block, the tile registers work on the next.
    void differentiate(const Tile& tile) {
        int turn = 0, key_before = -1, query_before = 0;
        auto finish = [&] {
            if (key_before < 0) return;
            const bool is_masked =
                p_.is_masked(tile.key + key_before, BLOCK, tile.position + query_before, BLOCK);
            (this->*(is_masked ? &Worker::differentiate_block<true>
                               : &Worker::differentiate_block<false>))(tile, key_before,
                                                                       query_before, turn ^ 1);
        };
        for (int j = 0; j < tile.num_keys; j += BLOCK)
            for (int i = tile.first_query(j); i < tile.num_queries; i += BLOCK) {
                const bf16 *k = k_ + (tile.key + j) * width_, *v = v_ + (tile.key + j) * width_;
                settle();
                multiply<BLOCK, BLOCK, false>(width_, k, width_, q_columns_ + i * width_, BLOCK,
                                              scores_[turn], BLOCK);
                multiply<BLOCK, BLOCK, false>(width_, v, width_, grad_columns_ + i * width_, BLOCK,
                                              p_grads_[turn], BLOCK);
                settle();
                finish();
                turn ^= 1;
                key_before = j, query_before = i;
            }
        finish();
    }

    template <bool MASKED>
    void differentiate_block(const Tile& tile, int first_key, int first_query, int turn) {
        const __m512 to_log2 = _mm512_set1_ps(p_.scale * LOG2_E), scale = _mm512_set1_ps(p_.scale);
        bf16* pairs = score_grad_pairs_ + first_query * TILE + first_key * BLOCK;
        for (int i = 0; i < BLOCK; i += 16) {
            const __m512 norm = _mm512_load_ps(norm_ + first_query + i),
                         delta = _mm512_load_ps(delta_ + first_query + i);
            for (int j = 0; j < BLOCK; j += 2) {
                const i64 at = (first_key + j) * TILE + first_query + i;
                __m512 grads[2], weights[2];
                for (int e = 0; e < 2; e++) {
                    const int own = (j + e) * BLOCK + i;
                    __m512 weight =
                        exp2(_mm512_fmsub_ps(_mm512_load_ps(scores_[turn] + own), to_log2, norm));
                    if (MASKED)
                        weight = _mm512_maskz_mov_ps(
                            p_.seen(tile.key + first_key + j + e, tile.position + first_query + i),
                            weight);
                    weights[e] = weight;
                    grads[e] = _mm512_mul_ps(
                        weight,
                        _mm512_fmsub_ps(_mm512_load_ps(p_grads_[turn] + own), scale, delta));
                }
                store_both(_mm512_cvtne2ps_pbh(weights[1], weights[0]), weights_ + at);
                const __m512bh both = _mm512_cvtne2ps_pbh(grads[1], grads[0]);
                store_both(both, score_grads_ + at);
                _mm512_storeu_si512(pairs + (j / 2 * BLOCK + i) * 2, interleaved((__m512i)both));
            }
        }
    }

    // Stores halves of two rows of a tile.
    static void store_both(__m512bh both, bf16* x) {
        store(x, (__m256bh)_mm512_castsi512_si256((__m512i)both));
        store(x + TILE, (__m256bh)_mm512_extracti64x4_epi64((__m512i)both, 1));
    }

    void add_products(const Tile& tile, bool has_q_grad) {
        settle();
        for (int j = 0; j < tile.num_keys; j += BLOCK) {
            const int i = tile.first_query(j), inner = tile.num_queries - i;
            if (inner <= 0) continue;
            const i64 sum = (tile.key + j) * width_;
            for (int d = 0; d < width_; d += BLOCK) {
                multiply<BLOCK, BLOCK, true>(inner, weights_ + j * TILE + i, TILE,
                                             grad_rows_ + i * width_ + d * 2, width_,
                                             v_sum_ + sum + d, width_);
                multiply<BLOCK, BLOCK, true>(inner, score_grads_ + j * TILE + i, TILE,
                                             q_rows_ + i * width_ + d * 2, width_, k_sum_ + sum + d,
                                             width_);
            }
        }
        auto add = has_q_grad ? multiply<BLOCK, BLOCK, true> : multiply<BLOCK, BLOCK, false>;
        for (int i = 0; i < tile.num_queries; i += BLOCK)
            for (int d = 0; d < width_; d += BLOCK)
                add(tile.end_key(i), k_columns_ + tile.key * width_ + d * TILE, TILE,
                    score_grad_pairs_ + i * TILE, BLOCK, q_grad_ + d * TILE + i, TILE);
        settle();
    }

    const Problem& p_;
    const int width_;
    // By key: the head's keys and values by rows, the keys by columns, and the sums of both
    // gradients.
    bf16 *k_, *v_, *k_columns_;
    float *k_sum_, *v_sum_;
    // By query of a block, in the orders that products read.
    bf16 *q_columns_, *q_rows_, *grad_columns_, *grad_rows_;
    float *q_grad_, *norm_, *delta_;
    // A tile.
    float *scores_[2], *p_grads_[2];
    bf16 *weights_, *score_grads_, *score_grad_pairs_;
};

void reverse(const Problem& problem, i64 num_threads) {
    const std::vector<i64> starts = problem.shares(num_threads);
    const int threads = int(starts.size()) - 1;
    // A key head's sums belong to the thread that begins it. Additions of the next threads wait
    // until that one is done.
    std::vector<std::pair<i64, std::vector<float>>> shared(threads);
#pragma omp parallel num_threads(threads)
    {
        Tiles registers;
        // There may be fewer threads than were asked for.
        for (int part = omp_get_thread_num(); part < threads; part += omp_get_num_threads()) {
            Worker worker(problem);
            worker.run(starts[part], starts[part + 1],
                       starts[part] % problem.units_of_key_head() != 0);
            shared[part] = {worker.shared_head, std::move(worker.shared_sums)};
        }
    }
    for (auto& [head, sums] : shared)
        if (!sums.empty()) problem.add_key_grads(head, sums.data(), sums.data() + sums.size() / 2);
}

}  // namespace

// grad, q, out and q_grad [n, heads, width], k and v [m, key heads, width], lse [n, heads]; k_grad
// and v_grad [m, key heads, width] are added to. segments: first row, number of rows, first key and
// number of keys of each. width: a multiple of 32. window: number of keys that a query sees, or 0.
//
// The order of the sums depends on the number of threads, and on nothing else.
extern "C" void attention_backward(const bf16* grad, const bf16* q, const bf16* k, const bf16* v,
                                   const bf16* out, const float* lse, bf16* q_grad, float* k_grad,
                                   float* v_grad, const i64* segments, i64 num_segments,
                                   i64 num_heads, i64 num_key_heads, i64 width, i64 window,
                                   double scale, i64 num_threads) {
    for (const i64* s = segments; s < segments + 4 * num_segments; s += 4) {
        const i64 row = s[0] * num_heads * width, key = s[2] * num_key_heads * width;
        reverse(Problem{{s[1], s[3], num_heads, num_key_heads, width, window},
                        grad + row,
                        q + row,
                        k + key,
                        v + key,
                        out + row,
                        lse + s[0] * num_heads,
                        q_grad + row,
                        k_grad + key,
                        v_grad + key,
                        float(scale)},
                num_threads);
    }
}

#endif
