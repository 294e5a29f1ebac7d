// What LoRAs add to sites that read the same rows, each row with its own adapter: y += scale B (A x) (arXiv
// 2106.09685).
//
// One call for any number of adapters, of any ranks, of which each sits at all of the sites or at some; factors are
// read where they lie. Sums are float32, in an order that depends neither on other rows nor on the number of threads.

#include "kernels.h"

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512F__)
const int LANES = 16;
#else
const int LANES = 8;
#endif

typedef float Floats __attribute__((vector_size(LANES * 4)));
typedef uint32_t Ints __attribute__((vector_size(LANES * 4)));
typedef uint16_t Halves __attribute__((vector_size(LANES * 2)));

inline Floats load(const float* x) {
    Floats values;
    std::memcpy(&values, x, sizeof values);
    return values;
}

inline Floats load(const bf16* x) {
    Halves bits;
    std::memcpy(&bits, x, sizeof bits);
    return (Floats)(__builtin_convertvector(bits, Ints) << 16);
}

// The first elements, and zeros.
template <typename T>
inline Floats load_first(const T* x, i64 count) {
    if (count >= LANES) return load(x);
    T values[LANES] = {};
    for (i64 i = 0; i < count; i++) values[i] = x[i];
    return load(values);
}

#if defined(__AVX512F__)
inline Floats load_first(const float* x, i64 count) {
    return (Floats)_mm512_maskz_loadu_ps(count >= LANES ? 0xffff : (1u << count) - 1, x);
}
#endif

// In one order, wherever the compiler puts it.
inline float sum_of(Floats x) {
#pragma GCC unroll 4
    for (int half = LANES / 2; half; half /= 2) {
        Ints other;
        for (int i = 0; i < LANES; i++) other[i] = i ^ half;
        x += __builtin_shuffle(x, other);
    }
    return x[0];
}

// Rows become columns: halves of the square change places, then halves of these, and so on.
inline void transpose(Floats (&square)[LANES]) {
#pragma GCC unroll 4
    for (int half = LANES / 2; half; half /= 2) {
        Ints upper, lower;
        for (int i = 0; i < LANES; i++) {
            upper[i] = i & half ? LANES + i - half : i;
            lower[i] = i & half ? LANES + i : i + half;
        }
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++)
            if (!(i & half)) {
                const Floats one = square[i], other = square[i + half];
                square[i] = __builtin_shuffle(one, other, upper);
                square[i + half] = __builtin_shuffle(one, other, lower);
            }
    }
}

// What an adapter has at a site, as Python writes it down; rank 0: nothing.
template <typename T>
struct Factors {
    const T* a;  // [rank, inner]
    const T* b;  // [outer, rank]
    i64 rank;
    double scale;
};

template <typename T>
struct Site {
    T* y;  // [.., outer]
    i64 step, outer;
};

// Rows that are multiplied while a part of the factors stays in a core's cache; rows of A, and columns of y, of which
// one thread makes the results.
const i64 BLOCK = 32, STRIP = 8, COLUMNS = 4 * LANES;

// What is done for rows that a factor is read for, in terms of one row.
const i64 READING = 4;

// A thread's part of work that comes in pieces of different costs.
class Part {
  public:
    explicit Part(i64 total) {
        const i64 thread = omp_get_thread_num(), threads = omp_get_num_threads();
        start_ = total * thread / threads, end_ = total * (thread + 1) / threads;
    }

    bool has(i64 cost) {
        const i64 start = done_;
        done_ += cost;
        return start >= start_ && start < end_;
    }

  private:
    i64 start_, end_, done_ = 0;
};

thread_local Scratch shared_scratch, own_scratch;

template <typename T>
class Batch {
  public:
    Batch(const T* x, i64 x_step, i64 inner, const i64* rows, const i64* ends, i64 num_adapters,
          const Factors<T>* table, i64 table_step, const Site<T>* sites, i64 num_sites)
        : x_(x),
          x_step_(x_step),
          inner_(inner),
          rows_(rows),
          ends_(ends),
          num_adapters_(num_adapters),
          table_(table),
          table_step_(table_step),
          sites_(sites),
          num_sites_(num_sites) {
        for (i64 adapter = 0; adapter < num_adapters; adapter++) {
            i64 width = 0;
            for (i64 site = 0; site < num_sites; site++) width += padded(at(adapter, site));
            width_ = std::max(width_, width);
        }
        narrow_ = reinterpret_cast<float*>(shared_scratch.take(ends[num_adapters - 1] * width_ * sizeof(float)));
    }

