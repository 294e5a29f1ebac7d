// LoRAs at sites that read the same rows, each row with its own adapter: y += scale B (A x) (arXiv
// 2106.09685).
//
// One call for any number of adapters, of any ranks, each of which sits at all of the sites or at
// some. Factors are read where they lie. Sums are float32, in an order that depends neither on
// other rows nor on the number of threads. An adapter of many rows may go through the tiles of
// `low_rank.cpp` instead. An adapter that is trained may drop features of its rows, which are
// neighbours.

#include <vector>

#include "avx512/adapter_pairs.h"
#include "common/dropout.h"
#include "kernels.h"
#include "common/low_rank_jobs.h"

namespace {

// Rows that are multiplied while a part of the factors stays in a core's cache.
const i64 BLOCK = 32;

// Cost of reading a factor for some rows, relative to the work for one row.
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

    // Whether none of the next pieces, of this cost together, is this thread's.
    bool passes(i64 cost) {
        if (done_ < end_ && done_ + cost > start_) return false;
        done_ += cost;
        return true;
    }

  private:
    i64 start_, end_, done_ = 0;
};

thread_local Scratch shared_scratch;

template <typename T>
class Batch {
  public:
    // are_done: adapters that have been added otherwise.
    Batch(const T* x, i64 x_step, i64 inner, const i64* rows, const i64* ends, i64 num_adapters,
          const Factors<T>* table, i64 table_step, const Site<T>* sites, i64 num_sites,
          const std::vector<bool>& are_done)
        : all_{x, x_step, inner, rows, nullptr, 0},
          ends_(ends),
          num_adapters_(num_adapters),
          table_(table),
          table_step_(table_step),
          sites_(sites),
          num_sites_(num_sites),
          are_done_(are_done) {
        for (i64 adapter = 0; adapter < num_adapters; adapter++) {
            i64 width = 0;
            for (i64 site = 0; site < num_sites; site++) width += at(adapter, site).padded();
            all_.width = std::max(all_.width, width);
        }
        const i64 num_narrow = ends[num_adapters - 1] * all_.width;
        all_.narrow = reinterpret_cast<T*>(shared_scratch.take(num_narrow * sizeof(T)));
        std::memset(static_cast<void*>(all_.narrow), 0, num_narrow * sizeof(T));
    }

    void run(i64 num_threads) const {
        i64 costs[2] = {};
        for (bool is_down : {true, false})
            each_group(is_down,
                       [&](const Piece<T>&, i64 cost, i64 end) { costs[is_down] += cost * end; });
#pragma omp parallel num_threads(num_threads)
        {
            thread_local std::vector<Piece<T>> pieces;
            pieces.clear();
            take_part(true, Part(costs[true]), pieces);
            const size_t num_down = pieces.size();
            take_part(false, Part(costs[false]), pieces);
            for (size_t i = 0; i + 1 < pieces.size(); i++)
                pieces[i].next = start_of(pieces[i + 1], i + 1 < num_down);
            for (size_t i = 0; i < num_down; i++) to_narrow(all_, pieces[i]);
#pragma omp barrier
            for (size_t i = num_down; i < pieces.size(); i++) from_narrow(all_, pieces[i]);
        }
        keep();
    }

  private:
    const Factors<T>& at(i64 adapter, i64 site) const {
        return table_[adapter * table_step_ + site];
    }

    // Stores the input of B, for adapters that keep it.
    void keep() const {
        for (i64 adapter = 0, first = 0; adapter < num_adapters_; first = ends_[adapter++])
            for (i64 site = 0, place = 0; site < num_sites_;
                 place += at(adapter, site++).padded()) {
                const Factors<T>& factors = at(adapter, site);
                if (are_done_[adapter] || !factors.narrow) continue;
                for (i64 row = first; row < ends_[adapter]; row++)
                    std::memcpy(static_cast<void*>(factors.narrow + (row - first) * factors.rank),
                                all_.narrow + row * all_.width + place, factors.rank * sizeof(T));
            }
    }

    const T* start_of(const Piece<T>& piece, bool is_down) const {
        return is_down ? piece.factors->a + piece.start * all_.inner
                       : piece.factors->b + piece.start * piece.factors->rank;
    }

    // Calls with the first piece of each adapter's rows at each site, the cost of a row of A or
    // column of y, and their number.
    template <typename Function>
    void each_group(bool is_down, Function function) const {
        for (i64 adapter = 0, first = 0; adapter < num_adapters_; first = ends_[adapter++])
            for (i64 row = are_done_[adapter] ? ends_[adapter] : first; row < ends_[adapter];
                 row += BLOCK) {
                const i64 last = std::min(row + BLOCK, ends_[adapter]);
                for (i64 site = 0, place = 0; site < num_sites_;
                     place += at(adapter, site++).padded()) {
                    const Factors<T>& factors = at(adapter, site);
                    if (!factors.rank) continue;
                    const Piece<T> piece{&factors, &sites_[site], row, last, 0, place, factors.b};
                    function(piece,
                             (last - row + READING) * (is_down ? all_.inner : factors.padded()),
                             is_down ? factors.rank : sites_[site].outer);
                }
            }
    }

