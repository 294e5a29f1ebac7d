// Product y = (x W^T) s + b of few rows in bfloat16, with W in int8 and a scale s per output
// channel, on AMX: W is the left factor as it lies, y^T = W x^T.
//
// Up to 32 rows W is not converted, so that the time is that of reading it once. Rows of x become
// whole numbers of 24 bits, in three parts of 8 bits, with a scale for each row and group of
// elements, a power of two. Elements of at least 2^-14 of their group's largest are exact, and the
// others are off by at most 2^-22 of that. Sums of a group are exact. For more rows a strip of W at
// a time is converted to bfloat16, in which all its values are exact, too.

#include <cmath>
#include <limits>

#include "tiles/skinny.h"

#ifdef HAS_AMX

namespace {

// Rows of the weight that are multiplied at once.
const int STRIP = 32;
// Rows of x in a block, elements of a row in a tile, bytes of a tile.
const int BLOCK = 16, WIDTH = 64, TILE = 1024;
// Elements of a row that share a scale: the sum of as many products of parts is below 2^24, exact
// in float32.
const i64 GROUP = 512;
// Parts of a number, and bits of its magnitude.
const int PARTS = 3, BITS = 22;
// Maximum number of rows that are split into parts; the parts of more rows would leave the caches.
const i64 MAX_ROWS_IN_PARTS = 32;
// Elements of a row of int8 that are converted to bfloat16 at once. Those of a strip's rows stay in
// the inner cache.
const i64 WIDENED = 128;
// Distance before its product at which a row of the weight is fetched.
const i64 AHEAD = 512;

thread_local Scratch shared_scratch, own_scratch;

// The rows x as right factors: for each block and each 64 elements a tile [16, 16, 4] of each part,
// from the highest to the lowest.
class Parts {
  public:
    Parts(const bf16* x, i64 step, i64 n, i64 inner)
        : x_(x), step_(step), n_(n), inner_(inner), num_groups_((inner + GROUP - 1) / GROUP) {
        const i64 num_tile_bytes = num_blocks() * inner / WIDTH * PARTS * TILE;
        tiles_ = reinterpret_cast<int8_t*>(shared_scratch.take(
            num_tile_bytes + num_blocks() * num_groups_ * BLOCK * sizeof(float)));
        scales_ = reinterpret_cast<float*>(tiles_ + num_tile_bytes);
    }

    i64 num_blocks() const { return (n_ + BLOCK - 1) / BLOCK; }
    i64 num_groups() const { return num_groups_; }
    int8_t* tiles(i64 block, i64 k) const {
        return tiles_ + (block * inner_ + k) / WIDTH * PARTS * TILE;
    }
    float* scales(i64 block, i64 group) const {
        return scales_ + (block * num_groups_ + group) * BLOCK;
    }

    void fill(i64 block, i64 group) const {
        const i64 first = group * GROUP, last = std::min(first + GROUP, inner_);
        const int num_rows = int(std::min<i64>(BLOCK, n_ - block * BLOCK));
        const bf16* x = x_ + block * BLOCK * step_;
        float inverse[BLOCK];
        for (int row = 0; row < num_rows; row++)
            choose_scale(x + row * step_, first, last, scales(block, group)[row], inverse[row]);
        for (int row = num_rows; row < BLOCK; row++) scales(block, group)[row] = 0;
        for (i64 k = first; k < last; k += WIDTH) {
            __m512i parts[PARTS][BLOCK] = {};
            for (int row = 0; row < num_rows; row++) {
                alignas(64) int8_t bytes[PARTS][WIDTH];
                split(x + row * step_ + k, _mm512_set1_ps(inverse[row]), bytes);
                for (int part = 0; part < PARTS; part++)
                    parts[part][row] = _mm512_load_si512(bytes[part]);
            }
            for (int part = 0; part < PARTS; part++) {
                transpose(parts[part]);
                int8_t* out = tiles(block, k) + part * TILE;
                for (int i = 0; i < BLOCK; i++) _mm512_store_si512(out + i * 64, parts[part][i]);
            }
        }
    }

  private:
    // The scale of a group. It is NaN if an element is infinite or NaN, which makes the whole sum
    // NaN.
    static void choose_scale(const bf16* x, i64 first, i64 last, float& scale, float& inverse) {
        __m512i bits = _mm512_setzero_si512();
        for (i64 k = first; k < last; k += 32)
            bits = _mm512_max_epu16(
                bits, _mm512_and_si512(_mm512_loadu_si512(x + k), _mm512_set1_epi16(0x7fff)));
        alignas(64) uint16_t found[32];
        _mm512_store_si512(found, bits);
        const int exponent =
            std::max(*std::max_element(found, found + 32) >> 7, 40);  // below 2^-87 all are alike
        const bool is_number = exponent < 255;
        scale = is_number ? std::ldexp(1.0f, exponent - 126 - BITS)
                          : std::numeric_limits<float>::quiet_NaN();
        inverse = is_number ? std::ldexp(1.0f, BITS + 126 - exponent) : 0;
    }

