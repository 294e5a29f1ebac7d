// Parts that both directions of attention share: tiles of queries and keys, the orders in which
// products read them, and their division among threads.
//
// Everything is computed with keys along the rows, S^T = K Q^T, so that the numbers of a query lie
// in one lane of the vectors, and the rounded scores of a tile are factors of the next products as
// they lie.
#pragma once

#include "tiles/tiles.h"

#ifdef HAS_TILES

#include <vector>

namespace {

const int TILE = 128;
// Blocks of a tile, 32 keys x 32 queries: the result of one `multiply`, which stays in the first
// cache with its factors.
const int BLOCK = 32;

// Returns 2^x, to 2e-7 of it; for x below -126 as for -126, since a processor takes a hundred times
// as long for numbers that small.
inline __m512 exp2(__m512 x) {
    x = _mm512_max_ps(_mm512_set1_ps(-126.0f), x);  // in this order a NaN stays one
    __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m512 rest = _mm512_sub_ps(x, whole);
    __m512 power = _mm512_set1_ps(1.3333558e-3f);
    for (float factor : {9.6181291e-3f, 5.5504109e-2f, 2.4022651e-1f, 6.9314718e-1f, 1.0f})
        power = _mm512_fmadd_ps(power, rest, _mm512_set1_ps(factor));
    return _mm512_scalef_ps(power, whole);
}

inline __m512i count_by(int step) {
    return _mm512_mullo_epi32(
        _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0),
        _mm512_set1_epi32(step));
}

inline void store(bf16* x, __m256bh values) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(x), (__m256i)values);
}

// Arranges x [n, width] as [padded / 2, width, 2], zeros after n: a right factor of which x's rows
// are the inner dimension.
void by_row_pairs(const bf16* x, i64 step, int n, int padded, int width, bf16* out) {
    for (int row = 0; row < padded; row += 2)
        for (int i = 0; i < width; i += 16) {
            __m256i pair[2] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
            for (int e = 0; e < 2; e++)
                if (row + e < n)
                    pair[e] = _mm256_loadu_si256(
                        reinterpret_cast<const __m256i*>(x + (row + e) * step + i));
            __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512(pair[0]), pair[1], 1);
            _mm512_storeu_si512(out + (row / 2 * width + i) * 2, interleaved(both));
        }
}

// Arranges 16 rows' pairs of 32 elements each, zeros after n, by pair.
inline void pairs_of_rows(const bf16* x, i64 step, i64 row, i64 n, __m512i (&pairs)[16]) {
    for (int e = 0; e < 16; e++)
        pairs[e] = row + e < n ? _mm512_loadu_si512(x + (row + e) * step) : _mm512_setzero_si512();
    transpose(pairs);
}

// Arranges x [n, width] as [padded / 32, width / 2, 32, 2], zeros after n: a right factor x^T of
// each 32 rows.
void by_column_pairs(const bf16* x, i64 step, int n, int padded, int width, bf16* out) {
    __m512i pairs[16];
    for (int row = 0; row < padded; row += 16)
        for (int i = 0; i < width; i += 32) {
            pairs_of_rows(x + i, step, row, n, pairs);
            bf16* at = out + row / BLOCK * BLOCK * width + row % BLOCK * 2;
            for (int e = 0; e < 16; e++)
                _mm512_storeu_si512(at + (i / 2 + e) * BLOCK * 2, pairs[e]);
        }
}

// Transposes x [n, width] into [width, padded], zeros after n.
void by_columns(const bf16* x, i64 step, i64 n, i64 padded, int width, bf16* out) {
    __m512i pairs[16];
    for (i64 row = 0; row < padded; row += 16)
        for (int i = 0; i < width; i += 32) {
            pairs_of_rows(x + i, step, row, n, pairs);
            for (int e = 0; e < 16; e++) {
                bf16* at = out + (i + 2 * e) * padded + row;
                store(at, (__m256bh)_mm512_cvtepi32_epi16(pairs[e]));
                store(at + padded,
                      (__m256bh)_mm512_cvtepi32_epi16(_mm512_srli_epi32(pairs[e], 16)));
            }
        }
}

// Writes the first n columns of x [width, TILE] as rows of bfloat16, `step` apart, each times its
// factor.
void rows_of_columns(const float* x, int n, int width, const float* factors, bf16* out, i64 step) {
    __m512i pairs[16];
    for (int i = 0; i < n; i += 16) {
        const __m512 factor = factors ? _mm512_load_ps(factors + i) : _mm512_set1_ps(1.0f);
        for (int d = 0; d < width; d += 32) {
            for (int e = 0; e < 16; e++) {
                const float* at = x + (d + 2 * e) * TILE + i;
                const __m512 even = _mm512_load_ps(at) * factor,
                             odd = _mm512_load_ps(at + TILE) * factor;
                pairs[e] = interleaved((__m512i)_mm512_cvtne2ps_pbh(odd, even));
            }
            transpose(pairs);
            for (int e = 0; e < 16 && i + e < n; e++)
                _mm512_storeu_si512(out + (i + e) * step + d, pairs[e]);
        }
    }
}

