// Products of many rows in bfloat16 with AMX, with sums in float32 that are rounded once: y = x
// W^T, and a LoRA that is added within the same sums. The weight is read as it lies, and what is
// multiplied next is fetched from memory while tiles are multiplied.

// As in rows.cpp: operations after a product give the same results there.
#pragma GCC optimize("no-associative-math", "signed-zeros", "fp-contract=off")

#include "tiles/finish.h"
#include "amx/wide_tiles.h"

#ifdef HAS_AMX

namespace {

// Maximum of the inner dimension for which rows of x are arranged at once, and whose sums are then
// put aside; and maximum number of blocks of these, which stay in the outer cache.
const i64 DEEP = 1024, MAX_BLOCKS = 256;
// Minimum number of rows per thread for which threads divide the rows instead of the weight's rows.
const i64 ROWS_OF_A_THREAD = 256;

thread_local Scratch scratch;

// Loads up to 32 elements of a row, and zeros.
inline __m512i load_some(const bf16* x, i64 count) {
    return _mm512_maskz_loadu_epi16(count < DEPTH ? (1u << count) - 1 : ~0u, x);
}

// Arranges rows of x as columns of right factors: [blocks, depth / 2, 32, 2], with zeros after the
// last row, and after the last of `columns` columns.
void arrange(const bf16* x, i64 step, i64 rows, i64 depth, i64 columns, bf16* out) {
    for (i64 row = 0; row < round_up(rows, BLOCK); row += 16) {
        bf16* block = out + row / BLOCK * BLOCK * depth + row % BLOCK * 2;
        for (i64 k = 0; k < depth; k += DEPTH) {
            __m512i pairs[16];
            for (int i = 0; i < 16; i++)
                pairs[i] = row + i < rows ? load_some(x + (row + i) * step + k, columns - k)
                                          : _mm512_setzero_si512();
            transpose(pairs);
            for (int i = 0; i < 16; i++)
                _mm512_storeu_si512(block + (k / 2 + i) * 2 * BLOCK, pairs[i]);
        }
    }
}

// Rounds the sums of a block, 32 outputs x 16 rows, with the bias (or null): a line for each row.
void round_block(const float* sums, const bf16* bias, __m512i (&lines)[16]) {
    for (int i = 0; i < 16; i++) {
        __m512 two[2];
        for (int e = 0; e < 2; e++) {
            two[e] = _mm512_loadu_ps(sums + (2 * i + e) * BLOCK);
            if (bias) two[e] = _mm512_add_ps(two[e], _mm512_set1_ps(widen(bias[2 * i + e])));
        }
        lines[i] = interleaved((__m512i)_mm512_cvtne2ps_pbh(two[1], two[0]));
    }
    transpose(lines);
}

// Addition to some columns of y: narrow B^T, as Python passes it. narrow [n, rank] with a step from
// row to row, B [end - start, rank].
struct Added {
    const bf16* narrow;
    i64 narrow_step;
    const bf16* b;
    i64 rank, start, end;

    i64 depth() const { return round_up(rank, DEPTH); }
};
static_assert(sizeof(Added) == 6 * sizeof(i64), "as Python has them");

// Destination of a product: rows y [n, width], with `onto`. A gated product writes silu(gate) up
// there, and, if they are kept, gate and up: rows of `width` elements, this many apart.
struct Target {
    bf16* y;
    i64 n, width;
    Onto onto;
    bool is_gated;
    bf16 *gate, *up;
    i64 kept_step;
    Lines lines = lines_of(y, width), gate_lines = lines_of(gate, kept_step),
          up_lines = lines_of(up, kept_step);

    Lines lines_of(bf16* first, i64 step) const { return Lines(first, step, n * width * 2); }

    // Writes the sums of a block of up to 32 rows and 32 columns.
    void write(const float* sums, const bf16* bias, i64 row, i64 rows, i64 column) const {
        for (i64 first = 0; first < rows; first += 16) {
            __m512i found[16];
            round_block(sums + first, bias ? bias + column : nullptr, found);
            for (i64 i = first; i < std::min(first + 16, rows); i++)
                lines.put(y + (row + i) * width + column, onto(found[i - first], row + i, column));
        }
    }

    // Writes the sums of a block of gates, and of the same columns of the other factor.
    void write_gated(const float* gates, const float* ups, const bf16* bias, i64 row, i64 rows,
                     i64 column) const {
        for (i64 first = 0; first < rows; first += 16) {
            __m512i gate_rows[16], up_rows[16];
            round_block(gates + first, bias ? bias + column : nullptr, gate_rows);
            round_block(ups + first, bias ? bias + width + column : nullptr, up_rows);
            for (i64 i = 0; i < std::min<i64>(16, rows - first); i++) {
                const i64 to = row + first + i;
                lines.put(y + to * width + column, gated(gate_rows[i], up_rows[i]));
                if (!gate) continue;
                gate_lines.put(gate + to * kept_step + column, gate_rows[i]);
                up_lines.put(up + to * kept_step + column, up_rows[i]);
            }
        }
    }
};

// Product y = x W^T + b, with the additions, for some rows of x and strips of 32 rows of the
// weight. The weight is the left factor.
struct Product {
    const bf16* x;
    i64 x_step;
    const bf16 *weight, *bias;
    Target target;
    i64 inner;
    const Added* added;
    i64 num_added;

