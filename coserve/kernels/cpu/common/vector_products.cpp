// Products y = x W^T + b and dx = dy W in float32; and in bfloat16 on processors without tiles,
// where they are computed in float32, since instructions for bfloat16 are slower there or missing.

#include "common/vector_panels.h"

namespace {

thread_local Scratch shared_scratch;

// Maximum number of rows for which bfloat16 products read the weight as it lies, which takes little
// longer than reading it once.
const i64 FEW_ROWS = vectors::LANES == 16 ? 16 : 10;

// Sums go along the weight's rows for few rows, and along their own for more: their order differs.
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

// Writes y [n, outer] from x [n, inner] with a step from row to row, weight [outer, inner] and bias
// [outer] or null. A row's sums are the same in any company of few rows, and in any of many.
extern "C" void vector_product(const bf16* x, i64 x_step, const bf16* weight, const bf16* bias,
                               bf16* y, i64 n, i64 inner, i64 outer, i64 num_threads) {
    multiply(x, x_step, weight, bias, y, n, inner, outer, FEW_ROWS, num_threads);
}

// few_rows: maximum number of rows that are few.
extern "C" void float32_product(const float* x, i64 x_step, const float* weight, const float* bias,
                                float* y, i64 n, i64 inner, i64 outer, i64 few_rows,
                                i64 num_threads) {
    multiply(x, x_step, weight, bias, y, n, inner, outer, few_rows, num_threads);
}

// Writes x_grad [n, inner] from grad [n, outer] with a step from row to row and weight [outer,
// inner].
extern "C" void vector_input_gradient(const bf16* grad, i64 grad_step, const bf16* weight,
                                      bf16* x_grad, i64 n, i64 inner, i64 outer, i64 num_threads) {
    multiply_back(grad, grad_step, weight, x_grad, n, inner, outer, num_threads);
}

extern "C" void float32_input_gradient(const float* grad, i64 grad_step, const float* weight,
                                       float* x_grad, i64 n, i64 inner, i64 outer,
                                       i64 num_threads) {
    multiply_back(grad, grad_step, weight, x_grad, n, inner, outer, num_threads);
}