    // The parts of 64 elements.
    static void split(const bf16* x, __m512 inverse, int8_t (&bytes)[PARTS][WIDTH]) {
        const __m512i half = _mm512_set1_epi32(128);
        for (int i = 0; i < WIDTH; i += 16) {
            __m512i rest = _mm512_cvtps_epi32(_mm512_mul_ps(load(x + i), inverse));
            for (int part = PARTS - 1; part >= 0; part--) {
                _mm_store_si128(reinterpret_cast<__m128i*>(bytes[part] + i),
                                _mm512_cvtepi32_epi8(rest));
                rest = _mm512_srai_epi32(_mm512_add_epi32(rest, half), 8);
            }
        }
    }

    const bf16* x_;
    i64 step_, n_, inner_, num_groups_;
    int8_t* tiles_;
    float* scales_;
};

// Sums of 32 rows of the weight with each part of a block [32, 16]. is_first: whether it is the
// first of the blocks, which fetches what comes next in the rows; the processor alone would wait
// for that.
inline void multiply_group(i64 count, const int8_t* weight, i64 step, const int8_t* tiles,
                           bool is_first, int32_t* sums) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    _tile_zero(4);
    _tile_zero(5);
    for (i64 k = 0; k < count; k += WIDTH, tiles += PARTS * TILE) {
        for (int row = 0; row < (is_first ? STRIP : 0); row++)
            _mm_prefetch(weight + row * step + k + AHEAD, _MM_HINT_T0);
        _tile_loadd(6, weight + k, step);
        _tile_loadd(7, tiles, 64);
        _tile_dpbssd(0, 6, 7);
        _tile_loadd(7, tiles + TILE, 64);
        _tile_dpbssd(1, 6, 7);
        _tile_loadd(7, tiles + 2 * TILE, 64);
        _tile_dpbssd(2, 6, 7);
        _tile_loadd(6, weight + 16 * step + k, step);
        _tile_dpbssd(5, 6, 7);
        _tile_loadd(7, tiles + TILE, 64);
        _tile_dpbssd(4, 6, 7);
        _tile_loadd(7, tiles, 64);
        _tile_dpbssd(3, 6, 7);
    }
    _tile_stored(0, sums, 64);
    _tile_stored(1, sums + STRIP * BLOCK, 64);
    _tile_stored(2, sums + 2 * STRIP * BLOCK, 64);
    _tile_stored(3, sums + 16 * BLOCK, 64);
    _tile_stored(4, sums + (STRIP + 16) * BLOCK, 64);
    _tile_stored(5, sums + (2 * STRIP + 16) * BLOCK, 64);
}

// Sums of the parts with the scales of their group [16] -> totals [32, 16], or added to them.
inline void add_group(const int32_t* sums, const float* scales, bool onto, float* totals) {
    const __m512 lowest = _mm512_loadu_ps(scales), step = _mm512_set1_ps(256);
    for (int i = 0; i < STRIP * BLOCK; i += BLOCK) {
        __m512 sum = _mm512_setzero_ps();
        for (int part = 0; part < PARTS; part++) {
            const __m512 found =
                _mm512_cvtepi32_ps(_mm512_load_si512(sums + part * STRIP * BLOCK + i));
            sum = _mm512_fmadd_ps(sum, step, found);
        }
        const __m512 before = onto ? _mm512_load_ps(totals + i) : _mm512_setzero_ps();
        _mm512_store_ps(totals + i, _mm512_fmadd_ps(sum, lowest, before));
    }
}

