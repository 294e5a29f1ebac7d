// y = x W^T + b and dx = dy W: in float32, and in bfloat16 on processors without tiles, where
// products are float32, since instructions for those of bfloat16 are slower there or missing.

#include "common/vector_panels.h"

namespace {

thread_local Scratch shared_scratch;

// Up to how many rows sums of bfloat16 are made of the weight as it lies, which takes nearly as
// long as reading it once.
const i64 FEW_ROWS = vectors::LANES == 16 ? 16 : 10;

// Of few rows along the weight's rows, of more along their own: the order of a sum is another.
template <typename T>
void multiply(const T* x, i64 x_step, const T* weight, const T* bias, T* y, i64 n, i64 inner,
              i64 outer, i64 few_rows, i64 num_threads) {
    const float* no_scales = nullptr;
    if (n <= few_rows)
        vectors::product_of(shared_scratch, x, x_step, weight, no_scales, bias, y, n, inner, outer,
                            num_threads);
    else
        panels::run<T>({x, x_step, {weight, inner, true}, bias, y, outer, inner}, n, num_threads);
}

template <typename T>
void multiply_back(const T* grad, i64 grad_step, const T* weight, T* x_grad, i64 n, i64 inner,
                   i64 outer, i64 num_threads) {
    panels::run<T>({grad, grad_step, {weight, inner, false}, nullptr, x_grad, inner, outer}, n,
                   num_threads);
}

}  // namespace

// x [n, inner] with a step from row to row, weight [outer, inner], bias [outer] or null, y [n,
// outer]. A row's sums are the same whatever other rows are there, among few and among many.
extern "C" void vector_product(const bf16* x, i64 x_step, const bf16* weight, const bf16* bias,
                               bf16* y, i64 n, i64 inner, i64 outer, i64 num_threads) {
    multiply(x, x_step, weight, bias, y, n, inner, outer, FEW_ROWS, num_threads);
}

// few_rows: up to how many rows are few.
extern "C" void float32_product(const float* x, i64 x_step, const float* weight, const float* bias,
                                float* y, i64 n, i64 inner, i64 outer, i64 few_rows,
                                i64 num_threads) {
    multiply(x, x_step, weight, bias, y, n, inner, outer, few_rows, num_threads);
}

// grad [n, outer] with a step from row to row, weight [outer, inner], x_grad [n, inner].
extern "C" void vector_input_gradient(const bf16* grad, i64 grad_step, const bf16* weight,
                                      bf16* x_grad, i64 n, i64 inner, i64 outer, i64 num_threads) {
    multiply_back(grad, grad_step, weight, x_grad, n, inner, outer, num_threads);
}

extern "C" void float32_input_gradient(const float* grad, i64 grad_step, const float* weight,
                                       float* x_grad, i64 n, i64 inner, i64 outer,
                                       i64 num_threads) {
    multiply_back(grad, grad_step, weight, x_grad, n, inner, outer, num_threads);
}
