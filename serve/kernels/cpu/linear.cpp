// y = x W^T + b on float32 rows, with weights of three types repacked for vectors.
//
// Weights keep their type. They lie as [output / 16][input][16], bfloat16 ones as
// [output / 16][input / 2][16][2]: one load gives sixteen outputs their weight for one input, or for
// a pair of inputs, so nothing is summed across lanes. They are widened to float32 in registers,
// which loses nothing, and multiplied there. Every output adds its products in one fixed order,
// input by input in equal chunks of at most kMaxChunk, so a row is the same to the bit in every
// batch, with any number of threads, and for every type that holds the same numbers.

#include "linear.h"

#include <algorithm>
#include <type_traits>

#include "entry_points.h"
#include "lanes.h"
#include "pool.h"
#include "status.h"

namespace serve {
namespace {

constexpr int64_t kMaxChunk = 1024;           // most inputs summed in registers at a time, even
constexpr int64_t kPanelFloats = 192 * 1024;  // inputs of rows taken at a time stay in the L2 cache
constexpr int64_t kFetchAhead = 16;           // inputs ahead whose weights are fetched
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kAccumulators = 24;  // vector registers that hold sums
#else
constexpr int kAccumulators = 12;
#endif
constexpr int kMostRows = kAccumulators / kParts / (kParts == 1 ? 2 : 1);
constexpr int kMaxTiles = 4;

// Rows of a block: two bytes a weight need registers for the halves of a pair.
template <typename T>
constexpr int kMaxRows = sizeof(T) == sizeof(float) ? kMostRows : kMostRows - 1;

// How many tiles of sixteen outputs go side by side for a number of rows.
template <typename T>
constexpr int tiles_for(int num_rows) {
  const int num_sums = sizeof(T) == sizeof(float) ? kAccumulators : kAccumulators * 2 / 3;
  const int fit = num_sums / (num_rows * kParts);
  return fit < 1 ? 1 : fit > kMaxTiles ? kMaxTiles : fit;
}

template <typename T>
constexpr bool kIsPaired = std::is_same<T, Bf16>::value;

// Elements of a tile; where inputs come in pairs, an odd one has a pair to itself.
template <typename T>
int64_t tile_size(int64_t num_in) {
  return (kIsPaired<T> ? (num_in + 1) / 2 * 2 : num_in) * kLanes;
}

int64_t num_tiles(int64_t num_out) { return (num_out + kLanes - 1) / kLanes; }

// Hides where a pointer comes from, so that the compiler loads again instead of keeping a register.
template <typename T>
SERVE_INLINE const T* again(const T* source) {
  asm("" : "+r"(source));
  return source;
}

// One input's weights for sixteen outputs.
template <typename T>
SERVE_INLINE Lanes weights_at(const T* tile, int64_t input) {
  return load(tile + input * kLanes);
}

SERVE_INLINE Lanes weights_at(const Bf16* tile, int64_t input) {
  const Bf16* source = tile + (input & ~(int64_t)1) * kLanes;
  Lanes out;
  for (int i = 0; i < kParts; i++) {
    NativeBits both;
    std::memcpy(&both, source + 2 * i * kNative, sizeof both);
    out.part[i] = bit_cast<Native>(input & 1 ? both & 0xffff0000u : both << 16);
  }
  return out;
}

// The part of a product that is summed in registers: some rows, some tiles, one chunk of inputs.
template <typename T>
struct Block {
  const float* x;  // first row, first input
  int64_t x_stride;
  const T* weight;      // first tile, first input
  int64_t tile_stride;  // elements between tiles
  int64_t num_in;
  const T* next;  // where weights lie that are needed soon
};

// Where the sums of a block go.
struct Target {
  float* out;  // first row, first tile
  int64_t out_stride;
  const float* bias;  // of the first tile; null for none
  int64_t num_out;    // outputs from the first tile on
  bool is_first;      // chunk: nothing has been added yet
};

// What a block does about the weights that are needed soon; the values are those of the builtin.
enum Fetch { kNothing = 0, kToL2 = 2, kToL1 = 3 };

template <int kRows, int kTiles>
struct Sums {
  Lanes of[kRows][kTiles];
};

template <typename T, int kRows, int kTiles>
SERVE_INLINE void add_input(Sums<kRows, kTiles>& sums, const Block<T>& block, const T* weight,
                            int64_t input) {
  Lanes weights[kTiles];
  for (int t = 0; t < kTiles; t++) weights[t] = weights_at(weight + t * block.tile_stride, input);
  for (int r = 0; r < kRows; r++) {
    const Native value = splat_native(block.x[r * block.x_stride + input]);
    for (int t = 0; t < kTiles; t++) sums.of[r][t] = fma(weights[t], value, sums.of[r][t]);
  }
}

template <int kRows, int kTiles>
SERVE_INLINE void add_to(const Target& target, const Sums<kRows, kTiles>& sums) {
  for (int t = 0; t < kTiles; t++) {
    const int64_t count = target.num_out - t * kLanes;
    for (int r = 0; r < kRows; r++) {
      float* place = target.out + r * target.out_stride + t * kLanes;
      Lanes total = sums.of[r][t];
      if (!target.is_first) {
        total = load_some(place, count) + total;
      } else if (target.bias != nullptr) {
        total = load_some(target.bias + t * kLanes, count) + total;
      }
      store_some(place, total, count);
    }
  }
}

// Not inlined: beside other loops the compiler runs out of registers for this one.
template <typename T, int kRows, int kTiles, Fetch kFetch>
__attribute__((noinline)) void compute(const Block<T>& block, const Target& target) {
  Sums<kRows, kTiles> sums;
  for (int r = 0; r < kRows; r++) {
    for (int t = 0; t < kTiles; t++) sums.of[r][t] = splat(0.0f);
  }
  constexpr int kStep = kIsPaired<T> ? 2 : 1;
  int64_t i = 0;
  for (; i + kStep <= block.num_in; i += kStep) {
    if constexpr (kFetch != kNothing) __builtin_prefetch(block.next + i * kLanes, 0, kFetch);
    add_input(sums, block, block.weight, i);
    if constexpr (kStep == 2) add_input(sums, block, again(block.weight), i + 1);
  }
  if (i < block.num_in) add_input(sums, block, block.weight, i);
  add_to(target, sums);
}

template <typename T>
Block<T> block_at(const DenseProduct& p, int64_t row, int64_t tile, int64_t first, int64_t last) {
  const int64_t size = tile_size<T>(p.num_in);
  const T* weight = (const T*)p.weight + tile * size + first * kLanes;
  const float* x = p.x + row * p.x_stride + first;
  return {x, p.x_stride, weight, size, last - first, weight + kFetchAhead * kLanes};
}

Target target_at(const DenseProduct& p, int64_t row, int64_t tile, int64_t first) {
  const int64_t output = tile * kLanes;
  return {p.out + row * p.out_stride + output, p.out_stride,
          p.bias == nullptr ? nullptr : p.bias + output, p.num_out - output, first == 0};
}

// Calls body(first, last) for equal chunks of inputs, each but the last of an even number; once for
// no inputs: the outputs are then the bias.
template <typename Body>
SERVE_INLINE void for_chunks(int64_t num_in, Body&& body) {
  const int64_t num_chunks = std::max<int64_t>((num_in + kMaxChunk - 1) / kMaxChunk, 1);
  const int64_t size = ((num_in + num_chunks - 1) / num_chunks + 1) / 2 * 2;
  int64_t first = 0;
  do {
    const int64_t last = std::min(first + size, num_in);
    body(first, last);
    first = last;
  } while (first < num_in);
}

template <typename T, int kRows, int kTiles>
SERVE_INLINE void columns(const DenseProduct& p, int64_t tile) {
  // One tile is one stream of memory, too few for the hardware to keep it busy.
  constexpr Fetch kFetch = kTiles == 1 ? kToL1 : kNothing;
  for_chunks(p.num_in, [&](int64_t first, int64_t last) {
    compute<T, kRows, kTiles, kFetch>(block_at<T>(p, 0, tile, first, last),
                                      target_at(p, 0, tile, first));
  });
}

// All rows at once, at most kRows: every weight is read once.
template <typename T, int kRows = kMaxRows<T>>
void few_rows(const DenseProduct& p, int64_t begin, int64_t end) {
  if constexpr (kRows > 1) {
    if (p.num_rows < kRows) return few_rows<T, kRows - 1>(p, begin, end);
  }
  constexpr int kTiles = tiles_for<T>(kRows);
  int64_t tile = begin;
  for (; tile + kTiles <= end; tile += kTiles) columns<T, kRows, kTiles>(p, tile);
  for (; tile < end; tile++) columns<T, kRows, 1>(p, tile);
}

// Picks the block height at run time; count is at most kRows.
template <typename T, int kRows = kMaxRows<T>>
void some_rows(int64_t count, const Block<T>& block, const Target& target) {
  if constexpr (kRows > 1) {
    if (count < kRows) return some_rows<T, kRows - 1>(count, block, target);
  }
  compute<T, kRows, 1, kToL2>(block, target);
}

// Rows [row, row + num_rows) in blocks of nearly equal height, tile by tile: a chunk of a tile's
// weights comes from memory for the first block only, the second fetches what the next tile needs.
template <typename T>
void many_rows(const DenseProduct& p, int64_t row, int64_t num_rows, int64_t begin, int64_t end) {
  const int64_t num_blocks = (num_rows + kMaxRows<T> - 1) / kMaxRows<T>;
  for (int64_t tile = begin; tile < end; tile++) {
    for_chunks(p.num_in, [&](int64_t first, int64_t last) {
      Block<T> block = block_at<T>(p, row, tile, first, last);
      const float* x = block.x;
      for (int64_t index = 0; index < num_blocks; index++) {
        const int64_t top = num_rows * index / num_blocks;
        const int64_t bottom = num_rows * (index + 1) / num_blocks;
        block.x = x + top * p.x_stride;
        block.next = block.weight + (index == 1 ? block.num_in * kLanes : 0);
        some_rows(bottom - top, block, target_at(p, row + top, tile, first));
      }
    });
  }
}

template <typename T>
void run_tiles(const DenseProduct& p, int64_t begin, int64_t end) {
  if (p.num_rows <= 0) return;
  if (p.num_rows <= kMaxRows<T>) return few_rows<T>(p, begin, end);
  const int64_t panel = std::max<int64_t>(kPanelFloats / (p.num_in + 1), kMaxRows<T>);
  for (int64_t row = 0; row < p.num_rows; row += panel) {
    many_rows<T>(p, row, std::min(panel, p.num_rows - row), begin, end);
  }
}

template <typename T>
void unpack_row(const T* weight, int64_t row, float* out, int64_t num_in) {
  const T* tile = weight + row / kLanes * tile_size<T>(num_in);
  const int64_t lane = row % kLanes;
  for (int64_t i = 0; i < num_in; i++) {
    const int64_t place = kIsPaired<T> ? (i / 2 * kLanes + lane) * 2 + i % 2 : i * kLanes + lane;
    out[i] = widen_one(tile[place]);
  }
}

template <typename T>
void copy_row(const T* row, float* out, int64_t num_in) {
  int64_t i = 0;
  for (; i + kLanes <= num_in; i += kLanes) store(out + i, load(row + i));
  for (; i < num_in; i++) out[i] = widen_one(row[i]);
}

// Element is an integer as wide as a weight: packing moves bits.
template <typename Element, bool kPaired>
void pack_rows(const Element* weight, Element* packed, int64_t first, int64_t num_rows,
               int64_t num_in) {
  constexpr int64_t kStrip = 64;  // inputs at a time, so that sixteen short strips are read at once
  const int64_t num_places = kPaired ? (num_in + 1) / 2 * 2 : num_in;
  const int64_t end = (first + num_rows + kLanes - 1) / kLanes * kLanes;
  for (int64_t tile = first / kLanes; tile * kLanes < end; tile++) {
    const int64_t begin_lane = std::max<int64_t>(first - tile * kLanes, 0);
    for (int64_t begin = 0; begin < num_places; begin += kStrip) {
      const int64_t last = std::min(begin + kStrip, num_places);
      for (int64_t lane = begin_lane; lane < kLanes; lane++) {
        const int64_t row = tile * kLanes + lane - first;
        const Element* source = weight + row * num_in;
        Element* target = packed + tile * num_places * kLanes + lane * (kPaired ? 2 : 1);
        for (int64_t i = begin; i < last; i++) {
          const int64_t place = kPaired ? i / 2 * 2 * kLanes + i % 2 : i * kLanes;
          target[place] = row < num_rows && i < num_in ? source[i] : (Element)0;
        }
      }
    }
  }
}

}  // namespace

bool is_weight_type(int32_t type) {
  return type == kFloat32Weight || type == kBfloat16Weight || type == kFloat16Weight;
}

void dense_tiles(const DenseProduct& product, int64_t begin, int64_t end) {
  switch (product.type) {
    case kFloat32Weight: return run_tiles<float>(product, begin, end);
    case kBfloat16Weight: return run_tiles<Bf16>(product, begin, end);
    case kFloat16Weight: return run_tiles<Fp16>(product, begin, end);
  }
}

void packed_row(int32_t type, const void* weight, int64_t row, float* out, int64_t num_in) {
  switch (type) {
    case kFloat32Weight: return unpack_row((const float*)weight, row, out, num_in);
    case kBfloat16Weight: return unpack_row((const Bf16*)weight, row, out, num_in);
    case kFloat16Weight: return unpack_row((const Fp16*)weight, row, out, num_in);
  }
}

void plain_row(int32_t type, const void* weight, int64_t row, float* out, int64_t num_in) {
  switch (type) {
    case kFloat32Weight: return copy_row((const float*)weight + row * num_in, out, num_in);
    case kBfloat16Weight: return copy_row((const Bf16*)weight + row * num_in, out, num_in);
    case kFloat16Weight: return copy_row((const Fp16*)weight + row * num_in, out, num_in);
  }
}

}  // namespace serve

