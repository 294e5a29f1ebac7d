// Operations of a product on its rounded elements before they are written: 32 neighbours of a row
// at once. A file that includes this first sets what GCC may do with float32 (see `rows.cpp`), so
// that results equal those of the kernels that do the same afterwards.
#pragma once

#include "common/row_formulas.h"

#ifdef HAS_TILES

// Rows [n, width] that are added to a result, which is rounded again; or none.
struct Onto {
    const bf16* rows;
    i64 step;

    __m512i operator()(__m512i line, i64 row, i64 column) const {
        if (!rows) return line;
        return (Floats(line) + Floats(_mm512_loadu_si512(rows + row * step + column))).pairs();
    }
};

// silu(gate) up.
inline __m512i gated(__m512i gate, __m512i up) {
    return silu_times<bf16>(Floats(gate), Floats(up)).pairs();
}

#endif
