// y = x W^T of few rows in bfloat16 on AMX, with sums in float32 that are rounded once. PyTorch's product rearranges
// the weight first; here it is the left factor as it lies, y^T = W x^T, so that the time is that of reading it once. A
// weight in int8 is half of that: a strip at a time becomes bfloat16, in which all its values are exact, in the caches.

#include "amx.h"

#ifdef HAS_AMX

namespace {

// Rows of the weight that are multiplied at once.
const int STRIP = 32;
// Elements of a row of int8 that become bfloat16 at once: with a strip's rows they stay in the inner cache.
const i64 WIDENED = 128;
// How far ahead of that a row is fetched.
const i64 AHEAD = 4 * WIDENED;

thread_local Scratch shared_scratch, own_scratch;

// Rows of x as columns of a right factor x^T: blocks of 32 rows, each [inner / 2, 32, 2], zeros after n. The last
// block is 16 wide where that is enough.
class Panel {
  public:
    Panel(const bf16* x, i64 step, i64 n, i64 inner)
        : x_(x), step_(step), n_(n), inner_(inner), padded_(round_up(n, 16)) {
        data_ = reinterpret_cast<bf16*>(shared_scratch.take(padded_ * inner * sizeof(bf16)));
    }

    i64 padded() const { return padded_; }
    int width(i64 block) const { return block + 32 <= padded_ ? 32 : 16; }
    bf16* at(i64 block) const { return data_ + block * inner_; }

    // 32 elements of the inner dimension.
    void fill(i64 k) const {
        for (i64 row = 0; row < padded_; row += 16) {
            __m512i pairs[16];
            for (int i = 0; i < 16; i++)
                pairs[i] = row + i < n_ ? _mm512_loadu_si512(x_ + (row + i) * step_ + k) : _mm512_setzero_si512();
            transpose(pairs);
            const i64 block = row / 32 * 32;
            bf16* out = at(block) + k * width(block) + (row - block) * 2;
            for (int i = 0; i < 16; i++) _mm512_storeu_si512(out + i * width(block) * 2, pairs[i]);
        }
    }

  private:
    const bf16* x_;
    i64 step_, n_, inner_, padded_;
    bf16* data_;
};

// How far apart the weight's rows that are multiplied at once lie, in rows. The processor fetches ahead along a row of
// a page, and along one row of each page only: neighbours in one page would hold each other up.
i64 spacing(i64 inner) {
    const i64 row_bytes = inner * sizeof(bf16), page_bytes = 4096;
    i64 rows = std::max<i64>(1, (2 * page_bytes + row_bytes - 1) / row_bytes);
    return rows > 1 && rows * row_bytes % page_bytes == 0 ? rows + 1 : rows;
}

// Sums [32 * spacing, up to 16] -> rounded, with the scales and the bias (or null), as elements of up to 16 rows of y.
// The sums of neighbours in y stand in strips one after another.
void finish(const float* sums, i64 step, i64 spacing, i64 strip_step, const float* scales, const bf16* bias, i64 n,
            bf16* y, i64 y_step) {
    i64 strip = 0, row = 0;
    for (i64 column = 0; column < STRIP * spacing; column += 32) {
        __m512i pairs[16];
        for (int i = 0; i < 16; i++) {
            __m512 two[2];
            for (int e = 0; e < 2; e++) {
                two[e] = _mm512_loadu_ps(sums + strip * strip_step + row * step);
                if (++strip == spacing) strip = 0, row++;
                if (scales) two[e] = _mm512_mul_ps(two[e], _mm512_set1_ps(scales[column + 2 * i + e]));
                if (bias) two[e] = _mm512_add_ps(two[e], _mm512_set1_ps(widen(bias[column + 2 * i + e])));
            }
            pairs[i] = interleaved((__m512i)_mm512_cvtne2ps_pbh(two[1], two[0]));
        }
        transpose(pairs);
        for (int i = 0; i < std::min<i64>(16, n); i++) _mm512_storeu_si512(y + i * y_step + column, pairs[i]);
    }
}

// As many elements, a multiple of 32.
void widen_all(const int8_t* values, i64 count, bf16* out) {
    for (i64 i = 0; i < count; i += 32) {
        auto half = [=](i64 at) {
            const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(values + at));
            return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
        };
        _mm512_storeu_si512(out + i, (__m512i)_mm512_cvtne2ps_pbh(half(i + 16), half(i)));
    }
}

}  // namespace