// out [num_rows][num_out], rows out_stride floats apart, = x [num_rows][num_in], rows x_stride floats
// apart, times weight, packed from type, plus bias [num_out] unless null.
SERVE_API serve::Status serve_linear(int32_t type, const float* x, int64_t x_stride,
                                     const void* weight, const float* bias, float* out,
                                     int64_t out_stride, int64_t num_rows, int64_t num_in,
                                     int64_t num_out) {
  using namespace serve;
  if (!is_weight_type(type)) return kBadType;
  if (!is_size(num_rows) || !is_size(num_in) || !is_size(num_out)) return kBadShape;
  const DenseProduct product{x,          x_stride, weight, bias,    out,
                             out_stride, num_rows, num_in, num_out, type};
  const int64_t num_groups = (num_tiles(num_out) + kMaxTiles - 1) / kMaxTiles;
  const int64_t products_per_group = num_rows * num_in * kLanes * kMaxTiles + 1;
  parallel_for(num_groups, kMinParallelWork / products_per_group + 1, [&](int64_t begin, int64_t end) {
    dense_tiles(product, begin * kMaxTiles, std::min(end * kMaxTiles, num_tiles(num_out)));
  });
  return kOk;
}

// Gives the bytes of a packed weight, -1 for a type or sizes that there are not.
SERVE_API int64_t serve_packed_bytes(int32_t type, int64_t num_in, int64_t num_out) {
  using namespace serve;
  if (!is_weight_type(type) || !is_size(num_in) || !is_size(num_out)) return -1;
  switch (type) {
    case kFloat32Weight: return num_tiles(num_out) * tile_size<float>(num_in) * 4;
    case kBfloat16Weight: return num_tiles(num_out) * tile_size<Bf16>(num_in) * 2;
    default: return num_tiles(num_out) * tile_size<Fp16>(num_in) * 2;
  }
}