// Returns the products of 16 rows each of x and y, without those after n.
inline __m512 products_of_rows(const bf16* x, const bf16* y, i64 step, int n, int width) {
    __m512i sums[16];
    for (int e = 0; e < 16; e++) {
        __m512 sum = _mm512_setzero_ps();
        for (int d = 0; e < n && d < width; d += 32)
            sum = _mm512_dpbf16_ps(sum, (__m512bh)_mm512_loadu_si512(x + e * step + d),
                                   (__m512bh)_mm512_loadu_si512(y + e * step + d));
        sums[e] = (__m512i)sum;
    }
    transpose(sums);
    for (int half = 8; half; half /= 2)
        for (int e = 0; e < half; e++)
            sums[e] = (__m512i)((__m512)sums[e] + (__m512)sums[e + half]);
    return (__m512)sums[0];
}

// Which queries see which keys, and their division into tiles: blocks of queries x tiles of keys,
// both of 128.
struct Shape {
    i64 num_rows, num_keys, num_heads, num_key_heads, width, window;

    i64 earlier() const { return num_keys - num_rows; }
    i64 group() const { return num_heads / num_key_heads; }
    i64 num_blocks() const { return (num_rows + TILE - 1) / TILE; }
    i64 padded_keys() const { return round_up(num_keys, TILE); }

    // Units of work are blocks of queries, by key head, and for each block the query heads in turn,
    // whose rows are neighbours in memory.
    i64 units_of_key_head() const { return group() * num_blocks(); }
    i64 head_of(i64 unit) const { return unit / units_of_key_head() * group() + unit % group(); }
    i64 block_of(i64 unit) const { return unit % units_of_key_head() / group(); }

    // The tiles of keys that a block of queries sees: the first key, and the number of tiles.
    i64 first_key(i64 block) const {
        return window ? std::max<i64>(0, earlier() + block * TILE - window + 1) / TILE * TILE : 0;
    }
    i64 num_tiles(i64 block) const {
        i64 end = std::min(earlier() + (block + 1) * TILE, num_keys);
        return (end - first_key(block) + TILE - 1) / TILE;
    }

    // The first unit of each thread, and the end after them. Units are blocks of queries, head by
    // head, and each thread has a run of them with as many tiles as the others'.
    std::vector<i64> shares(i64 num_threads) const {
        const i64 blocks = num_blocks(), units = num_heads * blocks;
        const size_t threads = std::min(num_threads, units);
        i64 tiles = 0, done = 0;
        for (i64 block = 0; block < blocks; block++) tiles += num_heads * num_tiles(block);
        std::vector<i64> starts{0};
        for (i64 unit = 0; unit < units; unit++) {
            while (starts.size() < threads && done * i64(threads) >= tiles * i64(starts.size()))
                starts.push_back(unit);
            done += num_tiles(block_of(unit));
        }
        starts.resize(threads + 1, units);
        return starts;
    }

    // Whether some query of a tile must not see some key of it.
    bool is_masked(i64 key, int num_keys, i64 position, int num_queries) const {
        return key + num_keys - 1 > position ||
               (window && key <= position + num_queries - 1 - window);
    }

    // Which of 16 queries, the first of them at a position, see a key.
    __mmask16 seen(i64 key, i64 position) const {
        const __m512i own = _mm512_set1_epi32(int(key));
        const __m512i last = _mm512_add_epi32(count_by(1), _mm512_set1_epi32(int(position)));
        __mmask16 seen = _mm512_cmple_epi32_mask(own, last);
        if (window)
            seen &= _mm512_cmpgt_epi32_mask(own,
                                            _mm512_sub_epi32(last, _mm512_set1_epi32(int(window))));
        return seen;
    }
};

// Keys x queries of a tile, the places of the first ones, and which of its blocks have keys that a
// query sees.
struct Tile {
    i64 key, position;
    int num_keys, num_queries;

    // For the block of keys that begins with `j`.
    int first_query(int j) const {
        return int(std::max<i64>(0, key + j - position)) / BLOCK * BLOCK;
    }
    // For the block of queries that begins with `i`.
    int end_key(int i) const {
        const i64 seen = position + i + BLOCK - key;
        return seen <= 0 ? 0 : int(std::min<i64>(num_keys, round_up(seen, BLOCK)));
    }
};

// Copies a head's keys or values [m, heads, width] into one piece [padded, width], zeros after
// them.
inline void collect(const Shape& shape, const bf16* x, i64 head, bf16* out) {
    for (i64 key = 0; key < shape.num_keys; key++)
        std::memcpy(static_cast<void*>(out + key * shape.width),
                    x + (key * shape.num_key_heads + head) * shape.width,
                    shape.width * sizeof(bf16));
    std::memset(static_cast<void*>(out + shape.num_keys * shape.width), 0,
                (shape.padded_keys() - shape.num_keys) * shape.width * sizeof(bf16));
}

}  // namespace

#endif
