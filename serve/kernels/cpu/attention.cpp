// Causal attention of packed queries over the paged cache.
//
// A row is one query head of one token. The rows that share a kv head of a request are cut into
// items of at most kItemRows, so grouped heads and neighbouring tokens share each load of a key or
// value. An item walks its keys in chunks of kChunk, cut at fixed positions: a chunk gives the
// largest score, the sum of exponentials and the weighted values, and chunks are merged in order.
// What else is in the batch, how a prompt was split into steps and how many threads there are can
// therefore not change a bit of a row.

#include "attention.h"

#include <algorithm>
#include <limits>
#include <new>
#include <vector>

#include "batch_checks.h"
#include "entry_points.h"
#include "kv_cache.h"
#include "pool.h"

namespace serve {
namespace {

constexpr int kChunk = 256;
constexpr int kGroups = kChunk / kLanes;  // key tiles in a chunk
constexpr int kItemRows = 24;
constexpr int kTileRows = 6;              // rows that share a load in registers
constexpr int kAccumulators = kNative == 16 ? 16 : 12;
constexpr int64_t kMinParallelWork = 150000;  // multiply-adds that pay for waking a helper
constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

// One call: the batch with its queries and options.
struct Batch : AttentionBatch {
  const float* query;  // [num_tokens][num_heads][head_size], rows query_stride apart
  float* out;
  int64_t query_stride;
  int64_t out_stride;
  int num_heads;
  float scale;
  int window;  // keys that a query sees, itself included; 0 = all

  int first_key(int position) const { return window > 0 ? std::max(0, position + 1 - window) : 0; }
};

// A run of rows of one request: row r is token r / group_size, head r % group_size of the kv head.
struct Item {
  int32_t request;
  int32_t first_row;
  int32_t num_rows;
  int32_t first_chunk;
  int32_t end_chunk;
};

// What a chunk, or all chunks so far, gave for some rows.
struct Partial {
  float* largest;  // [rows]
  float* sum;      // [rows], of exp(score - largest)
  float* values;   // [rows][value_size], weighted by exp(score - largest)
};

int64_t floats_in_partial(int num_rows, int value_size) {
  return (int64_t)num_rows * (value_size + 2);
}

Partial partial_at(float* memory, int num_rows) {
  return Partial{memory, memory + num_rows, memory + 2 * num_rows};
}

Partial from_row(const Partial& partial, int row, int value_size) {
  float* values = partial.values + (int64_t)row * value_size;
  return Partial{partial.largest + row, partial.sum + row, values};
}

// The keys of one chunk that some row of the item sees, as pointers to the tiles of the cache.
template <typename T>
struct ChunkView {
  const T* key_tile[kGroups];
  const T* value_row[kGroups];  // of the first key of the group
  int base;                     // position of the chunk's first key
  int begin, end;               // visible to some row, relative to base
  int head_size, value_size;

  int first_group() const { return begin / kLanes; }
  int end_group() const { return (end + kLanes - 1) / kLanes; }
};

// Up to kTileRows rows: scaled queries as [head_size][R] and the keys each row sees.
struct Tile {
  float query[kMaxHeadSize * kTileRows];
  int first_key[kTileRows];
  int end_key[kTileRows];
  float weight[kTileRows][kChunk];  // scores, then exp(score - largest)
};

// total[n][r] += source[n] * factor[r * stride], arranged so that nothing but the sums, which take
// up to twelve of sixteen registers, has to stay in one: with one source its vectors are kept and
// the factors pass by, with several it is the other way round.
template <int R, int N, typename T>
SERVE_INLINE void add_products(const T* const (&source)[N], const float* factor, int stride,
                               Lanes (&total)[N][R]) {
  if constexpr (N == 1) {
    const Lanes wide = load(source[0]);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      total[0][r] = fma(wide, splat_native(factor[r * stride]), total[0][r]);
    }
  } else {
    Native splats[R];
    for (int r = 0; r < R; r++) splats[r] = splat_native(factor[r * stride]);
#pragma GCC unroll 16
    for (int i = 0; i < N * kParts; i++) {
      const int n = i / kParts, part = i % kParts;
      const Native wide = widen(source[n] + part * kNative);
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) {
        total[n][r].part[part] = fma_native(wide, splats[r], total[n][r].part[part]);
      }
    }
  }
}

