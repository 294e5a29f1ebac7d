// y = x W^T of few rows in bfloat16 on AMX, with sums in float32 that are rounded once. PyTorch's product rearranges the
// weight first; here it is the left factor as it lies, y^T = W x^T, so that the time is that of reading it once.

#include "amx.h"

#ifdef HAS_TILES

namespace {

// Rows of the weight that are multiplied at once.
const int STRIP = 32;

thread_local Scratch shared_scratch, own_scratch;

// Rows of x as columns of a right factor x^T: blocks of 32 rows, each [inner / 2, 32, 2], zeros behind n. The last
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

// Sums [32, up to 16] of a strip of the weight -> rounded, with the bias, as 32 elements of each of up to 16 rows of y.
void finish(const float* sums, i64 step, const bf16* bias, i64 n, bf16* y, i64 y_step) {
    __m512i pairs[16];
    for (int i = 0; i < 16; i++) {
        __m512 two[2];
        for (int e = 0; e < 2; e++) {
            two[e] = _mm512_loadu_ps(sums + (2 * i + e) * step);
            if (bias) two[e] = _mm512_add_ps(two[e], _mm512_set1_ps(widen(bias[2 * i + e])));
        }
        pairs[i] = interleaved((__m512i)_mm512_cvtne2ps_pbh(two[1], two[0]));
    }
    transpose(pairs);
    for (int i = 0; i < std::min<i64>(16, n); i++) _mm512_storeu_si512(y + i * y_step, pairs[i]);
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
        float* sums = reinterpret_cast<float*>(own_scratch.take(STRIP * 32 * sizeof(float)));
        Tiles registers;
#pragma omp barrier
        for (i64 strip = start(outer / STRIP, thread); strip < start(outer / STRIP, thread + 1); strip++)
            for (i64 block = 0; block < panel.padded(); block += 32) {
                const int width = panel.width(block);
                settle();
                auto run = width == 32 ? multiply<32, 32, false> : multiply<32, 16, false>;
                run(int(inner), weight + strip * STRIP * inner, inner, panel.at(block), width, sums, width);
                settle();
                for (i64 row = block; row < std::min(n, block + 32); row += 16)
                    finish(sums + row - block, width, bias ? bias + strip * STRIP : nullptr, n - row,
                           y + row * outer + strip * STRIP, outer);
            }
    }
}

#else

extern "C" void product() {}

#endif
