// The integer part of a product: exact sums of a group of inputs, for some rows and outputs.
//
// Weights come from a source: a tile, whose codes are expanded in registers, or a panel, where they
// lie expanded. Both give the same sums, and so the same results to the bit.
#pragma once

#include "quantized_rows.h"

namespace serve {

constexpr int kPanelBlocks = 16;  // with its scales a panel takes half of a first-level cache
#if defined(__AVX512F__)
constexpr int kPanelTiles = 2;
#else
constexpr int kPanelTiles = 1;
#endif

// All that sums must know of codes that a source gives: value = code + kStart. kPlanes and kCentre are
// of bytes: without 32-bit sums codes of 8 bits are taken as two planes of 4, and codes of 5 and 6 bits
// less kCentre, so that 16 bits hold the sum of a group.
template <int kGroups_, bool kHasMinimum_, int kStart_, int kPlanes_, int kCentre_>
struct Shape {
  static constexpr int kGroups = kGroups_;
  static constexpr int kGroup = kBlockInputs / kGroups;
  static constexpr bool kHasMinimum = kHasMinimum_;
  static constexpr int kStart = kStart_;
  static constexpr int kPlanes = kPlanes_;
  static constexpr int kCentre = kCentre_;
};

// A form of multiplication: kExact or kByte. TileShape is what a tile gives, PanelShape a panel.
struct ExactForm {
  typedef ExactRows Rows;
  template <typename T>
  using TileShape = Shape<T::kGroups, T::kHasMinimum, -T::kOffset, 1, 0>;
  template <typename T>
  using PanelShape = Shape<T::kGroups, T::kHasMinimum, 0, 1, 0>;
  template <typename S>
  static constexpr int kBlockVectors = kPairs;

  // Vector v of a block, less the type's offset if it is to be kept in a panel.
  template <typename T, bool kWithOffset>
  SERVE_INLINE static void load(const uint8_t* block, int v, NativeWords* out) {
    const ShortLanes codes = T::codes(block, v);
    for (int i = 0; i < kParts; i++) {
      out[i] = (NativeWords)codes.part[i] - (uint16_t)(kWithOffset ? T::kOffset : 0);
    }
  }
};

struct ByteForm {
  typedef ByteRows Rows;
  template <typename T>
  static constexpr int kPlanes = T::kLow == 8 && !kWideByteSums ? 2 : 1;
  template <typename T>
  static constexpr int kCentre = kWideByteSums || T::kHigh == 0 ? 0 : 8 << T::kHigh;
  template <typename T>
  using TileShape = Shape<T::kGroups, T::kHasMinimum, -(T::kLow == 8 ? 128 : T::kOffset), kPlanes<T>, kCentre<T>>;
  template <typename T>
  using PanelShape = TileShape<T>;
  template <typename S>
  static constexpr int kBlockVectors = kQuads * S::kPlanes;

  template <typename T, bool kWithOffset>
  SERVE_INLINE static void load(const uint8_t* block, int v, NativeWords* out) {
    const WordLanes codes = T::quad_codes(block, v % kQuads);
    for (int i = 0; i < kParts; i++) {
      out[i] = codes.part[i];
      if constexpr (kPlanes<T> == 2) out[i] = (v < kQuads ? out[i] >> 4 : out[i]) & (uint16_t)0x0f0f;
    }
  }
};

// Codes and scales of one tile as they are stored.
template <typename Form, typename T>
struct TileSource {
  typedef typename Form::template TileShape<T> Shape;
  static constexpr int kNatives = kParts;

  const uint8_t* tile;
  int64_t first_block;

  SERVE_INLINE void codes(int64_t b, int v, NativeWords* out) const {
    Form::template load<T, false>(T::block(tile, first_block + b), v, out);
  }
  SERVE_INLINE void scale(int64_t b, int group, Native* out) const {
    const Lanes scale = T::scale(T::head(tile, first_block + b), T::block(tile, first_block + b), group);
    for (int i = 0; i < kParts; i++) out[i] = scale.part[i];
  }
  SERVE_INLINE void minimum(int64_t b, int group, Native* out) const {
    const Lanes minimum = T::minimum(T::head(tile, first_block + b), T::block(tile, first_block + b), group);
    for (int i = 0; i < kParts; i++) out[i] = minimum.part[i];
  }
};

// Up to kPanelBlocks blocks of kTiles neighbouring tiles, expanded once for many rows.
// Types of one shape share the code that multiplies.
template <typename Form, typename Shape_, int kTiles>
struct Panel {
  typedef Shape_ Shape;
  static constexpr int kNatives = kTiles * kParts;
  static constexpr int kVectors = Form::template kBlockVectors<Shape>;
  static constexpr int kMinimumBlocks = Shape::kHasMinimum ? kPanelBlocks : 1;

  alignas(64) NativeWords words[kPanelBlocks][kVectors][kNatives];
  alignas(64) Native scales[kPanelBlocks][Shape::kGroups][kNatives];
  alignas(64) Native minimums[kMinimumBlocks][Shape::kGroups][kNatives];

