// From rows of floats to integers with one scale for 32 inputs (quantized_rows.h).

#include "quantized_rows.h"

#include <algorithm>
#include <limits>

#include "entry_points.h"
#include "pool.h"
#include "quantized_linear.h"

namespace serve {
namespace {

constexpr float kSmallestInput = 1e-33f;  // a block below this is zero: its scale has no inverse
constexpr int64_t kMinInputs = 16 * 1024;  // less than this does not pay for a helper
constexpr uint32_t kMagnitude = 0x7fffffffu;
constexpr uint32_t kInfinity = 0x7f800000u;
// Adding this and taking it away again rounds to the nearest integer, ties to even.
constexpr float kRounder = 12582912.0f;  // 1.5 * 2^23
constexpr int kNatives = kBlockInputs / kNative;

template <typename Code>
constexpr float kLargestCode = sizeof(Code) == 2 ? 32767.0f : 127.0f;

// A block with an input that is not finite makes its row not a number in every output.
template <typename Code, typename Info>
void spoil_block(Code* codes, Info* info) {
  std::memset(codes, 0, kBlockInputs * sizeof *codes);
  const float nan = std::numeric_limits<float>::quiet_NaN();
  *info = Info{};
  info->scale = nan;
  for (float& sum : info->scaled_sums) sum = nan;
}

typedef int32_t FourInts __attribute__((vector_size(16)));
typedef uint16_t FourWords __attribute__((vector_size(8)));

// One of the four-lane pieces of a vector.
SERVE_INLINE FourInts piece(const NativeInt& value, int index) {
  FourInts out;
  std::memcpy(&out, (const char*)&value + index * sizeof out, sizeof out);
  return out;
}

// The greatest magnitude of 32 inputs as bits, which are above kInfinity for what is not a number.
SERVE_INLINE uint32_t greatest_bits(const Native* x) {
  NativeInt most{};
  for (int i = 0; i < kNatives; i++) {
    const NativeInt bits = (NativeInt)(bit_cast<NativeBits>(x[i]) & kMagnitude);
    most = most > bits ? most : bits;
  }
  FourInts four = piece(most, 0);
  for (int i = 1; i < kNative / 4; i++) four = four > piece(most, i) ? four : piece(most, i);
  return (uint32_t)std::max(std::max(four[0], four[1]), std::max(four[2], four[3]));
}

SERVE_INLINE int32_t sum_lanes(const NativeInt& value) {
  FourInts four = piece(value, 0);
  for (int i = 1; i < kNative / 4; i++) four += piece(value, i);
  return (four[0] + four[1]) + (four[2] + four[3]);
}

// Stores the integers of 16 bits.
SERVE_INLINE void store_codes(const NativeInt* whole, int16_t* codes, BlockInfo* info) {
  NativeInt halves[2] = {};
  for (int i = 0; i < kNatives; i++) {
    const auto narrow = __builtin_convertvector(whole[i], NativeNarrow);
    std::memcpy(codes + i * kNative, &narrow, sizeof narrow);
    halves[i * kNative / kLanes] += whole[i];
  }
  info->sums[1] = sum_lanes(halves[0]);
  info->sums[2] = sum_lanes(halves[1]);
  info->sums[0] = info->sums[1] + info->sums[2];
}

// The same for 8 bits, in the order of the quads of a tile.
SERVE_INLINE void store_codes(const NativeInt* whole, int8_t* codes, ByteBlockInfo* info) {
  FourWords words[kBlockInputs / 4];
  for (int i = 0; i < kNatives; i++) {
    const auto narrow = __builtin_convertvector(whole[i], NativeNarrow);
    std::memcpy(words + i * kNative / 4, &narrow, sizeof narrow);
  }
  FourWords columns[2] = {};  // of each half: sums of columns 0, 1, 2, 3, modulo 4
  for (int i = 0; i < kBlockInputs / 8; i++) {
    const FourWords first = words[2 * i], second = words[2 * i + 1];
    const FourWords bytes = (first & (uint16_t)255) | (second << 8);  // 0, 4, 1, 5 | 2, 6, 3, 7
    std::memcpy(codes + 8 * i, &bytes, sizeof bytes);
    columns[i / 2] += first + second;
  }
  int even[3], odd[3];
  for (int h = 0; h < 2; h++) {
    even[1 + h] = (int16_t)columns[h][0] + (int16_t)columns[h][2];
    odd[1 + h] = (int16_t)columns[h][1] + (int16_t)columns[h][3];
  }
  even[0] = even[1] + even[2];
  odd[0] = odd[1] + odd[2];
  for (int i = 0; i < 3; i++) {
    info->sums[i] = even[i] + odd[i];
    info->column_sums[i] = (int32_t)((uint32_t)odd[i] << 16 | (uint16_t)even[i]);
  }
}

template <typename Code, typename Info>
SERVE_INLINE void quantize_block(const float* source, Code* codes, Info* info) {
  Native x[kNatives];
  for (int i = 0; i < kNatives; i++) x[i] = widen(source + i * kNative);
  const uint32_t bits = greatest_bits(x);
  if (bits >= kInfinity) return spoil_block(codes, info);
  const float limit = bit_cast<float>(bits);
  const bool is_zero = limit < kSmallestInput;
  const Native inverse = splat_native(is_zero ? 0.0f : kLargestCode<Code> / limit);
  const Native rounder = splat_native(kRounder);
  NativeInt whole[kNatives];
  for (int i = 0; i < kNatives; i++) {
    whole[i] = bit_cast<NativeInt>(fma_native(x[i], inverse, rounder)) - bit_cast<int32_t>(kRounder);
  }
  store_codes(whole, codes, info);
  info->scale = is_zero ? 0.0f : limit / kLargestCode<Code>;
  for (int i = 0; i < 3; i++) info->scaled_sums[i] = info->scale * (float)info->sums[i];
}

template <typename Target>
void quantize(const float* x, uint8_t* row, int64_t num_in) {
  typename Target::Code* codes = (typename Target::Code*)row;
  typename Target::Info* infos = (typename Target::Info*)(codes + num_in);
  for (int64_t b = 0; b < num_in / kBlockInputs; b++) {
    quantize_block(x + b * kBlockInputs, codes + b * kBlockInputs, infos + b);
  }
}

}  // namespace

int64_t quantized_row_bytes(int64_t num_in, int32_t activations) {
  return activations == kByte ? ByteRows{nullptr, num_in}.stride() : ExactRows{nullptr, num_in}.stride();
}

void quantize_row(const float* x, uint8_t* row, int64_t num_in, int32_t activations) {
  if (activations == kByte) return quantize<ByteRows>(x, row, num_in);
  quantize<ExactRows>(x, row, num_in);
}

}  // namespace serve

// Gives the bytes that serve_quantize_rows writes for each row.
SERVE_API int64_t serve_quantized_row_bytes(int64_t num_in, int32_t activations) {
  return serve::quantized_row_bytes(num_in, activations);
}

// Turns rows of x, x_stride floats apart, into integers; num_in is a multiple of 32. activations:
// 0 exact, 1 int8 (quantized_rows.h).
SERVE_API serve::Status serve_quantize_rows(const float* x, int64_t x_stride, uint8_t* rows,
                                            int64_t num_rows, int64_t num_in, int32_t activations) {
  using namespace serve;
  if (!is_activations(activations)) return kBadType;
  if (!is_size(num_rows) || !is_size(num_in) || num_in % kBlockInputs != 0) return kBadShape;
  const int64_t row_bytes = quantized_row_bytes(num_in, activations);
  parallel_for(num_rows, kMinInputs / (num_in + 1) + 1, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row++) {
      quantize_row(x + row * x_stride, rows + row * row_bytes, num_in, activations);
    }
  });
  return kOk;
}
