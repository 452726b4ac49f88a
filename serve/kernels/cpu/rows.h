// Norm, rotary embedding and gated activation of one float32 row, always in one fixed order.
#pragma once

#include <cmath>

#include "lanes.h"

namespace serve {

// 1 / sqrt(mean(x^2) + eps)
inline float inverse_rms(const float* row, int64_t size, float eps) {
  Lanes even = splat(0.0f);
  Lanes odd = splat(0.0f);
  for (int64_t i = 0; i < size; i += 2 * kLanes) {
    const Lanes first = load_some(row + i, size - i);
    even = fma(first, first, even);
    if (i + kLanes >= size) break;
    const Lanes second = load_some(row + i + kLanes, size - i - kLanes);
    odd = fma(second, second, odd);
  }
  return 1.0f / std::sqrt(sum(even + odd) / (float)size + eps);
}

inline void norm_row(const float* row, const float* weight, float* out, int64_t size, float eps) {
  const Lanes factor = splat(inverse_rms(row, size, eps));
  for (int64_t i = 0; i < size; i += kLanes) {
    const Lanes scaled = load_some(row + i, size - i) * factor;
    store_some(out + i, scaled * load_some(weight + i, size - i), size - i);
  }
}

inline void add_row(const float* row, float* residual, int64_t size) {
  for (int64_t i = 0; i < size; i += kLanes) {
    const Lanes total = load_some(residual + i, size - i) + load_some(row + i, size - i);
    store_some(residual + i, total, size - i);
  }
}

// Turns (x, y) by the angle whose cosine and sine are given, for each pair of the two halves.
inline void rotate_head(float* head, const float* cosine, const float* sine, int64_t half) {
  for (int64_t i = 0; i < half; i += kLanes) {
    const int64_t count = half - i;
    const Lanes c = load_some(cosine + i, count);
    const Lanes s = load_some(sine + i, count);
    const Lanes x = load_some(head + i, count);
    const Lanes y = load_some(head + half + i, count);
    store_some(head + i, x * c - y * s, count);
    store_some(head + half + i, y * c + x * s, count);
  }
}

inline void gate_row(const float* gate, const float* up, float* out, int64_t size) {
  const Lanes one = splat(1.0f);
  for (int64_t i = 0; i < size; i += kLanes) {
    const Lanes g = load_some(gate + i, size - i);
    const Lanes silu = g / (one + exponential(splat(0.0f) - g));
    store_some(out + i, silu * load_some(up + i, size - i), size - i);
  }
}

}  // namespace serve
