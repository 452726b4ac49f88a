// Causal attention of packed queries over the paged cache, without checks; see attention.cpp.
#pragma once

#include "cache_description.h"
#include "status.h"

namespace serve {

// query, out  [num_tokens][num_heads][head_size], tokens query_stride and out_stride floats apart
// The batch must have passed check_requests for this cache and window, num_heads must be a multiple
// of num_kv_heads. What is left to go wrong is kOutOfMemory.
Status paged_attention(const float* query, float* out, int64_t query_stride, int64_t out_stride,
                       int num_heads, const AttentionBatch& batch, const AttentionOptions& options,
                       const CacheDescription& cache);

}  // namespace serve
