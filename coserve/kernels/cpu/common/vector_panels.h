// Products of rows with a weight on processors without tiles, and in float32: a strip of the weight
// is arranged once, as float32 in the first cache, and is multiplied there with all rows.
//
// A sum consists of blocks of DEPTH terms, one after the other, whatever other rows there are and
// however many threads: each thread has a part of the result for itself.
#pragma once

#include <utility>

#include "common/vector_products.h"

namespace panels {

using vectors::Floats;
using vectors::LANES;
using vectors::PAIR;
using vectors::Words;

// Number of rows whose sums of PAIR columns, a strip, are in registers.
#if defined(__AVX512F__)
const i64 MAX_ROWS = 14;
#else
const i64 MAX_ROWS = 6;
#endif
// Terms of a block. A strip of it, 16 KiB, stays in the first cache; all rows of a chunk, or their
// sums for the columns of a panel, in the second.
const i64 DEPTH = 2048 / LANES, CHUNK = 256, PANEL = 14 * PAIR;

// -- what is multiplied, arranged ---------------------------------------------------------

// Exchanges squares of STEP x STEP words beside the diagonal, in two rows.
template <int STEP, int... LANE>
inline void exchange(Words& x, Words& y, std::integer_sequence<int, LANE...>) {
    const Words one = x, other = y;
    x = __builtin_shuffle(one, other, Words{uint32_t(LANE & STEP ? LANES + LANE - STEP : LANE)...});
    y = __builtin_shuffle(one, other, Words{uint32_t(LANE & STEP ? LANES + LANE : LANE + STEP)...});
}

template <int STEP = LANES / 2>
inline void transpose(Words (&x)[LANES]) {
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++)
        if (!(i & STEP))
            exchange<STEP>(x[i], x[i + STEP], std::make_integer_sequence<int, LANES>());
    if constexpr (STEP > 1) transpose<STEP / 2>(x);
}

// Elements of a row in a vector of words.
template <typename T>
const int IN_WORDS = sizeof(Words) / sizeof(T);

// Writes a vector of words as float32 to `out` and, if a word has two elements, a step further on.
inline void store_words(Words words, bf16*, float* out, i64 step) {
    const Words even = words << 16, odd = words & 0xffff0000u;
    std::memcpy(out, &even, sizeof even);
    std::memcpy(out + step, &odd, sizeof odd);
}

inline void store_words(Words words, float*, float* out, i64) {
    std::memcpy(out, &words, sizeof words);
}

// Transposes LANES rows to float32: out [depth rounded up to pairs, step].
template <typename T>
inline void arrange_columns(const T* const (&rows)[LANES], i64 depth, float* out, i64 step) {
    const int width = IN_WORDS<T>;
    Words words[LANES];
    auto arrange = [&](i64 k) {
        transpose(words);
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++)
            store_words(words[i], static_cast<T*>(nullptr), out + (k + width / LANES * i) * step,
                        step);
    };
    const i64 whole = depth / width * width;
    for (i64 k = 0; k < whole; k += width) {
#pragma GCC unroll 16
        for (int lane = 0; lane < LANES; lane++)
            std::memcpy(&words[lane], rows[lane] + k, sizeof(Words));
        arrange(k);
    }
    if (whole == depth) return;
    T rest[LANES][width] = {};
    for (int lane = 0; lane < LANES; lane++)
        std::memcpy(rest[lane], rows[lane] + whole, (depth - whole) * sizeof(T));
    std::memcpy(words, rest, sizeof words);
    arrange(whole);
}

// Returns the column of a strip for a lane of its first or second vector, in the order of
// `load_pair`.
inline i64 column_of(i64 lane, int half, const bf16*) { return 2 * lane + half; }
inline i64 column_of(i64 lane, int half, const float*) { return lane + half * LANES; }

// A weight, by terms of the sums and by columns of the result.
template <typename T>
struct Weight {
    const T* start;
    i64 step;                // from row to row
    bool has_rows_of_terms;  // y = x W^T: a row is a column's terms; dx = dy W: a row is a term's
                             // columns

