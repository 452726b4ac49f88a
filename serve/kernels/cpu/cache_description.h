// The paged cache of a layer, the batch of a step and the options of a layer, as entry points take
// them. descriptions.py declares the same structures, field by field.
#pragma once

#include <cstdint>

namespace serve {

enum CacheType : int32_t { kFloat32 = 0, kBfloat16 = 1, kFloat16 = 2, kInt8 = 3 };

// One layer's paged cache; kv_cache.h says how a block lies in memory.
struct CacheDescription {
  void* key;
  void* value;
  float* key_scale;    // int8 only: [num_blocks][num_kv_heads][block_size], else null
  float* value_scale;
  int64_t num_blocks;
  int32_t type;        // a CacheType
  int32_t block_size;  // positions in a block
  int32_t num_kv_heads;
  int32_t head_size;
};

// One step's requests, the same for all layers.
struct AttentionBatch {
  const int32_t* query_start_loc;  // [num_reqs + 1], prefix sums of the query lengths
  const int32_t* seq_lens;         // [num_reqs], computed + new tokens
  const int32_t* block_table;      // [num_reqs][max_blocks], rows block_table_stride apart
  int64_t block_table_stride;
  int64_t max_blocks;
  const int64_t* slot_mapping;     // [num_tokens], -1 = do not write
  int64_t num_reqs;
  int64_t num_tokens;
};

struct AttentionOptions {
  float scale;                // of a query times a key
  int32_t window;             // keys that a query sees, itself included; 0 = all
  float soft_cap;             // scores become soft_cap * tanh(score / soft_cap); 0 = none
  const float* alibi_slopes;  // [num_heads], times the distance of key and query; null = none
};

}  // namespace serve
