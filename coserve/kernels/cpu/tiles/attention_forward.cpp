// Causal attention, forward: the algorithm of FlashAttention-2 (arXiv 2307.08691, section 3) on
// tiles (`tiles.h`) that stay in a core's cache with everything that belongs to them.
//
// S^T = K Q^T gives P^T, and O^T += V^T P^T. Earlier sums are scaled down when a query meets a
// larger score.

#include "tiles/attention_tiles.h"

#ifdef HAS_TILES

#include <cmath>
#include <limits>

namespace {

struct Problem : Shape {
    const bf16 *q, *k, *v;
    bf16* out;
    float* lse;
    float scale;
};

thread_local Scratch scratch;

// One thread's part: some blocks of queries of some heads, one after another.
class Worker {
  public:
    explicit Worker(const Problem& problem) : p_(problem), width_(int(problem.width)) {
        const size_t keys = p_.padded_keys() * width_, block = TILE * width_, strip = TILE * BLOCK;
        char* at = scratch.take((block + 2 * strip + 3 * TILE) * sizeof(float) +
                                (2 * keys + block + strip) * sizeof(bf16));
        auto floats = [&](size_t n) {
            return at += n * sizeof(float), reinterpret_cast<float*>(at) - n;
        };
        auto halves = [&](size_t n) {
            return at += n * sizeof(bf16), reinterpret_cast<bf16*>(at) - n;
        };
        sums_ = floats(block), scores_[0] = floats(strip), scores_[1] = floats(strip);
        most_ = floats(TILE), norm_ = floats(TILE), shrinks_ = floats(TILE);
        k_ = halves(keys), v_columns_ = halves(keys), q_columns_ = halves(block),
        weight_pairs_ = halves(strip);
    }

    void run(i64 first_unit, i64 end_unit) {
        i64 head = -1;
        for (i64 unit = first_unit; unit < end_unit; unit++) {
            const i64 key_head = unit / p_.units_of_key_head();
            if (key_head != head) {
                head = key_head;
                collect(p_, p_.k, head, k_);
                for (i64 key = 0; key < p_.num_keys; key += TILE)
                    by_columns(p_.v + (key * p_.num_key_heads + head) * width_,
                               p_.num_key_heads * width_, p_.num_keys - key, TILE, width_,
                               v_columns_ + key * width_);
            }
            attend(p_.head_of(unit), p_.block_of(unit));
        }
    }

  private:
    void attend(i64 head, i64 block) {
        const i64 first = block * TILE, step = p_.num_heads * width_,
                  at = (first * p_.num_heads + head) * width_;
        const int n = int(std::min<i64>(TILE, p_.num_rows - first)), padded = int(round_up(n, 32));
        by_column_pairs(p_.q + at, step, n, padded, width_, q_columns_);
        std::fill(most_, most_ + TILE, -1e30f);
        std::fill(norm_, norm_ + TILE, 0.0f);
        std::memset(sums_, 0, TILE * width_ * sizeof(float));
        const i64 position = p_.earlier() + first, end = position + n;
        // While the vectors work on one strip of queries, the tile registers work on the next.
        Tile tile{}, tile_before{};
        int turn = 0, query_before = -1;
        for (i64 key = p_.first_key(block); key < end; key += TILE) {
            tile = {key, position, int(round_up(std::min<i64>(TILE, end - key), BLOCK)), padded};
            for (int i = tile.first_query(0); i < padded; i += BLOCK, turn ^= 1) {
                settle();
                for (int j = 0; j < tile.end_key(i); j += BLOCK)
                    multiply<BLOCK, BLOCK, false>(width_, k_ + (key + j) * width_, width_,
                                                  q_columns_ + i * width_, BLOCK,
                                                  scores_[turn] + j * BLOCK, BLOCK);
                settle();
                if (query_before >= 0) add(tile_before, query_before, turn ^ 1);
                tile_before = tile, query_before = i;
            }
        }
        add(tile_before, query_before, turn ^ 1);
        for (int i = 0; i < padded; i += 16)
            _mm512_store_ps(shrinks_ + i,
                            _mm512_div_ps(_mm512_set1_ps(1.0f), _mm512_load_ps(norm_ + i)));
        rows_of_columns(sums_, n, width_, shrinks_, p_.out + at, step);
        for (int i = 0; i < n; i++)
            p_.lse[(first + i) * p_.num_heads + head] = most_[i] / LOG2_E + std::log(norm_[i]);
    }

    // Adds the values of a tile's keys, weighted by the attention of a strip of queries.
    void add(const Tile& tile, int first, int turn) {
        const int num_keys = tile.end_key(first);
        const bool is_masked = p_.is_masked(tile.key, num_keys, tile.position + first, BLOCK);
        is_masked ? weigh<true>(tile, num_keys, first, turn)
                  : weigh<false>(tile, num_keys, first, turn);
        for (int d = 0; d < width_; d++)
            for (int i = first; i < first + BLOCK; i += 16) {
                float* sum = sums_ + d * TILE + i;
                _mm512_store_ps(sum,
                                _mm512_mul_ps(_mm512_load_ps(sum), _mm512_load_ps(shrinks_ + i)));
            }
        settle();
        for (int d = 0; d < width_; d += BLOCK)
            multiply<BLOCK, BLOCK, true>(num_keys, v_columns_ + tile.key * width_ + d * TILE, TILE,
                                         weight_pairs_, BLOCK, sums_ + d * TILE + first, TILE);
        settle();
    }