// y = x W^T + b: x [n, inner] with a step from row to row, weight [outer, inner], bias [outer] or null, y [n, outer].
// inner and outer are multiples of 32. A row's sums are the same whatever other rows are there.
extern "C" void product(const bf16* x, i64 x_step, const bf16* weight, const bf16* bias, bf16* y, i64 n, i64 inner,
                        i64 outer, i64 num_threads) {
    const Panel panel(x, x_step, n, inner);
#pragma omp parallel num_threads(num_threads)
    {
        const int thread = omp_get_thread_num(), threads = omp_get_num_threads();
        auto start = [&](i64 count, int part) { return count * part / threads; };
        for (i64 k = start(inner / 32, thread); k < start(inner / 32, thread + 1); k++) panel.fill(k * 32);
        const i64 strip_sums = STRIP * panel.padded(), most = spacing(inner), end = start(outer / STRIP, thread + 1);
        float* sums = reinterpret_cast<float*>(own_scratch.take(most * strip_sums * sizeof(float)));
        Tiles registers;
#pragma omp barrier
        for (i64 first = start(outer / STRIP, thread); first < end; first += most) {
            const i64 strips = std::min(most, end - first), row = first * STRIP;
            for (i64 strip = 0; strip < strips; strip++)
                for (i64 block = 0; block < panel.padded(); block += 32) {
                    const int width = panel.width(block);
                    settle();
                    auto run = width == 32 ? multiply<32, 32, false> : multiply<32, 16, false>;
                    run(int(inner), weight + (row + strip) * inner, strips * inner, panel.at(block), width,
                        sums + strip * strip_sums + block * STRIP, width);
                    settle();
                }
            for (i64 i = 0; i < n; i += 16) {
                const i64 block = i / 32 * 32;
                finish(sums + block * STRIP + i - block, panel.width(block), strips, strip_sums, nullptr,
                       bias ? bias + row : nullptr, n - i, y + i * outer + row, outer);
            }
        }
    }
}

// y = (x W^T) s + b: the same with a weight in int8 and scales [outer].
extern "C" void int8_product_by_tiles(const bf16* x, i64 x_step, const int8_t* weight, const float* scales,
                                      const bf16* bias, bf16* y, i64 n, i64 inner, i64 outer, i64 num_threads) {
    const Panel panel(x, x_step, n, inner);
#pragma omp parallel num_threads(num_threads)
    {
        const int thread = omp_get_thread_num(), threads = omp_get_num_threads();
        auto start = [&](i64 count, int part) { return count * part / threads; };
        for (i64 k = start(inner / 32, thread); k < start(inner / 32, thread + 1); k++) panel.fill(k * 32);
        const i64 num_sums = STRIP * panel.padded(), end = start(outer / STRIP, thread + 1);
        float* sums =
            reinterpret_cast<float*>(own_scratch.take(num_sums * sizeof(float) + STRIP * WIDENED * sizeof(bf16)));
        bf16* wide = reinterpret_cast<bf16*>(sums + num_sums);
        Tiles registers;
#pragma omp barrier
        for (i64 strip = start(outer / STRIP, thread); strip < end; strip++) {
            const i64 row = strip * STRIP;
            for (i64 k = 0; k < inner; k += WIDENED) {
                const i64 count = std::min(WIDENED, inner - k);
                // What comes next is on its way meanwhile: the processor alone would wait for it.
                const i64 ahead = k + AHEAD < inner ? AHEAD : (STRIP - 1) * inner + AHEAD;
                for (i64 i = 0; i < STRIP; i++) {
                    const int8_t* values = weight + (row + i) * inner + k;
                    for (i64 at = 0; at < count; at += 64) _mm_prefetch(values + ahead + at, _MM_HINT_T0);
                    widen_all(values, count, wide + i * WIDENED);
                }
                settle();
                for (i64 block = 0; block < panel.padded(); block += 32) {
                    const int width = panel.width(block);
                    auto run = width == 32 ? (k ? multiply<32, 32, true> : multiply<32, 32, false>)
                                           : (k ? multiply<32, 16, true> : multiply<32, 16, false>);
                    run(int(count), wide, WIDENED, panel.at(block) + k * width, width, sums + block * STRIP, width);
                }
                settle();
            }
            for (i64 i = 0; i < n; i += 16) {
                const i64 block = i / 32 * 32;
                finish(sums + block * STRIP + i - block, panel.width(block), 1, 0, scales + row,
                       bias ? bias + row : nullptr, n - i, y + i * outer + row, outer);
            }
        }
    }
}

#endif
