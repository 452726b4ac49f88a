// From the blocks of GGUF files, or whole numbers in rows, to tiles (quantized_tile.h), and back to
// single rows of floats.
//
// Source: block layouts of ggml (ggml-common.h, ggml-quants.c).

#include <algorithm>

#include "entry_points.h"
#include "pool.h"
#include "quantized_linear.h"
#include "quantized_tile.h"
#include "status.h"

namespace serve {
namespace {

constexpr int kSuperInputs = 256;
constexpr int64_t kMinRangeTiles = 4;

// One block of a file, taken apart: 32 codes and no small scales, or 256 codes of a K type.
struct Parts {
  uint8_t codes[kSuperInputs];
  uint8_t scales[kSuperInputs / 16];
  uint8_t minimums[kSuperInputs / 16];
  uint16_t scale;
  uint16_t minimum;
};

uint16_t half_at(const uint8_t* raw) {
  uint16_t half;
  std::memcpy(&half, raw, sizeof half);
  return half;
}

void take_nibbles(const uint8_t* raw, Parts* out) {
  for (int i = 0; i < 16; i++) {
    out->codes[i] = raw[i] & 15;
    out->codes[i + 16] = raw[i] >> 4;
  }
}

void add_fifth_bits(const uint8_t* raw, Parts* out) {
  for (int i = 0; i < 32; i++) out->codes[i] |= (uint8_t)((raw[i / 8] >> (i % 8) & 1) << 4);
}

int take_q4_0(const uint8_t* raw, Parts* out) {
  out->scale = half_at(raw);
  take_nibbles(raw + 2, out);
  return 18;
}

int take_q4_1(const uint8_t* raw, Parts* out) {
  out->scale = half_at(raw);
  out->minimum = half_at(raw + 2);
  take_nibbles(raw + 4, out);
  return 20;
}

int take_q5_0(const uint8_t* raw, Parts* out) {
  out->scale = half_at(raw);
  take_nibbles(raw + 6, out);
  add_fifth_bits(raw + 2, out);
  return 22;
}

int take_q5_1(const uint8_t* raw, Parts* out) {
  out->scale = half_at(raw);
  out->minimum = half_at(raw + 2);
  take_nibbles(raw + 8, out);
  add_fifth_bits(raw + 4, out);
  return 24;
}

int take_q8_0(const uint8_t* raw, Parts* out) {
  out->scale = half_at(raw);
  std::memcpy(out->codes, raw + 2, 32);
  return 34;
}

int take_q2_k(const uint8_t* raw, Parts* out) {
  out->scale = half_at(raw + 80);
  out->minimum = half_at(raw + 82);
  for (int i = 0; i < 16; i++) {
    out->scales[i] = raw[i] & 15;
    out->minimums[i] = raw[i] >> 4;
  }
  for (int i = 0; i < 256; i++) {
    out->codes[i] = raw[16 + i / 128 * 32 + i % 32] >> (i / 32 % 4 * 2) & 3;
  }
  return 84;
}

int take_q3_k(const uint8_t* raw, Parts* out) {
  out->scale = half_at(raw + 108);
  for (int i = 0; i < 16; i++) {
    const int low = raw[96 + i % 8] >> (i / 8 * 4) & 15;
    const int high = raw[104 + i % 4] >> (i / 4 * 2) & 3;
    out->scales[i] = (uint8_t)((low | high << 4) - 32);
  }
  for (int i = 0; i < 256; i++) {
    const int low = raw[32 + i / 128 * 32 + i % 32] >> (i / 32 % 4 * 2) & 3;
    const int high = raw[i % 32] >> (i / 32) & 1;
    out->codes[i] = (uint8_t)(low | high << 2);
  }
  return 110;
}

// Eight 6-bit scales and eight 6-bit minimums in twelve bytes.
void take_six_bit_scales(const uint8_t* raw, Parts* out) {
  for (int i = 0; i < 4; i++) {
    out->scales[i] = raw[i] & 63;
    out->minimums[i] = raw[4 + i] & 63;
    out->scales[4 + i] = (uint8_t)((raw[8 + i] & 15) | (raw[i] >> 6) << 4);
    out->minimums[4 + i] = (uint8_t)((raw[8 + i] >> 4) | (raw[4 + i] >> 6) << 4);
  }
}

int take_q4_k(const uint8_t* raw, Parts* out) {
  out->scale = half_at(raw);
  out->minimum = half_at(raw + 2);
  take_six_bit_scales(raw + 4, out);
  for (int i = 0; i < 256; i++) out->codes[i] = raw[16 + i / 64 * 32 + i % 32] >> (i / 32 % 2 * 4) & 15;
  return 144;
}

int take_q5_k(const uint8_t* raw, Parts* out) {
  out->scale = half_at(raw);
  out->minimum = half_at(raw + 2);
  take_six_bit_scales(raw + 4, out);
  for (int i = 0; i < 256; i++) {
    const int low = raw[48 + i / 64 * 32 + i % 32] >> (i / 32 % 2 * 4) & 15;
    const int high = raw[16 + i % 32] >> (i / 32) & 1;
    out->codes[i] = (uint8_t)(low | high << 4);
  }
  return 176;
}

int take_q6_k(const uint8_t* raw, Parts* out) {
  out->scale = half_at(raw + 208);
  std::memcpy(out->scales, raw + 192, 16);
  for (int i = 0; i < 256; i++) {
    const int low = raw[i / 128 * 64 + i % 64] >> (i / 64 % 2 * 4) & 15;
    const int high = raw[128 + i / 128 * 32 + i % 32] >> (i / 32 % 4 * 2) & 3;
    out->codes[i] = (uint8_t)(low | high << 4);
  }
  return 210;
}

typedef int (*TakeBlock)(const uint8_t* raw, Parts* out);
// In the order of TileType. Each gives the bytes of a block.
constexpr TakeBlock kTakeBlock[] = {take_q4_0, take_q4_1, take_q5_0, take_q5_1, take_q8_0,
                                    take_q2_k, take_q3_k, take_q4_k, take_q5_k, take_q6_k};

// The byte of a vector with the code of an output's input.
int code_place(int lane, int input) { return (2 * lane + input % 2) * 2 + byte_of(input / 2); }

// Writes the codes of one output's 32 inputs; the memory was zero before.
template <typename T>
void put_codes(const uint8_t* codes, int lane, uint8_t* block) {
  for (int i = 0; i < kBlockInputs; i++) {
    const int quad = quad_of(i / 2);
    const int place = code_place(lane, i);
    if constexpr (T::kLow == 8) {
      block[quad * kVectorBytes + place] = codes[i];
    } else {
      block[quad / 2 * kVectorBytes + place] |= (uint8_t)((codes[i] & 15) << (quad % 2 * 4));
    }
    if constexpr (T::kHigh > 0) {
      uint8_t* high = block + T::kLowBytes + quad * T::kHigh / 8 * kVectorBytes + place;
      *high |= (uint8_t)((codes[i] >> 4) << (quad * T::kHigh % 8));
    }
  }
}

template <typename T>
void put_unit(const Parts& parts, int lane, uint8_t* unit) {
  if constexpr (T::kIsSuper) {
    std::memcpy(unit + 2 * lane, &parts.scale, 2);
    if constexpr (T::kHasMinimum) std::memcpy(unit + 2 * (kLanes + lane), &parts.minimum, 2);
  }
  for (int b = 0; b < T::kUnitBlocks; b++) {
    uint8_t* block = unit + T::kHeadBytes + b * T::kBlockBytes;
    put_codes<T>(parts.codes + b * kBlockInputs, lane, block);
    if constexpr (T::kIsSuper) {
      for (int group = 0; group < T::kGroups; group++) {
        const int place = group * kLanes + lane;
        block[T::kScales + place] = parts.scales[b * T::kGroups + group];
        if constexpr (T::kHasMinimum) {
          block[T::kMinimums + place] = parts.minimums[b * T::kGroups + group];
        }
      }
    } else {
      std::memcpy(block + T::kScales + 2 * lane, &parts.scale, 2);
      if constexpr (T::kHasMinimum) std::memcpy(block + T::kMinimums + 2 * lane, &parts.minimum, 2);
    }
  }
}

template <typename T>
void pack_tile(const uint8_t* rows, int64_t row_bytes, TakeBlock take, int num_rows, int64_t num_in,
               uint8_t* tile) {
  std::memset(tile, 0, (size_t)T::tile_bytes(num_in));
  for (int lane = 0; lane < num_rows; lane++) {
    const uint8_t* raw = rows + lane * row_bytes;
    uint8_t* unit = tile;
    for (int64_t i = 0; i < num_in; i += kBlockInputs * T::kUnitBlocks) {
      Parts parts;
      raw += take(raw, &parts);
      put_unit<T>(parts, lane, unit);
      unit += T::kUnitBytes;
    }
  }
}

// A matrix of whole numbers in rows: num_out of num_in codes, a scale and a zero point for each group.
struct AffineRows {
  const uint8_t* codes;
  const float* scales;
  const uint8_t* zeros;
  int64_t num_in;
  int64_t num_out;
};

template <typename T>
void pack_affine_tile(const AffineRows& rows, int64_t first, uint8_t* tile) {
  constexpr int kUnitInputs = kBlockInputs * T::kUnitBlocks;
  constexpr uint8_t kFlip = T::kLow == 8 ? 0x80 : 0;  // to a signed code
  const int64_t num_units = rows.num_in / kUnitInputs;
  std::memset(tile, 0, (size_t)T::tile_bytes(rows.num_in));
  for (int lane = 0; lane < std::min<int64_t>(kLanes, rows.num_out - first); lane++) {
    const int64_t row = first + lane;
    const uint8_t* source = rows.codes + row * rows.num_in;
    for (int64_t u = 0; u < num_units; u++) {
      uint8_t* unit = tile + u * T::kUnitBytes;
      std::memcpy(unit + lane * sizeof(float), rows.scales + row * num_units + u, sizeof(float));
      unit[T::kZeros + lane] = rows.zeros[row * num_units + u] ^ kFlip;
      for (int b = 0; b < T::kUnitBlocks; b++) {
        uint8_t codes[kBlockInputs];
        for (int i = 0; i < kBlockInputs; i++) codes[i] = *source++ ^ kFlip;
        put_codes<T>(codes, lane, unit + T::kHeadBytes + b * T::kBlockBytes);
      }
    }
  }
}

template <typename PackTile>
void for_tiles(int64_t num_out, const PackTile& pack_tile) {
  parallel_for((num_out + kLanes - 1) / kLanes, kMinRangeTiles, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; t++) pack_tile(t);
  });
}

