// One layer's paged cache.
//
// key    [num_blocks][num_kv_heads][block_size / 16][head_size][16]   sixteen keys are lanes
// value  [num_blocks][num_kv_heads][block_size][value_size]            value_size is head_size
//                                                                     rounded up, zero padded
// A score is then a chain of multiply-adds over head_size with no sum across lanes, and a weighted
// sum of values needs none either.
#pragma once

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

}  // namespace serve
