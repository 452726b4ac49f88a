// A decoder's layers as one call takes them. descriptions.py declares the same structures, field by
// field.
#pragma once

#include "cache_description.h"
#include "linear_description.h"
#include "status.h"

namespace serve {

enum EmbeddingKind : int32_t { kPlainRows = 0, kPackedRows = 1, kQuantizedRows = 2 };

// [num_rows][hidden_size], as it lies in a file, or as a packed weight of the output head.
struct EmbeddingPlan {
  int32_t kind;  // an EmbeddingKind
  int32_t type;  // of kQuantizedRows a TileType, else a WeightType
  const void* weight;
  int64_t num_rows;
};

struct LayerPlan {
  const float* input_norm;           // [hidden_size]
  const float* post_attention_norm;  // [hidden_size]
  const float* query_norm;           // [head_size], of each head; null = none
  const float* key_norm;
  LinearLayer qkv;      // hidden_size to queries, keys, values
  LinearLayer out;      // heads to hidden_size
  LinearLayer gate_up;  // hidden_size to gate, up
  LinearLayer down;     // inner_size to hidden_size
  AttentionOptions attention;
};

struct StackPlan {
  EmbeddingPlan embedding;
  const LayerPlan* layers;
  const float* norm;     // [hidden_size]
  const float* cos_sin;  // [max_position][rotary_size], cosines then sines
  int64_t num_layers;
  int64_t hidden_size;
  int64_t inner_size;  // of the gated product
  int64_t max_position;
  int32_t num_heads;
  int32_t num_kv_heads;
  int32_t head_size;
  int32_t rotary_size;
  float eps;  // of all norms
};

struct StepInputs {
  const int32_t* input_ids;       // [num_tokens]
  const int64_t* positions;       // [num_tokens]
  AttentionBatch batch;
  const CacheDescription* caches;  // [num_layers], of one geometry
  const int64_t* embed_rows;      // [num_embeds] tokens that are not looked up but given
  const float* embeds;            // [num_embeds][hidden_size]
  int64_t num_embeds;
  const int64_t* rows;            // [num_rows] tokens whose hidden state is wanted; null = all
  int64_t num_rows;
  float* hidden_states;           // out: [num_rows][hidden_size]
  uint8_t* scratch;               // serve_stack_scratch_bytes, on a cache line
};

}  // namespace serve
