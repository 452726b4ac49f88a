// Causal attention of packed queries over the paged cache.
//
// A row is one query head of one token. The rows that share a kv head of a request are cut into
// items of at most kItemRows, so grouped heads and neighbouring tokens share each load of a key or
// value. An item walks its keys in chunks of kChunk, cut at fixed positions: a chunk gives the
// largest score, the sum of weights and the weighted values, and chunks are merged in order. What
// else is in the batch, how a prompt was split into steps and how many threads there are can
// therefore not change a bit of a row.

#include "attention.h"

#include <algorithm>
#include <new>
#include <vector>

#include "attention_tile.h"
#include "batch_checks.h"
#include "entry_points.h"
#include "pool.h"

namespace serve {
namespace {

constexpr int kItemRows = 24;
constexpr int kMaxTiles = (kItemRows + kTileRows - 1) / kTileRows;
constexpr int64_t kRangesPerThread = 8;
constexpr int64_t kMaxPartialFloats = 16 << 20;  // what chunks that run apart may keep, in all
constexpr float kLog2OfE = 1.44269504088896341f;

// A run of rows of one request: row r is token r / group_size, head r % group_size of the kv head.
struct Item {
  int32_t request;
  int32_t first_row;
  int32_t num_rows;
  int32_t first_chunk;
  int32_t end_chunk;
  int64_t cost;  // of one kv head

  int num_chunks() const { return end_chunk - first_chunk; }
};

// What one thread does at a time: an item for one head, or some chunks of it.
struct Unit {
  int32_t item;
  int32_t head;
  int32_t first_chunk;
  int32_t end_chunk;
  int32_t split;  // index of the split that it is a part of, -1 = the whole item
};

// An item for one head whose chunks run apart; the last unit to finish merges them.
struct Split {
  int64_t memory;  // first float of its partials, one for each chunk
  int32_t units_left;
};

// Kept from call to call, so that a step allocates nothing once it has seen its like.
struct Scratch {
  std::vector<Item> items;
  std::vector<Unit> units;
  std::vector<Split> splits;
  std::vector<int64_t> ranges;  // units[ranges[i]] to units[ranges[i + 1]] go to one thread
  std::vector<float> partials;
};

int64_t floats_in_partial(int num_rows, int value_size) {
  return ((int64_t)num_rows * (value_size + 2) + kLanes - 1) / kLanes * kLanes;
}

Partial partial_at(float* memory, int num_rows, int value_size) {
  float* largest = memory + (int64_t)num_rows * value_size;
  return Partial{largest, largest + num_rows, memory};
}

Partial from_row(const Partial& partial, int row, int value_size) {
  float* values = partial.values + (int64_t)row * value_size;
  return Partial{partial.largest + row, partial.sum + row, values};
}

void clear(const Partial& total, int num_rows, int value_size) {
  std::fill_n(total.largest, num_rows, kMinusInfinity);
  std::fill_n(total.sum, num_rows, 0.0f);
  std::fill_n(total.values, (int64_t)num_rows * value_size, 0.0f);
}

// Folds the next chunk into the total of one row: total and next both describe one row.
void merge_row(const Partial& total, const Partial& next, int value_size) {
  const float most = *next.largest > *total.largest ? *next.largest : *total.largest;
  const float keep = power_of_two(*total.largest - most);
  const float add = power_of_two(*next.largest - most);
  *total.largest = most;
  *total.sum = *total.sum * keep + *next.sum * add;
  for (int d = 0; d < value_size; d += kLanes) {
    const Lanes kept = load(total.values + d) * splat(keep);
    store(total.values + d, fma(load(next.values + d), splat(add), kept));
  }
}

// One call: the batch with its queries and options.
struct Batch : AttentionBatch {
  const float* query;  // [num_tokens][num_heads][head_size], rows query_stride apart
  float* out;
  int64_t query_stride;
  int64_t out_stride;
  int num_heads;
  AttentionOptions options;