template <typename T>
int code_at(const uint8_t* block, int lane, int input) {
  const int quad = quad_of(input / 2);
  const int place = code_place(lane, input);
  if constexpr (T::kLow == 8) return (int8_t)block[quad * kVectorBytes + place];
  int code = block[quad / 2 * kVectorBytes + place] >> (quad % 2 * 4) & 15;
  if constexpr (T::kHigh > 0) {
    const uint8_t* high = block + T::kLowBytes + quad * T::kHigh / 8 * kVectorBytes + place;
    code |= (*high >> (quad * T::kHigh % 8) & ((1 << T::kHigh) - 1)) << 4;
  }
  return code - T::kOffset;
}

template <typename T>
void unpack_lane(const uint8_t* tile, int lane, int64_t num_in, float* out) {
  for (int64_t b = 0; b < num_in / kBlockInputs; b++) {
    const uint8_t* head = T::head(tile, b);
    const uint8_t* block = T::block(tile, b);
    for (int group = 0; group < T::kGroups; group++) {
      float scales[kLanes], zeros[kLanes] = {}, minimums[kLanes] = {};
      store(scales, T::scale(head, block, group));
      if constexpr (T::kIsAffine) {
        store(zeros, T::zero(head));
      } else if constexpr (T::kHasMinimum) {
        store(minimums, T::minimum(head, block, group));
      }
      for (int i = group * T::kGroup; i < (group + 1) * T::kGroup; i++) {
        const float code = (float)code_at<T>(block, lane, i) - zeros[lane];
        out[b * kBlockInputs + i] = scales[lane] * code + minimums[lane];
      }
    }
  }
}

}  // namespace

