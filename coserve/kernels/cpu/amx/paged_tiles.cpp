// Attention of rows that are each the last of a sequence of its own (`paged_attention.h`), in tiles
// (`tiles.h`).
//
// As many key heads are processed together as have query heads for the 16 columns of a tile. Scores
// are K Q^T with the keys as they lie in their pages. Each query head is a lane of the vectors that
// turn scores into weights, and a row of the weights that multiply values. While a chunk of keys is
// processed the next one is fetched into the outer cache: a processor has no more than some 16
// lines under way into the inner one.

#include "tiles/attention_tiles.h"
#include "common/paged_attention.h"

#ifdef HAS_AMX

#include <limits>

namespace {

// Keys of a tile of scores, and of one of weights; query heads that are processed together.
const int KEYS = 16, PART = 32, LANES = 16;
// Relative times of a tile's product, of two keys' weights, and of pairing two keys' values, by
// which the fetches are spread.
const int PRODUCT_UNITS = 20, WEIGHT_UNITS = 8, PAIR_UNITS = 3, VALUE_UNITS = 12;

typedef PagedRows<bf16> Problem;

thread_local Scratch scratch;

// One thread's part of the chunks.
class Worker {
  public:
    static const int ALIGNED = KEYS;
    static i64 heads_at_once(const Problem& p) {
        return std::min(p.num_key_heads, LANES / p.group());
    }

    explicit Worker(const Problem& p)
        : p_(p), width_(int(p.width)), group_(int(p.group())), at_once_(int(heads_at_once(p))) {
        const size_t floats = (CHUNK + width_) * LANES;
        const size_t halves = (at_once_ * width_ + CHUNK) * LANES + CHUNK * width_;
        scores_ =
            reinterpret_cast<float*>(scratch.take(floats * sizeof(float) + halves * sizeof(bf16)));
        sums_ = scores_ + CHUNK * LANES;
        weights_ = reinterpret_cast<bf16*>(sums_ + LANES * width_);
        values_ = weights_ + LANES * CHUNK;
        q_ = values_ + CHUNK * width_;
    }

    void attend(const Chunk& chunk, const Chunk* next, i64 first_head, i64 end_head,
                const Partial& partial) {
        for (first_ = first_head; first_ < end_head; first_ = end_) {
            end_ = std::min(first_ + at_once_, end_head);
            padded_ = int(round_up(chunk.num_keys, PART));
            if (chunk.row != q_row_ || first_ != q_head_) take_queries(chunk.row);
            if (end_ < end_head)
                plan_fetching(&chunk, end_);
            else
                plan_fetching(next, 0);
            score(chunk);
            weigh(chunk, partial);
            for (i64 head = first_; head < end_; head++)
                add(chunk, head, partial.values + head * group_ * width_);
        }
    }

  private:
    const bf16* row_of(const bf16* pages, i64 row, i64 key) const {
        const i64 page = p_.pages[p_.first_page[row] + key / p_.block_tokens];
        return pages + page * p_.page_step + key % p_.block_tokens * p_.row_width();
    }

    // By key head and 32 of their elements: pairs, for the heads' own columns, and zeros.
    void take_queries(i64 row) {
        q_row_ = row, q_head_ = first_;
        const bf16* q = p_.q + (row * p_.num_heads + first_ * group_) * width_;
        bf16* out = q_;
        for (int head = 0; head < end_ - first_; head++)
            for (int i = 0; i < width_; i += 32, out += 32 * LANES) {
                __m512i pairs[LANES];
                for (int lane = 0; lane < LANES; lane++)
                    pairs[lane] = lane / group_ == head ? _mm512_loadu_si512(q + lane * width_ + i)
                                                        : _mm512_setzero_si512();
                transpose(pairs);
                for (int k = 0; k < 16; k++) _mm512_store_si512(out + k * 32, pairs[k]);
            }
    }

    // Computes scores [keys, lanes] of four tiles of keys at once, since each product of one waits
    // for the last.
    void score(const Chunk& chunk) {
        const i64 step = p_.row_width() * sizeof(bf16);
        for (int key = 0; key < chunk.num_keys; key += 4 * KEYS) {
            const bf16* rows[4];
            const int count = std::min(4, (chunk.num_keys - key + KEYS - 1) / KEYS);
            for (int i = 0; i < count; i++)
                rows[i] =
                    row_of(p_.keys, chunk.row, chunk.first_key + key + i * KEYS) + first_ * width_;
            settle();
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
            for (int i = 0; i < (end_ - first_) * width_; i += 32) {
                _tile_loadd(6, q_ + i * LANES, 64);
                _tile_loadd(4, rows[0] + i, step);
                _tile_dpbf16ps(0, 4, 6);
                fetch(PRODUCT_UNITS);
                if (count > 1) {
                    _tile_loadd(5, rows[1] + i, step);
                    _tile_dpbf16ps(1, 5, 6);
                    fetch(PRODUCT_UNITS);
                }
                if (count > 2) {
                    _tile_loadd(4, rows[2] + i, step);
                    _tile_dpbf16ps(2, 4, 6);
                    fetch(PRODUCT_UNITS);
                }
                if (count > 3) {
                    _tile_loadd(5, rows[3] + i, step);
                    _tile_dpbf16ps(3, 5, 6);
                    fetch(PRODUCT_UNITS);
                }
            }
            float* to = scores_ + key * LANES;
            const int tile = KEYS * LANES;
            _tile_stored(0, to, 64);
            if (count > 1) _tile_stored(1, to + tile, 64);
            if (count > 2) _tile_stored(2, to + 2 * tile, 64);
            if (count > 3) _tile_stored(3, to + 3 * tile, 64);
            settle();
        }
    }

