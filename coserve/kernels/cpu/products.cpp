// y = x W^T in bfloat16 in tiles, of few rows here, with sums in float32 that are rounded once. PyTorch's product
// rearranges the weight first; here it is the left factor as it lies, y^T = W x^T, so that the time is that of reading
// it once.

#include "skinny.h"

#ifdef HAS_TILES

namespace {

// Rows of the weight that are multiplied at once.
const int STRIP = 32;
// Up to how many rows a tile that is multiplied by vectors takes longer than the rows alone.
const i64 FEWEST_ROWS = 12;
// From how many rows on, and with how many threads at most, the kernel for many is the faster one.
const i64 MANY_ROWS = 128, MOST_WIDE_THREADS = 4;

thread_local Scratch shared_scratch, own_scratch;

}  // namespace

// y = x W^T + b: x [n, inner] with a step from row to row, weight [outer, inner], bias [outer] or null, y [n, outer].
// inner and outer are multiples of 32. A row's sums are the same whatever other rows are there, among few and among
// many; without AMX, among the fewest and among more.
extern "C" void product(const bf16* x, i64 x_step, const bf16* weight, const bf16* bias, bf16* y, i64 n, i64 inner,
                        i64 outer, i64 num_threads) {
#ifdef HAS_PAIRS
    if (n <= FEWEST_ROWS) return pair_product(x, x_step, weight, bias, y, n, inner, outer, num_threads);
#endif
#ifdef HAS_AMX
    if (n >= MANY_ROWS && num_threads <= MOST_WIDE_THREADS)
        return wide_product(x, x_step, weight, bias, y, n, inner, outer, num_threads);
#endif
    const Panel panel(shared_scratch, x, x_step, n, inner);
#pragma omp parallel num_threads(num_threads)
    {
        const int thread = omp_get_thread_num(), threads = omp_get_num_threads();
        auto start = [&](i64 count, int part) { return count * part / threads; };
        for (i64 k = start(inner / 32, thread); k < start(inner / 32, thread + 1); k++) panel.fill(k * 32);
        const i64 strip_sums = STRIP * panel.padded(), most = spacing(inner * sizeof(bf16)),
                  end = start(outer / STRIP, thread + 1);
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
                round_rows(sums + block * STRIP + i - block, panel.width(block), strips, strip_sums, nullptr,
                           bias ? bias + row : nullptr, n - i, y + i * outer + row, outer);
            }
        }
    }
}

#endif
