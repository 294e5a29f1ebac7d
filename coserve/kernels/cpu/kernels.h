// Declarations of every kernel that Python may call. Their arguments are stated here alone: the
// definitions are compiled against this header, and `compiled.py` reads it when it loads the
// library. An argument is an address, an i64 or a double.
//
// A group whose comment says (AMX) is compiled for processors that have it; (pairs), for those that
// have AVX-512's instructions for products of pairs of bfloat16 instead; (tiles), for both. All
// other groups are compiled for every processor. The folders are the same division: `amx`, `avx512`
// (pairs), `tiles`, and `common`.
#pragma once

#include "common/common.h"

extern "C" {

// tiles/tiles.cpp: asks the system for the tile registers of AMX, if there are any; returns how
// tiles are multiplied.
enum { NO_TILES, TILES_BY_PAIRS, TILES_BY_AMX };
int request_tiles();

// tiles/attention_forward.cpp, tiles/attention_backward.cpp (tiles)
void attention_forward(const bf16* q, const bf16* k, const bf16* v, bf16* out, float* lse,
                       const i64* segments, i64 num_segments, i64 num_heads, i64 num_key_heads,
                       i64 width, i64 window, double scale, i64 num_threads);
void attention_backward(const bf16* grad, const bf16* q, const bf16* k, const bf16* v,
                        const bf16* out, const float* lse, bf16* q_grad, float* k_grad,
                        float* v_grad, const i64* segments, i64 num_segments, i64 num_heads,
                        i64 num_key_heads, i64 width, i64 window, double scale, i64 num_threads);

// common/paged_attention.cpp
void paged_attention_bfloat16(const bf16* q, const bf16* keys, const bf16* values, const i64* pages,
                              const i64* first_page, const i64* lengths, bf16* out, float* lse,
                              i64 num_rows, i64 num_heads, i64 num_key_heads, i64 width,
                              i64 block_tokens, i64 page_step, i64 window, double scale,
                              i64 num_threads);
void paged_attention_float32(const float* q, const float* keys, const float* values,
                             const i64* pages, const i64* first_page, const i64* lengths,
                             float* out, float* lse, i64 num_rows, i64 num_heads, i64 num_key_heads,
                             i64 width, i64 block_tokens, i64 page_step, i64 window, double scale,
                             i64 num_threads);

// amx/paged_tiles.cpp (AMX)
void paged_attention_by_tiles(const bf16* q, const bf16* keys, const bf16* values, const i64* pages,
                              const i64* first_page, const i64* lengths, bf16* out, float* lse,
                              i64 num_rows, i64 num_heads, i64 num_key_heads, i64 width,
                              i64 block_tokens, i64 page_step, i64 window, double scale,
                              i64 num_threads);

// tiles/pieces.cpp (tiles)
void attend_in_pieces(const bf16* q, const bf16* keys, const bf16* values, const i64* pages,
                      bf16* out, float* lse, const i64* pieces, i64 num_pieces, i64 num_heads,
                      i64 num_key_heads, i64 width, i64 block_tokens, i64 page_step, i64 window,
                      double scale, i64 num_threads);

// common/dropout.cpp
void drop_features(const void* x, i64 x_step, const i64* keys, i64 salt, double p, void* y, i64 n,
                   i64 width, i64 is_bfloat16, i64 num_threads);

// tiles/products.cpp (tiles)
void product(const bf16* x, i64 x_step, const bf16* weight, const bf16* bias, bf16* y, i64 n,
             i64 inner, i64 outer, i64 num_threads);

// tiles/products.cpp (AMX)
void product_onto(const bf16* x, i64 x_step, const bf16* weight, const bf16* bias, const bf16* onto,
                  i64 onto_step, bf16* y, i64 n, i64 inner, i64 outer, i64 num_threads);
void gated_product(const bf16* x, i64 x_step, const bf16* weight, const bf16* bias, bf16* y, i64 n,
                   i64 inner, i64 outer, i64 num_threads);

// amx/wide_tiles.cpp (AMX)
void wide_product(const bf16* x, i64 x_step, const bf16* weight, const bf16* bias, bf16* y, i64 n,
                  i64 inner, i64 outer, i64 num_threads);
void wide_product_onto(const bf16* x, i64 x_step, const bf16* weight, const bf16* bias,
                       const bf16* onto, i64 onto_step, bf16* y, i64 n, i64 inner, i64 outer,
                       i64 num_threads);
void wide_gated_product(const bf16* x, i64 x_step, const bf16* weight, const bf16* bias, bf16* gate,
                        bf16* up, i64 kept_step, bf16* y, const i64* added, i64 num_added, i64 n,
                        i64 inner, i64 outer, i64 num_threads);
void wide_product_and_low_rank(const bf16* x, i64 x_step, const bf16* weight, const bf16* bias,
                               bf16* y, const i64* added, i64 num_added, i64 n, i64 inner,
                               i64 outer, i64 num_threads);

// amx/wide_gradients.cpp (AMX)
void tile_input_gradient(const bf16* grad, i64 grad_step, const bf16* weight, bf16* x_grad,
                         i64 x_grad_step, i64 is_added, const bf16* narrow, i64 narrow_step,
                         const bf16* a, i64 rank, i64 n, i64 inner, i64 outer, i64 num_threads);

// amx/int8_tiles.cpp (AMX)
void int8_product_by_tiles(const bf16* x, i64 x_step, const int8_t* weight, const float* scales,
                           const bf16* bias, bf16* y, i64 n, i64 inner, i64 outer, i64 num_threads);

// common/vector_products.cpp
void vector_product(const bf16* x, i64 x_step, const bf16* weight, const bf16* bias, bf16* y, i64 n,
                    i64 inner, i64 outer, i64 num_threads);
void vector_input_gradient(const bf16* grad, i64 grad_step, const bf16* weight, bf16* x_grad, i64 n,
                           i64 inner, i64 outer, i64 num_threads);
void float32_product(const float* x, i64 x_step, const float* weight, const float* bias, float* y,
                     i64 n, i64 inner, i64 outer, i64 few_rows, i64 num_threads);
void float32_input_gradient(const float* grad, i64 grad_step, const float* weight, float* x_grad,
                            i64 n, i64 inner, i64 outer, i64 num_threads);

// avx512/pair_products.cpp (pairs)
void pair_product(const bf16* x, i64 x_step, const bf16* weight, const bf16* bias, bf16* y, i64 n,
                  i64 inner, i64 outer, i64 num_threads);
void int8_pair_product(const bf16* x, i64 x_step, const int8_t* weight, const float* scales,
                       const bf16* bias, bf16* y, i64 n, i64 inner, i64 outer, i64 num_threads);

// avx512/pair_gradients.cpp (pairs)
void pair_input_gradient(const bf16* grad, i64 grad_step, const bf16* weight, bf16* x_grad,
                         i64 x_step, i64 adds, i64 n, i64 inner, i64 outer, i64 num_threads);

// common/int8.cpp
void int8_product_bfloat16(const bf16* x, i64 x_step, const int8_t* weight, const float* scales,
                           const bf16* bias, bf16* y, i64 n, i64 inner, i64 outer, i64 num_threads);
void int8_product_float32(const float* x, i64 x_step, const int8_t* weight, const float* scales,
                          const float* bias, float* y, i64 n, i64 inner, i64 outer,
                          i64 num_threads);
void int8_to_bfloat16(const int8_t* values, const float* scales, bf16* out, i64 rows, i64 columns,
                      i64 num_threads);

// tiles/low_rank.cpp (tiles): jobs as in common/low_rank_jobs.h
void to_low_rank(const i64* jobs, i64 num_jobs, i64 is_transposed, i64 width, i64 rank,
                 i64 num_threads);
void from_low_rank(const i64* jobs, i64 num_jobs, i64 is_transposed, i64 adds, i64 width, i64 rank,
                   i64 num_threads);
void add_low_rank_gradient(const i64* jobs, i64 num_jobs, i64 is_transposed, i64 width, i64 rank,
                           i64 num_threads);

// common/vector_low_rank.cpp: the same
void vector_to_low_rank(const i64* jobs, i64 num_jobs, i64 is_transposed, i64 width, i64 rank,
                        i64 num_threads);
void vector_from_low_rank(const i64* jobs, i64 num_jobs, i64 is_transposed, i64 adds, i64 width,
                          i64 rank, i64 num_threads);
void vector_low_rank_gradient(const i64* jobs, i64 num_jobs, i64 is_transposed, i64 width, i64 rank,
                              i64 num_threads);

// common/adapters.cpp
void add_adapters(const void* x, i64 x_step, i64 inner, const i64* rows, const i64* ends,
                  i64 num_adapters, const i64* table, i64 table_step, const i64* sites,
                  i64 num_sites, i64 many_rows, i64 is_bfloat16, i64 num_threads);

// common/windows.cpp
void keep_rows(const void* x, i64 x_step, i64 row_bytes, const i64* windows, i64 num_windows,
               i64 slot, i64 num_threads);
void attend_in_windows(const void* q, void* out, float* lse, const i64* windows, i64 num_windows,
                       i64 keys, i64 values, i64 num_heads, i64 num_key_heads, i64 width,
                       i64 window, double scale, i64 has_tiles, i64 is_bfloat16, i64 num_threads);

// common/rows.cpp
void rms_norm(const void* x, i64 x_step, const void* weight, void* y, i64 num_rows, i64 width,
              i64 features, double eps, i64 is_bfloat16, i64 num_threads);
void rms_norm_gradient(const void* grad, i64 grad_step, const void* x, i64 x_step,
                       const void* weight, void* x_grad, void* y, i64 num_rows, i64 width,
                       i64 features, double eps, i64 is_bfloat16, i64 num_threads);
void silu_mul(const void* gate, i64 gate_step, const void* up, i64 up_step, void* y, i64 num_rows,
              i64 width, i64 is_bfloat16, i64 num_threads);
void silu_mul_gradient(const void* grad, i64 grad_step, const void* gate, i64 gate_step,
                       const void* up, i64 up_step, void* gate_grad, void* up_grad, void* y,
                       i64 num_rows, i64 width, i64 is_bfloat16, i64 num_threads);
void add(const void* a, i64 a_step, const void* b, i64 b_step, void* y, i64 num_rows, i64 width,
         i64 is_bfloat16, i64 num_threads);
void rope(const void* x, i64 x_step, const void* cos, i64 cos_step, const void* sin, i64 sin_step,
          void* y, i64 num_rows, i64 width, i64 head_width, i64 reverse, i64 is_bfloat16,
          i64 num_threads);
void cross_entropy(const void* logits, i64 step, const i64* targets, float* loss, bool* correct,
                   float* log_sum, i64 num_rows, i64 vocabulary, i64 is_bfloat16, i64 num_threads);
void cross_entropy_gradient(const void* logits, i64 step, const i64* targets, const float* log_sum,
                            const float* loss_grad, void* grad, i64 num_rows, i64 vocabulary,
                            i64 is_bfloat16, i64 num_threads);
void argmax(const void* x, i64 step, i64* places, i64 num_rows, i64 width, i64 is_bfloat16,
            i64 num_threads);

// common/draw.cpp
void draw(const float* scores, i64 step, const double* uniform, const i64* top_k,
          const double* top_p, i64* tokens, i64 n, i64 vocabulary, i64 num_threads);

// common/calls.cpp
void store_rows(const void* x, i64 x_step, void* store, i64 page_step, const i64* pages,
                const i64* offsets, i64 num_rows, i64 row_bytes);
void kernel_numbers(const char* names, i64* numbers);
void run_calls(const i64* calls, i64 num_calls, const i64* step, i64* nanoseconds);

// common/collectives.cpp: rank is the state of a rank (`ArenaRankState` in
// kernels/groups/_arena.py), to which the outcome is written
void rank_sum(i64* rank, const void* x, void* y, i64 num_rows, i64 width, i64 is_bfloat16,
              i64 digest);
void rank_gather(i64* rank, const void* x, void* out, i64 num_bytes, i64 to, i64 digest);
void rank_agree(i64* rank, i64* number, i64 digest);

// amx/logit_columns.cpp (AMX)
void cross_entropy_of_columns(const bf16* logits, const i64* targets, float* loss, bool* correct,
                              float* log_sum, i64 n, i64 vocabulary, i64 num_threads);
void cross_entropy_gradient_of_columns(const bf16* logits, const i64* targets, const float* log_sum,
                                       const float* loss_grad, bf16* grad, i64 n, i64 vocabulary,
                                       i64 num_threads);
void cross_entropy_input_gradient_of_columns(const bf16* logits, const i64* targets,
                                             const float* log_sum, const float* loss_grad,
                                             const bf16* weight, bf16* x_grad, i64 n,
                                             i64 vocabulary, i64 width, i64 num_threads);

}  // extern "C"