    // Turns scores [keys, queries] into weights relative to the largest score so far, as pairs of
    // keys; adds up the weights; and finds the factor by which earlier sums shrink.
    template <bool MASKED>
    void weigh(const Tile& tile, int num_keys, int first, int turn) {
        const __m512 to_log2 = _mm512_set1_ps(p_.scale * LOG2_E),
                     none = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
        for (int i = 0; i < BLOCK; i += 16) {
            float *scores = scores_[turn] + i, *most_so_far = most_ + first + i,
                  *norm = norm_ + first + i;
            const __m512 before = _mm512_load_ps(most_so_far);
            // Several at once, since one waits for the last.
            __m512 mosts[4] = {none, none, none, none},
                   sums[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
            for (int j = 0; j < num_keys; j += 4)
                for (int e = 0; e < 4; e++) {
                    float* at = scores + (j + e) * BLOCK;
                    __m512 score = _mm512_load_ps(at);
                    if (MASKED) {
                        const __mmask16 seen = p_.seen(tile.key + j + e, tile.position + first + i);
                        score = _mm512_mask_mov_ps(none, seen, score);
                        _mm512_store_ps(at, score);
                    }
                    mosts[e] = _mm512_max_ps(mosts[e], score);
                }
            const __m512 found =
                _mm512_max_ps(_mm512_max_ps(mosts[0], mosts[1]), _mm512_max_ps(mosts[2], mosts[3]));
            const __m512 most = _mm512_max_ps(before, _mm512_mul_ps(found, to_log2));
            for (int j = 0; j < num_keys; j += 2) {
                __m512 weights[2];
                for (int e = 0; e < 2; e++) {
                    const __m512 score = _mm512_load_ps(scores + (j + e) * BLOCK);
                    weights[e] = exp2(_mm512_fmsub_ps(score, to_log2, most));
                    sums[e] = _mm512_add_ps(sums[e], weights[e]);
                }
                _mm512_store_si512(
                    weight_pairs_ + (j / 2 * BLOCK + i) * 2,
                    interleaved((__m512i)_mm512_cvtne2ps_pbh(weights[1], weights[0])));
            }
            const __m512 shrinks = exp2(_mm512_sub_ps(before, most));
            _mm512_store_ps(shrinks_ + first + i, shrinks);
            _mm512_store_ps(most_so_far, most);
            _mm512_store_ps(norm, _mm512_fmadd_ps(_mm512_load_ps(norm), shrinks,
                                                  _mm512_add_ps(sums[0], sums[1])));
        }
    }

    const Problem& p_;
    const int width_;
    // By key: the head's keys by rows, and its values by columns.
    bf16 *k_, *v_columns_;
    // By query of a block: the queries by columns; sums [width, queries]; and for each query the
    // largest score times log2(e), the sum of weights, and the factor by which the last tile shrank
    // its sums.
    bf16* q_columns_;
    float *sums_, *most_, *norm_, *shrinks_;
    // A tile's keys × a strip of 32 queries.
    float* scores_[2];
    bf16* weight_pairs_;
};

void attend(const Problem& problem, i64 num_threads) {
    const std::vector<i64> starts = problem.shares(num_threads);
    const int threads = int(starts.size()) - 1;
#pragma omp parallel num_threads(threads)
    {
        Tiles registers;
        // There may be fewer threads than were asked for.
        for (int part = omp_get_thread_num(); part < threads; part += omp_get_num_threads())
            Worker(problem).run(starts[part], starts[part + 1]);
    }
}

}  // namespace

// q and out [n, heads, width], k and v [m, key heads, width], lse [n, heads]. segments: first row,
// number of rows, first key and number of keys of each. width: a multiple of 32. window: number of
// keys that a query sees, or 0. A query's result does not depend on its thread.
extern "C" void attention_forward(const bf16* q, const bf16* k, const bf16* v, bf16* out,
                                  float* lse, const i64* segments, i64 num_segments, i64 num_heads,
                                  i64 num_key_heads, i64 width, i64 window, double scale,
                                  i64 num_threads) {
    const i64 row = num_heads * width, key = num_key_heads * width;
    for (const i64* s = segments; s < segments + 4 * num_segments; s += 4)
        attend(Problem{{s[1], s[3], num_heads, num_key_heads, width, window},
                       q + s[0] * row,
                       k + s[2] * key,
                       v + s[2] * key,
                       out + s[0] * row,
                       lse + s[0] * num_heads,
                       float(scale)},
               num_threads);
}

#endif