    void run(i64 num_threads) {
        i64 costs[2] = {};
        each_piece(true, [&](const Piece&, i64 cost) { costs[0] += cost; });
        each_piece(false, [&](const Piece&, i64 cost) { costs[1] += cost; });
#pragma omp parallel num_threads(num_threads)
        {
            Part down(costs[0]), up(costs[1]);
            each_piece(true, [&](const Piece& piece, i64 cost) {
                if (down.has(cost)) to_narrow(piece);
            });
#pragma omp barrier
            each_piece(false, [&](const Piece& piece, i64 cost) {
                if (up.has(cost)) from_narrow(piece);
            });
        }
    }

  private:
    // Rows first to last of an adapter, in the order of `rows`; rows of A or columns of y from `start` on; where the
    // site's sums stand in a row of `narrow`.
    struct Piece {
        const Factors<T>& factors;
        const Site<T>& site;
        i64 first, last, start, place;
    };

    const Factors<T>& at(i64 adapter, i64 site) const { return table_[adapter * table_step_ + site]; }
    static i64 padded(const Factors<T>& factors) { return round_up(factors.rank, LANES); }

    template <typename Function>
    void each_piece(bool is_down, Function function) const {
        for (i64 adapter = 0, first = 0; adapter < num_adapters_; first = ends_[adapter++])
            for (i64 row = first; row < ends_[adapter]; row += BLOCK) {
                const i64 last = std::min(row + BLOCK, ends_[adapter]);
                for (i64 site = 0, place = 0; site < num_sites_; place += padded(at(adapter, site++))) {
                    const Factors<T>& factors = at(adapter, site);
                    if (!factors.rank) continue;
                    const i64 end = is_down ? factors.rank : sites_[site].outer, step = is_down ? STRIP : COLUMNS;
                    const i64 cost = (last - row + READING) * (is_down ? inner_ : padded(factors));
                    for (i64 start = 0; start < end; start += step)
                        function(Piece{factors, sites_[site], row, last, start, place},
                                 cost * std::min(step, end - start));
                }
            }
    }

