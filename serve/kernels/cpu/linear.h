// Parts of a linear layer on float weights, for callers that share out the work themselves.
#pragma once

#include <cstdint>

namespace serve {

enum WeightType : int32_t { kFloat32Weight = 0, kBfloat16Weight = 1, kFloat16Weight = 2 };

struct DenseProduct {
  const float* x;
  int64_t x_stride;    // floats from row to row
  const void* weight;  // packed
  const float* bias;   // [num_out] or null
  float* out;
  int64_t out_stride;
  int64_t num_rows;
  int64_t num_in;
  int64_t num_out;
  int32_t type;  // a WeightType
};

bool is_weight_type(int32_t type);

// Computes the outputs of tiles [begin, end), sixteen to a tile, for all rows on this thread.
// Fastest by fours of tiles for one row, by twos for two.
void dense_tiles(const DenseProduct& product, int64_t begin, int64_t end);

// Writes a row of a packed weight as float32 to out [num_in].
void packed_row(int32_t type, const void* weight, int64_t row, float* out, int64_t num_in);

// Writes a row of a plain matrix [rows][num_in] as float32 to out [num_in].
void plain_row(int32_t type, const void* weight, int64_t row, float* out, int64_t num_in);

}  // namespace serve