  int first_key(int position) const {
    return options.window > 0 ? std::max(0, position + 1 - options.window) : 0;
  }
};

// An item for one head, ready to be worked on: the queries of its tiles and who sees what.
struct Work {
  alignas(64) float query[kItemRows * kMaxHeadSize];
  Rows tiles[kMaxTiles];
  int num_tiles;
};

// The running result of an item, and memory for one chunk of one of its tiles.
struct Results {
  alignas(64) float total_memory[kItemRows * (kMaxHeadSize + 2)];
  alignas(64) float next_memory[kTileRows * (kMaxHeadSize + 2)];
};

template <typename T>
class Attention {
 public:
  Attention(const CacheView<T>& cache, const Batch& batch, Scratch& scratch)
      : cache_(cache),
        batch_(batch),
        scratch_(scratch),
        group_size_(batch.num_heads / cache.num_kv_heads),
        value_size_(cache.value_size()) {}

  void run() {
    plan_items();
    const int threads = work_ < kMinParallelWork ? 1 : num_threads();
    plan_units(threads);
    const auto run_units = [&](int64_t begin, int64_t end) {
      for (int64_t i = scratch_.ranges[(size_t)begin]; i < scratch_.ranges[(size_t)end]; i++) {
        run_unit(scratch_.units[(size_t)i]);
      }
    };
    const int64_t num_ranges = (int64_t)scratch_.ranges.size() - 1;
    if (threads == 1) {
      run_units(0, num_ranges);
    } else {
      parallel_for(num_ranges, 1, [&](int64_t begin, int64_t end) { run_units(begin, end); });
    }
  }

 private:
  void plan_items() {
    scratch_.items.clear();
    for (int64_t request = 0; request < batch_.num_reqs; request++) {
      const int32_t* start = batch_.query_start_loc + request;
      const int query_len = start[1] - start[0];
      if (query_len > 0) add_items((int)request, query_len, batch_.seq_lens[request]);
    }
  }

  void add_items(int request, int query_len, int seq_len) {
    const int num_rows = query_len * group_size_;
    for (int row = 0; row < num_rows; row += kItemRows) {
      Item item{request, row, std::min(kItemRows, num_rows - row), 0, 0, 0};
      const int first_position = seq_len - query_len + row / group_size_;
      const int last_position = seq_len - query_len + (row + item.num_rows - 1) / group_size_;
      const int first_key = batch_.first_key(first_position);
      const int64_t num_keys = last_position + 1 - first_key;
      item.first_chunk = first_key / kChunk;
      item.end_chunk = last_position / kChunk + 1;
      // Few rows wait for memory instead, as if there were two more.
      item.cost = (item.num_rows + 2) * num_keys * cache_.head_size;
      cost_ += item.cost * cache_.num_kv_heads;
      work_ += 2 * item.num_rows * num_keys * cache_.head_size * cache_.num_kv_heads;
      scratch_.items.push_back(item);
    }
  }

  // Cuts the work into ranges of about the same cost, of which an item that costs more has several.
  void plan_units(int threads) {
    scratch_.units.clear();
    scratch_.splits.clear();
    scratch_.ranges.assign(1, 0);
    const int64_t most = threads == 1 ? cost_ : cost_ / (threads * kRangesPerThread) + 1;
    int64_t range_cost = 0, num_floats = 0;
    for (size_t i = 0; i < scratch_.items.size(); i++) {
      const Item& item = scratch_.items[i];
      const int num_chunks = item.num_chunks();
      const int64_t floats = num_chunks * floats_in_partial(item.num_rows, value_size_);
      const int64_t wanted = std::min<int64_t>(num_chunks, (item.cost + most - 1) / most);
      for (int head = 0; head < cache_.num_kv_heads; head++) {
        const bool is_split = wanted > 1 && num_floats + floats <= kMaxPartialFloats;
        const int parts = is_split ? (int)wanted : 1;
        const int split = is_split ? (int)scratch_.splits.size() : -1;
        if (is_split) {
          scratch_.splits.push_back(Split{num_floats, parts});
          num_floats += floats;
        }
        for (int part = 0; part < parts; part++) {
          scratch_.units.push_back(Unit{(int32_t)i, head,
                                        item.first_chunk + num_chunks * part / parts,
                                        item.first_chunk + num_chunks * (part + 1) / parts, split});
          range_cost += item.cost / parts;
          if (range_cost < most) continue;
          scratch_.ranges.push_back((int64_t)scratch_.units.size());
          range_cost = 0;
        }
      }
    }
    if (scratch_.ranges.back() != (int64_t)scratch_.units.size()) {
      scratch_.ranges.push_back((int64_t)scratch_.units.size());
    }
    if ((int64_t)scratch_.partials.size() < num_floats) scratch_.partials.resize((size_t)num_floats);
  }

