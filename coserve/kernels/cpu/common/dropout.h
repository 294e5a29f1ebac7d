// The features that rows drop: a pure function of a row's key, the feature and a salt, bit by bit
// that of `kernels/dropout.py`.
#pragma once

#include "common/common.h"

// The 32-bit finalizer of MurmurHash3 (https://github.com/aappleby/smhasher).
inline uint32_t mixed(uint32_t x) {
    x = (x ^ (x >> 16)) * 0x85ebca6bu;
    x = (x ^ (x >> 13)) * 0xc2b2ae35u;
    return x ^ (x >> 16);
}

// Returns a row's key for one part of a model.
inline uint32_t key_of_part(uint32_t key, i64 part) {
    return mixed(key + uint32_t(part) * 0x9e3779b1u);
}

namespace {

// A place of a model that drops features, each with probability p. A thread has one at a time,
// whose memory is the thread's.
class Dropout {
  public:
    Dropout(i64 width, i64 salt, double p)
        : width_(width), least_(uint32_t(i64(p * 4294967296.0))), scale_(float(1 / (1 - p))) {
        features_ = reinterpret_cast<uint32_t*>(scratch_.take(width * sizeof(uint32_t)));
        for (i64 i = 0; i < width; i++) features_[i] = mixed(uint32_t(i) + uint32_t(salt));
    }

    // Writes to y what stays of x, scaled up for what is dropped; both of this place's width.
    void apply(const float* x, uint32_t key, float* y) const {
        const Dropout here = *this;  // in registers, whatever y may be
        for (i64 i = 0; i < here.width_; i++) y[i] = x[i] * here.factor(key, i);
    }

    // Numbers that the compiler combines to vectors.
    void apply(const bf16* x, uint32_t key, bf16* y) const {
        const Dropout here = *this;
        const auto* bits = reinterpret_cast<const uint16_t*>(x);
        auto* out = reinterpret_cast<uint16_t*>(y);
        for (i64 i = 0; i < here.width_; i++) {
            const uint32_t wide = uint32_t(bits[i]) << 16;
            float value;
            std::memcpy(&value, &wide, sizeof value);
            bf16 rounded;
            narrow(value * here.factor(key, i), rounded);
            out[i] = rounded.bits;
        }
    }

  private:
    float factor(uint32_t key, i64 i) const {
        const float scale = scale_;
        return mixed(key ^ features_[i]) >= least_ ? scale : 0.0f;
    }

    inline static thread_local Scratch scratch_;
    i64 width_;
    uint32_t* features_;
    uint32_t least_;
    float scale_;
};

}  // namespace