// Packs weight [num_rows][num_in] as the outputs from first on; the tile that the last of them is in
// is filled up with zeros, so parts of one weight are packed in order.
SERVE_API serve::Status serve_pack_linear(int32_t type, const void* weight, void* packed,
                                          int64_t first, int64_t num_rows, int64_t num_in) {
  using namespace serve;
  if (!is_weight_type(type)) return kBadType;
  if (!is_size(first) || !is_size(num_rows) || !is_size(num_in)) return kBadShape;
  if (type == kFloat32Weight) {
    pack_rows<uint32_t, false>((const uint32_t*)weight, (uint32_t*)packed, first, num_rows, num_in);
  } else if (type == kBfloat16Weight) {
    pack_rows<uint16_t, true>((const uint16_t*)weight, (uint16_t*)packed, first, num_rows, num_in);
  } else {
    pack_rows<uint16_t, false>((const uint16_t*)weight, (uint16_t*)packed, first, num_rows, num_in);
  }
  return kOk;
}

// Writes rows of a packed weight as float32 to out [count][num_in]; fault names the first bad index.
SERVE_API serve::Status serve_packed_rows(int32_t type, const void* packed, const int64_t* indices,
                                          int64_t count, float* out, int64_t num_in,
                                          int64_t num_out, serve::Fault* fault) {
  using namespace serve;
  if (!is_weight_type(type)) return kBadType;
  for (int64_t i = 0; i < count; i++) {
    if (indices[i] < 0 || indices[i] >= num_out) {
      *fault = Fault{i, indices[i], 0};
      return kBadRow;
    }
  }
  parallel_for(count, kMinParallelWork / (num_in + 1) + 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
      packed_row(type, packed, indices[i], out + i * num_in, num_in);
    }
  });
  return kOk;
}
