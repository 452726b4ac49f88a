// y = x W^T + b on quantised weights in tiles (quantized_tile.h) and float32 rows.
//
// Rows of x become integers (quantized_rows.h). A group of inputs is then one exact integer sum; the
// groups of an output are added in their order as floats. A row is therefore the same to the bit in
// every batch and with any number of threads.

#include "quantized_linear.h"

#include <algorithm>

#include "entry_points.h"
#include "pool.h"
#include "quantized_sums.h"

namespace serve {
namespace {

constexpr int64_t kChunkBytes = 512 * 1024;   // rows as integers that stay in the L2 cache
constexpr int64_t kMaxChunkRows = 240;
// Rows that share the codes of a tile in registers, and those that pass over a panel together.
#if defined(__AVX512F__)
constexpr int kMaxTileRows = 4;
constexpr int kMaxPanelRows = 6;  // twelve sums, as many totals and what goes with them: 32 registers
#elif defined(__AVX2__)
constexpr int kMaxTileRows = 4;
constexpr int kMaxPanelRows = 4;
#else
constexpr int kMaxTileRows = 2;
constexpr int kMaxPanelRows = 2;
#endif

// Rows from which on it pays to expand tiles once for all of them, 0 for never: with sixteen registers
// codes that take a shift and a mask are expanded as fast as they are loaded.
template <typename T>
constexpr int64_t min_panel_rows() {
#if defined(__AVX512F__)
  return kMaxTileRows + 1;
#elif defined(__AVX2__)
  return T::kHigh > 0 ? 2 * kMaxPanelRows : 0;
#else
  return 0;
#endif
}

// Adds the exact sum of a group to an output: the only place where numbers are rounded.
template <typename Source, int kRows, typename Info>
SERVE_INLINE void add_group(const Source& source, int64_t b, int group,
                            const NativeInt (*sums)[Source::kNatives], const Info* const* infos,
                            Native (*totals)[Source::kNatives]) {
  typedef typename Source::Shape S;
  const int entry = S::kGroups == 1 ? 0 : 1 + group;
  Native scale[Source::kNatives], minimum[Source::kNatives];
  source.scale(b, group, scale);
  if constexpr (S::kHasMinimum) source.minimum(b, group, minimum);
  for (int r = 0; r < kRows; r++) {
    const Native row_scale = splat_native(infos[r][b].scale);
    const Native row_sum = splat_native(infos[r][b].scaled_sums[entry]);
    for (int i = 0; i < Source::kNatives; i++) {
      const Native value = __builtin_convertvector(sums[r][i], Native);
      Native total = fma_native(value, scale[i] * row_scale, totals[r][i]);
      if constexpr (S::kHasMinimum) total = fma_native(minimum[i], row_sum, total);
      totals[r][i] = total;
    }
  }
}

// Adds the first num_blocks of a source to the totals of kRows rows; it begins at first_block of x.
// Not inlined: so registers are given out for this loop alone.
template <typename Source, int kRows, typename X>
__attribute__((noinline)) void add_blocks(const Source& source, const X& x, int64_t row,
                                          int64_t first_block, int64_t num_blocks,
                                          Native (*totals)[Source::kNatives]) {
  const typename X::Code* codes[kRows];
  const typename X::Info* infos[kRows];
  Native kept[kRows][Source::kNatives];
  for (int r = 0; r < kRows; r++) {
    codes[r] = x.codes(row + r) + first_block * kBlockInputs;
    infos[r] = x.infos(row + r) + first_block;
    for (int i = 0; i < Source::kNatives; i++) kept[r][i] = totals[r][i];
  }
  for (int64_t b = 0; b < num_blocks; b++) {
#pragma GCC unroll 2
    for (int group = 0; group < Source::Shape::kGroups; group++) {
      NativeInt sums[kRows][Source::kNatives];
      add_up<Source, kRows>(source, b, group, codes, infos, sums);
      add_group<Source, kRows>(source, b, group, sums, infos, kept);
    }
  }
  for (int r = 0; r < kRows; r++) {
    for (int i = 0; i < Source::kNatives; i++) totals[r][i] = kept[r][i];
  }
}

// The same for any number of rows: kRows at a time, the rest by halves.
template <typename Source, int kRows, typename X>
void add_rows(const Source& source, const X& x, int64_t row, int64_t end, int64_t first_block,
              int64_t num_blocks, Native (*totals)[Source::kNatives]) {
  for (; row + kRows <= end; row += kRows, totals += kRows) {
    add_blocks<Source, kRows>(source, x, row, first_block, num_blocks, totals);
  }
  if constexpr (kRows > 1) add_rows<Source, kRows / 2>(source, x, row, end, first_block, num_blocks, totals);
}

// Adds bias and stores the totals of neighbouring tiles.
template <int kNatives>
void finish(const QuantizedProduct& p, int64_t row, int64_t tile, const Native* totals) {
  for (int t = 0; t * kParts < kNatives; t++) {
    const int64_t output = (tile + t) * kLanes;
    const int64_t count = p.num_out - output;
    Lanes total;
    for (int i = 0; i < kParts; i++) total.part[i] = totals[t * kParts + i];
    if (p.bias != nullptr) total = total + load_some(p.bias + output, count);
    store_some(p.out + row * p.out_stride + output, total, count);
  }
}

// Calls body(begin, end) for ranges of nearly one size, of at most most items.
template <typename Body>
SERVE_INLINE void for_ranges(int64_t total, int64_t most, Body&& body) {
  const int64_t count = (total + most - 1) / most;
  for (int64_t i = 0; i < count; i++) body(total * i / count, total * (i + 1) / count);
}

// kPanelTiles tiles times rows [row, end), at most kMaxChunkRows of them, through a panel.
template <typename Form, typename T>
void panel_tiles(const QuantizedProduct& p, int64_t tile, int64_t row, int64_t end) {
  typedef Panel<Form, typename Form::template PanelShape<T>, kPanelTiles> Source;
  const typename Form::Rows x{p.rows, p.num_in};
  const int64_t tile_bytes = T::tile_bytes(p.num_in);
  Native totals[kMaxChunkRows][Source::kNatives];
  std::memset(totals, 0, (size_t)(end - row) * sizeof totals[0]);
  Source panel;
  for_ranges(p.num_in / kBlockInputs, kPanelBlocks, [&](int64_t first, int64_t last) {
    panel.template fill<T>(p.weight + tile * tile_bytes, tile_bytes, first, last);
    add_rows<Source, kMaxPanelRows>(panel, x, row, end, first, last - first, totals);
  });
  for (int64_t r = row; r < end; r++) finish<Source::kNatives>(p, r, tile, totals[r - row]);
}

// One tile times rows [row, end), expanded in registers for a few of them at a time.
template <typename Form, typename T>
void one_tile(const QuantizedProduct& p, int64_t tile, int64_t row, int64_t end) {
  typedef TileSource<Form, T> Source;
  const Source source{p.weight + tile * T::tile_bytes(p.num_in), 0};
  const typename Form::Rows x{p.rows, p.num_in};
  for (; row < end; row += kMaxTileRows) {
    const int64_t last = std::min(row + kMaxTileRows, end);
    Native totals[kMaxTileRows][Source::kNatives] = {};
    add_rows<Source, kMaxTileRows>(source, x, row, last, 0, p.num_in / kBlockInputs, totals);
    for (int64_t r = row; r < last; r++) finish<Source::kNatives>(p, r, tile, totals[r - row]);
  }
}

template <typename Form, typename T>
void tiles(const QuantizedProduct& p, int64_t begin, int64_t end) {
  const typename Form::Rows x{p.rows, p.num_in};
  const int64_t most = std::min(std::max(kChunkBytes / x.stride(), (int64_t)kMaxTileRows), kMaxChunkRows);
  for_ranges(p.num_rows, most, [&](int64_t row, int64_t end_row) {
    int64_t tile = begin;
    if constexpr (min_panel_rows<T>() > 0) {
      const bool pays = end_row - row >= min_panel_rows<T>();
      for (; pays && tile + kPanelTiles <= end; tile += kPanelTiles) panel_tiles<Form, T>(p, tile, row, end_row);
    }
    for (; tile < end; tile++) one_tile<Form, T>(p, tile, row, end_row);
  });
}

}  // namespace

void quantized_tiles(const QuantizedProduct& product, int64_t begin, int64_t end) {
  with_tile(product.type, [&](auto tile) {
    if (product.activations == kByte) {
      tiles<ByteForm, decltype(tile)>(product, begin, end);
    } else {
      tiles<ExactForm, decltype(tile)>(product, begin, end);
    }
  });
}

}  // namespace serve

// out [num_rows][num_out], rows out_stride floats apart, = rows of serve_quantize_rows times a packed
// weight, plus bias [num_out] unless null. activations: that of the rows.
SERVE_API serve::Status serve_quantized_linear(int32_t type, const uint8_t* rows,
                                               const uint8_t* weight, const float* bias, float* out,
                                               int64_t out_stride, int64_t num_rows, int64_t num_in,
                                               int64_t num_out, int32_t activations) {
  using namespace serve;
  if (!is_activations(activations)) return kBadType;
  if (!is_size(num_rows) || serve_quantized_bytes(type, num_in, num_out) < 0) return kBadShape;
  const QuantizedProduct product{type,       rows,     weight, bias,    out,
                                 out_stride, num_rows, num_in, num_out, activations};
  const int64_t num_tiles = (num_out + kLanes - 1) / kLanes;
  const int64_t min_tiles = kMinParallelWork / (num_rows * num_in * kLanes + 1) + 1;
  parallel_for(num_tiles, min_tiles,
               [&](int64_t begin, int64_t end) { quantized_tiles(product, begin, end); });
  return kOk;
}
