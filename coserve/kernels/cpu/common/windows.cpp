// Training windows in a step that runs as one call: their rows of the kept tensors are copied to
// their places, and they attend to the keys of their own pack.

#include <vector>

#include "kernels.h"
#ifdef __AVX512F__
#include <immintrin.h>
#endif

namespace {

// Minimum rows of a sequence for which arranging its keys in tiles pays; as in `traced_calls.py`.
const i64 MIN_ROWS_BY_TILES = 10;

// Minimum number of bytes of a copy that threads share.
const i64 MANY_BYTES = 1 << 16;

// A window as `traced_calls.py` writes it.
struct Window {
    i64 first_row, num_rows;  // in the step
    i64 first_in_pack;
    char* const* kept;  // where the first row of each tensor goes that may be kept, or null
    const i64*
        segments;  // of each its first row in the window, number of rows, first key, number of keys
    i64 num_segments;
};

thread_local std::vector<i64> numbers;

// Attends row after row, each the last of its sequence: the keys stand in one page.
template <typename T, typename Kernel>
void attend_one_by_one(Kernel kernel, const T* q, const T* keys, const T* values, T* out,
                       float* lse, i64 num_rows, i64 num_keys, i64 num_heads, i64 num_key_heads,
                       i64 width, i64 window, double scale, i64 num_threads) {
    numbers.assign(3 * num_rows, 0);
    i64* lengths = numbers.data() + 2 * num_rows;
    for (i64 i = 0; i < num_rows; i++) lengths[i] = num_keys - num_rows + i + 1;
    kernel(q, keys, values, numbers.data(), numbers.data() + num_rows, lengths, out, lse, num_rows,
           num_heads, num_key_heads, width, num_keys, num_keys * num_key_heads * width, window,
           scale, num_threads);
}

#ifdef HAS_TILES
void attend_by_tiles(const bf16* q, const bf16* keys, const bf16* values, bf16* out, float* lse,
                     i64 num_rows, i64 num_keys, i64 num_heads, i64 num_key_heads, i64 width,
                     i64 window, double scale, i64 num_threads) {
    const i64 segment[] = {0, num_rows, 0, num_keys};
    attention_forward(q, keys, values, out, lse, segment, 1, num_heads, num_key_heads, width,
                      window, scale, num_threads);
}
#endif

template <typename T, typename Kernel>
void attend(Kernel one_by_one, const T* q, T* out, float* lse, const Window* windows,
            i64 num_windows, i64 keys, i64 values, i64 num_heads, i64 num_key_heads, i64 width,
            i64 window, double scale, bool has_tiles, i64 num_threads) {
    const i64 row = num_heads * width, key = num_key_heads * width;
    for (const Window* w = windows; w < windows + num_windows; w++) {
        auto store = [&](i64 slot) {
            return reinterpret_cast<const T*>(w->kept[slot]) - w->first_in_pack * key;
        };
        for (const i64* s = w->segments; s < w->segments + 4 * w->num_segments; s += 4) {
            const i64 first = w->first_row + s[0];
            const T *own_keys = store(keys) + s[2] * key, *own_values = store(values) + s[2] * key;
#ifdef HAS_TILES
            if constexpr (std::is_same_v<T, bf16>)
                if (has_tiles && s[1] >= MIN_ROWS_BY_TILES) {
                    attend_by_tiles(q + first * row, own_keys, own_values, out + first * row,
                                    lse + first * num_heads, s[1], s[3], num_heads, num_key_heads,
                                    width, window, scale, num_threads);
                    continue;
                }
#endif
            attend_one_by_one(one_by_one, q + first * row, own_keys, own_values, out + first * row,
                              lse + first * num_heads, s[1], s[3], num_heads, num_key_heads, width,
                              window, scale, num_threads);
        }
    }
}

// Copies a row. One of many bytes, which are hardly read again before the pack goes backward,
// bypasses the caches. (Keys and values are read at once, but are few.)
inline void keep(const char* from, char* to, i64 num_bytes, bool is_of_many) {
#ifdef __AVX512F__
    if (is_of_many && !((reinterpret_cast<uintptr_t>(to) | num_bytes) & 63)) {
        for (i64 i = 0; i < num_bytes; i += 64)
            _mm512_stream_si512(reinterpret_cast<__m512i*>(to + i), _mm512_loadu_si512(from + i));
        return;
    }
#endif
    std::memcpy(to, from, num_bytes);
}

// Makes everything that this thread kept visible to others.
inline void end_keeping() {
#ifdef __AVX512F__
    _mm_sfence();
#endif
}

}  // namespace

// Copies windows' rows of a tensor to where they are kept. x [n, row_bytes]; all steps in bytes.
// slot: the tensor's place among those that may be kept.
extern "C" void keep_rows(const void* x, i64 x_step, i64 row_bytes, const i64* windows,
                          i64 num_windows, i64 slot, i64 num_threads) {
    const Window* all = reinterpret_cast<const Window*>(windows);
    for (const Window* w = all; w < all + num_windows; w++) {
        char* to = w->kept[slot];
        if (!to) continue;
        const char* from = static_cast<const char*>(x) + w->first_row * x_step;
        const bool many = w->num_rows * row_bytes >= MANY_BYTES;
#pragma omp parallel num_threads(int(num_threads)) if (many && num_threads > 1)
        {
#pragma omp for schedule(static)
            for (i64 i = 0; i < w->num_rows; i++)
                keep(from + i * x_step, to + i * row_bytes, row_bytes, many);
            end_keeping();
        }
    }
}

// Attends with windows' rows within their packs, as `paged_attention_…` does for other rows. keys,
// values: their places among the kept tensors.
extern "C" void attend_in_windows(const void* q, void* out, float* lse, const i64* windows,
                                  i64 num_windows, i64 keys, i64 values, i64 num_heads,
                                  i64 num_key_heads, i64 width, i64 window, double scale,
                                  i64 has_tiles, i64 is_bfloat16, i64 num_threads) {
    const Window* all = reinterpret_cast<const Window*>(windows);
    auto run = [=](auto kernel, auto type) {
        using T = decltype(type);
        attend(kernel, static_cast<const T*>(q), static_cast<T*>(out), lse, all, num_windows, keys,
               values, num_heads, num_key_heads, width, window, scale, has_tiles, num_threads);
    };
    is_bfloat16 ? run(paged_attention_bfloat16, bf16{}) : run(paged_attention_float32, float{});
}
