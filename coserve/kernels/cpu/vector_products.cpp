// y = x W^T + b of few rows in bfloat16, on processors without tiles: products are float32, since instructions for
// those of bfloat16 are slower there or missing, and the time is that of reading W once.

#include "vector_products.h"

namespace {

thread_local Scratch shared_scratch;

}  // namespace

// x [n, inner] with a step from row to row, weight [outer, inner], bias [outer] or null, y [n, outer]. A row's sums are
// the same whatever other rows are there.
extern "C" void vector_product(const bf16* x, i64 x_step, const bf16* weight, const bf16* bias, bf16* y, i64 n,
                               i64 inner, i64 outer, i64 num_threads) {
    vectors::product_of(shared_scratch, x, x_step, weight, static_cast<const float*>(nullptr), bias, y, n, inner, outer,
                        num_threads);
}
