// How quantised weights lie in memory: the blocks of GGUF files and the whole numbers of others, nothing
// lost, in the order that vector units read them.
//
// A tile is sixteen outputs by all inputs, cut into units of one block (32 inputs) or, for the
// K types, of eight. A unit of a K type begins with a factor (and a factor of minimums) in float16
// for each output. A block is
//   codes    bits 0 to 3: 256 bytes, or 512 bytes of whole codes for Q8_0
//   high     bits 4 and 5 where there are any: 64 bytes for each
//   scales   a float16 scale (and minimum) for each output, or for K types a byte each for each
//            output and group of 16 or 32 inputs, multiplied with the unit's factors
// Codes are spread so that 8-bit and 16-bit products both find them with a shift and a mask. Lane r
// of a vector, four bytes, belongs to output r. A field of it holds bits of four columns, one in each
// byte: quad q is columns 0, 4, 1, 5 (q even) or 2, 6, 3, 7 (q odd) of the eight from 8 * (q / 2) on.
// Seen as 16-bit words, the low bytes of a quad are columns 0, 1 or 2, 3, the high bytes 4, 5 or 6, 7:
// pairs of neighbouring columns.
#pragma once

#include <cstdint>

#include "int_lanes.h"

namespace serve {

constexpr int kBlockInputs = 32;
constexpr int kPairs = kBlockInputs / 2;
constexpr int kQuads = kBlockInputs / 4;
constexpr int kVectorBytes = kLanes * 4;
constexpr int kMaxGroups = 2;

// Numbered as in block_formats.py. value = scale * (code - kOffset) [+ minimum]
enum TileType : int32_t {
  kQ4_0 = 0,
  kQ4_1 = 1,
  kQ5_0 = 2,
  kQ5_1 = 3,
  kQ8_0 = 4,
  kQ2_K = 5,
  kQ3_K = 6,
  kQ4_K = 7,
  kQ5_K = 8,
  kQ6_K = 9,
  kAffine4_32 = 10,
  kAffine4_64 = 11,
  kAffine4_128 = 12,
  kAffine8_32 = 13,
  kAffine8_64 = 14,
  kAffine8_128 = 15,
};

// Where a pair of columns lies: the quad, and the byte (0 or 1) of each 16-bit word.
constexpr int quad_of(int pair) { return pair / 4 * 2 + pair % 2; }
constexpr int byte_of(int pair) { return pair % 4 / 2; }

// kLow: bits of a code stored together, 4 or 8 (8: signed). kHigh: bits stored apart. kGroup:
// inputs that share a scale. kUnitBlocks: 1, or 8 for K types. kHasMinimum: else only a scale.
template <int kLow_, int kHigh_, int kGroup_, int kUnitBlocks_, bool kHasMinimum_, int kOffset_>
struct Tile {
  static constexpr int kLow = kLow_;
  static constexpr int kHigh = kHigh_;
  static constexpr int kGroup = kGroup_;
  static constexpr int kUnitBlocks = kUnitBlocks_;
  static constexpr bool kHasMinimum = kHasMinimum_;
  static constexpr int kOffset = kOffset_;

  static constexpr uint16_t kHighMask = ((1 << kHigh) - 1) << 4;
  static constexpr bool kIsAffine = false;
  static constexpr bool kIsSuper = kUnitBlocks > 1;
  static constexpr bool kSignedScale = !kHasMinimum;  // of K types
  static constexpr int kGroups = kBlockInputs / kGroup;
  static constexpr int kLowBytes = kLanes * kBlockInputs * kLow / 8;
  static constexpr int kHighBytes = kLanes * kBlockInputs * kHigh / 8;
  static constexpr int kScaleBytes = kGroups * kLanes * (kIsSuper ? 1 : 2);
  static constexpr int kScales = kLowBytes + kHighBytes;
  static constexpr int kMinimums = kScales + kScaleBytes;
  static constexpr int kBlockBytes = kMinimums + (kHasMinimum ? kScaleBytes : 0);
  static constexpr int kHeadBytes = kIsSuper ? kLanes * (kHasMinimum ? 4 : 2) : 0;
  static constexpr int kUnitBytes = kHeadBytes + kUnitBlocks * kBlockBytes;

  static int64_t tile_bytes(int64_t num_in) {
    return num_in / (kBlockInputs * kUnitBlocks) * kUnitBytes;
  }

  static const uint8_t* block(const uint8_t* tile, int64_t index) {
    const uint64_t place = (uint64_t)index;
    return head(tile, index) + kHeadBytes + place % kUnitBlocks * kBlockBytes;
  }

  static const uint8_t* head(const uint8_t* tile, int64_t index) {
    return tile + (uint64_t)index / kUnitBlocks * kUnitBytes;
  }

  // The codes of one pair of columns, without the offset.
  SERVE_INLINE static ShortLanes codes(const uint8_t* block, int pair) {
    ShortLanes out;
    for (int i = 0; i < kParts; i++) {
      const NativeWords words = load_words(low_part(block, quad_of(pair), i));
      if constexpr (kLow == 8) {
        out.part[i] = (NativeShorts)(byte_of(pair) ? words : words << 8) >> 8;
      } else {
        const int begin = byte_of(pair) * 8 + quad_of(pair) % 2 * 4;
        NativeWords code = words >> begin;
        if (begin < 12) code = code & (uint16_t)15;
        if constexpr (kHigh > 0) code = code | high_bits(block, quad_of(pair), i, 8 * byte_of(pair), kHighMask);
        out.part[i] = (NativeShorts)code;
      }
    }
    return out;
  }

