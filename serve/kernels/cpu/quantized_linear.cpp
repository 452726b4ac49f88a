// y = x W^T + b on quantised weights in tiles (quantized_tile.h) and float32 rows.
//
// Each row of x becomes 16-bit integers, with one scale for 32 inputs: 256 times finer than the
// usual 8 bits, so that what is lost is below what float32 sums lose. A group of inputs is then one
// exact integer sum; the groups of an output are added in their order as floats. A row is therefore
// the same to the bit in every batch and with any number of threads.

#include "quantized_linear.h"

#include <algorithm>
#include <limits>

#include "entry_points.h"
#include "pool.h"
#include "quantized_tile.h"
#include "status.h"

namespace serve {
namespace {

constexpr float kLargestCode = 32767.0f;
constexpr float kSmallestInput = 1e-33f;      // a block below this is zero: its scale has no inverse
constexpr int64_t kMinProducts = 150 * 1000;  // less than this does not pay for a helper
constexpr int64_t kMinInputs = 16 * 1024;     // the same for quantising
constexpr int64_t kChunkBytes = 512 * 1024;   // rows as integers that stay in the L2 cache
#if defined(__AVX512F__)
constexpr int kMaxRows = 8;
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

// A tile times kRows rows: codes are expanded in registers, once for all of the rows.
template <typename T, int kRows>
void block(const Problem& p, int64_t tile, int64_t row) {
  const uint8_t* weight = p.weight + tile * T::tile_bytes(p.num_in);
  const int16_t* codes[kRows];
  const BlockInfo* infos[kRows];
  Lanes totals[kRows];
  for (int r = 0; r < kRows; r++) {
    codes[r] = p.x.codes(row + r);
    infos[r] = p.x.infos(row + r);
    totals[r] = splat(0.0f);
  }
  const int64_t num_blocks = p.num_in / kBlockInputs;
  for (int64_t b = 0; b < num_blocks; b++) {
    const uint8_t* head = T::head(weight, b);
    const uint8_t* block = T::block(weight, b);
#pragma GCC unroll 2
    for (int group = 0; group < T::kGroups; group++) {
      const int entry = T::kGroups == 1 ? 0 : 1 + group;
      NativeInt sums[kRows][kParts];
      for (int r = 0; r < kRows; r++) {
        const int32_t start = -T::kOffset * infos[r][b].sums[entry];
        for (int i = 0; i < kParts; i++) sums[r][i] = start - NativeInt{};
      }
#pragma GCC unroll 16
      for (int pair = group * T::kGroup / 2; pair < (group + 1) * T::kGroup / 2; pair++) {
        const ShortLanes w = T::codes(block, pair);
        for (int r = 0; r < kRows; r++) {
          const NativeShorts x = splat_pair(codes[r] + b * kBlockInputs + 2 * pair);
          for (int i = 0; i < kParts; i++) {
            sums[r][i] = add_products(sums[r][i], w.part[i], x);
            pin(&sums[r][i]);
          }
        }
      }
      Factors<T::kHasMinimum> factors{T::scale(head, block, group), splat(0.0f)};
      if constexpr (T::kHasMinimum) factors.minimum = T::minimum(head, block, group);
      for (int r = 0; r < kRows; r++) {
        for (int i = 0; i < kParts; i++) {
          totals[r].part[i] = add_group(totals[r].part[i], sums[r][i], factors, i, infos[r][b], entry);
        }
      }
    }
  }
  for (int r = 0; r < kRows; r++) finish(p, row + r, tile, totals[r]);
}

// Takes rows [row, end) in blocks of kRows, the rest in lower ones.
template <typename T, int kRows>
void rows(const Problem& p, int64_t tile, int64_t row, int64_t end) {
  for (; row + kRows <= end; row += kRows) block<T, kRows>(p, tile, row);
  if constexpr (kRows > 1) rows<T, kRows / 2>(p, tile, row, end);
}

template <typename T>
void tiles(const Problem& p, int64_t begin, int64_t end) {
  const int64_t chunk = std::max(kChunkBytes / p.x.stride() / kMaxRows, (int64_t)1) * kMaxRows;
  for (int64_t row = 0; row < p.num_rows; row += chunk) {
    const int64_t end_row = std::min(row + chunk, p.num_rows);
    for (int64_t tile = begin; tile < end; tile++) rows<T, kMaxRows>(p, tile, row, end_row);
  }
}

}  // namespace

int64_t quantized_row_bytes(int64_t num_in) { return Rows{nullptr, num_in}.stride(); }

void quantize_row(const float* x, uint8_t* row, int64_t num_in) {
  int16_t* codes = (int16_t*)row;
  BlockInfo* infos = (BlockInfo*)(codes + num_in);
  for (int64_t b = 0; b < num_in / kBlockInputs; b++) {
    quantize_block(x + b * kBlockInputs, codes + b * kBlockInputs, infos + b);
  }
}

void quantized_tiles(const QuantizedProduct& product, int64_t begin, int64_t end) {
  const Problem problem{Rows{product.rows, product.num_in}, product.weight,   product.bias,
                        product.out,                        product.out_stride, product.num_rows,
                        product.num_in,                     product.num_out};
  with_tile(product.type, [&](auto tile) { tiles<decltype(tile)>(problem, begin, end); });
}

}  // namespace serve

// Gives the bytes that serve_quantize_rows writes for each row.
SERVE_API int64_t serve_quantized_row_bytes(int64_t num_in) {
  return serve::quantized_row_bytes(num_in);
}

// Turns rows of x, x_stride floats apart, into integers; num_in is a multiple of 32.
SERVE_API void serve_quantize_rows(const float* x, int64_t x_stride, uint8_t* rows, int64_t num_rows,
                                   int64_t num_in) {
  using namespace serve;
  const int64_t row_bytes = quantized_row_bytes(num_in);
  parallel_for(num_rows, kMinInputs / (num_in + 1) + 1, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row++) {
      quantize_row(x + row * x_stride, rows + row * row_bytes, num_in);
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
  const QuantizedProduct product{type,       rows,     weight, bias,   out,
                                 out_stride, num_rows, num_in, num_out};
  const int64_t num_tiles = (num_out + kLanes - 1) / kLanes;
  const int64_t min_tiles = kMinProducts / (num_rows * num_in * kLanes + 1) + 1;
  parallel_for(num_tiles, min_tiles,
               [&](int64_t begin, int64_t end) { quantized_tiles(product, begin, end); });
}
