// Some rows of one request and one kv head against one chunk of its keys.
//
// Scores come first, for all keys of the chunk, then the weights that they give, then the weighted
// sum of values. Each score is a chain over the head's elements and each output a chain over the
// keys, in order, so how many rows or keys are worked on at once cannot change a bit.
#pragma once

#include <algorithm>

#include "cache_description.h"
#include "kv_cache.h"

namespace serve {

constexpr int kChunk = 256;
constexpr int kGroups = kChunk / kLanes;  // tiles of sixteen keys in a chunk
constexpr int kAhead = 4;                 // tiles that are fetched before their turn
constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

// Rows that share a load, and registers that hold sums.
#if defined(__AVX512F__)
constexpr int kTileRows = 12;
constexpr int kAccumulators = 24;
#elif defined(__AVX__)
constexpr int kTileRows = 6;
constexpr int kAccumulators = 12;
#elif defined(__aarch64__)
constexpr int kTileRows = 6;
constexpr int kAccumulators = 24;
#else
constexpr int kTileRows = 3;
constexpr int kAccumulators = 12;
#endif

// Vectors of sixteen columns that R rows can sum at once.
template <int R>
constexpr int kWidth = R * kParts * 4 <= kAccumulators ? 4 : R * kParts * 2 <= kAccumulators ? 2 : 1;

// The tiles of the cache that hold a chunk's keys. Those past the last group are only fetched: the
// values, whose turn is next, and the keys of the following chunk.
template <typename T>
struct ChunkView {
  const T* key[kGroups + kAhead];
  const T* value[kGroups + kAhead];
  const float* key_scale[kGroups];
  const float* value_scale[kGroups];
  int base;  // position of the chunk's first key
  int head_size;
  int value_size;
};

// How scores are changed before they become weights, in units of log2.
struct ScoreOptions {
  float soft_cap;  // 0 = none
  bool has_slopes;
};

// Up to kTileRows rows, which follow each other: positions never fall.
struct Rows {
  const float* query;  // scaled to log2, [head_size][R]
  int count;           // R
  int first_key[kTileRows];
  int end_key[kTileRows];
  float slope[kTileRows];
};

// What a chunk, or all chunks so far, gave for some rows.
struct Partial {
  float* largest;  // [rows]
  float* sum;      // [rows], of 2^(score - largest)
  float* values;   // [rows][value_size], weighted by 2^(score - largest)
};

// Range of keys of a chunk, relative to its base.
struct KeyRange {
  int begin, end;

  int first_group() const { return begin / kLanes; }
  int end_group() const { return (end + kLanes - 1) / kLanes; }
  // Tells whether no key of a group is outside.
  bool covers(int group) const { return begin <= group * kLanes && (group + 1) * kLanes <= end; }
  Mask mask(int group) const { return lanes_between(begin - group * kLanes, end - group * kLanes); }
};

// Into the second cache: more lines can be on their way to it than to the first, which makes a
// third more of the memory's speed.
SERVE_INLINE void fetch(const void* address) { __builtin_prefetch(address, 0, 2); }

// total[n][r] += source[n] * factor[r * stride], arranged so that next to the sums as few registers
// as can be are in use: either the elements of all vectors stay and the factors pass by, or the
// other way round.
template <int R, int N, typename T>
SERVE_INLINE void add_products(const T* const (&source)[N], const float* factor, int stride,
                               Lanes (&total)[N][R]) {
  constexpr int kVectors = N * kParts;
  if constexpr (kVectors < R) {
    Native wide[kVectors];
#pragma GCC unroll 16
    for (int i = 0; i < kVectors; i++) wide[i] = widen(source[i / kParts] + i % kParts * kNative);
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
      const Native splat = splat_native(factor[r * stride]);
#pragma GCC unroll 16
      for (int i = 0; i < kVectors; i++) {
        Native& sum = total[i / kParts][r].part[i % kParts];
        sum = fma_native(wide[i], splat, sum);
      }
    }
  } else {
    Native splats[R];
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) splats[r] = splat_native(factor[r * stride]);
#pragma GCC unroll 16
    for (int i = 0; i < kVectors; i++) {
      const Native wide = widen(source[i / kParts] + i % kParts * kNative);
#pragma GCC unroll 16
      for (int r = 0; r < R; r++) {
        Native& sum = total[i / kParts][r].part[i % kParts];
        sum = fma_native(wide, splats[r], sum);
      }
    }
  }
}

// Scores of G groups of sixteen keys; rows of score lie kChunk floats apart.
template <int R, int G, typename T>
SERVE_INLINE void score_groups(const float* query, const ChunkView<T>& chunk, int group,
                               float* score) {
  constexpr int kLine = 64 / sizeof(T);
  Lanes total[G][R] = {};
  const T* key[G];
  const T* next[G];
  for (int g = 0; g < G; g++) {
    key[g] = chunk.key[group + g];
    next[g] = chunk.key[group + g + kAhead];
  }
  for (int d = 0; d < chunk.head_size; d++, query += R) {
    add_products(key, query, 1, total);
    for (int g = 0; g < G; g++) {
      if (kLanes >= kLine || d * kLanes % kLine == 0) fetch(next[g] + d * kLanes);
      key[g] += kLanes;
    }
  }
  for (int g = 0; g < G; g++) {
    for (int r = 0; r < R; r++) {
      Lanes value = total[g][r];
      if constexpr (kIsScaled<T>) value = value * load(chunk.key_scale[group + g]);
      store(score + r * kChunk + (group + g) * kLanes, value);
    }
  }
}

