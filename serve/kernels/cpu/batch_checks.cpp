#include "batch_checks.h"

#include <algorithm>

#include "kv_cache.h"

namespace serve {
namespace {

Status check_blocks(const AttentionBatch& batch, const CacheDescription& cache, int64_t request,
                    int64_t first_key, int64_t seq_len, Fault* fault) {
  const int32_t* table = batch.block_table + request * batch.block_table_stride;
  const int64_t end = (seq_len + cache.block_size - 1) / cache.block_size;
  for (int64_t i = first_key / cache.block_size; i < end; i++) {
    if (table[i] < 0 || table[i] >= cache.num_blocks) {
      *fault = Fault{request, i, table[i]};
      return kBadBlock;
    }
  }
  return kOk;
}

}  // namespace

Status check_cache(const CacheDescription& cache, Fault* fault) {
  const bool is_sound = cache.type >= kFloat32 && cache.type <= kInt8 && cache.num_blocks >= 0 &&
                        cache.block_size > 0 && cache.block_size % kLanes == 0 &&
                        cache.num_kv_heads > 0 && cache.head_size > 0 &&
                        cache.head_size <= kMaxHeadSize &&
                        (cache.type != kInt8 || (cache.key_scale && cache.value_scale));
  if (is_sound) return kOk;
  *fault = Fault{cache.type, cache.block_size, cache.head_size};
  return kBadCache;
}

Status check_slots(const AttentionBatch& batch, const CacheDescription& cache, Fault* fault) {
  const int64_t num_slots = cache.num_blocks * cache.block_size;
  for (int64_t token = 0; token < batch.num_tokens; token++) {
    const int64_t slot = batch.slot_mapping[token];
    if (slot < -1 || slot >= num_slots) {
      *fault = Fault{token, slot, 0};
      return kBadSlot;
    }
  }
  return kOk;
}

Status check_requests(const AttentionBatch& batch, const CacheDescription& cache, int window,
                      Fault* fault) {
  const int32_t* starts = batch.query_start_loc;
  for (int64_t request = 0; request < batch.num_reqs; request++) {
    const int64_t begin = starts[request], end = starts[request + 1];
    if (begin < 0 || end < begin || end > batch.num_tokens) {
      *fault = Fault{request, end, 0};
      return kBadQueryStart;
    }
    if (begin == end) continue;
    const int64_t seq_len = batch.seq_lens[request];
    if (seq_len < end - begin || seq_len > batch.max_blocks * cache.block_size) {
      *fault = Fault{request, seq_len, 0};
      return kBadSeqLen;
    }
    const int64_t first_position = seq_len - (end - begin);
    const int64_t first_key = window > 0 ? std::max<int64_t>(0, first_position + 1 - window) : 0;
    const Status status = check_blocks(batch, cache, request, first_key, seq_len, fault);
    if (status != kOk) return status;
  }
  return kOk;
}

Status check_batch(const AttentionBatch& batch, const CacheDescription& cache, int window,
                   Fault* fault) {
  Status status = check_cache(cache, fault);
  if (status == kOk) status = check_slots(batch, cache, fault);
  if (status == kOk) status = check_requests(batch, cache, window, fault);
  return status;
}

}  // namespace serve