    const T* at(i64 term, i64 column) const {
        return has_rows_of_terms ? start + column * step + term : start + term * step + column;
    }

    // Arranges a strip of at most PAIR columns for each of `depth` terms, two vectors in the order
    // of `load_pair`.
    void arrange(i64 term, i64 column, i64 depth, i64 columns, float* out) const {
        const T* from = at(term, column);
        for (int half = 0; has_rows_of_terms && half < 2; half++) {
            const T* rows[LANES];
            for (i64 lane = 0; lane < LANES; lane++)
                rows[lane] = from + std::min(column_of(lane, half, from), columns - 1) * step;
            arrange_columns(rows, depth, out + half * LANES, PAIR);
        }
        T part[PAIR] = {};
        for (i64 k = 0; !has_rows_of_terms && k < depth; k++, from += step) {
            const T* own = from;
            if (columns < PAIR) own = static_cast<T*>(std::memcpy(part, from, columns * sizeof(T)));
            Floats pair[2];
            vectors::load_pair(own, pair[0], pair[1]);
            std::memcpy(out + k * PAIR, pair, sizeof pair);
        }
    }
};

// -- products -------------------------------------------------------------------------------

// Lines that are fetched meanwhile: some of each row of a part of the weight. Each of `turns` calls
// with the same strip fetches its rows.
struct Ahead {
    const char* start;
    i64 step, lines, turn, turns;
};
const i64 LINE_BYTES = 64;

// Computes sums [ROWS, PAIR] = x w, added to earlier ones unless they are the first; x [depth,
// LANES], w [depth, PAIR].
template <int ROWS>
void multiply(const float* x, const float* w, i64 depth, float* sums, bool is_first,
              const Ahead& ahead) {
    Floats totals[ROWS][2] = {};
    auto add = [&](i64 k) {
        const Floats even = vectors::load(w + k * PAIR), odd = vectors::load(w + k * PAIR + LANES);
#pragma GCC unroll 16
        for (int row = 0; row < ROWS; row++) {
            const Floats own = Floats{} + x[k * LANES + row];
            totals[row][0] = vectors::multiply_add(own, even, totals[row][0]);
            totals[row][1] = vectors::multiply_add(own, odd, totals[row][1]);
        }
    };
    i64 k = 0;
    for (i64 row = 0; k + ahead.lines <= depth; row++) {
        const char* line = ahead.start + (row % ahead.turns == ahead.turn ? row * ahead.step : 0);
        for (const i64 end = k + ahead.lines; k < end; k++, line += LINE_BYTES) {
            __builtin_prefetch(line, 0, 2);
            add(k);
        }
    }
    for (; k < depth; k++) add(k);
#pragma GCC unroll 16
    for (int row = 0; row < ROWS; row++)
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
            float* place = sums + row * PAIR + half * LANES;
            if (!is_first) totals[row][half] += vectors::load(place);
            std::memcpy(place, &totals[row][half], sizeof(Floats));
        }
}

typedef void (*Multiply)(const float*, const float*, i64, float*, bool, const Ahead&);

template <int ROWS = MAX_ROWS>
inline Multiply multiply_of(i64 rows) {
    if constexpr (ROWS > 1)
        if (rows < ROWS) return multiply_of<ROWS - 1>(rows);
    return multiply<ROWS>;
}

// y = x w + b
template <typename T>
struct Problem {
    const T* x;
    i64 x_step;
    Weight<T> weight;
    const T* bias;  // or null
    T* y;
    i64 columns, terms;

    static const i64 LINE = LINE_BYTES / sizeof(T);