  // Lays out the queries of an item as [head_size][rows of the tile], scaled so that weights are
  // powers of two.
  void prepare(const Item& item, int head, Work& work) const {
    const int32_t* start = batch_.query_start_loc + item.request;
    const int first_position = batch_.seq_lens[item.request] - (start[1] - start[0]);
    const float scale = batch_.options.scale * kLog2OfE;
    int token = item.first_row / group_size_;
    int member = item.first_row % group_size_;
    float* query = work.query;
    work.num_tiles = (item.num_rows + kTileRows - 1) / kTileRows;
    for (int t = 0; t < work.num_tiles; t++) {
      Rows& rows = work.tiles[t];
      rows.count =
          item.num_rows * (t + 1) / work.num_tiles - item.num_rows * t / work.num_tiles;
      rows.query = query;
      for (int r = 0; r < rows.count; r++) {
        const int query_head = head * group_size_ + member;
        const float* source = batch_.query + (start[0] + token) * batch_.query_stride +
                              (int64_t)query_head * cache_.head_size;
        for (int d = 0; d < cache_.head_size; d++) query[d * rows.count + r] = source[d] * scale;
        rows.first_key[r] = batch_.first_key(first_position + token);
        rows.end_key[r] = first_position + token + 1;
        const float* slopes = batch_.options.alibi_slopes;
        rows.slope[r] = slopes ? slopes[query_head] * kLog2OfE : 0.0f;
        if (++member == group_size_) {
          member = 0;
          token++;
        }
      }
      query += cache_.head_size * rows.count;
    }
  }

  // Finds the tiles of a chunk's keys in [begin, end), positions in the request.
  void view_chunk(const Item& item, int head, int base, int begin, int end,
                  ChunkView<T>& chunk) const {
    chunk.base = base;
    chunk.head_size = cache_.head_size;
    chunk.value_size = value_size_;
    const int32_t* table = batch_.block_table + item.request * batch_.block_table_stride;
    const int first_group = (begin - base) / kLanes;
    const int end_group = (end - base + kLanes - 1) / kLanes;
    int index = (base + first_group * kLanes) / cache_.block_size;
    int offset = (base + first_group * kLanes) % cache_.block_size;
    for (int group = first_group; group < end_group; group++) {
      const int64_t place = cache_.place(table[index], head, offset);
      chunk.key[group] = cache_.key_tile(place);
      chunk.value[group] = cache_.value_tile(place);
      if (kIsScaled<T>) {
        chunk.key_scale[group] = cache_.key_scale + place;
        chunk.value_scale[group] = cache_.value_scale + place;
      }
      offset += kLanes;
      if (offset == cache_.block_size) {
        offset = 0;
        index++;
      }
    }
    // A next chunk, if any, goes on at (index, offset).
    for (int i = 0; i < kAhead; i++) {
      chunk.key[end_group + i] = chunk.value[std::min(first_group + i, end_group - 1)];
      chunk.value[end_group + i] = chunk.value[end_group - 1];
    }
    if (end - base == kChunk && base + kChunk < batch_.seq_lens[item.request]) {
      for (int i = 0; i < kAhead; i++) {
        chunk.value[end_group + i] = cache_.key_tile(cache_.place(table[index], head, offset));
      }
    }
  }

  // Attends to one chunk and gives each row that sees a key of it to sink(row, partial of the row).
  template <typename Sink>
  void attend_chunk(const Item& item, int head, int chunk_index, const Work& work, float* memory,
                    Sink&& sink) const {
    const int base = chunk_index * kChunk, end = base + kChunk;
    const Rows& last = work.tiles[work.num_tiles - 1];
    const ScoreOptions options{batch_.options.soft_cap * kLog2OfE,
                               batch_.options.alibi_slopes != nullptr};
    ChunkView<T> chunk;
    view_chunk(item, head, base, std::max(base, work.tiles[0].first_key[0]),
               std::min(end, last.end_key[last.count - 1]), chunk);
    int first_row = 0;
    for (int t = 0; t < work.num_tiles; first_row += work.tiles[t++].count) {
      const Rows& rows = work.tiles[t];
      if (rows.first_key[0] >= end || rows.end_key[rows.count - 1] <= base) continue;
      const Partial result = partial_at(memory, rows.count, value_size_);
      attend_rows<T>(rows, chunk, options, result);
      for (int r = 0; r < rows.count; r++) {
        if (rows.first_key[r] < end && rows.end_key[r] > base) {
          sink(first_row + r, from_row(result, r, value_size_));
        }
      }
    }
  }

