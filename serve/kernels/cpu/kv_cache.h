// One layer's paged cache.
//
// key    [num_blocks][num_kv_heads][block_size / 16][head_size][16]   sixteen keys are lanes
// value  [num_blocks][num_kv_heads][block_size][value_size]            value_size is head_size
//                                                                     rounded up, zero padded
// A score is then a chain of multiply-adds over head_size with no sum across lanes, and a weighted
// sum of values needs none either.
#pragma once

#include "cache_description.h"
#include "lanes.h"

namespace serve {

constexpr int kMaxHeadSize = 512;

inline int padded_head_size(int head_size) { return (head_size + kLanes - 1) / kLanes * kLanes; }

template <typename T>
struct CacheView {
  T* key;
  T* value;
  int64_t num_blocks;
  int block_size;
  int num_kv_heads;
  int head_size;

  int value_size() const { return padded_head_size(head_size); }
  int64_t num_slots() const { return num_blocks * block_size; }

  // The [head_size][16] tile that holds position offset (of a block) and its fifteen neighbours.
  T* key_tile(int64_t block, int head, int offset) const {
    const int64_t tiles_per_block = block_size / kLanes;
    const int64_t tile = (block * num_kv_heads + head) * tiles_per_block + offset / kLanes;
    return key + tile * head_size * kLanes;
  }

  T* value_row(int64_t block, int head, int offset) const {
    return value + ((block * num_kv_heads + head) * block_size + offset) * value_size();
  }
};

template <typename T>
inline CacheView<T> view_as(const CacheDescription& cache) {
  return CacheView<T>{(T*)cache.key,    (T*)cache.value,    cache.num_blocks,
                      cache.block_size, cache.num_kv_heads, cache.head_size};
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