    // Appends the pieces of this thread.
    void take_part(bool is_down, Part part, std::vector<Piece<T>>& pieces) const {
        each_group(is_down, [&](Piece<T> piece, i64 cost, i64 end) {
            if (part.passes(cost * end)) return;
            for (const i64 step = is_down ? STRIP : COLUMNS; piece.start < end; piece.start += step)
                if (part.has(cost * std::min(step, end - piece.start))) pieces.push_back(piece);
        });
    }

    Rows<T> all_;
    const i64* ends_;
    i64 num_adapters_;
    const Factors<T>* table_;
    i64 table_step_;
    const Site<T>* sites_;
    i64 num_sites_;
    const std::vector<bool>& are_done_;
};

// Minimum elements of the wide tensor per call for a second thread: it takes longer to begin than
// it helps with fewer.
const i64 ONE_THREAD_ELEMENTS = 1 << 13;

thread_local std::vector<bool> are_done;
thread_local Scratch dropped_scratch;

bool are_neighbours(const i64* rows, i64 count) {
    for (i64 i = 1; i < count; i++)
        if (rows[i] != rows[0] + i) return false;
    return true;
}

#ifdef HAS_TILES
thread_local Scratch gathered_scratch, sums_scratch;

// Copies these rows of a matrix side by side, or back from there.
template <bool BACK>
void copy_rows(bf16* x, i64 step, i64 width, const i64* rows, i64 n, bf16* gathered,
               i64 num_threads) {
#pragma omp parallel for schedule(static)                                                          \
    num_threads(num_threads) if (n * width > ONE_THREAD_ELEMENTS)
    for (i64 i = 0; i < n; i++) {
        bf16 *there = x + rows[i] * step, *here = gathered + i * width;
        std::memcpy(static_cast<void*>(BACK ? there : here), BACK ? here : there,
                    width * sizeof(bf16));
    }
}
#endif

// Adds one adapter's n rows by tiles; returns whether they are for its ranks and these widths. Rows
// that are not neighbours are copied side by side.
bool add_in_tiles(const bf16* x, i64 x_step, i64 inner, const i64* rows, i64 n,
                  const Factors<bf16>* table, const Site<bf16>* sites, i64 num_sites,
                  i64 num_threads) {
#ifdef HAS_TILES
    const i64 MAX_RANK = 64, BLOCK = 32;
    for (i64 site = 0; site < num_sites; site++)
        if (table[site].rank > MAX_RANK || inner % BLOCK || sites[site].outer % BLOCK) return false;
    auto threads = [=](i64 width) { return n * width <= ONE_THREAD_ELEMENTS ? 1 : num_threads; };
    const bool are_apart = !are_neighbours(rows, n);
    i64 widest = inner;
    for (i64 site = 0; site < num_sites; site++) widest = std::max(widest, sites[site].outer);
    bf16* gathered = nullptr;
    low_rank::Job job{const_cast<bf16*>(x) + rows[0] * x_step, x_step, nullptr, 0, nullptr, n};
    if (are_apart) {
        gathered =
            reinterpret_cast<bf16*>(gathered_scratch.take(n * (inner + widest) * sizeof(bf16)));
        copy_rows<false>(const_cast<bf16*>(x), x_step, inner, rows, n, gathered, num_threads);
        job.wide = gathered, job.wide_step = inner;
    }
    for (i64 site = 0; site < num_sites; site++) {
        const Factors<bf16>& factors = table[site];
        const Site<bf16>& to = sites[site];
        if (!factors.rank) continue;
        bf16* sums = factors.narrow;
        if (!sums)
            sums = reinterpret_cast<bf16*>(sums_scratch.take(n * factors.rank * sizeof(bf16)));
        low_rank::Job down = job;
        down.narrow = sums, down.narrow_step = factors.rank,
        down.factor = const_cast<bf16*>(factors.a);
        to_low_rank(low_rank::table_of(down), 1, true, inner, factors.rank, threads(inner));
        if (factors.scale != 1)
            for (i64 i = 0; i < n * factors.rank; i++)
                narrow(widen(sums[i]) * float(factors.scale), sums[i]);
        low_rank::Job up = down;
        up.wide = to.y + rows[0] * to.step, up.wide_step = to.step,
        up.factor = const_cast<bf16*>(factors.b);
        if (are_apart) {
            up.wide = gathered + n * inner, up.wide_step = to.outer;
            copy_rows<false>(to.y, to.step, to.outer, rows, n, up.wide, num_threads);
        }
        from_low_rank(low_rank::table_of(up), 1, true, true, to.outer, factors.rank,
                      threads(to.outer));
        if (are_apart) copy_rows<true>(to.y, to.step, to.outer, rows, n, up.wide, num_threads);
    }
    return true;
#else
    return false;
#endif
}