  // Expands blocks [begin, end) of the tiles from weight on.
  template <typename T>
  void fill(const uint8_t* weight, int64_t tile_bytes, int64_t begin, int64_t end) {
    for (int t = 0; t < kTiles; t++) {
      const TileSource<Form, T> source{weight + t * tile_bytes, begin};
      for (int64_t b = 0; b < end - begin; b++) fill_block(source, b, t * kParts);
    }
  }

  template <typename T>
  SERVE_INLINE void fill_block(const TileSource<Form, T>& source, int64_t b, int part) {
    const uint8_t* block = T::block(source.tile, source.first_block + b);
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; v++) Form::template load<T, true>(block, v, &words[b][v][part]);
    for (int group = 0; group < Shape::kGroups; group++) {
      source.scale(b, group, &scales[b][group][part]);
      if constexpr (Shape::kHasMinimum) source.minimum(b, group, &minimums[b][group][part]);
    }
  }

  SERVE_INLINE void codes(int64_t b, int v, NativeWords* out) const {
    for (int i = 0; i < kNatives; i++) out[i] = words[b][v][i];
  }
  SERVE_INLINE void scale(int64_t b, int group, Native* out) const {
    for (int i = 0; i < kNatives; i++) out[i] = scales[b][group][i];
  }
  SERVE_INLINE void minimum(int64_t b, int group, Native* out) const {
    for (int i = 0; i < kNatives; i++) out[i] = minimums[b][group][i];
  }
};

// The sums of a group of block b of a source, for rows whose integers and infos of it are given.
template <typename Source, int kRows>
SERVE_INLINE void add_up(const Source& source, int64_t b, int group, const int16_t* const* x,
                         const BlockInfo* const* infos, NativeInt (*sums)[Source::kNatives]) {
  typedef typename Source::Shape S;
  const int entry = S::kGroups == 1 ? 0 : 1 + group;
  for (int r = 0; r < kRows; r++) {
    const int32_t start = S::kStart * infos[r][b].sums[entry];
    for (int i = 0; i < Source::kNatives; i++) sums[r][i] = start - NativeInt{};
  }
#pragma GCC unroll 16
  for (int pair = group * S::kGroup / 2; pair < (group + 1) * S::kGroup / 2; pair++) {
    NativeWords w[Source::kNatives];
    source.codes(b, pair, w);
    for (int r = 0; r < kRows; r++) {
      const NativeShorts columns = splat_pair(x[r] + b * kBlockInputs + 2 * pair);
      for (int i = 0; i < Source::kNatives; i++) {
        sums[r][i] = add_products(sums[r][i], (NativeShorts)w[i], columns);
        pin(&sums[r][i]);
      }
    }
  }
}

// The same for integers of 8 bits.
template <typename Source, int kRows>
SERVE_INLINE void add_up(const Source& source, int64_t b, int group, const int8_t* const* x,
                         const ByteBlockInfo* const* infos, NativeInt (*sums)[Source::kNatives]) {
  typedef typename Source::Shape S;
  constexpr int kStart = S::kCentre + S::kStart;
  const int entry = S::kGroups == 1 ? 0 : 1 + group;
#pragma GCC unroll 2
  for (int plane = 0; plane < S::kPlanes; plane++) {
    ByteSum bytes[kRows][Source::kNatives];
    for (int r = 0; r < kRows; r++) {
      const NativeWords centred = (NativeWords)splat_bytes(&infos[r][b].column_sums[entry]) * (uint16_t)-S::kCentre;
      for (int i = 0; i < Source::kNatives; i++) {
        bytes[r][i] = S::kCentre == 0 ? ByteSum{} : (ByteSum)centred;
      }
    }
#pragma GCC unroll 8
    for (int quad = group * S::kGroup / 4; quad < (group + 1) * S::kGroup / 4; quad++) {
      NativeWords w[Source::kNatives];
      source.codes(b, plane * kQuads + quad, w);
      for (int r = 0; r < kRows; r++) {
        const NativeWords columns = splat_quad(x[r] + b * kBlockInputs + 4 * quad);
        for (int i = 0; i < Source::kNatives; i++) {
          bytes[r][i] = add_byte_products(bytes[r][i], w[i], columns);
          pin(&bytes[r][i]);
        }
      }
    }
    for (int r = 0; r < kRows; r++) {
      const NativeInt start = splat_bytes(&infos[r][b].sums[entry]) * kStart;
      for (int i = 0; i < Source::kNatives; i++) {
        const NativeInt sum = widen_sum(bytes[r][i]);
        const bool is_high = S::kPlanes == 2 && plane == 0;
        sums[r][i] = is_high ? sum * 16 : plane == 1 ? sums[r][i] + sum : sum;
        if (kStart != 0 && plane == 0) sums[r][i] = sums[r][i] + start;
      }
    }
  }
}

}  // namespace serve