template <int R, typename T>
void score_chunk(const float* query, const ChunkView<T>& chunk, KeyRange range, float* score) {
  constexpr int G = kWidth<R>;
  int group = range.first_group();
  for (; group + G <= range.end_group(); group += G) score_groups<R, G>(query, chunk, group, score);
  for (; group < range.end_group(); group++) score_groups<R, 1>(query, chunk, group, score);
}

// Soft cap, then a penalty for each key of distance.
inline void change_scores(float* row, KeyRange range, int distance, float slope,
                          const ScoreOptions& options) {
  Lanes lane;
  for (int i = 0; i < kLanes; i++) lane.part[i / kNative][i % kNative] = (float)i;
  for (int group = range.first_group(); group < range.end_group(); group++) {
    Lanes score = load(row + group * kLanes);
    if (options.soft_cap > 0.0f) {
      const Lanes cap = splat(options.soft_cap);
      score = hyperbolic_tangent(score / cap) * cap;
    }
    if (options.has_slopes) {
      score = fma(lane + splat((float)(group * kLanes - distance)), splat(slope), score);
    }
    store(row + group * kLanes, score);
  }
}

// Turns the scores of a row into weights. Keys that the row does not see get weight zero, by
// selection: what lies in unwritten slots, a NaN even, cannot leak in.
template <typename T>
void weigh_row(float* row, const ChunkView<T>& chunk, KeyRange tile, KeyRange seen,
               float* largest_out, float* sum_out) {
  const Lanes lowest = splat(kMinusInfinity);
  Lanes most = lowest;
  for (int group = tile.first_group(); group < tile.end_group(); group++) {
    Lanes score = load(row + group * kLanes);
    if (!seen.covers(group)) score = select(seen.mask(group), score, lowest);
    most = at_least(score, most);
  }
  const float top = largest(most);
  Lanes total = splat(0.0f);
  for (int group = tile.first_group(); group < tile.end_group(); group++) {
    Lanes weight = power_of_two(load(row + group * kLanes) - splat(top));
    if (!seen.covers(group)) weight = select(seen.mask(group), weight, splat(0.0f));
    total = total + weight;
    if constexpr (kIsScaled<T>) {
      Lanes scale = load(chunk.value_scale[group]);
      if (!seen.covers(group)) scale = select(seen.mask(group), scale, splat(0.0f));
      weight = weight * scale;
    }
    store(row + group * kLanes, weight);
  }
  *largest_out = top;
  *sum_out = sum(total);
}

// Weighted values of B vectors of columns from d on.
template <int R, int B, typename T>
SERVE_INLINE void gather_columns(const float* weight, const ChunkView<T>& chunk, KeyRange range,
                                 int d, float* values) {
  const int value_size = chunk.value_size;
  Lanes total[B][R] = {};
  for (int group = range.first_group(); group < range.end_group(); group++) {
    const int begin = std::max(range.begin - group * kLanes, 0);
    const int end = std::min(range.end - group * kLanes, kLanes);
    const T* value = chunk.value[group] + begin * value_size + d;
    const T* next = chunk.value[group + kAhead] + begin * value_size + d;
    for (int lane = begin; lane < end; lane++, value += value_size, next += value_size) {
      const T* source[B];
      for (int b = 0; b < B; b++) source[b] = value + b * kLanes;
      for (int i = 0; i < B * kLanes; i += 64 / sizeof(T)) fetch(next + i);
      add_products(source, weight + group * kLanes + lane, kChunk, total);
    }
  }
  for (int r = 0; r < R; r++) {
    for (int b = 0; b < B; b++) store(values + r * value_size + d + b * kLanes, total[b][r]);
  }
}

template <int R, typename T>
void gather_values(const float* weight, const ChunkView<T>& chunk, KeyRange range, float* values) {
  constexpr int B = kWidth<R>;
  int d = 0;
  for (; d + B * kLanes <= chunk.value_size; d += B * kLanes) {
    gather_columns<R, B>(weight, chunk, range, d, values);
  }
  for (; d < chunk.value_size; d += kLanes) gather_columns<R, 1>(weight, chunk, range, d, values);
}

template <int R, typename T>
void attend_tile(const Rows& rows, const ChunkView<T>& chunk, const ScoreOptions& options,
                 const Partial& result) {
  alignas(64) float weight[R * kChunk];
  const auto clip = [&](int first_key, int end_key) {
    return KeyRange{std::max(first_key - chunk.base, 0), std::min(end_key - chunk.base, kChunk)};
  };
  const KeyRange tile = clip(rows.first_key[0], rows.end_key[R - 1]);
  score_chunk<R>(rows.query, chunk, tile, weight);
  for (int r = 0; r < R; r++) {
    float* row = weight + r * kChunk;
    if (options.soft_cap > 0.0f || options.has_slopes) {
      change_scores(row, tile, rows.end_key[r] - 1 - chunk.base, rows.slope[r], options);
    }
    weigh_row(row, chunk, tile, clip(rows.first_key[r], rows.end_key[r]), result.largest + r,
              result.sum + r);
  }
  gather_values<R>(weight, chunk, tile, result.values);
}

// Attends R rows, as many as there are, to the keys of a chunk that one of them sees, which must be
// at least one. What a row that sees none gets is of no use.
template <typename T, int R = kTileRows>
SERVE_INLINE void attend_rows(const Rows& rows, const ChunkView<T>& chunk,
                              const ScoreOptions& options, const Partial& result) {
  if (rows.count == R) return attend_tile<R>(rows, chunk, options, result);
  if constexpr (R > 1) attend_rows<T, R - 1>(rows, chunk, options, result);
}

}  // namespace serve