  void write_out(const Item& item, int head, const Partial& total) const {
    const int start = batch_.query_start_loc[item.request];
    int token = start + item.first_row / group_size_;
    int member = item.first_row % group_size_;
    for (int row = 0; row < item.num_rows; row++) {
      const Partial result = from_row(total, row, value_size_);
      float* out = batch_.out + token * batch_.out_stride +
                   ((int64_t)head * group_size_ + member) * cache_.head_size;
      const Lanes divisor = splat(*result.sum);
      for (int d = 0; d < cache_.head_size; d += kLanes) {
        store_some(out + d, load(result.values + d) / divisor, cache_.head_size - d);
      }
      if (++member == group_size_) {
        member = 0;
        token++;
      }
    }
  }

  void run_unit(const Unit& unit) const {
    const Item& item = scratch_.items[(size_t)unit.item];
    Work work;
    Results results;
    prepare(item, unit.head, work);
    const Partial total = partial_at(results.total_memory, item.num_rows, value_size_);
    if (unit.split >= 0) {
      run_part(unit, item, work, results.next_memory);
      if (!merge_parts(unit, item, total)) return;
    } else {
      clear(total, item.num_rows, value_size_);
      for (int chunk = unit.first_chunk; chunk < unit.end_chunk; chunk++) {
        attend_chunk(item, unit.head, chunk, work, results.next_memory,
                     [&](int row, const Partial& next) {
                       merge_row(from_row(total, row, value_size_), next, value_size_);
                     });
      }
    }
    write_out(item, unit.head, total);
  }

  Partial kept_partial(const Unit& unit, const Item& item, int chunk) const {
    const int64_t index = chunk - item.first_chunk;
    float* memory = &scratch_.partials[(size_t)scratch_.splits[(size_t)unit.split].memory];
    return partial_at(memory + index * floats_in_partial(item.num_rows, value_size_),
                      item.num_rows, value_size_);
  }

  // Keeps the partials of some chunks of an item.
  void run_part(const Unit& unit, const Item& item, const Work& work, float* memory) const {
    for (int chunk = unit.first_chunk; chunk < unit.end_chunk; chunk++) {
      const Partial kept = kept_partial(unit, item, chunk);
      std::fill_n(kept.sum, item.num_rows, 0.0f);  // a row that sees no key of the chunk has none
      attend_chunk(item, unit.head, chunk, work, memory, [&](int row, const Partial& next) {
        const Partial target = from_row(kept, row, value_size_);
        *target.largest = *next.largest;
        *target.sum = *next.sum;
        std::copy_n(next.values, value_size_, target.values);
      });
    }
  }

  // Merges all chunks of an item in order if all of them are there; tells whether they were.
  bool merge_parts(const Unit& unit, const Item& item, const Partial& total) const {
    int32_t* left = &scratch_.splits[(size_t)unit.split].units_left;
    if (__atomic_sub_fetch(left, 1, __ATOMIC_ACQ_REL) > 0) return false;
    clear(total, item.num_rows, value_size_);
    for (int chunk = item.first_chunk; chunk < item.end_chunk; chunk++) {
      const Partial kept = kept_partial(unit, item, chunk);
      for (int row = 0; row < item.num_rows; row++) {
        if (kept.sum[row] == 0.0f) continue;
        merge_row(from_row(total, row, value_size_), from_row(kept, row, value_size_), value_size_);
      }
    }
    return true;
  }

  const CacheView<T> cache_;
  const Batch& batch_;
  Scratch& scratch_;
  const int group_size_;
  const int value_size_;
  int64_t cost_ = 0;
  int64_t work_ = 0;
};

}  // namespace

Status paged_attention(const float* query, float* out, int64_t query_stride, int64_t out_stride,
                       int num_heads, const AttentionBatch& batch, const AttentionOptions& options,
                       const CacheDescription& cache) {
  static thread_local Scratch scratch;
  const Batch call{batch, query, out, query_stride, out_stride, num_heads, options};
  try {
    with_view(cache, [&](const auto& view) { Attention(view, call, scratch).run(); });
    return kOk;
  } catch (const std::bad_alloc&) {
    return kOutOfMemory;
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
