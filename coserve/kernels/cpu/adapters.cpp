// What LoRAs add to sites that read the same rows, each row with its own adapter: y += scale B (A x) (arXiv
// 2106.09685).
//
// One call for any number of adapters, of any ranks, of which each sits at all of the sites or at some; factors are
// read where they lie. Sums are float32, in an order that depends neither on other rows nor on the number of threads.

#include <vector>

#include "adapter_pairs.h"
#include "kernels.h"

namespace {

// Rows that are multiplied while a part of the factors stays in a core's cache.
const i64 BLOCK = 32;

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
    Batch(const T* x, i64 x_step, i64 inner, const i64* rows, const i64* ends, i64 num_adapters,
          const Factors<T>* table, i64 table_step, const Site<T>* sites, i64 num_sites)
        : all_{x, x_step, inner, rows, nullptr, 0},
          ends_(ends),
          num_adapters_(num_adapters),
          table_(table),
          table_step_(table_step),
          sites_(sites),
          num_sites_(num_sites) {
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
            each_group(is_down, [&](const Piece<T>&, i64 cost, i64 end) { costs[is_down] += cost * end; });
#pragma omp parallel num_threads(num_threads)
        {
            thread_local std::vector<Piece<T>> pieces;
            pieces.clear();
            take_part(true, Part(costs[true]), pieces);
            const size_t num_down = pieces.size();
            take_part(false, Part(costs[false]), pieces);
            for (size_t i = 0; i + 1 < pieces.size(); i++) pieces[i].next = start_of(pieces[i + 1], i + 1 < num_down);
            for (size_t i = 0; i < num_down; i++) to_narrow(all_, pieces[i]);
#pragma omp barrier
            for (size_t i = num_down; i < pieces.size(); i++) from_narrow(all_, pieces[i]);
        }
    }

  private:
    const Factors<T>& at(i64 adapter, i64 site) const { return table_[adapter * table_step_ + site]; }

    const T* start_of(const Piece<T>& piece, bool is_down) const {
        return is_down ? piece.factors->a + piece.start * all_.inner
                       : piece.factors->b + piece.start * piece.factors->rank;
    }

    // Calls with the first piece of each adapter's rows at each site, the cost of a row of A, or column of y, and the
    // number of these.
    template <typename Function>
    void each_group(bool is_down, Function function) const {
        for (i64 adapter = 0, first = 0; adapter < num_adapters_; first = ends_[adapter++])
            for (i64 row = first; row < ends_[adapter]; row += BLOCK) {
                const i64 last = std::min(row + BLOCK, ends_[adapter]);
                for (i64 site = 0, place = 0; site < num_sites_; place += at(adapter, site++).padded()) {
                    const Factors<T>& factors = at(adapter, site);
                    if (!factors.rank) continue;
                    const Piece<T> piece{&factors, &sites_[site], row, last, 0, place, factors.b};
                    function(piece, (last - row + READING) * (is_down ? all_.inner : factors.padded()),
                             is_down ? factors.rank : sites_[site].outer);
                }
            }
    }

    // The pieces of this thread, after what is there.
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