void multiply_parts(const bf16* x, i64 x_step, const int8_t* weight, const float* scales,
                    const bf16* bias, bf16* y, i64 n, i64 inner, i64 outer, i64 num_threads) {
    const Parts parts(x, x_step, n, inner);
#pragma omp parallel num_threads(num_threads)
    {
        const int thread = omp_get_thread_num(), threads = omp_get_num_threads();
        auto start = [&](i64 count, int part) { return count * part / threads; };
        const i64 num_fills = parts.num_blocks() * parts.num_groups();
        for (i64 i = start(num_fills, thread); i < start(num_fills, thread + 1); i++)
            parts.fill(i / parts.num_groups(), i % parts.num_groups());
        const i64 strip_sums = STRIP * BLOCK * parts.num_blocks(), most = spacing(inner);
        const i64 end = start(outer / STRIP, thread + 1);
        float* sums = reinterpret_cast<float*>(
            own_scratch.take((most * strip_sums + PARTS * STRIP * BLOCK) * sizeof(float)));
        int32_t* whole = reinterpret_cast<int32_t*>(sums + most * strip_sums);
        Tiles registers;
#pragma omp barrier
        for (i64 first = start(outer / STRIP, thread); first < end; first += most) {
            const i64 strips = std::min(most, end - first), row = first * STRIP;
            for (i64 strip = 0; strip < strips; strip++)
                for (i64 group = 0; group < parts.num_groups(); group++) {
                    const i64 k = group * GROUP, count = std::min(GROUP, inner - k);
                    const int8_t* values = weight + (row + strip) * inner + k;
                    for (i64 block = 0; block < parts.num_blocks(); block++) {
                        settle();
                        multiply_group(count, values, strips * inner, parts.tiles(block, k),
                                       block == 0, whole);
                        settle();
                        add_group(whole, parts.scales(block, group), group > 0,
                                  sums + strip * strip_sums + block * STRIP * BLOCK);
                    }
                }
            for (i64 i = 0; i < n; i += BLOCK)
                round_rows(sums + i * STRIP, BLOCK, strips, strip_sums, scales + row,
                           bias ? bias + row : nullptr, n - i, y + i * outer + row, outer);
        }
    }
}

// Converts elements from int8, a multiple of 32.
void widen_all(const int8_t* values, i64 count, bf16* out) {
    for (i64 i = 0; i < count; i += 32) {
        auto half = [=](i64 at) {
            const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(values + at));
            return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
        };
        _mm512_storeu_si512(out + i, (__m512i)_mm512_cvtne2ps_pbh(half(i + 16), half(i)));
    }
}

void multiply_widened(const bf16* x, i64 x_step, const int8_t* weight, const float* scales,
                      const bf16* bias, bf16* y, i64 n, i64 inner, i64 outer, i64 num_threads) {
    const Panel panel(shared_scratch, x, x_step, n, inner);
#pragma omp parallel num_threads(num_threads)
    {
        const int thread = omp_get_thread_num(), threads = omp_get_num_threads();
        auto start = [&](i64 count, int part) { return count * part / threads; };
        for (i64 k = start(inner / 32, thread); k < start(inner / 32, thread + 1); k++)
            panel.fill(k * 32);
        const i64 num_sums = STRIP * panel.padded(), end = start(outer / STRIP, thread + 1);
        float* sums = reinterpret_cast<float*>(
            own_scratch.take(num_sums * sizeof(float) + STRIP * WIDENED * sizeof(bf16)));
        bf16* wide = reinterpret_cast<bf16*>(sums + num_sums);
        Tiles registers;
#pragma omp barrier
        for (i64 strip = start(outer / STRIP, thread); strip < end; strip++) {
            const i64 row = strip * STRIP;
            for (i64 k = 0; k < inner; k += WIDENED) {
                const i64 count = std::min(WIDENED, inner - k);
                // Fetch what comes next meanwhile: the processor alone would wait for it.
                const i64 ahead = k + AHEAD < inner ? AHEAD : (STRIP - 1) * inner + AHEAD;
                for (i64 i = 0; i < STRIP; i++) {
                    const int8_t* values = weight + (row + i) * inner + k;
                    for (i64 at = 0; at < count; at += 64)
                        _mm_prefetch(values + ahead + at, _MM_HINT_T0);
                    widen_all(values, count, wide + i * WIDENED);
                }
                settle();
                for (i64 block = 0; block < panel.padded(); block += 32) {
                    const int width = panel.width(block);
                    auto run = width == 32 ? (k ? multiply<32, 32, true> : multiply<32, 32, false>)
                                           : (k ? multiply<32, 16, true> : multiply<32, 16, false>);
                    run(int(count), wide, WIDENED, panel.at(block) + k * width, width,
                        sums + block * STRIP, width);
                }
                settle();
            }
            for (i64 i = 0; i < n; i += 16) {
                const i64 block = i / 32 * 32;
                round_rows(sums + block * STRIP + i - block, panel.width(block), 1, 0, scales + row,
                           bias ? bias + row : nullptr, n - i, y + i * outer + row, outer);
            }
        }
    }
}

}  // namespace

// Writes y [n, outer] from x [n, inner] with a step from row to row, weight [outer, inner], scales
// [outer] and bias [outer] or null. inner is a multiple of 64, outer of 32. A row's sums are the
// same in any company of up to 32 rows, and in any company of more.
extern "C" void int8_product_by_tiles(const bf16* x, i64 x_step, const int8_t* weight,
                                      const float* scales, const bf16* bias, bf16* y, i64 n,
                                      i64 inner, i64 outer, i64 num_threads) {
    auto run = n <= MAX_ROWS_IN_PARTS ? multiply_parts : multiply_widened;
    run(x, x_step, weight, scales, bias, y, n, inner, outer, num_threads);
}

#endif