    // Strips of the weight in the order in which they are multiplied; those of a gated product
    // alternate between gates and the other factor.
    i64 first_row(i64 strip) const {
        return target.is_gated ? strip % 2 * target.width + strip / 2 * BLOCK : strip * BLOCK;
    }
    // Number of strips that are written together.
    i64 at_once() const { return target.is_gated ? 2 : 1; }

    void run_for(i64 first, i64 rows, Part strips) const {
        const i64 blocks = (rows + BLOCK - 1) / BLOCK, turns = (inner + DEEP - 1) / DEEP;
        const i64 groups = turns > 1 ? (strips.size() * blocks + MAX_BLOCKS - 1) / MAX_BLOCKS : 1;
        for (i64 group = 0; group < groups; group++)
            run_for(
                first, rows, blocks, turns,
                Part(strips.size() / at_once(), group, groups).times(at_once()).from(strips.start));
    }

    void run_for(i64 first, i64 rows, i64 blocks, i64 turns, Part strips) const {
        // Sums of all strips, if they are put aside; otherwise those that are multiplied and those
        // before, which are written meanwhile.
        const i64 together = at_once(), kept = turns > 1 ? strips.size() : 2 * together;
        i64 depths = 0, deepest = 0;
        for (i64 i = 0; i < num_added; i++)
            depths += added[i].depth(), deepest = std::max(deepest, added[i].depth());
        float* sums = reinterpret_cast<float*>(scratch.take(
            blocks * (kept * SUMS * sizeof(float) + BLOCK * (DEEP + depths) * sizeof(bf16)) +
            BLOCK * deepest * sizeof(bf16)));
        bf16* arranged = reinterpret_cast<bf16*>(sums + kept * blocks * SUMS);
        bf16* const narrow = arranged + blocks * BLOCK * DEEP;  // of one after the other
        bf16* const left_of_added = narrow + blocks * BLOCK * depths;
        bf16* place = narrow;
        for (i64 i = 0; i < num_added; place += blocks * BLOCK * added[i++].depth())
            arrange(added[i].narrow + first * added[i].narrow_step, added[i].narrow_step, rows,
                    added[i].depth(), added[i].rank, place);
        auto more_of = [&](i64 strip) {
            const bf16* right = narrow;
            for (i64 i = 0; i < num_added; right += blocks * BLOCK * added[i++].depth()) {
                const i64 row = first_row(strip) - added[i].start, depth = added[i].depth(),
                          rank = added[i].rank;
                if (row < 0 || first_row(strip) >= added[i].end) continue;
                for (i64 j = 0; j < BLOCK; j++)
                    for (i64 k = 0; k < depth; k += DEPTH)
                        _mm512_storeu_si512(left_of_added + j * depth + k,
                                            load_some(added[i].b + (row + j) * rank + k, rank - k));
                return More{left_of_added, right, depth};
            }
            return More{nullptr, nullptr, 0};
        };
        auto sums_of = [&](i64 strip) {
            return sums + (strip - strips.start) % kept * blocks * SUMS;
        };
        // Multiplies a block of a strip, or of the last of the strips that are written together.
        auto write = [&](i64 strip, i64 block) {
            const i64 row = block * BLOCK, some = std::min<i64>(BLOCK, rows - row);
            const float* last = sums_of(strip) + block * SUMS;
            if (!target.is_gated)
                target.write(last, bias, first + row, some, first_row(strip));
            else if (strip % 2)
                target.write_gated(sums_of(strip - 1) + block * SUMS, last, bias, first + row, some,
                                   first_row(strip - 1));
        };
        for (i64 turn = 0; turn < turns; turn++) {
            const Part deep(inner / DEPTH, turn, turns);
            const i64 start = deep.start * DEPTH, depth = deep.size() * DEPTH,
                      parts = (depth + INNER - 1) / INNER;
            const bool is_last = turn == turns - 1;
            arrange(x + first * x_step + start, x_step, rows, depth, depth, arranged);
            for (i64 strip = strips.start; strip < strips.end; strip++) {
                const bf16* left = weight + first_row(strip) * inner + start;
                const bf16* next =
                    strip + 1 < strips.end ? weight + first_row(strip + 1) * inner + start
                    : is_last ? left
                              : weight + first_row(strips.start) * inner + start + depth;
                float* own = sums_of(strip);
                for (i64 part = 0; part < parts; part++) {
                    const Part within(depth / DEPTH, part, parts);
                    const i64 k = within.start * DEPTH;
                    const More all =
                        is_last && part == parts - 1 ? more_of(strip) : More{nullptr, nullptr, 0};
                    for (i64 block = 0; block < blocks; block++) {
                        const More more{all.left, all.right + block * BLOCK * all.depth, all.depth};
                        const Fetch fetch =
                            turns == 1
                                ? Fetch::in_order(
                                      next, within.start * blocks + block * within.size(), blocks)
                                : Fetch::of_rows(next + k, inner, block, blocks);
                        run(turn || part, within.size() * DEPTH, left + k, inner,
                            arranged + (block * depth + k) * BLOCK, own + block * SUMS, fetch,
                            more);
                        if (turns > 1 && is_last && part == parts - 1) write(strip, block);
                        if (turns == 1 && !part && strip > strips.start) write(strip - 1, block);
                    }
                }
            }
        }
        for (i64 block = 0; turns == 1 && strips.size() && block < blocks; block++)
            write(strips.end - 1, block);
    }
};

}  // namespace