    // Multiplies rows [first, last) and columns [left, right) of y, at most CHUNK and PANEL.
    void run(Scratch& memory, i64 first, i64 last, i64 left, i64 right) const {
        const i64 n = last - first, tiles = (n + MAX_ROWS - 1) / MAX_ROWS;
        const i64 size = DEPTH * PAIR + tiles * DEPTH * LANES + n * round_up(right - left, PAIR);
        float* strip =
            reinterpret_cast<float*>(memory.take(size * sizeof(float)));  // [DEPTH, PAIR]
        float* rows = strip + DEPTH * PAIR;                               // [tiles, DEPTH, LANES]
        float* sums = rows + tiles * DEPTH * LANES;                       // [strips, n, PAIR]
        for (i64 term = 0; term < terms; term += DEPTH) {
            const i64 depth = std::min(DEPTH, terms - term);
            for (i64 tile = 0; tile < tiles; tile++) {
                const i64 row = first + n * tile / tiles, end = first + n * (tile + 1) / tiles;
                const T* from[LANES];
                for (i64 lane = 0; lane < LANES; lane++)
                    from[lane] = x + std::min(row + lane, end - 1) * x_step + term;
                arrange_columns(from, depth, rows + tile * DEPTH * LANES, LANES);
            }
            for (i64 column = left; column < right; column += PAIR) {
                const i64 width = std::min<i64>(PAIR, right - column);
                weight.arrange(term, column, depth, width, strip);
                for (i64 tile = 0; tile < tiles; tile++) {
                    const i64 row = n * tile / tiles, count = n * (tile + 1) / tiles - row;
                    float* own = sums + (column - left) * n + row * PAIR;
                    const Ahead next = ahead(term, column, left, right, tile, tiles);
                    multiply_of(count)(rows + tile * DEPTH * LANES, strip, depth, own, !term, next);
                    if (term + depth == terms) store(own, first + row, count, column, width);
                }
            }
        }
    }

    // While a strip is multiplied, fetch the next one or, of a weight whose rows pass through all
    // strips, a part of the next block.
    Ahead ahead(i64 term, i64 column, i64 left, i64 right, i64 tile, i64 tiles) const {
        i64 lines = DEPTH / LINE, next_term = term, next_column = column + PAIR;
        if (!weight.has_rows_of_terms) {
            lines = (right - left + LINE - 1) / LINE;
            next_term += DEPTH + (column - left) / PAIR * (DEPTH / lines);
            next_column = left;
        } else if (next_column >= right) {
            next_term += DEPTH;
            next_column = left;
        }
        if (next_term >= terms) {
            next_term -= terms;
            next_column += right - left;
        }
        const char* start = reinterpret_cast<const char*>(weight.at(next_term, next_column));
        return {start, i64(weight.step * sizeof(T)), lines, tile, tiles};
    }

    void store(const float* sums, i64 row, i64 count, i64 column, i64 width) const {
        Floats added[2] = {};
        T part[PAIR] = {};
        if (bias) {
            std::memcpy(part, bias + column, width * sizeof(T));
            vectors::load_pair(part, added[0], added[1]);
        }
        for (i64 i = 0; i < count; i++, sums += PAIR) {
            T* to = y + (row + i) * columns + column;
            vectors::store_pair(vectors::load(sums) + added[0],
                                vectors::load(sums + LANES) + added[1], width == PAIR ? to : part);
            if (width < PAIR) std::memcpy(to, part, width * sizeof(T));
        }
    }
};

// Threads share the columns, so that each part of the weight is widened once; and the rows too,
// where there are more threads than would have some strips each.
template <typename T>
void run(const Problem<T>& problem, i64 n, i64 num_threads) {
    static thread_local Scratch memory;
#pragma omp parallel num_threads(num_threads)
    {
        const i64 thread = omp_get_thread_num(), threads = omp_get_num_threads();
        const i64 strips = (problem.columns + PAIR - 1) / PAIR;
        i64 parts = 1;
        while (strips * parts < 4 * threads && threads % (2 * parts) == 0 && n >= 64 * parts)
            parts *= 2;
        const i64 place = thread / parts, places = threads / parts, part = thread % parts;
        const i64 begin = strips * place / places * PAIR;
        const i64 end = std::min(problem.columns, strips * (place + 1) / places * PAIR),
                  last = n * (part + 1) / parts;
        for (i64 row = n * part / parts; row < last; row += CHUNK)
            for (i64 left = begin; left < end; left += PANEL)
                problem.run(memory, row, std::min(row + CHUNK, last), left,
                            std::min(left + PANEL, end));
    }
}

}  // namespace panels