    // Sums of ROWS rows of x with RANKS rows of A.
    template <int ROWS, int RANKS>
    void multiply(const Piece& piece, i64 row, i64 rank) const {
        Floats totals[RANKS][ROWS] = {};
        const T *a = piece.factors.a + rank * inner_, *x[ROWS];
        for (int r = 0; r < ROWS; r++) x[r] = x_ + rows_[row + r] * x_step_;
        const i64 whole = inner_ / LANES * LANES;
        auto add = [&](i64 k, auto load) {
            Floats values[ROWS];
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; r++) values[r] = load(x[r] + k);
#pragma GCC unroll 8
            for (int j = 0; j < RANKS; j++) {
                const Floats factor = load(a + j * inner_ + k);
#pragma GCC unroll 8
                for (int r = 0; r < ROWS; r++) totals[j][r] += factor * values[r];
            }
        };
        for (i64 k = 0; k < whole; k += LANES) add(k, [](const T* from) { return load(from); });
        if (whole < inner_) add(whole, [&](const T* from) { return load_first(from, inner_ - whole); });
        for (int j = 0; j < RANKS; j++)
            for (int r = 0; r < ROWS; r++)
                narrow_[(row + r) * width_ + piece.place + rank + j] =
                    rounded<T>(rounded<T>(sum_of(totals[j][r])) * float(piece.factors.scale));
    }

    template <int ROWS>
    void multiply_rows(const Piece& piece, i64 row) const {
        const int most = ROWS == 4 ? 4 : 8;
        const i64 end = std::min(piece.start + STRIP, piece.factors.rank);
        i64 rank = piece.start;
        for (; rank + most <= end; rank += most) multiply<ROWS, most>(piece, row, rank);
        for (; rank < end; rank++) multiply<ROWS, 1>(piece, row, rank);
    }

    void to_narrow(const Piece& piece) const {
        const i64 rank = piece.factors.rank;
        i64 row = piece.first;
        for (; row + 4 <= piece.last; row += 4) multiply_rows<4>(piece, row);
        for (; row < piece.last; row++) multiply_rows<1>(piece, row);
        if (piece.start + STRIP >= rank)
            for (row = piece.first; row < piece.last; row++)
                for (i64 j = rank; j < padded(piece.factors); j++) narrow_[row * width_ + piece.place + j] = 0;
    }

    void from_narrow(const Piece& piece) const {
        const Factors<T>& factors = piece.factors;
        const i64 rank = factors.rank, depth = padded(factors);
        const i64 columns = std::min(COLUMNS, piece.site.outer - piece.start);
        // B's rows as columns [depth, COLUMNS].
        float* right = reinterpret_cast<float*>(own_scratch.take(depth * COLUMNS * sizeof(float)));
        for (i64 column = 0; column < columns; column += LANES)
            for (i64 j = 0; j < depth; j += LANES) {
                Floats square[LANES];
                const T* b = factors.b + (piece.start + column) * rank + j;
#pragma GCC unroll 16
                for (int i = 0; i < LANES; i++)
                    square[i] = column + i < columns ? load_first(b + i * rank, rank - j) : Floats{};
                transpose(square);
#pragma GCC unroll 16
                for (int i = 0; i < LANES; i++)
                    std::memcpy(right + (j + i) * COLUMNS + column, &square[i], sizeof(Floats));
            }
        for (i64 row = piece.first; row < piece.last; row++) {
            const float* left = narrow_ + row * width_ + piece.place;
            Floats totals[COLUMNS / LANES] = {};
            for (i64 j = 0; j < rank; j++)
#pragma GCC unroll 4
                for (int i = 0; i < COLUMNS / LANES; i++) totals[i] += load(right + j * COLUMNS + i * LANES) * left[j];
            float sums[COLUMNS];
            std::memcpy(sums, totals, sizeof sums);
            T* y = piece.site.y + rows_[row] * piece.site.step + piece.start;
            if (columns == COLUMNS)
                for (i64 i = 0; i < COLUMNS; i++) narrow(widen(y[i]) + sums[i], y[i]);
            else
                for (i64 i = 0; i < columns; i++) narrow(widen(y[i]) + sums[i], y[i]);
        }
    }

    const T* x_;
    i64 x_step_, inner_;
    const i64 *rows_, *ends_;
    i64 num_adapters_;
    const Factors<T>* table_;
    i64 table_step_;
    const Site<T>* sites_;
    i64 num_sites_;
    float* narrow_;  // A x * scale, rounded, as many columns as the most that an adapter has: [n, width]
    i64 width_ = 0;
};

}  // namespace

// x [.., inner] with a step from row to row. rows: which of its rows have an adapter, adapter by adapter; ends
// [num_adapters]: where each adapter's end. table: Factors of the sites, by adapter, which stand table_step factors
// apart. sites: address, step from row to row, and width of the outputs.
extern "C" void add_adapters(const void* x, i64 x_step, i64 inner, const i64* rows, const i64* ends, i64 num_adapters,
                             const i64* table, i64 table_step, const i64* sites, i64 num_sites, i64 is_bfloat16,
                             i64 num_threads) {
    auto run = [=](auto type) {
        using T = decltype(type);
        static_assert(sizeof(Factors<T>) == 4 * sizeof(i64) && sizeof(Site<T>) == 3 * sizeof(i64),
                      "as Python has them");
        Batch<T>(static_cast<const T*>(x), x_step, inner, rows, ends, num_adapters,
                 reinterpret_cast<const Factors<T>*>(table), table_step, reinterpret_cast<const Site<T>*>(sites),
                 num_sites)
            .run(num_threads);
    };
    is_bfloat16 ? run(bf16{}) : run(float{});
}
