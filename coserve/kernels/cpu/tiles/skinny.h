// Parts that products y^T = W x^T of few rows share, with a weight as the left factor as it lies,
// in tiles.
#pragma once

#include "tiles/tiles.h"

#ifdef HAS_TILES

// Arranges rows of x as columns of a right factor x^T: blocks of 32 rows, each [inner / 2, 32, 2],
// zeros after n. The last block is 16 wide where that is enough.
class Panel {
  public:
    Panel(Scratch& scratch, const bf16* x, i64 step, i64 n, i64 inner)
        : x_(x), step_(step), n_(n), inner_(inner), padded_(round_up(n, 16)) {
        data_ = reinterpret_cast<bf16*>(scratch.take(padded_ * inner * sizeof(bf16)));
    }

    i64 padded() const { return padded_; }
    int width(i64 block) const { return block + 32 <= padded_ ? 32 : 16; }
    bf16* at(i64 block) const { return data_ + block * inner_; }

    // 32 elements of the inner dimension.
    void fill(i64 k) const {
        for (i64 row = 0; row < padded_; row += 16) {
            __m512i pairs[16];
            for (int i = 0; i < 16; i++)
                pairs[i] = row + i < n_ ? _mm512_loadu_si512(x_ + (row + i) * step_ + k)
                                        : _mm512_setzero_si512();
            transpose(pairs);
            const i64 block = row / 32 * 32;
            bf16* out = at(block) + k * width(block) + (row - block) * 2;
            for (int i = 0; i < 16; i++) _mm512_storeu_si512(out + i * width(block) * 2, pairs[i]);
        }
    }

  private:
    const bf16* x_;
    i64 step_, n_, inner_, padded_;
    bf16* data_;
};

// Distance, in rows, between the weight's rows that are multiplied at once. The processor fetches
// ahead along one row of each page only: neighbours in one page would hold each other up.
inline i64 spacing(i64 row_bytes) {
    const i64 page_bytes = 4096;
    i64 rows = std::max<i64>(1, (2 * page_bytes + row_bytes - 1) / row_bytes);
    return rows > 1 && rows * row_bytes % page_bytes == 0 ? rows + 1 : rows;
}

// Rounds sums [32 * spacing, up to 16], with the scales and the bias (or null), to rows: 32
// neighbours of each at a time, from the first ones on. The sums of neighbours stand in strips one
// after another.
class RoundedRows {
  public:
    RoundedRows(const float* sums, i64 step, i64 spacing, i64 strip_step, const float* scales,
                const bf16* bias)
        : sums_(sums),
          scales_(scales),
          bias_(bias),
          step_(step),
          spacing_(spacing),
          strip_step_(strip_step) {}

    void next(__m512i (&lines)[16]) {
        for (int i = 0; i < 16; i++) {
            __m512 two[2];
            for (int e = 0; e < 2; e++, column_++) {
                two[e] = _mm512_loadu_ps(sums_ + strip_ * strip_step_ + row_ * step_);
                if (++strip_ == spacing_) strip_ = 0, row_++;
                if (scales_) two[e] = _mm512_mul_ps(two[e], _mm512_set1_ps(scales_[column_]));
                if (bias_) two[e] = _mm512_add_ps(two[e], _mm512_set1_ps(widen(bias_[column_])));
            }
            lines[i] = interleaved((__m512i)_mm512_cvtne2ps_pbh(two[1], two[0]));
        }
        transpose(lines);
    }

  private:
    const float *sums_, *scales_;
    const bf16* bias_;
    i64 step_, spacing_, strip_step_, strip_ = 0, row_ = 0, column_ = 0;
};

// The same, as elements of up to 16 rows of y.
inline void round_rows(const float* sums, i64 step, i64 spacing, i64 strip_step,
                       const float* scales, const bf16* bias, i64 n, bf16* y, i64 y_step) {
    RoundedRows rows(sums, step, spacing, strip_step, scales, bias);
    for (i64 column = 0; column < 32 * spacing; column += 32) {
        __m512i lines[16];
        rows.next(lines);
        for (int i = 0; i < std::min<i64>(16, n); i++)
            _mm512_storeu_si512(y + i * y_step + column, lines[i]);
    }
}

#endif
