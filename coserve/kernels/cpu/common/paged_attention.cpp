// Attention of rows that are each the last of a sequence of its own (`paged_attention.h`), by
// vectors: for every shape that has a kernel at all.

#include "common/paged_attention.h"

#if defined(__AVX512F__)
#include <immintrin.h>
#endif
#include <utility>

namespace {

#if defined(__AVX512F__)
const int LANES = 16;
#elif defined(__AVX__)
const int LANES = 8;
#else
const int LANES = 4;
#endif
const int MAX_HEADS = 8;  // query heads at once
const int AHEAD = 24;     // by how many keys they are asked for before they are read

typedef float Floats __attribute__((vector_size(LANES * 4)));
typedef int32_t Ints __attribute__((vector_size(LANES * 4)));
typedef uint32_t Words __attribute__((vector_size(LANES * 4)));
typedef uint16_t Halves __attribute__((vector_size(LANES * 2)));

inline Floats load(const float* x) {
    Floats values;
    std::memcpy(&values, x, sizeof values);
    return values;
}

inline Floats load(const bf16* x) {
#if defined(__AVX512F__)  // GCC makes four instructions of this conversion
    const __m512i words =
        _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)));
    return (Floats)_mm512_slli_epi32(words, 16);
#else
    Halves bits;
    std::memcpy(&bits, x, sizeof bits);
    return (Floats)(__builtin_convertvector(bits, Words) << 16);
#endif
}

inline void store(float* x, Floats values) { std::memcpy(x, &values, sizeof values); }

// In lanes whose number has the bit HALF, returns the second's sums, in the others the first's: of
// a lane and its partner, whose number differs in that bit.
template <int HALF, int... LANE>
inline Floats folded(Floats first, Floats second, std::integer_sequence<int, LANE...>) {
    const Ints own = {(LANE & HALF ? LANES : 0) + LANE...},
               partner = {(LANE & HALF ? LANES : 0) + (LANE ^ HALF)...};
    return __builtin_shuffle(first, second, own) + __builtin_shuffle(first, second, partner);
}

// Returns the sum of each of several vectors, `LANES / COUNT` times over.
template <int COUNT>
inline Floats sums_of(const Floats* x) {
    if constexpr (COUNT == 1) {
        return *x;
    } else {
        Floats halves[COUNT / 2];
        for (int i = 0; i < COUNT / 2; i++)
            halves[i] =
                folded<COUNT / 2>(x[i], x[i + COUNT / 2], std::make_integer_sequence<int, LANES>());
        return sums_of<COUNT / 2>(halves);
    }
}

// Returns 2^x for x <= 0, to 2e-7 of it; nearly 0 for x below -126.
inline Floats exp2_below_0(Floats x) {
    const Floats least = Floats{} - 126.0f;
    x = x < least ? least : x;
    const Ints whole = __builtin_convertvector(x - 0.5f, Ints);  // which cuts off: to the nearest
    const Floats rest = x - __builtin_convertvector(whole, Floats);
    Floats power = Floats{} + 1.3333558e-3f;
    for (float factor : {9.6181291e-3f, 5.5504109e-2f, 2.4022651e-1f, 6.9314718e-1f, 1.0f})
        power = power * rest + factor;
    return power * (Floats)((whole + 127) << 23);
}

static_assert(CHUNK % LANES == 0);

thread_local Scratch scratch;

// One thread's part of the chunks.
template <typename T>
class Worker {
  public:
    static const int ALIGNED = 1;
    static i64 heads_at_once(const PagedRows<T>&) { return 1; }

    explicit Worker(const PagedRows<T>& problem)
        : p_(problem), width_(int(p_.width)), group_(int(p_.group())) {
        const size_t q = p_.num_heads * width_;
        q_ = reinterpret_cast<float*>(scratch.take((q + p_.num_heads * CHUNK) * sizeof(float)));
        scores_ = q_ + q;
    }