template <int R, int G, typename T>
SERVE_INLINE void score_groups(Tile& tile, const ChunkView<T>& chunk, int group) {
  Lanes score[G][R] = {};
  const T* key[G];
  for (int g = 0; g < G; g++) key[g] = chunk.key_tile[group + g];
  const float* query = tile.query;
  for (int d = 0; d < chunk.head_size; d++, query += R) {
    add_products<R, G>(key, query, 1, score);
    for (int g = 0; g < G; g++) key[g] += kLanes;
  }
  for (int g = 0; g < G; g++) {
    for (int r = 0; r < R; r++) store(&tile.weight[r][(group + g) * kLanes], score[g][r]);
  }
}

template <int R>
constexpr int groups_at_once() {
  return R * kParts * 4 <= kAccumulators ? 4 : R * kParts * 2 <= kAccumulators ? 2 : 1;
}

template <int R, typename T>
void score_chunk(Tile& tile, const ChunkView<T>& chunk) {
  constexpr int G = groups_at_once<R>();
  int group = chunk.first_group();
  for (; group + G <= chunk.end_group(); group += G) score_groups<R, G>(tile, chunk, group);
  for (; group < chunk.end_group(); group++) score_groups<R, 1>(tile, chunk, group);
}

// Turns the scores of a row into weights. Keys that the row does not see get weight zero, by
// selection: what lies in unwritten slots, a NaN even, cannot leak in.
template <typename T>
void weigh_row(float* row, const ChunkView<T>& chunk, int first_key, int end_key,
               float* largest_out, float* sum_out) {
  const int begin = first_key - chunk.base;
  const int end = end_key - chunk.base;
  const Lanes lowest = splat(kMinusInfinity);
  Lanes most = lowest;
  for (int group = chunk.first_group(); group < chunk.end_group(); group++) {
    const int at = group * kLanes;
    const Mask seen = lanes_between(begin - at, end - at);
    most = at_least(select(seen, load(row + at), lowest), most);
  }
  const float top = largest(most);
  Lanes total = splat(0.0f);
  for (int group = chunk.first_group(); group < chunk.end_group(); group++) {
    const int at = group * kLanes;
    const Mask seen = lanes_between(begin - at, end - at);
    const Lanes weight = select(seen, exponential(load(row + at) - splat(top)), splat(0.0f));
    store(row + at, weight);
    total = total + weight;
  }
  *largest_out = top;
  *sum_out = sum(total);
}

template <int R, int B, typename T>
SERVE_INLINE void gather_values(const Tile& tile, const ChunkView<T>& chunk, int d, float* values) {
  Lanes total[B][R] = {};
  for (int group = chunk.first_group(); group < chunk.end_group(); group++) {
    const int begin = std::max(chunk.begin, group * kLanes);
    const int end = std::min(chunk.end, (group + 1) * kLanes);
    const int64_t first_row = begin - group * kLanes;
    const T* value = chunk.value_row[group] + first_row * chunk.value_size + d;
    for (int key = begin; key < end; key++, value += chunk.value_size) {
      const T* block[B];
      for (int b = 0; b < B; b++) block[b] = value + b * kLanes;
      add_products<R, B>(block, &tile.weight[0][key], kChunk, total);
    }
  }
  for (int r = 0; r < R; r++) {
    for (int b = 0; b < B; b++) store(values + r * chunk.value_size + d + b * kLanes, total[b][r]);
  }
}

template <int R, typename T>
void attend_tile(Tile& tile, const ChunkView<T>& chunk, const Partial& result) {
  constexpr int B = groups_at_once<R>();
  score_chunk<R>(tile, chunk);
  for (int r = 0; r < R; r++) {
    weigh_row(tile.weight[r], chunk, tile.first_key[r], tile.end_key[r], result.largest + r,
              result.sum + r);
  }
  int d = 0;
  for (; d + B * kLanes <= chunk.value_size; d += B * kLanes) {
    gather_values<R, B>(tile, chunk, d, result.values);
  }
  for (; d < chunk.value_size; d += kLanes) gather_values<R, 1>(tile, chunk, d, result.values);
}

