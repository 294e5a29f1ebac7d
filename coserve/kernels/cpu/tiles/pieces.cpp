// Attention for pieces of prompts in a step that runs as one call: their keys and values are
// gathered from pages, and their rows attend in tiles.

#include "kernels.h"

#ifdef HAS_TILES

namespace {

// A piece as `traced_calls.py` writes it: rows of the step that are the last of a sequence's keys,
// and the place of its first page in the table.
struct Piece {
    i64 first_row, num_rows, num_keys, first_page;
};

thread_local Scratch scratch;

}  // namespace

// Like `paged_attention_bfloat16`, for rows that belong together. pieces: four numbers each. width:
// a multiple of 32.
extern "C" void attend_in_pieces(const bf16* q, const bf16* keys, const bf16* values,
                                 const i64* pages, bf16* out, float* lse, const i64* pieces,
                                 i64 num_pieces, i64 num_heads, i64 num_key_heads, i64 width,
                                 i64 block_tokens, i64 page_step, i64 window, double scale,
                                 i64 num_threads) {
    const i64 row = num_heads * width, page = block_tokens * num_key_heads * width;
    const Piece* all = reinterpret_cast<const Piece*>(pieces);
    for (const Piece* p = all; p < all + num_pieces; p++) {
        const i64 num_pages = (p->num_keys + block_tokens - 1) / block_tokens;
        bf16* own_keys = reinterpret_cast<bf16*>(scratch.take(2 * num_pages * page * sizeof(bf16)));
        bf16* own_values = own_keys + num_pages * page;
        const i64* table = pages + p->first_page;
#pragma omp parallel for schedule(static) num_threads(int(num_threads))
        for (i64 i = 0; i < num_pages; i++) {
            std::memcpy(own_keys + i * page, keys + table[i] * page_step, page * sizeof(bf16));
            std::memcpy(own_values + i * page, values + table[i] * page_step, page * sizeof(bf16));
        }
        const i64 segment[] = {0, p->num_rows, 0, p->num_keys};
        attention_forward(q + p->first_row * row, own_keys, own_values, out + p->first_row * row,
                          lse + p->first_row * num_heads, segment, 1, num_heads, num_key_heads,
                          width, window, scale, num_threads);
    }
    scratch.give_back_large();
}

#endif
