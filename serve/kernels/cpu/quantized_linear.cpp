// y = x W^T + b on quantised weights in tiles (quantized_tile.h) and float32 rows.
//
// Each row of x becomes 16-bit integers, with one scale for 32 inputs: 256 times finer than the
// usual 8 bits, so that what is lost is below what float32 sums lose. A group of inputs is then one
// exact integer sum; the groups of an output are added in their order as floats. A row is therefore
// the same to the bit in every batch and with any number of threads.

#include <algorithm>
#include <limits>

#include "pool.h"
#include "quantized_tile.h"
#include "status.h"

namespace serve {
namespace {

constexpr float kLargestCode = 32767.0f;
constexpr float kSmallestInput = 1e-33f;      // a block below this is zero: its scale has no inverse
constexpr int64_t kMinProducts = 150 * 1000;  // less than this does not pay for a helper
constexpr int64_t kMinInputs = 16 * 1024;     // the same for quantising
constexpr int64_t kChunkBlocks = 16;          // blocks of a tile that are expanded at a time
constexpr int64_t kChunkRows = 128;           // rows whose integers stay in the L2 cache
constexpr int kDirectRows = 4;                // up to this many rows expand the codes in registers
#if defined(__AVX512F__)
constexpr int kMaxRows = 12;
#else
constexpr int kMaxRows = 4;
#endif

// What goes with 32 integers of a row: groups of 32 use entry 0, groups of 16 entries 1 and 2.
struct BlockInfo {
  float scale;
  int32_t sums[3];        // of the integers
  float scaled_sums[3];   // times scale
  int32_t padding;
};

// A quantised row: num_in integers, then a BlockInfo for each 32 of them.
struct Rows {
  const uint8_t* data;
  int64_t num_in;

