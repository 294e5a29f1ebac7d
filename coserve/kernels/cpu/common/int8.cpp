// Product y = (x W^T) s + b of few rows, with W in int8 and a scale s per output channel, in the
// time of reading W once. Many rows are better multiplied by a library with a dense weight, which
// `int8_to_bfloat16` makes, a tile at a time.

#include "common/vector_products.h"

namespace {

thread_local Scratch shared_scratch;

}  // namespace

// Writes y [n, outer] from x [n, inner] with a step from row to row, weight [outer, inner], scales
// [outer] and bias [outer] or null.
#define INT8_PRODUCT(name, T)                                                                      \
    extern "C" void name(const T* x, i64 x_step, const int8_t* weight, const float* scales,        \
                         const T* bias, T* y, i64 n, i64 inner, i64 outer, i64 num_threads) {      \
        vectors::product_of(shared_scratch, x, x_step, weight, scales, bias, y, n, inner, outer,   \
                            num_threads);                                                          \
    }
INT8_PRODUCT(int8_product_bfloat16, bf16)
INT8_PRODUCT(int8_product_float32, float)

// Writes values * scales, rounded, as rows of out; values [rows, columns], scales [rows].
extern "C" void int8_to_bfloat16(const int8_t* values, const float* scales, bf16* out, i64 rows,
                                 i64 columns, i64 num_threads) {
#pragma omp parallel for num_threads(num_threads)
    for (i64 row = 0; row < rows; row++)
        for (i64 i = 0; i < columns; i++)
            narrow(float(values[row * columns + i]) * scales[row], out[row * columns + i]);
}