static void run_product(const bf16* x, i64 x_step, const bf16* weight, const bf16* bias,
                        const Target& target, const i64* added, i64 num_added, i64 n, i64 inner,
                        i64 outer, i64 num_threads) {
    const Product product{
        x, x_step, weight, bias, target, inner, reinterpret_cast<const Added*>(added), num_added};
    const bool by_rows = n >= num_threads * ROWS_OF_A_THREAD;
    const i64 blocks = (n + BLOCK - 1) / BLOCK, at_once = product.at_once(),
              strips = outer / BLOCK / at_once;
#pragma omp parallel num_threads(num_threads)
    {
        const i64 thread = omp_get_thread_num(), threads = omp_get_num_threads();
        const Part all = by_rows ? Part(blocks, thread, threads) : Part(blocks, 0, 1);
        const Part own =
            (by_rows ? Part(strips, 0, 1) : Part(strips, thread, threads)).times(at_once);
        const i64 groups = (all.size() * BLOCK + MAX_ROWS - 1) / MAX_ROWS;
        Tiles registers;
        for (i64 group = 0; group < groups; group++) {
            const Part part(all.size(), group, groups);
            const i64 first = (all.start + part.start) * BLOCK,
                      end = std::min(n, (all.start + part.end) * BLOCK);
            product.run_for(first, end - first, own);
        }
        _mm_sfence();
    }
}

// Writes y = x W^T + b, plus narrow B^T in some columns: x [n, inner] with a step from row to row,
// weight [outer, inner], bias [outer] or null, y [n, outer]. added: Added, of columns that begin
// and end with whole blocks of 32; no column is in two. inner and outer are multiples of 32. A
// row's sums are the same in any company.
extern "C" void wide_product_and_low_rank(const bf16* x, i64 x_step, const bf16* weight,
                                          const bf16* bias, bf16* y, const i64* added,
                                          i64 num_added, i64 n, i64 inner, i64 outer,
                                          i64 num_threads) {
    run_product(x, x_step, weight, bias, {y, n, outer, {nullptr, 0}, false, nullptr, nullptr, 0},
                added, num_added, n, inner, outer, num_threads);
}

// The same without additions.
extern "C" void wide_product(const bf16* x, i64 x_step, const bf16* weight, const bf16* bias,
                             bf16* y, i64 n, i64 inner, i64 outer, i64 num_threads) {
    wide_product_and_low_rank(x, x_step, weight, bias, y, nullptr, 0, n, inner, outer, num_threads);
}

// The same product, rounded, and added to rows [n, outer], rounded again.
extern "C" void wide_product_onto(const bf16* x, i64 x_step, const bf16* weight, const bf16* bias,
                                  const bf16* onto, i64 onto_step, bf16* y, i64 n, i64 inner,
                                  i64 outer, i64 num_threads) {
    run_product(x, x_step, weight, bias,
                {y, n, outer, {onto, onto_step}, false, nullptr, nullptr, 0}, nullptr, 0, n, inner,
                outer, num_threads);
}

// `gated_product` with low-rank additions to its factors. Unless they are null, the factors are
// kept as gate and up [n, outer / 2], with as many elements from row to row.
extern "C" void wide_gated_product(const bf16* x, i64 x_step, const bf16* weight, const bf16* bias,
                                   bf16* gate, bf16* up, i64 kept_step, bf16* y, const i64* added,
                                   i64 num_added, i64 n, i64 inner, i64 outer, i64 num_threads) {
    run_product(x, x_step, weight, bias, {y, n, outer / 2, {nullptr, 0}, true, gate, up, kept_step},
                added, num_added, n, inner, outer, num_threads);
}

#endif