  // The codes of one quad of columns in the order of its bytes, without the offset. Those of 8 bits
  // are 128 more, so that none is negative.
  SERVE_INLINE static WordLanes quad_codes(const uint8_t* block, int quad) {
    WordLanes out;
    for (int i = 0; i < kParts; i++) {
      const NativeWords words = load_words(low_part(block, quad, i));
      if constexpr (kLow == 8) {
        out.part[i] = words ^ (uint16_t)0x8080;
      } else {
        out.part[i] = (quad % 2 ? words >> 4 : words) & (uint16_t)0x0f0f;
        if constexpr (kHigh > 0) out.part[i] = out.part[i] | high_bits(block, quad, i, 0, kHighMask * 0x101);
      }
    }
    return out;
  }

  SERVE_INLINE static const uint8_t* low_part(const uint8_t* block, int quad, int part) {
    return block + quad * kLow / 8 * kVectorBytes + part * kNative * 4;
  }

  // The high bits of a quad, less low bits of each word, where codes have them.
  SERVE_INLINE static NativeWords high_bits(const uint8_t* block, int quad, int part, int low, uint16_t mask) {
    const uint8_t* source = block + kLowBytes + quad * kHigh / 8 * kVectorBytes + part * kNative * 4;
    const NativeWords words = load_words(source);
    const int begin = quad * kHigh % 8 + low;
    return (begin < 4 ? words << (4 - begin) : words >> (begin - 4)) & mask;
  }

  SERVE_INLINE static Lanes scale(const uint8_t* head, const uint8_t* block, int group) {
    const uint8_t* source = block + kScales + group * kLanes * (kIsSuper ? 1 : 2);
    if constexpr (!kIsSuper) return load((const Fp16*)source);
    return load((const Fp16*)head) * load_bytes(source, kSignedScale);
  }

  SERVE_INLINE static Lanes minimum(const uint8_t* head, const uint8_t* block, int group) {
    const uint8_t* source = block + kMinimums + group * kLanes * (kIsSuper ? 1 : 2);
    if constexpr (!kIsSuper) return load((const Fp16*)source);
    // K types subtract their minimums.
    return splat(0.0f) - load((const Fp16*)(head + kLanes * 2)) * load_bytes(source, false);
  }
};

// Whole numbers of kLow_ bits as AWQ, GPTQ and others store them: value = scale * (code - zero). A unit
// begins with sixteen float32 scales and sixteen zero points of a byte (signed where codes are), which
// hold for all of its kUnitBlocks_ blocks.
template <int kLow_, int kUnitBlocks_>
struct AffineTile : Tile<kLow_, 0, kBlockInputs, kUnitBlocks_, true, 0> {
  static constexpr int kUnitBlocks = kUnitBlocks_;
  static constexpr bool kIsAffine = true;
  static constexpr bool kIsSuper = false;
  static constexpr int kBlockBytes = kLanes * kBlockInputs * kLow_ / 8;
  static constexpr int kZeros = kLanes * (int)sizeof(float);
  static constexpr int kHeadBytes = kZeros + kLanes;
  static constexpr int kUnitBytes = kHeadBytes + kUnitBlocks * kBlockBytes;

  static int64_t tile_bytes(int64_t num_in) {
    return num_in / (kBlockInputs * kUnitBlocks) * kUnitBytes;
  }

  static const uint8_t* head(const uint8_t* tile, int64_t index) {
    return tile + (uint64_t)index / kUnitBlocks * kUnitBytes;
  }

  static const uint8_t* block(const uint8_t* tile, int64_t index) {
    return head(tile, index) + kHeadBytes + (uint64_t)index % kUnitBlocks * kBlockBytes;
  }

  SERVE_INLINE static Lanes scale(const uint8_t* head, const uint8_t*, int) {
    return load((const float*)head);
  }

  SERVE_INLINE static Lanes zero(const uint8_t* head) { return load_bytes(head + kZeros, kLow_ == 8); }

  SERVE_INLINE static Lanes minimum(const uint8_t* head, const uint8_t* block, int group) {
    return splat(0.0f) - zero(head) * scale(head, block, group);
  }
};

// Calls function with the Tile that belongs to a type; false for a number that is none.
template <typename Function>
inline bool with_tile(int32_t type, Function&& function) {
  switch (type) {
    case kQ4_0: function(Tile<4, 0, 32, 1, false, 8>()); return true;
    case kQ4_1: function(Tile<4, 0, 32, 1, true, 0>()); return true;
    case kQ5_0: function(Tile<4, 1, 32, 1, false, 16>()); return true;
    case kQ5_1: function(Tile<4, 1, 32, 1, true, 0>()); return true;
    case kQ8_0: function(Tile<8, 0, 32, 1, false, 0>()); return true;
    case kQ2_K: function(Tile<4, 0, 16, 8, true, 0>()); return true;
    case kQ3_K: function(Tile<4, 0, 16, 8, false, 4>()); return true;
    case kQ4_K: function(Tile<4, 0, 32, 8, true, 0>()); return true;
    case kQ5_K: function(Tile<4, 1, 32, 8, true, 0>()); return true;
    case kQ6_K: function(Tile<4, 2, 16, 8, false, 32>()); return true;
    case kAffine4_32: function(AffineTile<4, 1>()); return true;
    case kAffine4_64: function(AffineTile<4, 2>()); return true;
    case kAffine4_128: function(AffineTile<4, 4>()); return true;
    case kAffine8_32: function(AffineTile<8, 1>()); return true;
    case kAffine8_64: function(AffineTile<8, 2>()); return true;
    case kAffine8_128: function(AffineTile<8, 4>()); return true;
    default: return false;
  }
}

}  // namespace serve