    // Attends with these key heads. next: the chunk after this one, or null.
    void attend(const Chunk& chunk, const Chunk* next, i64 first_head, i64 end_head,
                const Partial& partial) {
        const i64 start = first_head * group_, end = end_head * group_;
        const float scale = p_.scale * LOG2_E;  // scores are powers of 2
        const T* q = p_.q + chunk.row * p_.num_heads * width_;
        for (i64 i = start * width_; i < end * width_; i += LANES)
            store(q_ + i, load(q + i) * scale);
        locate(chunk, next);
        const int count = chunk.num_keys;
        // Heads go side by side through few keys, since they lie side by side in memory.
        for (int key = 0; key < count; key += LANES)
            for_groups(first_head, end_head, [&](i64 column, i64 head, auto group) {
                score<decltype(group)::value>(key, std::min(LANES, count - key), column,
                                              q_ + head * width_, scores_ + head * CHUNK + key);
            });
        for (i64 head = start; head < end; head++)
            weigh(scores_ + head * CHUNK, count, partial.largest[head], partial.weights[head]);
        std::memset(partial.values + start * width_, 0, (end - start) * width_ * sizeof(float));
        for (int key = 0; key < count; key += LANES)
            for_groups(first_head, end_head, [&](i64 column, i64 head, auto group) {
                add<decltype(group)::value>(count + key, std::min(LANES, count - key), column,
                                            scores_ + head * CHUNK + key,
                                            partial.values + head * width_);
            });
    }

  private:
    // The addresses of the chunk's keys, then of its values, then of the next one's first keys, in
    // the order of reading.
    void locate(const Chunk& chunk, const Chunk* next) {
        num_rows_ = 0;
        add_rows(p_.keys, chunk, chunk.num_keys);
        add_rows(p_.values, chunk, chunk.num_keys);
        if (next) add_rows(p_.keys, *next, std::min(AHEAD, next->num_keys));
    }

    void add_rows(const T* pages, const Chunk& chunk, int count) {
        const i64 row_width = p_.row_width();
        const i64* page = p_.pages + p_.first_page[chunk.row] + chunk.first_key / p_.block_tokens;
        i64 token = chunk.first_key % p_.block_tokens;
        for (int key = 0; key < count; key++) {
            rows_[num_rows_++] = pages + *page * p_.page_step + token * row_width;
            if (++token == p_.block_tokens) token = 0, page++;
        }
    }

    // Prefetches what will soon be read: pages lie far apart, which the CPU does not foresee. (GCC
    // drops calls of a function that only prefetches, unless it is inlined.)
    [[gnu::always_inline]] void fetch(int row, i64 column, int width) const {
        if (row >= num_rows_) return;
        for (int i = 0; i < width; i += 64 / int(sizeof(T)))
            __builtin_prefetch(rows_[row] + column + i);
    }

    // Calls `work` for the query heads of some key heads: with the column at which the key head
    // begins, the first of a few query heads, and their number as a type.
    template <typename Work>
    void for_groups(i64 first_head, i64 end_head, Work work) {
        for (i64 head = first_head; head < end_head; head++)
            for (int g = 0; g < group_; g += MAX_HEADS) {
                const i64 column = head * width_, first = head * group_ + g;
                switch (group_ - g) {
                    case 1:
                        work(column, first, std::integral_constant<int, 1>());
                        break;
                    case 2:
                        work(column, first, std::integral_constant<int, 2>());
                        break;
                    case 3:
                        work(column, first, std::integral_constant<int, 3>());
                        break;
                    case 4:
                        work(column, first, std::integral_constant<int, 4>());
                        break;
                    case 5:
                        work(column, first, std::integral_constant<int, 5>());
                        break;
                    case 6:
                        work(column, first, std::integral_constant<int, 6>());
                        break;
                    case 7:
                        work(column, first, std::integral_constant<int, 7>());
                        break;
                    default:
                        work(column, first, std::integral_constant<int, MAX_HEADS>());
                }
            }
    }

    // Computes the scores of up to LANES keys.
    template <int GROUP>
    void score(int first, int count, i64 column, const float* q, float* scores) {
        const int width = width_;
        Floats parts[GROUP][LANES];
        for (int key = 0; key < LANES; key++) {
            const T* k = rows_[first + std::min(key, count - 1)] + column;
            fetch(first + key + AHEAD, column, width);
            Floats sums[GROUP] = {};
            for (int i = 0; i < width; i += LANES) {
                const Floats value = load(k + i);
                for (int g = 0; g < GROUP; g++) sums[g] += value * load(q + g * width + i);
            }
            for (int g = 0; g < GROUP; g++) parts[g][key] = sums[g];
        }
        for (int g = 0; g < GROUP; g++) store(scores + g * CHUNK, sums_of<LANES>(parts[g]));
    }

