// y = x W^T + b and dx = dy W in bfloat16, on processors without tiles: products are float32, since instructions for
// those of bfloat16 are slower there or missing.

#include "vector_panels.h"

namespace {

thread_local Scratch shared_scratch;

// Up to how many rows the time is that of reading W once, as it lies.
const i64 FEW_ROWS = 16;

}  // namespace

// x [n, inner] with a step from row to row, weight [outer, inner], bias [outer] or null, y [n, outer]. A row's sums are
// the same whatever other rows are there, among few and among many.
extern "C" void vector_product(const bf16* x, i64 x_step, const bf16* weight, const bf16* bias, bf16* y, i64 n,
                               i64 inner, i64 outer, i64 num_threads) {
    if (n <= FEW_ROWS)
        vectors::product_of(shared_scratch, x, x_step, weight, static_cast<const float*>(nullptr), bias, y, n, inner,
                            outer, num_threads);
    else
        panels::run({x, x_step, {weight, inner, true}, bias, y, outer, inner}, n, num_threads);
}

// grad [n, outer] with a step from row to row, weight [outer, inner], x_grad [n, inner].
extern "C" void vector_input_gradient(const bf16* grad, i64 grad_step, const bf16* weight, bf16* x_grad, i64 n,
                                      i64 inner, i64 outer, i64 num_threads) {
    panels::run({grad, grad_step, {weight, inner, false}, nullptr, x_grad, inner, outer}, n, num_threads);
}