template <typename T>
void attend_tile(int num_rows, Tile& tile, const ChunkView<T>& chunk, const Partial& result) {
  static_assert(kTileRows == 6, "one case for each number of rows");
  switch (num_rows) {
    case 1: return attend_tile<1>(tile, chunk, result);
    case 2: return attend_tile<2>(tile, chunk, result);
    case 3: return attend_tile<3>(tile, chunk, result);
    case 4: return attend_tile<4>(tile, chunk, result);
    case 5: return attend_tile<5>(tile, chunk, result);
    default: return attend_tile<6>(tile, chunk, result);
  }
}

// Folds the next chunk into the total of one row: total and next both describe one row.
void merge_row(const Partial& total, const Partial& next, int value_size) {
  const float most = *next.largest > *total.largest ? *next.largest : *total.largest;
  const float keep = exponential(*total.largest - most);
  const float add = exponential(*next.largest - most);
  *total.largest = most;
  *total.sum = *total.sum * keep + *next.sum * add;
  for (int d = 0; d < value_size; d += kLanes) {
    const Lanes kept = load(total.values + d) * splat(keep);
    store(total.values + d, fma(load(next.values + d), splat(add), kept));
  }
}

template <typename T>
class Attention {
 public:
  Attention(const CacheView<T>& cache, const Batch& batch)
      : cache_(cache), batch_(batch), group_size_(batch.num_heads / cache.num_kv_heads) {}

  // Cuts the batch into items.
  void plan() {
    for (int64_t request = 0; request < batch_.num_reqs; request++) {
      const int32_t* start = batch_.query_start_loc + request;
      const int query_len = start[1] - start[0];
      if (query_len > 0) add_items((int)request, query_len, batch_.seq_lens[request]);
    }
  }