    // Turns scores into weights, the largest of which is 1.
    static void weigh(float* scores, int count, float& largest, float& sum) {
        for (int i = count; i % LANES; i++) scores[i] = -INFINITY;
        Floats most = load(scores);
        for (int i = LANES; i < count; i += LANES)
            most = load(scores + i) > most ? load(scores + i) : most;
        largest = most[0];
        for (int lane = 1; lane < LANES; lane++) largest = std::max(largest, most[lane]);
        Floats total = {};
        for (int i = 0; i < count; i += LANES) {
            Floats weights = exp2_below_0(load(scores + i) - largest);
            if (i + LANES > count)
                for (int lane = count - i; lane < LANES; lane++) weights[lane] = 0;
            store(scores + i, weights);
            total += weights;
        }
        Floats lanes[LANES] = {total};
        sum = sums_of<LANES>(lanes)[0];
    }

    // Adds the values of up to LANES keys, VECTORS vectors of each, by their weights.
    template <int GROUP, int VECTORS>
    void add_part(int first, int count, i64 column, const float* weights, float* sums) {
        const int width = width_;
        Floats sum[GROUP][VECTORS];
        for (int g = 0; g < GROUP; g++)
            for (int i = 0; i < VECTORS; i++) sum[g][i] = load(sums + g * width + i * LANES);
        for (int key = 0; key < count; key++) {
            const T* v = rows_[first + key] + column;
            fetch(first + key + AHEAD, column, VECTORS * LANES);
            for (int i = 0; i < VECTORS; i++) {
                const Floats value = load(v + i * LANES);
                for (int g = 0; g < GROUP; g++) sum[g][i] += value * weights[g * CHUNK + key];
            }
        }
        for (int g = 0; g < GROUP; g++)
            for (int i = 0; i < VECTORS; i++) store(sums + g * width + i * LANES, sum[g][i]);
    }

    template <int GROUP>
    void add(int first, int count, i64 column, const float* weights, float* sums) {
        const int VECTORS = GROUP <= 4 ? 4 : 2;  // as many sums as there are registers
        int i = 0;
        for (; i + VECTORS * LANES <= width_; i += VECTORS * LANES)
            add_part<GROUP, VECTORS>(first, count, column + i, weights, sums + i);
        for (; i < width_; i += LANES)
            add_part<GROUP, 1>(first, count, column + i, weights, sums + i);
    }

    const PagedRows<T>& p_;
    const int width_, group_;
    int num_rows_ = 0;
    const T* rows_[2 * CHUNK + AHEAD];
    // The queries, times the scale; the chunk's scores, then weights, by query head.
    float *q_, *scores_;
};

}  // namespace

// q and out [rows, heads, width], lse [rows, heads]; keys and values: pages of [block tokens, key
// heads * width], page_step elements apart. A row's pages are numbered in `pages`, from
// first_page[row] on. It has lengths[row] keys and sees all of them, or the last `window`; a row
// without keys stays as it is. width: a multiple of 16.
#define PAGED_ATTENTION(NAME, T)                                                                   \
    extern "C" void NAME(                                                                          \
        const T* q, const T* keys, const T* values, const i64* pages, const i64* first_page,       \
        const i64* lengths, T* out, float* lse, i64 num_rows, i64 num_heads, i64 num_key_heads,    \
        i64 width, i64 block_tokens, i64 page_step, i64 window, double scale, i64 num_threads) {   \
        attend_by<Worker<T>>(PagedRows<T>{q, keys, values, pages, first_page, lengths, out, lse,   \
                                          num_rows, num_heads, num_key_heads, width, block_tokens, \
                                          page_step, window, float(scale)},                        \
                             num_threads);                                                         \
    }

PAGED_ATTENTION(paged_attention_bfloat16, bf16)
PAGED_ATTENTION(paged_attention_float32, float)
