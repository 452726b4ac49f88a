// Writes new keys and values into the paged cache.

#include "kv_cache.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "batch_checks.h"
#include "entry_points.h"
#include "pool.h"

namespace serve {
namespace {

inline void narrow(float value, float* target) { *target = value; }

inline void narrow(float value, Bf16* target) {
  const uint32_t bits = bit_cast<uint32_t>(value);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  target->bits = (uint16_t)(value != value ? (bits >> 16) | 0x40u : rounded);
}

inline void narrow(float value, Fp16* target) {
#if defined(__F16C__)
  target->bits = _cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT);
#else
  const uint32_t bits = bit_cast<uint32_t>(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) {
    target->bits = (uint16_t)(sign | 0x7e00u | ((magnitude >> 13) & 0x3ffu));
  } else if (magnitude >= 0x477ff000u) {  // rounds to 2^16 or above
    target->bits = (uint16_t)(sign | 0x7c00u);
  } else if (magnitude >= 0x38800000u) {
    const uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
    target->bits = (uint16_t)(sign | ((rounded - 0x38000000u) >> 13));
  } else {  // adding 0.5 leaves a multiple of 2^-24, a subnormal's step, in the low bits
    const float shifted = bit_cast<float>(magnitude) + 0.5f;
    target->bits = (uint16_t)(sign | (bit_cast<uint32_t>(shifted) - 0x3f000000u));
  }
#endif
}

// Rounds a head's elements to the cache's type. Only int8 has a scale to give.
template <typename T>
float narrow_head(const float* source, int size, T* target) {
  for (int d = 0; d < size; d++) narrow(source[d], target + d);
  return 1.0f;
}

// The largest magnitude becomes 127. A head with an element that is not finite has a scale that is
// not a number, and so has what is read from it.
template <>
float narrow_head(const float* source, int size, int8_t* target) {
  float most = 0.0f;
  bool is_finite = true;
  for (int d = 0; d < size; d++) {
    const float magnitude = std::fabs(source[d]);
    is_finite &= magnitude <= std::numeric_limits<float>::max();
    most = magnitude > most ? magnitude : most;
  }
  const float scale = is_finite ? most / 127.0f : std::numeric_limits<float>::quiet_NaN();
  if (!(scale > 0.0f)) {
    std::fill_n(target, size, (int8_t)0);
    return scale;
  }
  for (int d = 0; d < size; d++) {
    const float code = std::nearbyint(source[d] / scale);  // to the even of two neighbours
    target[d] = (int8_t)std::fmin(std::fmax(code, -127.0f), 127.0f);
  }
  return scale;
}

template <typename T>
void write_token(const CacheView<T>& cache, const float* key, const float* value, int64_t slot) {
  const int64_t block = slot / cache.block_size;
  const int offset = (int)(slot % cache.block_size);
  const int lane = offset % kLanes;
  const int size = cache.head_size;
  T narrowed[kMaxHeadSize];
  for (int head = 0; head < cache.num_kv_heads; head++) {
    const int64_t place = cache.place(block, head, offset);
    const float key_scale = narrow_head(key + (int64_t)head * size, size, narrowed);
    T* key_lane = cache.key_tile(place - lane) + lane;
    for (int d = 0; d < size; d++) key_lane[d * kLanes] = narrowed[d];
    const float* head_value = value + (int64_t)head * size;
    const float value_scale = narrow_head(head_value, size, cache.value_tile(place));
    if (kIsScaled<T>) {
      cache.key_scale[place] = key_scale;
      cache.value_scale[place] = value_scale;
    }
  }
}

}  // namespace

void write_token_kv(const float* key, const float* value, int64_t slot,
                    const CacheDescription& cache) {
  if (slot < 0) return;
  with_view(cache, [&](const auto& view) { write_token(view, key, value, slot); });
}

void write_kv(const float* key, const float* value, int64_t key_stride, int64_t value_stride,
              const AttentionBatch& batch, const CacheDescription& cache) {
  constexpr int64_t kMinTokens = 64;
  parallel_for(batch.num_tokens, kMinTokens, [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; token++) {
      write_token_kv(key + token * key_stride, value + token * value_stride,
                     batch.slot_mapping[token], cache);
    }
  });
}

}  // namespace serve

// Checks every slot before the first write, so that a bad one leaves the cache as it was.
SERVE_API serve::Status serve_write_kv(const float* key, const float* value, int64_t key_stride,
                                       int64_t value_stride, const serve::AttentionBatch* batch,
                                       const serve::CacheDescription* cache, serve::Fault* fault) {
  using namespace serve;
  Status status = check_cache(*cache, fault);
  if (status == kOk) status = check_slots(*batch, *cache, fault);
  if (status == kOk) write_kv(key, value, key_stride, value_stride, *batch, *cache);
  return status;
}