void unpack_row(int32_t type, const uint8_t* weight, int64_t row, float* out, int64_t num_in) {
  with_tile(type, [&](auto tile) {
    typedef decltype(tile) T;
    const uint8_t* source = weight + row / kLanes * T::tile_bytes(num_in);
    unpack_lane<T>(source, (int)(row % kLanes), num_in, out);
  });
}

}  // namespace serve

// Gives the bytes of a packed weight, -1 for an unknown type or inputs that are no whole blocks.
SERVE_API int64_t serve_quantized_bytes(int32_t type, int64_t num_in, int64_t num_out) {
  using namespace serve;
  int64_t num_bytes = -1;
  with_tile(type, [&](auto tile) {
    typedef decltype(tile) T;
    if (!is_size(num_in) || !is_size(num_out) || num_in % (kBlockInputs * T::kUnitBlocks)) return;
    num_bytes = (num_out + kLanes - 1) / kLanes * T::tile_bytes(num_in);
  });
  return num_bytes;
}

// Repacks rows of a file's blocks, row_bytes apart, into tiles of serve_quantized_bytes. No file has
// blocks of the affine types: serve_pack_affine makes those.
SERVE_API serve::Status serve_pack_quantized(int32_t type, const uint8_t* rows, int64_t row_bytes,
                                             uint8_t* packed, int64_t num_in, int64_t num_out) {
  using namespace serve;
  if (serve_quantized_bytes(type, num_in, num_out) < 0) return kBadShape;
  Status status = kBadType;
  with_tile(type, [&](auto tile) {
    typedef decltype(tile) T;
    if constexpr (!T::kIsAffine) {
      status = kOk;
      for_tiles(num_out, [&](int64_t t) {
        const int num_rows = (int)std::min<int64_t>(kLanes, num_out - t * kLanes);
        pack_tile<T>(rows + t * kLanes * row_bytes, row_bytes, kTakeBlock[type], num_rows, num_in,
                     packed + t * T::tile_bytes(num_in));
      });
    }
  });
  return status;
}