  int64_t stride() const { return num_in * 2 + num_in / kBlockInputs * (int64_t)sizeof(BlockInfo); }
  const int16_t* codes(int64_t row) const { return (const int16_t*)(data + row * stride()); }
  const BlockInfo* infos(int64_t row) const { return (const BlockInfo*)(codes(row) + num_in); }
};

// Adding this and taking it away again rounds to the nearest integer, ties to even.
constexpr float kRounder = 12582912.0f;  // 1.5 * 2^23

// A block with an input that is not finite makes its row not a number in every output.
void spoil_block(int16_t* codes, BlockInfo* info) {
  std::memset(codes, 0, kBlockInputs * sizeof *codes);
  const float nan = std::numeric_limits<float>::quiet_NaN();
  *info = BlockInfo{nan, {0, 0, 0}, {nan, nan, nan}, 0};
}

void quantize_block(const float* x, int16_t* codes, BlockInfo* info) {
  const Lanes halves[2] = {load(x), load(x + kLanes)};
  Lanes most = splat(0.0f);
  Lanes zero = splat(0.0f);  // becomes not a number when an input is not finite
  for (const Lanes& half : halves) {
    most = at_least(at_least(half, splat(0.0f) - half), most);
    zero = zero + half * splat(0.0f);
  }
  if (sum(zero) != 0.0f) return spoil_block(codes, info);
  const float limit = largest(most);
  const bool is_zero = limit < kSmallestInput;
  const Lanes inverse = splat(is_zero ? 0.0f : kLargestCode / limit);
  int32_t sums[2] = {};
  for (int h = 0; h < 2; h++) {
    float rounded[kLanes];
    store(rounded, fma(halves[h], inverse, splat(kRounder)) - splat(kRounder));
    for (int i = 0; i < kLanes; i++) {
      const int32_t code = (int32_t)rounded[i];
      codes[h * kLanes + i] = (int16_t)code;
      sums[h] += code;
    }
  }
  const float scale = is_zero ? 0.0f : limit / kLargestCode;
  const int32_t whole = sums[0] + sums[1];
  *info = BlockInfo{scale,
                    {whole, sums[0], sums[1]},
                    {scale * (float)whole, scale * (float)sums[0], scale * (float)sums[1]},
                    0};
}

struct Problem {
  Rows x;
  const uint8_t* weight;
  const float* bias;  // may be null
  float* out;
  int64_t out_stride;
  int64_t num_rows;
  int64_t num_in;
  int64_t num_out;
};

// The scale, and the minimum if there is one, of a group of a tile.
template <bool kHasMinimum>
struct Factors {
  Lanes scale;
  Lanes minimum;
};

// Adds the exact sum of a group to an output: the only place where numbers are rounded.
template <bool kHasMinimum>
SERVE_INLINE Native add_group(Native total, NativeInt group_sum, const Factors<kHasMinimum>& factors,
                              int part, const BlockInfo& info, int entry) {
  const Native value = __builtin_convertvector(group_sum, Native);
  total = fma_native(value, factors.scale.part[part] * splat_native(info.scale), total);
  if constexpr (!kHasMinimum) return total;
  return fma_native(factors.minimum.part[part], splat_native(info.scaled_sums[entry]), total);
}

SERVE_INLINE void finish(const Problem& p, int64_t row, int64_t tile, Lanes total) {
  const int64_t output = tile * kLanes;
  const int64_t count = p.num_out - output;
  if (p.bias != nullptr) total = total + load_some(p.bias + output, count);
  store_some(p.out + row * p.out_stride + output, total, count);
}

// Few rows: codes are expanded in registers and used at once.
template <typename T, int kRows>
void direct_tile(const Problem& p, int64_t tile) {
  const uint8_t* weight = p.weight + tile * T::tile_bytes(p.num_in);
  Lanes totals[kRows];
  for (int r = 0; r < kRows; r++) totals[r] = splat(0.0f);
  const int64_t num_blocks = p.num_in / kBlockInputs;
  for (int64_t b = 0; b < num_blocks; b++) {
    const uint8_t* head = T::head(weight, b);
    const uint8_t* block = T::block(weight, b);
    for (int i = 0; i < T::kBlockBytes; i += 64) __builtin_prefetch(block + 8 * T::kBlockBytes + i);
#pragma GCC unroll 2
    for (int group = 0; group < T::kGroups; group++) {
      const int entry = T::kGroups == 1 ? 0 : 1 + group;
      NativeInt sums[kRows][kParts];
      for (int r = 0; r < kRows; r++) {
        const int32_t start = -T::kOffset * p.x.infos(r)[b].sums[entry];
        for (int i = 0; i < kParts; i++) sums[r][i] = start - NativeInt{};
      }
#pragma GCC unroll 16
      for (int pair = group * T::kGroup / 2; pair < (group + 1) * T::kGroup / 2; pair++) {
        const ShortLanes codes = T::codes(block, pair);
        for (int r = 0; r < kRows; r++) {
          const NativeShorts x = splat_pair(p.x.codes(r) + b * kBlockInputs + 2 * pair);
          for (int i = 0; i < kParts; i++) sums[r][i] = add_products(sums[r][i], codes.part[i], x);
        }
      }
      Factors<T::kHasMinimum> factors{T::scale(head, block, group), splat(0.0f)};
      if constexpr (T::kHasMinimum) factors.minimum = T::minimum(head, block, group);
      for (int r = 0; r < kRows; r++) {
        const BlockInfo& info = p.x.infos(r)[b];
        for (int i = 0; i < kParts; i++) {
          totals[r].part[i] = add_group(totals[r].part[i], sums[r][i], factors, i, info, entry);
        }
      }
    }
  }
  for (int r = 0; r < kRows; r++) finish(p, r, tile, totals[r]);
}

// A piece of a tile with its codes as 16-bit integers and its scales as floats.
struct Expanded {
  int16_t codes[kChunkBlocks][kPairs][2 * kLanes];
  float scales[kChunkBlocks][kMaxGroups][kLanes];
  float minimums[kChunkBlocks][kMaxGroups][kLanes];
};

template <typename T>
void expand(const uint8_t* weight, int64_t first, int64_t last, Expanded* out) {
  for (int64_t b = first; b < last; b++) {
    const uint8_t* head = T::head(weight, b);
    const uint8_t* block = T::block(weight, b);
#pragma GCC unroll 16
    for (int pair = 0; pair < kPairs; pair++) {
      const ShortLanes codes = T::codes(block, pair);
      for (int i = 0; i < kParts; i++) {
        const NativeShorts value = codes.part[i] - (int16_t)T::kOffset;
        std::memcpy(out->codes[b - first][pair] + i * 2 * kNative, &value, sizeof value);
      }
    }
    for (int group = 0; group < T::kGroups; group++) {
      store(out->scales[b - first][group], T::scale(head, block, group));
      if constexpr (T::kHasMinimum) {
        store(out->minimums[b - first][group], T::minimum(head, block, group));
      }
    }
  }
}

// Adds the products of an expanded piece, blocks [first, last), for kRows rows. The sums of earlier
// pieces wait in out.
template <int kGroup, bool kHasMinimum, int kRows>
void expanded_rows(const Problem& p, const Expanded& weight, int64_t row, int64_t tile, int64_t first,
                   int64_t last) {
  constexpr int kGroups = kBlockInputs / kGroup;
  Lanes totals[kRows];
  const int16_t* codes[kRows];
  const BlockInfo* infos[kRows];
  const int64_t count = p.num_out - tile * kLanes;
  for (int r = 0; r < kRows; r++) {
    float* target = p.out + (row + r) * p.out_stride + tile * kLanes;
    totals[r] = first == 0 ? splat(0.0f) : load_some(target, count);
    codes[r] = p.x.codes(row + r);
    infos[r] = p.x.infos(row + r);
  }
  for (int64_t b = first; b < last; b++) {
#pragma GCC unroll 2
    for (int group = 0; group < kGroups; group++) {
      const int entry = kGroups == 1 ? 0 : 1 + group;
      NativeInt sums[kRows][kParts];
      for (int r = 0; r < kRows; r++) {
        for (int i = 0; i < kParts; i++) sums[r][i] = NativeInt{};
      }
      const int16_t* source = weight.codes[b - first][group * kGroup / 2];
      for (int pair = group * kGroup / 2; pair < (group + 1) * kGroup / 2; pair++) {
        NativeShorts w[kParts];
        for (int i = 0; i < kParts; i++) w[i] = load_shorts(source + i * 2 * kNative);
        source += 2 * kLanes;
        for (int r = 0; r < kRows; r++) {
          const NativeShorts x = splat_pair(codes[r] + b * kBlockInputs + 2 * pair);
          for (int i = 0; i < kParts; i++) sums[r][i] = add_products(sums[r][i], w[i], x);
        }
      }
      Factors<kHasMinimum> factors{load(weight.scales[b - first][group]), splat(0.0f)};
      if constexpr (kHasMinimum) factors.minimum = load(weight.minimums[b - first][group]);
      for (int r = 0; r < kRows; r++) {
        for (int i = 0; i < kParts; i++) {
          totals[r].part[i] = add_group(totals[r].part[i], sums[r][i], factors, i, infos[r][b], entry);
        }
      }
    }
  }
  for (int r = 0; r < kRows; r++) {
    if (last * kBlockInputs == p.num_in) {
      finish(p, row + r, tile, totals[r]);
    } else {
      store_some(p.out + (row + r) * p.out_stride + tile * kLanes, totals[r], count);
    }
  }
}

// Picks the height at run time; count is at most kRows.
template <int kGroup, bool kHasMinimum, int kRows>
SERVE_INLINE void some_rows(int count, const Problem& p, const Expanded& weight, int64_t row,
                            int64_t tile, int64_t first, int64_t last) {
  if constexpr (kRows > 1) {
    if (count < kRows) {
      return some_rows<kGroup, kHasMinimum, kRows - 1>(count, p, weight, row, tile, first, last);
    }
  }
  expanded_rows<kGroup, kHasMinimum, kRows>(p, weight, row, tile, first, last);
}

template <typename T>
void expanded_tiles(const Problem& p, int64_t begin, int64_t end) {
  Expanded expanded;
  const int64_t num_blocks = p.num_in / kBlockInputs;
  for (int64_t first_row = 0; first_row < p.num_rows; first_row += kChunkRows) {
    const int64_t end_row = std::min(first_row + kChunkRows, p.num_rows);
    for (int64_t tile = begin; tile < end; tile++) {
      const uint8_t* weight = p.weight + tile * T::tile_bytes(p.num_in);
      for (int64_t first = 0; first < num_blocks; first += kChunkBlocks) {
        const int64_t last = std::min(first + kChunkBlocks, num_blocks);
        expand<T>(weight, first, last, &expanded);
        for (int64_t row = first_row; row < end_row; row += kMaxRows) {
          const int count = (int)std::min<int64_t>(kMaxRows, end_row - row);
          some_rows<T::kGroup, T::kHasMinimum, kMaxRows>(count, p, expanded, row, tile, first, last);
        }
      }
    }
  }
}

template <typename T>
void tiles(const Problem& p, int64_t begin, int64_t end) {
  if (p.num_rows > kDirectRows) return expanded_tiles<T>(p, begin, end);
  for (int64_t tile = begin; tile < end; tile++) {
    if (p.num_rows == 1) direct_tile<T, 1>(p, tile);
    if (p.num_rows == 2) direct_tile<T, 2>(p, tile);
    if (p.num_rows == 3) direct_tile<T, 3>(p, tile);
    if (p.num_rows == 4) direct_tile<T, 4>(p, tile);
  }
}

}  // namespace
}  // namespace serve