  void run() {
    const int64_t num_items = (int64_t)items_.size() * cache_.num_kv_heads;
    if (work_ < kMinParallelWork || num_threads() == 1) {
      for (int64_t i = 0; i < num_items; i++) run_item(i);
    } else if (num_items < 4 * num_threads() && num_chunks_ > (int64_t)items_.size()) {
      run_chunks_apart();
    } else {
      parallel_for(num_items, 1, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; i++) run_item(i);
      });
    }
  }

 private:
  void add_items(int request, int query_len, int seq_len) {
    const int num_rows = query_len * group_size_;
    for (int row = 0; row < num_rows; row += kItemRows) {
      Item item{request, row, std::min(kItemRows, num_rows - row), 0, 0};
      const int first_position = seq_len - query_len + row / group_size_;
      const int last_position = seq_len - query_len + (row + item.num_rows - 1) / group_size_;
      item.first_chunk = batch_.first_key(first_position) / kChunk;
      item.end_chunk = last_position / kChunk + 1;
      num_chunks_ += item.end_chunk - item.first_chunk;
      work_ += 2LL * item.num_rows * (last_position + 1 - batch_.first_key(first_position)) *
               cache_.head_size * cache_.num_kv_heads;
      items_.push_back(item);
    }
  }

  int row_position(const Item& item, int row) const {
    const int query_len =
        batch_.query_start_loc[item.request + 1] - batch_.query_start_loc[item.request];
    return batch_.seq_lens[item.request] - query_len + (item.first_row + row) / group_size_;
  }

  bool sees_chunk(const Item& item, int row, int chunk_index) const {
    const int position = row_position(item, row);
    return chunk_index * kChunk <= position &&
           (chunk_index + 1) * kChunk > batch_.first_key(position);
  }

  // Offset of a row's head in the packed tensors whose tokens are stride floats apart.
  int64_t row_offset(const Item& item, int head, int row, int64_t stride) const {
    const int64_t token =
        batch_.query_start_loc[item.request] + (item.first_row + row) / group_size_;
    const int64_t query_head = (int64_t)head * group_size_ + (item.first_row + row) % group_size_;
    return token * stride + query_head * cache_.head_size;
  }

  ChunkView<T> view_chunk(const Item& item, int head, int chunk_index) const {
    ChunkView<T> chunk;
    chunk.base = chunk_index * kChunk;
    chunk.head_size = cache_.head_size;
    chunk.value_size = cache_.value_size();
    chunk.begin = std::max(batch_.first_key(row_position(item, 0)) - chunk.base, 0);
    chunk.end = std::min(row_position(item, item.num_rows - 1) + 1 - chunk.base, kChunk);
    const int32_t* table = batch_.block_table + item.request * batch_.block_table_stride;
    for (int group = chunk.first_group(); group < chunk.end_group(); group++) {
      const int key = chunk.base + group * kLanes;
      const int64_t block = table[key / cache_.block_size];
      const int offset = key % cache_.block_size;
      chunk.key_tile[group] = cache_.key_tile(block, head, offset);
      chunk.value_row[group] = cache_.value_row(block, head, offset);
    }
    return chunk;
  }

  void load_tile(const Item& item, int head, int first_row, int num_rows, Tile& tile) const {
    for (int r = 0; r < num_rows; r++) {
      const int position = row_position(item, first_row + r);
      tile.first_key[r] = batch_.first_key(position);
      tile.end_key[r] = position + 1;
      const float* query =
          batch_.query + row_offset(item, head, first_row + r, batch_.query_stride);
      for (int d = 0; d < cache_.head_size; d++) {
        tile.query[d * num_rows + r] = query[d] * batch_.scale;
      }
    }
  }

  // Attends to one chunk and gives each row that sees a key of it to sink(row, partial of the row).
  template <typename Sink>
  void attend_chunk(const Item& item, int head, int chunk_index, Sink&& sink) const {
    const ChunkView<T> chunk = view_chunk(item, head, chunk_index);
    const int num_tiles = (item.num_rows + kTileRows - 1) / kTileRows;
    alignas(64) Tile tile;
    alignas(64) float values[kTileRows * kMaxHeadSize];
    float largest_score[kTileRows];
    float sum_of_weights[kTileRows];
    const Partial result{largest_score, sum_of_weights, values};
    for (int t = 0; t < num_tiles; t++) {
      const int first_row = item.num_rows * t / num_tiles;
      const int num_rows = item.num_rows * (t + 1) / num_tiles - first_row;
      load_tile(item, head, first_row, num_rows, tile);
      attend_tile(num_rows, tile, chunk, result);
      for (int r = 0; r < num_rows; r++) {
        if (sees_chunk(item, first_row + r, chunk_index)) {
          sink(first_row + r, from_row(result, r, chunk.value_size));
        }
      }
    }
  }

  void write_out(const Item& item, int head, const Partial& total) const {
    const int value_size = cache_.value_size();
    for (int row = 0; row < item.num_rows; row++) {
      const Partial result = from_row(total, row, value_size);
      float* out = batch_.out + row_offset(item, head, row, batch_.out_stride);
      const Lanes divisor = splat(*result.sum);
      for (int d = 0; d < cache_.head_size; d += kLanes) {
        store_some(out + d, load(result.values + d) / divisor, cache_.head_size - d);
      }
    }
  }

  void clear(const Partial& total, int num_rows) const {
    std::fill_n(total.largest, num_rows, kMinusInfinity);
    std::fill_n(total.sum, num_rows, 0.0f);
    std::fill_n(total.values, (int64_t)num_rows * cache_.value_size(), 0.0f);
  }

  void run_item(int64_t index) const {
    const Item& item = items_[(size_t)(index / cache_.num_kv_heads)];
    const int head = (int)(index % cache_.num_kv_heads);
    const int value_size = cache_.value_size();
    alignas(64) float values[kItemRows * kMaxHeadSize];
    float largest_score[kItemRows];
    float sum_of_weights[kItemRows];
    const Partial total{largest_score, sum_of_weights, values};
    clear(total, item.num_rows);
    for (int chunk = item.first_chunk; chunk < item.end_chunk; chunk++) {
      attend_chunk(item, head, chunk, [&](int row, const Partial& next) {
        merge_row(from_row(total, row, value_size), next, value_size);
      });
    }
    write_out(item, head, total);
  }

  // Few items with many keys: chunks run on all threads and are merged in order afterwards.
  void run_chunks_apart() {
    const int value_size = cache_.value_size();
    struct Piece {
      int32_t item, head, chunk, num_rows;
      int64_t memory;
    };
    std::vector<Piece> pieces;
    int64_t num_floats = 0;
    for (size_t i = 0; i < items_.size(); i++) {
      for (int head = 0; head < cache_.num_kv_heads; head++) {
        for (int chunk = items_[i].first_chunk; chunk < items_[i].end_chunk; chunk++) {
          pieces.push_back(Piece{(int32_t)i, head, chunk, items_[i].num_rows, num_floats});
          num_floats += floats_in_partial(items_[i].num_rows, value_size);
        }
      }
    }
    std::vector<float> memory((size_t)num_floats);
    parallel_for((int64_t)pieces.size(), 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; i++) {
        const Piece& piece = pieces[(size_t)i];
        const Partial result = partial_at(&memory[(size_t)piece.memory], piece.num_rows);
        clear(result, piece.num_rows);
        attend_chunk(items_[(size_t)piece.item], piece.head, piece.chunk,
                     [&](int row, const Partial& next) {
                       const Partial target = from_row(result, row, value_size);
                       *target.largest = *next.largest;
                       *target.sum = *next.sum;
                       std::copy_n(next.values, value_size, target.values);
                     });
      }
    });
    alignas(64) float values[kItemRows * kMaxHeadSize];
    float largest_score[kItemRows];
    float sum_of_weights[kItemRows];
    const Partial total{largest_score, sum_of_weights, values};
    for (const Piece& piece : pieces) {
      const Item& item = items_[(size_t)piece.item];
      if (piece.chunk == item.first_chunk) clear(total, item.num_rows);
      const Partial next = partial_at(&memory[(size_t)piece.memory], piece.num_rows);
      for (int row = 0; row < item.num_rows; row++) {
        if (!sees_chunk(item, row, piece.chunk)) continue;
        merge_row(from_row(total, row, value_size), from_row(next, row, value_size), value_size);
      }
      if (piece.chunk + 1 == item.end_chunk) write_out(item, piece.head, total);
    }
  }

  const CacheView<T> cache_;
  const Batch batch_;
  const int group_size_;
  std::vector<Item> items_;
  int64_t num_chunks_ = 0;
  int64_t work_ = 0;
};

