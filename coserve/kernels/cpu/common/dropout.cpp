// Dropout whose mask is computed where it is needed, and never stored.
#ifdef __AVX512F__  // GCC would use half of each register
#pragma GCC target("prefer-vector-width=512")
#endif

#include "common/dropout.h"

#include "kernels.h"

// Number of elements below which one thread is used: another takes longer to begin than it helps.
static const i64 MIN_SHARED_ELEMENTS = 32768;

// Writes y [n, width]: x without the features that its rows drop, scaled up for them. x [n, width]
// with a step from row to row; keys: int64 [n], of which the low half counts.
extern "C" void drop_features(const void* x, i64 x_step, const i64* keys, i64 salt, double p,
                              void* y, i64 n, i64 width, i64 is_bfloat16, i64 num_threads) {
    const Dropout dropout(width, salt, p);
    auto run = [&](auto type) {
        using T = decltype(type);
#pragma omp parallel for schedule(static)                                                          \
    num_threads(num_threads) if (n * width >= MIN_SHARED_ELEMENTS)
        for (i64 row = 0; row < n; row++)
            dropout.apply(static_cast<const T*>(x) + row * x_step, uint32_t(keys[row]),
                          static_cast<T*>(y) + row * width);
    };
    is_bfloat16 ? run(bf16{}) : run(float{});
}