// Packs codes [num_out][num_in], and scales and zero points of each group of inputs of a row, into
// tiles of an affine type of serve_quantized_bytes.
SERVE_API serve::Status serve_pack_affine(int32_t type, const uint8_t* codes, const float* scales,
                                          const uint8_t* zeros, uint8_t* packed, int64_t num_in,
                                          int64_t num_out) {
  using namespace serve;
  if (serve_quantized_bytes(type, num_in, num_out) < 0) return kBadShape;
  Status status = kBadType;
  const AffineRows rows{codes, scales, zeros, num_in, num_out};
  with_tile(type, [&](auto tile) {
    typedef decltype(tile) T;
    if constexpr (T::kIsAffine) {
      status = kOk;
      for_tiles(num_out, [&](int64_t t) {
        pack_affine_tile<T>(rows, t * kLanes, packed + t * T::tile_bytes(num_in));
      });
    }
  });
  return status;
}

// Writes rows of a packed weight as floats to out [count][num_in]. Nothing is written when an index
// is outside the weight; fault is then its place and value.
SERVE_API int32_t serve_quantized_rows(int32_t type, const uint8_t* packed, const int64_t* indices,
                                       int64_t count, float* out, int64_t num_in, int64_t num_out,
                                       serve::Fault* fault) {
  using namespace serve;
  for (int64_t i = 0; i < count; i++) {
    if (indices[i] < 0 || indices[i] >= num_out) {
      *fault = Fault{i, indices[i], 0};
      return kBadRow;
    }
  }
  parallel_for(count, 16, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) unpack_row(type, packed, indices[i], out + i * num_in, num_in);
  });
  return kOk;
}