template <typename T>
Status attend(const CacheView<T>& cache, const Batch& batch) {
  try {
    Attention<T> attention(cache, batch);
    attention.plan();
    attention.run();
    return kOk;
  } catch (const std::bad_alloc&) {
    return kOutOfMemory;
  }
}

}  // namespace

Status paged_attention(const float* query, float* out, int64_t query_stride, int64_t out_stride,
                       int num_heads, const AttentionBatch& batch, const AttentionOptions& options,
                       const CacheDescription& cache) {
  const Batch call{batch,     query,         out,           query_stride, out_stride,
                   num_heads, options.scale, options.window};
  switch (cache.type) {
    case kFloat32: return attend(view_as<float>(cache), call);
    case kBfloat16: return attend(view_as<Bf16>(cache), call);
    default: return attend(view_as<Fp16>(cache), call);
  }
}

}  // namespace serve

// Checks the whole batch first; when it refuses, out is untouched.
SERVE_API serve::Status serve_paged_attention(
    const float* query, float* out, int64_t query_stride, int64_t out_stride, int32_t num_heads,
    const serve::AttentionBatch* batch, const serve::AttentionOptions* options,
    const serve::CacheDescription* cache, serve::Fault* fault) {
  using namespace serve;
  Status status = check_cache(*cache, fault);
  if (status == kOk) status = check_requests(*batch, *cache, options->window, fault);
  if (status != kOk) return status;
  if (num_heads <= 0 || num_heads % cache->num_kv_heads != 0) {
    *fault = Fault{num_heads, cache->num_kv_heads, 0};
    return kBadHeads;
  }
  return paged_attention(query, out, query_stride, out_stride, num_heads, *batch, *options, *cache);
}
