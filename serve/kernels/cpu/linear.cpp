// y = x W^T + b on float32 rows, with weights repacked for vectors.
//
// Weights lie as [output / 16][input][16]: one vector load gives sixteen outputs their weight for
// one input, so nothing is summed across lanes. Every output adds its products in one fixed order,
// input by input in equal chunks of at most kMaxChunk, so a row is the same to the bit in every
// batch and with any number of threads.

#include "linear.h"

#include <algorithm>

#include "entry_points.h"
#include "lanes.h"
#include "pool.h"
#include "status.h"

namespace serve {
namespace {

constexpr int64_t kMaxChunk = 1024;           // most inputs summed in registers at a time
constexpr int64_t kPrefetch = 16;             // inputs ahead whose weights are fetched
constexpr int64_t kGroupFloats = 64 * 1024;   // weights of a group of tiles stay in the L2 cache
constexpr int64_t kMinProducts = 150 * 1000;  // less than this does not pay for a helper
#if defined(__AVX512F__)
constexpr int kAccumulators = 24;  // vector registers that hold sums
#else
constexpr int kAccumulators = 12;
#endif
constexpr int kMaxRows = kAccumulators / kParts / (kParts == 1 ? 2 : 1);
constexpr int kMaxTiles = 4;

// How many tiles of sixteen outputs go side by side for a number of rows.
constexpr int tiles_for(int num_rows) {
  const int fit = kAccumulators / (num_rows * kParts);
  return fit < 1 ? 1 : fit > kMaxTiles ? kMaxTiles : fit;
}

// Adds the products of inputs [first, last) for kRows rows and kTiles tiles to out.
template <int kRows, int kTiles>
SERVE_INLINE void block(const DenseProduct& p, int64_t row, int64_t tile, int64_t first, int64_t last) {
  Lanes sums[kRows][kTiles];
  for (int r = 0; r < kRows; r++) {
    for (int t = 0; t < kTiles; t++) sums[r][t] = splat(0.0f);
  }
  const float* x = p.x + row * p.x_stride;
  const float* weight = p.weight + tile * p.num_in * kLanes;
  for (int64_t i = first; i < last; i++) {
    Lanes w[kTiles];
    for (int t = 0; t < kTiles; t++) {
      const float* source = weight + (t * p.num_in + i) * kLanes;
      // One tile is one stream of memory, too few for the hardware to keep it busy.
      if constexpr (kTiles == 1) __builtin_prefetch(source + kPrefetch * kLanes);
      w[t] = load(source);
    }
    for (int r = 0; r < kRows; r++) {
      const Native value = splat_native(x[r * p.x_stride + i]);
      for (int t = 0; t < kTiles; t++) sums[r][t] = fma(w[t], value, sums[r][t]);
    }
  }
  for (int t = 0; t < kTiles; t++) {
    const int64_t output = (tile + t) * kLanes;
    const int64_t count = p.num_out - output;
    for (int r = 0; r < kRows; r++) {
      float* target = p.out + (row + r) * p.out_stride + output;
      Lanes total = sums[r][t];
      if (first > 0) {
        total = load_some(target, count) + total;
      } else if (p.bias != nullptr) {
        total = load_some(p.bias + output, count) + total;
      }
      store_some(target, total, count);
    }
  }
}

template <int kRows>
SERVE_INLINE void rows(const DenseProduct& p, int64_t row, int64_t begin, int64_t end, int64_t first,
                       int64_t last) {
  constexpr int kTiles = tiles_for(kRows);
  int64_t tile = begin;
  for (; tile + kTiles <= end; tile += kTiles) block<kRows, kTiles>(p, row, tile, first, last);
  for (; tile < end; tile++) block<kRows, 1>(p, row, tile, first, last);
}

// Picks the block height at run time; count is at most kRows.
template <int kRows>
SERVE_INLINE void some_rows(int count, const DenseProduct& p, int64_t row, int64_t begin, int64_t end,
                            int64_t first, int64_t last) {
  if constexpr (kRows > 1) {
    if (count < kRows) return some_rows<kRows - 1>(count, p, row, begin, end, first, last);
  }
  rows<kRows>(p, row, begin, end, first, last);
}

}  // namespace

void dense_tiles(const DenseProduct& p, int64_t begin, int64_t end) {
  const int64_t num_chunks = std::max<int64_t>((p.num_in + kMaxChunk - 1) / kMaxChunk, 1);
  const int64_t chunk = (p.num_in + num_chunks - 1) / num_chunks;
  // Whole blocks: a tile that is left over runs alone and slowly.
  const int64_t group = (kGroupFloats / (chunk * kLanes + 1) / kMaxTiles + 1) * kMaxTiles;
  for (int64_t tile = begin; tile < end; tile += group) {
    const int64_t last_tile = std::min(tile + group, end);
    int64_t first = 0;
    do {  // also once for no inputs: the outputs are then the bias
      const int64_t last = std::min(first + chunk, p.num_in);
      for (int64_t row = 0; row < p.num_rows; row += kMaxRows) {
        const int count = (int)std::min<int64_t>(kMaxRows, p.num_rows - row);
        some_rows<kMaxRows>(count, p, row, tile, last_tile, first, last);
      }
      first = last;
    } while (first < p.num_in);
  }
}

}  // namespace serve

// out [num_rows][num_out] = x [num_rows][num_in] times weight, plus bias [num_out] unless null.
// weight is [ceil(num_out / 16)][num_in][16]; rows of x lie x_stride floats apart.
SERVE_API void serve_linear(const float* x, int64_t x_stride, const float* weight,
                            const float* bias, float* out, int64_t num_rows, int64_t num_in,
                            int64_t num_out) {
  using namespace serve;
  const DenseProduct product{x, x_stride, weight, bias, out, num_out, num_rows, num_in, num_out};
  const int64_t num_tiles = (num_out + kLanes - 1) / kLanes;
  const int64_t products_per_tile = num_rows * num_in * kLanes + 1;
  const int64_t min_tiles = std::max<int64_t>(kMinProducts / products_per_tile + 1, kMaxTiles);
  parallel_for(num_tiles, min_tiles,
               [&](int64_t begin, int64_t end) { dense_tiles(product, begin, end); });
}

// Repacks weight [num_out][num_in] into packed [ceil(num_out / 16)][num_in][16], zero padded.
SERVE_API void serve_pack_linear(const float* weight, float* packed, int64_t num_in,
                                 int64_t num_out) {
  using namespace serve;
  constexpr int64_t kStrip = 64;  // inputs at a time, so that sixteen short strips are read at once
  const int64_t num_tiles = (num_out + kLanes - 1) / kLanes;
  for (int64_t tile = 0; tile < num_tiles; tile++) {
    const int64_t count = std::min<int64_t>(kLanes, num_out - tile * kLanes);
    const float* source = weight + tile * kLanes * num_in;
    float* target = packed + tile * kLanes * num_in;
    for (int64_t begin = 0; begin < num_in; begin += kStrip) {
      const int64_t end = std::min(begin + kStrip, num_in);
      for (int64_t lane = 0; lane < kLanes; lane++) {
        for (int64_t i = begin; i < end; i++) {
          target[i * kLanes + lane] = lane < count ? source[lane * num_in + i] : 0.0f;
        }
      }
    }
  }
}
