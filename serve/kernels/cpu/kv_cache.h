// One layer's paged cache.
//
// key    [num_blocks][num_kv_heads][block_size / 16][head_size][16]   sixteen keys are lanes
// value  [num_blocks][num_kv_heads][block_size][value_size]            value_size is head_size
//                                                                     rounded up, zero padded
// A score is then a chain of multiply-adds over head_size with no sum across lanes, and a weighted
// sum of values needs none either. int8 has a scale for each head of a position,
// [num_blocks][num_kv_heads][block_size].
#pragma once

#include "cache_description.h"
#include "lanes.h"

namespace serve {

constexpr int kMaxHeadSize = 512;

inline int padded_head_size(int head_size) { return (head_size + kLanes - 1) / kLanes * kLanes; }

template <typename T>
constexpr bool kIsScaled = false;
template <>
inline constexpr bool kIsScaled<int8_t> = true;

template <typename T>
struct CacheView {
  T* key;
  T* value;
  float* key_scale;
  float* value_scale;
  int block_size;
  int num_kv_heads;
  int head_size;

  int value_size() const { return padded_head_size(head_size); }

  // Place of a head's position among those of all heads and blocks.
  int64_t place(int64_t block, int head, int offset) const {
    return (block * num_kv_heads + head) * block_size + offset;
  }

  // Keys and values of sixteen positions, of which the first is given.
  T* key_tile(int64_t first_place) const { return key + first_place * head_size; }
  T* value_tile(int64_t first_place) const { return value + first_place * value_size(); }
};

template <typename T>
inline CacheView<T> view_as(const CacheDescription& cache) {
  return CacheView<T>{(T*)cache.key,     (T*)cache.value,    cache.key_scale, cache.value_scale,
                      cache.block_size,  cache.num_kv_heads, cache.head_size};
}

// Calls function with a view of the type that the cache has.
template <typename Function>
SERVE_INLINE auto with_view(const CacheDescription& cache, Function&& function) {
  switch (cache.type) {
    case kFloat32: return function(view_as<float>(cache));
    case kBfloat16: return function(view_as<Bf16>(cache));
    case kFloat16: return function(view_as<Fp16>(cache));
    default: return function(view_as<int8_t>(cache));
  }
}

// Stores one token's key and value [num_kv_heads][head_size] in its slot, without checks; a
// negative slot skips it.
void write_token_kv(const float* key, const float* value, int64_t slot,
                    const CacheDescription& cache);

// Stores all tokens of a batch that has passed check_slots, on several threads; tokens lie
// key_stride and value_stride floats apart.
void write_kv(const float* key, const float* value, int64_t key_stride, int64_t value_stride,
              const AttentionBatch& batch, const CacheDescription& cache);

}  // namespace serve
