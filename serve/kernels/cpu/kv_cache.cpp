// Writes new keys and values into the paged cache.

#include "kv_cache.h"

#include "pool.h"
#include "status.h"

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

struct NewTokens {
  const float* key;
  const float* value;
  int64_t key_stride;  // floats from token to token
  int64_t value_stride;
  const int64_t* slot_mapping;
  int64_t num_tokens;
};

template <typename T>
void write_token(const CacheView<T>& cache, const NewTokens& tokens, int64_t token) {
  const int64_t slot = tokens.slot_mapping[token];
  if (slot < 0) return;
  const int64_t block = slot / cache.block_size;
  const int offset = (int)(slot % cache.block_size);
  const float* key = tokens.key + token * tokens.key_stride;
  const float* value = tokens.value + token * tokens.value_stride;
  for (int head = 0; head < cache.num_kv_heads; head++) {
    T* key_lane = cache.key_tile(block, head, offset) + offset % kLanes;
    T* value_row = cache.value_row(block, head, offset);
    for (int d = 0; d < cache.head_size; d++) narrow(key[d], key_lane + d * kLanes);
    for (int d = 0; d < cache.head_size; d++) narrow(value[d], value_row + d);
    key += cache.head_size;
    value += cache.head_size;
  }
}

template <typename T>
void write_tokens(const CacheView<T>& cache, const NewTokens& tokens) {
  constexpr int64_t kMinTokens = 64;
  parallel_for(tokens.num_tokens, kMinTokens, [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; token++) write_token(cache, tokens, token);
  });
}

template <typename T>
CacheView<T> view_cache(void* key, void* value, int64_t num_blocks, int block_size,
                        int num_kv_heads, int head_size) {
  return CacheView<T>{(T*)key, (T*)value, num_blocks, block_size, num_kv_heads, head_size};
}

}  // namespace
}  // namespace serve

// Checks every slot before the first write, so that a bad one leaves the cache as it was.
SERVE_API int32_t serve_write_kv(const float* key, const float* value, int64_t key_stride,
                                 int64_t value_stride, const int64_t* slot_mapping,
                                 int64_t num_tokens, void* key_cache, void* value_cache,
                                 int32_t cache_type, int64_t num_blocks, int32_t block_size,
                                 int32_t num_kv_heads, int32_t head_size, serve::Fault* fault) {
  using namespace serve;
  const int64_t num_slots = num_blocks * block_size;
  for (int64_t token = 0; token < num_tokens; token++) {
    const int64_t slot = slot_mapping[token];
    if (slot < -1 || slot >= num_slots) {
      *fault = Fault{token, slot, 0};
      return kBadSlot;
    }
  }
  const NewTokens tokens{key, value, key_stride, value_stride, slot_mapping, num_tokens};
  if (cache_type == kFloat32) {
    write_tokens(view_cache<float>(key_cache, value_cache, num_blocks, block_size, num_kv_heads,
                                   head_size), tokens);
  } else if (cache_type == kBfloat16) {
    write_tokens(view_cache<Bf16>(key_cache, value_cache, num_blocks, block_size, num_kv_heads,
                                  head_size), tokens);
  } else {
    write_tokens(view_cache<Fp16>(key_cache, value_cache, num_blocks, block_size, num_kv_heads,
                                  head_size), tokens);
  }
  return kOk;
}
