// Parts that all kernels share: bfloat16, exponentials, memory for a thread's work.
#pragma once

#include <omp.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

// Instructions that the compiler may use: products of tiles of bfloat16 (`tiles.h`), by AMX or by
// AVX-512's instructions for pairs.
#if defined(__AVX512BF16__)
#define HAS_TILES
#if defined(__AMX_BF16__) && defined(__AMX_INT8__)
#define HAS_AMX
#else
#define HAS_PAIRS
#endif
#endif

typedef int64_t i64;

// Factors between powers of e and powers of 2.
const float LOG2_E = 1.44269504f, LN_2 = 0.693147181f;

struct bf16 {
    uint16_t bits;
};

static inline float widen(float x) { return x; }

static inline float widen(bf16 x) {
    uint32_t bits = uint32_t(x.bits) << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

static inline void narrow(float x, float& out) { out = x; }

// Rounds to the nearest, ties to even, as PyTorch does; a NaN stays one.
static inline void narrow(float x, bf16& out) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    out.bits = uint16_t(x != x ? 0x7fc0 : rounded);
}

template <typename T>
static inline float rounded(float x) {
    T value;
    narrow(x, value);
    return widen(value);
}

static inline i64 round_up(i64 x, i64 to) { return (x + to - 1) / to * to; }

// Memory that a thread reuses at its next call: allocating it again would cost as much as some
// kernels.
class Scratch {
  public:
    ~Scratch() { std::free(start_); }

    // Returns memory that is aligned to a page, its content undefined.
    char* take(size_t num_bytes) {
        if (num_bytes > size_) {
            std::free(start_);
            size_ = round_up(num_bytes, 4096);
            start_ = static_cast<char*>(std::aligned_alloc(4096, size_));
            if (!start_) {
                std::fprintf(stderr, "coserve: a CPU kernel found no memory for %zu bytes\n",
                             size_);
                std::abort();
            }
        }
        return start_;
    }

    // Frees the memory if it is large.
    void give_back_large() {
        const size_t MAX_KEPT = 64 << 20;
        if (size_ <= MAX_KEPT) return;
        std::free(start_);
        start_ = nullptr, size_ = 0;
    }

  private:
    char* start_ = nullptr;
    size_t size_ = 0;
};
