// AMX in software, for processors that have AVX-512's bfloat16 instructions but no AMX: included before every kernel
// by COSERVE_CXXFLAGS, so that what is compiled for AMX runs in tests on any of them. One thread's eight tile registers
// are memory of that thread. Results are the processor's to rounding: it adds products in another order.
#pragma once

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>

#if !defined(__AVX512BF16__)
#error "emulated AMX needs AVX-512's instructions for bfloat16"
#endif
#if defined(__AMX_TILE__)
#error "this processor has AMX"
#endif
#define __AMX_BF16__ 1
#define __AMX_INT8__ 1

// The request for tile registers (arch_prctl): granted.
#undef syscall
#define syscall(...) 0L

namespace emulated_amx {

struct alignas(64) Configuration {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t num_rows[16];
};

struct State {
    Configuration configuration;
    alignas(64) uint8_t tiles[8][16][64];
};

inline State& state() {
    static thread_local State found = {};
    return found;
}

// A tile that is used without having been configured faults on a processor; so it does here.
inline Configuration& configured(int tile) {
    Configuration& found = state().configuration;
    if (found.palette != 1 || found.num_rows[tile] == 0) __builtin_trap();
    return found;
}

inline void load_configuration(const void* from) {
    std::memcpy(&state().configuration, from, sizeof(Configuration));
    std::memset(state().tiles, 0, sizeof(State::tiles));
}

inline void store_configuration(void* to) { std::memcpy(to, &state().configuration, sizeof(Configuration)); }

inline void zero(int tile) {
    configured(tile);
    std::memset(state().tiles[tile], 0, sizeof(State::tiles[tile]));
}

// Rows and bytes beyond what is configured become zero.
inline void load(int tile, const void* from, int64_t step) {
    const Configuration& has = configured(tile);
    zero(tile);
    for (int row = 0; row < has.num_rows[tile]; row++)
        std::memcpy(state().tiles[tile][row], static_cast<const uint8_t*>(from) + row * step, has.row_bytes[tile]);
}

inline void store(int tile, void* to, int64_t step) {
    const Configuration& has = configured(tile);
    for (int row = 0; row < has.num_rows[tile]; row++)
        std::memcpy(static_cast<uint8_t*>(to) + row * step, state().tiles[tile][row], has.row_bytes[tile]);
}

// C [rows, columns] += A [rows, inner] B [inner, columns], an element of A and of B being the pair or the four numbers
// that `product` multiplies and adds.
template <typename Sum, typename Product>
inline void multiply(int c, int a, int b, Product product) {
    State& s = state();
    const int num_rows = configured(c).num_rows[c], inner = configured(a).row_bytes[a] / 4;
    configured(b);
    for (int row = 0; row < num_rows; row++) {
        Sum sums;
        std::memcpy(&sums, s.tiles[c][row], 64);
        for (int k = 0; k < inner; k++) {
            int32_t left;
            std::memcpy(&left, s.tiles[a][row] + 4 * k, 4);
            sums = product(sums, left, s.tiles[b][k]);
        }
        std::memcpy(s.tiles[c][row], &sums, 64);
    }
}

inline void multiply_bfloat16(int c, int a, int b) {
    multiply<__m512>(c, a, b, [](__m512 sums, int32_t left, const void* right) {
        return _mm512_dpbf16_ps(sums, (__m512bh)_mm512_set1_epi32(left), (__m512bh)_mm512_load_si512(right));
    });
}

inline void multiply_int8(int c, int a, int b) {
    struct Sums {
        int32_t values[16];
    };
    multiply<Sums>(c, a, b, [](Sums sums, int32_t left, const uint8_t* right) {
        const auto* x = reinterpret_cast<const int8_t*>(&left);
        for (int column = 0; column < 16; column++)
            for (int i = 0; i < 4; i++) sums.values[column] += x[i] * int8_t(right[4 * column + i]);
        return sums;
    });
}

}  // namespace emulated_amx

#undef _tile_loadconfig
#undef _tile_storeconfig
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#undef _tile_dpbssd
#define _tile_loadconfig(from) emulated_amx::load_configuration(from)
#define _tile_storeconfig(to) emulated_amx::store_configuration(to)
#define _tile_zero(tile) emulated_amx::zero(tile)
#define _tile_loadd(tile, from, step) emulated_amx::load(tile, from, step)
#define _tile_stored(tile, to, step) emulated_amx::store(tile, to, step)
#define _tile_dpbf16ps(c, a, b) emulated_amx::multiply_bfloat16(c, a, b)
#define _tile_dpbssd(c, a, b) emulated_amx::multiply_int8(c, a, b)