// Gives the bytes that serve_quantize_rows writes for each row.
SERVE_API int64_t serve_quantized_row_bytes(int64_t num_in) {
  return serve::Rows{nullptr, num_in}.stride();
}

// Turns rows of x, x_stride floats apart, into integers; num_in is a multiple of 32.
SERVE_API void serve_quantize_rows(const float* x, int64_t x_stride, uint8_t* rows, int64_t num_rows,
                                   int64_t num_in) {
  using namespace serve;
  const Rows target{rows, num_in};
  parallel_for(num_rows, kMinInputs / (num_in + 1) + 1, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row++) {
      int16_t* codes = (int16_t*)(rows + row * target.stride());
      BlockInfo* infos = (BlockInfo*)(codes + num_in);
      for (int64_t b = 0; b < num_in / kBlockInputs; b++) {
        quantize_block(x + row * x_stride + b * kBlockInputs, codes + b * kBlockInputs, infos + b);
      }
    }
  });
}

// out [num_rows][num_out], rows out_stride floats apart, = rows of serve_quantize_rows times a packed
// weight, plus bias [num_out] unless null.
SERVE_API void serve_quantized_linear(int32_t type, const uint8_t* rows, const uint8_t* weight,
                                      const float* bias, float* out, int64_t out_stride,
                                      int64_t num_rows, int64_t num_in, int64_t num_out) {
  using namespace serve;
  if (num_rows <= 0) return;
  const Problem problem{Rows{rows, num_in}, weight, bias, out, out_stride, num_rows, num_in, num_out};
  const int64_t num_tiles = (num_out + kLanes - 1) / kLanes;
  const int64_t min_tiles = kMinProducts / (num_rows * num_in * kLanes + 1) + 1;
  with_tile(type, [&](auto tile) {
    parallel_for(num_tiles, min_tiles, [&](int64_t begin, int64_t end) {
      tiles<decltype(tile)>(problem, begin, end);
    });
  });
}