    // Turns scores into rounded weights, the largest of which is 1: by 32 keys [lanes, keys].
    void weigh(const Chunk& chunk, const Partial& partial) {
        const __m512 to_log2 = _mm512_set1_ps(p_.scale * LOG2_E),
                     none = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
        auto hide = [&](int key) { _mm512_store_ps(scores_ + key * LANES, none); };
        for (int key = 0; key < chunk.num_unseen; key++) hide(key);
        for (int key = chunk.num_keys; key < padded_; key++) hide(key);
        __m512 mosts[4] = {none, none, none, none},
               totals[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
        for (int key = 0; key < padded_; key += 4)
            for (int e = 0; e < 4; e++)
                mosts[e] = _mm512_max_ps(mosts[e], _mm512_load_ps(scores_ + (key + e) * LANES));
        const __m512 found =
            _mm512_max_ps(_mm512_max_ps(mosts[0], mosts[1]), _mm512_max_ps(mosts[2], mosts[3]));
        const __m512 most = _mm512_mul_ps(found, to_log2);
        for (int first = 0; first < padded_; first += PART) {
            __m512i pairs[PART / 2];
            for (int k = 0; k < PART; k += 2) {
                fetch(WEIGHT_UNITS);
                __m512 weights[2];
                for (int e = 0; e < 2; e++) {
                    const __m512 score = _mm512_load_ps(scores_ + (first + k + e) * LANES);
                    weights[e] = exp2(_mm512_fmsub_ps(score, to_log2, most));
                    totals[e] = _mm512_add_ps(totals[e], weights[e]);
                }
                pairs[k / 2] = interleaved((__m512i)_mm512_cvtne2ps_pbh(weights[1], weights[0]));
            }
            transpose(pairs);
            for (int lane = 0; lane < LANES; lane++)
                _mm512_store_si512(weights_ + first * LANES + lane * PART, pairs[lane]);
        }
        const __mmask16 own = (1u << (end_ - first_) * group_) - 1;
        _mm512_mask_storeu_ps(partial.largest + first_ * group_, own, most);
        _mm512_mask_storeu_ps(partial.weights + first_ * group_, own,
                              _mm512_add_ps(totals[0], totals[1]));
    }

    // Adds the values of a key head by the weights of its query heads.
    void add(const Chunk& chunk, i64 head, float* out) {
        pair_values(chunk, head);
        settle();
        for (int first = 0; first < width_; first += 64) {
            const bool is_whole = first + 32 < width_;
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
            for (int key = 0; key < padded_; key += PART) {
                const bf16* values = values_ + key * width_ + first * PART;
                _tile_loadd(4, weights_ + key * LANES, 64);
                _tile_loadd(5, values, 64);
                _tile_dpbf16ps(0, 4, 5);
                fetch(VALUE_UNITS);
                _tile_loadd(6, values + 16 * PART, 64);
                _tile_dpbf16ps(1, 4, 6);
                fetch(VALUE_UNITS);
                if (is_whole) {
                    _tile_loadd(5, values + 32 * PART, 64);
                    _tile_dpbf16ps(2, 4, 5);
                    _tile_loadd(6, values + 48 * PART, 64);
                    _tile_dpbf16ps(3, 4, 6);
                }
            }
            float* to = sums_ + first;
            _tile_stored(0, to, width_ * 4);
            _tile_stored(1, to + 16, width_ * 4);
            if (is_whole) {
                _tile_stored(2, to + 32, width_ * 4);
                _tile_stored(3, to + 48, width_ * 4);
            }
        }
        settle();
        std::memcpy(out, sums_ + (head - first_) * group_ * width_,
                    group_ * width_ * sizeof(float));
    }

    // Arranges values by 32 keys and 16 elements: pairs of keys, zeros after the last.
    void pair_values(const Chunk& chunk, i64 head) {
        const i64 step = p_.row_width();
        const __m512i low =
            interleaved(_mm512_inserti64x4(_mm512_castsi256_si512(count_up()),
                                           _mm256_add_epi16(count_up(), _mm256_set1_epi16(32)), 1));
        const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
        for (int key = 0; key < padded_; key += KEYS) {
            const int count = chunk.num_keys - key;
            const bf16* rows =
                count > 0 ? row_of(p_.values, chunk.row, chunk.first_key + key) + head * width_
                          : nullptr;
            bf16* out = values_ + key / PART * PART * width_ + key % PART * 16;
            auto load = [&](int k, int i) {
                return k < count ? _mm512_loadu_si512(rows + k * step + i) : _mm512_setzero_si512();
            };
            for (int k = 0; k < KEYS; k += 2, out += 32) {
                fetch(PAIR_UNITS);
                for (int i = 0; i < width_; i += 32) {
                    const __m512i even = load(k, i), odd = load(k + 1, i);
                    _mm512_store_si512(out + i * PART, _mm512_permutex2var_epi16(even, low, odd));
                    _mm512_store_si512(out + (i + 16) * PART,
                                       _mm512_permutex2var_epi16(even, high, odd));
                }
            }
        }
    }

    static __m256i count_up() {
        return _mm256_set_epi16(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    }

    // Prepares what is fetched while key heads are processed: from a chunk those from `head` on
    // that go together, evenly spread.
    void plan_fetching(const Chunk* chunk, i64 head) {
        num_blocks_ = block_ = key_ = credit_ = 0;
        if (!chunk) return;
        fetched_bytes_ =
            int((std::min(head + at_once_, p_.num_key_heads) - head) * width_ * sizeof(bf16));
        for (const bf16* pages : {p_.keys, p_.values})
            for (int key = 0; key < chunk->num_keys; key += KEYS) {
                blocks_[num_blocks_] =
                    row_of(pages, chunk->row, chunk->first_key + key) + head * width_;
                num_keys_[num_blocks_++] = std::min(KEYS, chunk->num_keys - key);
            }
        const int heads = int(end_ - first_), products = padded_ / KEYS * heads * width_ / 32;
        const int units = products * PRODUCT_UNITS + padded_ / 2 * WEIGHT_UNITS +
                          heads * (padded_ / 2 * PAIR_UNITS +
                                   padded_ / PART * ((width_ + 32) / 64) * 2 * VALUE_UNITS);
        row_units_ = std::max(1, units / (2 * chunk->num_keys));
    }

    // Fetches the share that is due after some units of work.
    [[gnu::always_inline]] void fetch(int units) {
        for (credit_ += units; credit_ >= row_units_ && block_ < num_blocks_;
             credit_ -= row_units_) {
            const char* row =
                reinterpret_cast<const char*>(blocks_[block_] + key_ * p_.row_width());
            for (int i = 0; i < fetched_bytes_; i += 64) _mm_prefetch(row + i, _MM_HINT_T1);
            if (++key_ == num_keys_[block_]) key_ = 0, block_++;
        }
    }

    Tiles registers_;
    const Problem& p_;
    const int width_, group_, at_once_;
    // The key heads that are processed; the keys of a chunk, up to whole parts; the row whose
    // queries are in `q`.
    i64 first_ = 0, end_ = 0;
    int padded_ = 0;
    i64 q_row_ = -1, q_head_ = -1;
    float *scores_, *sums_;
    bf16 *weights_, *values_, *q_;
    // What is fetched: blocks of 16 keys or values, and how many have been.
    const bf16* blocks_[2 * CHUNK / KEYS];
    int num_keys_[2 * CHUNK / KEYS], num_blocks_ = 0, block_ = 0, key_ = 0;
    int fetched_bytes_ = 0, row_units_ = 1, credit_ = 0;
};

}  // namespace

// See `paged_attention_bfloat16`, which runs whatever does not fit into tiles.
extern "C" void paged_attention_by_tiles(const bf16* q, const bf16* keys, const bf16* values,
                                         const i64* pages, const i64* first_page,
                                         const i64* lengths, bf16* out, float* lse, i64 num_rows,
                                         i64 num_heads, i64 num_key_heads, i64 width,
                                         i64 block_tokens, i64 page_step, i64 window, double scale,
                                         i64 num_threads) {
    if (num_heads / num_key_heads > LANES || width % 32 || block_tokens % KEYS) {
        paged_attention_bfloat16(q, keys, values, pages, first_page, lengths, out, lse, num_rows,
                                 num_heads, num_key_heads, width, block_tokens, page_step, window,
                                 scale, num_threads);
        return;
    }
    attend_by<Worker>(
        Problem{q, keys, values, pages, first_page, lengths, out, lse, num_rows, num_heads,
                num_key_heads, width, block_tokens, page_step, window, float(scale)},
        num_threads);
}

#endif
