// Product y = x W^T in bfloat16 in tiles, of few rows here, with sums in float32 that are rounded
// once. PyTorch's product rearranges the weight first. Here it is the left factor as it lies, y^T =
// W x^T, so that the time is that of reading it once.

// As in rows.cpp: operations after a product give the same results there.
#pragma GCC optimize("no-associative-math", "signed-zeros", "fp-contract=off")

#include "tiles/finish.h"
#include "tiles/skinny.h"

#ifdef HAS_TILES

namespace {

// Rows of the weight that are multiplied at once.
const int STRIP = 32;
// Maximum number of rows for which vectors without tiles are faster than a tile by vectors.
const i64 MAX_PAIR_ROWS = 12;
// Minimum number of rows, and maximum number of threads, for which the kernel for many rows is
// faster.
const i64 MANY_ROWS = 128, MAX_WIDE_THREADS = 4;

thread_local Scratch shared_scratch, own_scratch;

// y = x W^T + b, and `onto`, each rounded. GATED: the product with the first half of W's rows,
// passed through SiLU, times that with the second.
template <bool GATED>
void product_of_few_rows(const bf16* x, i64 x_step, const bf16* weight, const bf16* bias, Onto onto,
                         bf16* y, i64 n, i64 inner, i64 outer, i64 num_threads) {
    const int PARTS = GATED ? 2 : 1;
    const Panel panel(shared_scratch, x, x_step, n, inner);
#pragma omp parallel num_threads(num_threads)
    {
        const int thread = omp_get_thread_num(), threads = omp_get_num_threads();
        auto start = [&](i64 count, int part) { return count * part / threads; };
        for (i64 k = start(inner / 32, thread); k < start(inner / 32, thread + 1); k++)
            panel.fill(k * 32);
        const i64 width = outer / PARTS, strip_sums = STRIP * panel.padded(),
                  most = spacing(inner * sizeof(bf16)), end = start(width / STRIP, thread + 1);
        float* sums =
            reinterpret_cast<float*>(own_scratch.take(PARTS * most * strip_sums * sizeof(float)));
        Tiles registers;
#pragma omp barrier
        for (i64 first = start(width / STRIP, thread); first < end; first += most) {
            const i64 strips = std::min(most, end - first), row = first * STRIP;
            for (int part = 0; part < PARTS; part++)
                for (i64 strip = 0; strip < strips; strip++)
                    for (i64 block = 0; block < panel.padded(); block += 32) {
                        const int columns = panel.width(block);
                        settle();
                        auto run =
                            columns == 32 ? multiply<32, 32, false> : multiply<32, 16, false>;
                        run(int(inner), weight + (part * width + row + strip) * inner,
                            strips * inner, panel.at(block), columns,
                            sums + (part * most + strip) * strip_sums + block * STRIP, columns);
                        settle();
                    }
            for (i64 i = 0; i < n; i += 16) {
                const i64 block = i / 32 * 32;
                auto rows_of = [&](i64 part) {
                    return RoundedRows(sums + part * most * strip_sums + block * STRIP + i - block,
                                       panel.width(block), strips, strip_sums, nullptr,
                                       bias ? bias + part * width + row : nullptr);
                };
                RoundedRows rows = rows_of(0), ups = rows_of(PARTS - 1);
                for (i64 column = row; column < row + strips * STRIP; column += 32) {
                    __m512i lines[16], others[16];
                    rows.next(lines);
                    if (GATED) ups.next(others);
                    for (i64 k = 0; k < std::min<i64>(16, n - i); k++)
                        _mm512_storeu_si512(
                            y + (i + k) * width + column,
                            GATED ? gated(lines[k], others[k]) : onto(lines[k], i + k, column));
                }
            }
        }
    }
}

}  // namespace

// Writes y [n, outer] = x W^T + b from x [n, inner] with a step from row to row, weight [outer,
// inner] and bias [outer] or null. inner and outer are multiples of 32. A row's sums are the same
// in any company of few rows, and in any of many; without AMX, in any of the fewest, and in any of
// more.
extern "C" void product(const bf16* x, i64 x_step, const bf16* weight, const bf16* bias, bf16* y,
                        i64 n, i64 inner, i64 outer, i64 num_threads) {
#ifdef HAS_PAIRS
    if (n <= MAX_PAIR_ROWS)
        return pair_product(x, x_step, weight, bias, y, n, inner, outer, num_threads);
#endif
#ifdef HAS_AMX
    if (n >= MANY_ROWS && num_threads <= MAX_WIDE_THREADS)
        return wide_product(x, x_step, weight, bias, y, n, inner, outer, num_threads);
#endif
    product_of_few_rows<false>(x, x_step, weight, bias, {nullptr, 0}, y, n, inner, outer,
                               num_threads);
}

#ifdef HAS_AMX

// The same product, rounded, and added to rows [n, outer], rounded again.
extern "C" void product_onto(const bf16* x, i64 x_step, const bf16* weight, const bf16* bias,
                             const bf16* onto, i64 onto_step, bf16* y, i64 n, i64 inner, i64 outer,
                             i64 num_threads) {
    if (n >= MANY_ROWS && num_threads <= MAX_WIDE_THREADS)
        return wide_product_onto(x, x_step, weight, bias, onto, onto_step, y, n, inner, outer,
                                 num_threads);
    product_of_few_rows<false>(x, x_step, weight, bias, {onto, onto_step}, y, n, inner, outer,
                               num_threads);
}

// Writes y [n, outer / 2] = silu(x G^T + b) (x U^T + b), of a weight [outer, inner] whose rows are
// G's and then as many of U's. outer is a multiple of 64.
extern "C" void gated_product(const bf16* x, i64 x_step, const bf16* weight, const bf16* bias,
                              bf16* y, i64 n, i64 inner, i64 outer, i64 num_threads) {
    if (n >= MANY_ROWS && num_threads <= MAX_WIDE_THREADS)
        return wide_gated_product(x, x_step, weight, bias, nullptr, nullptr, 0, y, nullptr, 0, n,
                                  inner, outer, num_threads);
    product_of_few_rows<true>(x, x_step, weight, bias, {nullptr, 0}, y, n, inner, outer,
                              num_threads);
}

#endif

#endif
