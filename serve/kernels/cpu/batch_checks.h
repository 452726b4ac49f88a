// Checks of a step's batch against a cache, before the first read or write.
//
// They depend on the batch and on the geometry that all layers share, not on a layer, so whoever
// runs many layers checks once and then calls the unchecked functions of attention.h and
// kv_cache.h.
#pragma once

#include "cache_description.h"
#include "status.h"

namespace serve {

Status check_cache(const CacheDescription& cache, Fault* fault);

Status check_slots(const AttentionBatch& batch, const CacheDescription& cache, Fault* fault);

// Query ranges, lengths and the blocks that a window (0 = all keys) reaches.
Status check_requests(const AttentionBatch& batch, const CacheDescription& cache, int window,
                      Fault* fault);

// All of the above; window is the widest of the layers.
Status check_batch(const AttentionBatch& batch, const CacheDescription& cache, int window,
                   Fault* fault);

}  // namespace serve