bool add_in_tiles(const float*, i64, i64, const i64*, i64, const Factors<float>*,
                  const Site<float>*, i64, i64) {
    return false;
}

// Adds n neighbours by tiles if there are many, by vectors otherwise.
template <typename T>
void add_neighbours(const T* x, i64 x_step, i64 inner, const i64* rows, i64 n,
                    const Factors<T>* table, const Site<T>* sites, i64 num_sites, i64 many_rows,
                    i64 num_threads) {
    if (n >= many_rows &&
        add_in_tiles(x, x_step, inner, rows, n, table, sites, num_sites, num_threads))
        return;
    static const std::vector<bool> is_done(1);
    Batch<T>(x, x_step, inner, rows, &n, 1, table, 0, sites, num_sites, is_done).run(num_threads);
}

// Adds n neighbours, of which each site drops other features.
template <typename T>
void add_dropped(const T* x, i64 x_step, i64 inner, const i64* rows, i64 n, const Factors<T>* table,
                 const Site<T>* sites, i64 num_sites, i64 many_rows, i64 num_threads) {
    T* left = reinterpret_cast<T*>(dropped_scratch.take(n * inner * sizeof(T)));
    const T* first = x + rows[0] * x_step;
    for (i64 site = 0; site < num_sites; site++) {
        const Factors<T>& factors = table[site];
        if (!factors.rank) continue;
        const Dropout dropout(inner, factors.salt, factors.p);
#pragma omp parallel for schedule(static)                                                          \
    num_threads(num_threads) if (n * inner > ONE_THREAD_ELEMENTS)
        for (i64 row = 0; row < n; row++)
            dropout.apply(first + row * x_step,
                          key_of_part(uint32_t(factors.row_ids[row]), factors.part),
                          left + row * inner);
        add_neighbours(left - rows[0] * inner, inner, inner, rows, n, &factors, &sites[site], 1,
                       many_rows, num_threads);
    }
}

template <typename T>
bool drops(const Factors<T>* table, i64 num_sites) {
    return std::any_of(table, table + num_sites,
                       [](const Factors<T>& factors) { return factors.p > 0; });
}

}  // namespace

// x [.., inner] with a step from row to row. rows: its rows that have an adapter, adapter by
// adapter; ends [num_adapters]: ends of each adapter's. table: Factors of the sites, by adapter,
// table_step factors apart. sites: address, step from row to row, and width of the outputs.
// many_rows: minimum number of an adapter's rows that go through tiles, where they can.
extern "C" void add_adapters(const void* x, i64 x_step, i64 inner, const i64* rows, const i64* ends,
                             i64 num_adapters, const i64* table, i64 table_step, const i64* sites,
                             i64 num_sites, i64 many_rows, i64 is_bfloat16, i64 num_threads) {
    auto run = [=](auto type) {
        using T = decltype(type);
        static_assert(sizeof(Factors<T>) == 9 * sizeof(i64) && sizeof(Site<T>) == 3 * sizeof(i64),
                      "as Python has them");
        const T* all = static_cast<const T*>(x);
        const Factors<T>* factors = reinterpret_cast<const Factors<T>*>(table);
        const Site<T>* to = reinterpret_cast<const Site<T>*>(sites);
        are_done.assign(num_adapters, false);
        i64 num_done = 0;
        for (i64 adapter = 0, first = 0; adapter < num_adapters; first = ends[adapter++]) {
            const i64 count = ends[adapter] - first;
            const Factors<T>* own = factors + adapter * table_step;
            if (drops(own, num_sites)) {
                add_dropped(all, x_step, inner, rows + first, count, own, to, num_sites, many_rows,
                            num_threads);
                are_done[adapter] = true;
            } else if (count >= many_rows) {
                are_done[adapter] = add_in_tiles(all, x_step, inner, rows + first, count, own, to,
                                                 num_sites, num_threads);
            }
            num_done += are_done[adapter];
        }
        if (num_done < num_adapters)
            Batch<T>(all, x_step, inner, rows, ends, num_adapters, factors, table_step, to,
                     num_sites, are_done)
                .run(num_threads);
    };
    is_bfloat16 ? run(bf16{}) : run(float{});
}
