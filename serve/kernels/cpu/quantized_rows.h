// Rows of activations as integers, each 32 inputs with one scale.
//
// kExact: 16-bit integers, 256 times finer than the usual 8 bits, so that what is lost is below what
// float32 sums lose. kByte: the usual 8 bits, for speed.
#pragma once

#include <cstdint>

#include "quantized_tile.h"

namespace serve {

// The last argument of the entry points that round activations: what --cpu-activations chooses.
enum Activations : int32_t { kExact = 0, kByte = 1 };

inline bool is_activations(int32_t value) { return value == kExact || value == kByte; }

// What goes with 32 integers of a row. Groups of 32 use entry 0, groups of 16 entries 1 and 2.
struct BlockInfo {
  float scale;
  float scaled_sums[3];  // sums times scale
  int32_t sums[3];       // of the integers
  int32_t padding;
};

// What 8-bit integers need too: sums of even and of odd columns, of 16 bits in one word.
struct ByteBlockInfo : BlockInfo {
  int32_t column_sums[3];
  int32_t more_padding;
};

// Keeps rows from being whole cache lines apart: the same columns of neighbouring rows are loaded
// together and would come from one bank of the cache.
constexpr int kRowPadding = 16;

// A quantised row: num_in integers, then an Info for each 32 of them. Integers of 8 bits lie in the
// order of the quads of a tile.
template <typename Code_, typename Info_>
struct Rows {
  typedef Code_ Code;
  typedef Info_ Info;

  const uint8_t* data;
  int64_t num_in;

  int64_t stride() const {
    return num_in * (int64_t)sizeof(Code) + num_in / kBlockInputs * (int64_t)sizeof(Info) + kRowPadding;
  }
  const Code* codes(int64_t row) const { return (const Code*)(data + row * stride()); }
  const Info* infos(int64_t row) const { return (const Info*)(codes(row) + num_in); }
};

typedef Rows<int16_t, BlockInfo> ExactRows;
typedef Rows<int8_t, ByteBlockInfo> ByteRows;

}  // namespace serve
