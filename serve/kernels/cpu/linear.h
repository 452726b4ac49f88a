// Parts of a linear layer on float weights, for callers that share out the work themselves.
#pragma once

#include <cstdint>

namespace serve {

struct DenseProduct {
  const float* x;
  int64_t x_stride;  // floats from row to row
  const float* weight;
  const float* bias;  // [num_out] or null
  float* out;
  int64_t out_stride;
  int64_t num_rows;
  int64_t num_in;
  int64_t num_out;
};

// Computes the outputs of tiles [begin, end), sixteen to a tile, for all rows on this thread.
void dense_tiles(const DenseProduct& product, int64_t begin, int64_t end);

}  // namespace serve
