// Parts of a linear layer on quantised weights, for callers that share out the work themselves.
#pragma once

#include <cstdint>

namespace serve {

struct QuantizedProduct {
  int32_t type;  // TileType of weight
  const uint8_t* rows;  // of quantize_row, one after the other
  const uint8_t* weight;
  const float* bias;  // [num_out] or null
  float* out;
  int64_t out_stride;  // floats from row to row
  int64_t num_rows;
  int64_t num_in;
  int64_t num_out;
  int32_t activations;  // of the rows: Activations (quantized_rows.h)
};

// Gives the bytes that quantize_row writes.
int64_t quantized_row_bytes(int64_t num_in, int32_t activations);

// Turns a row of num_in floats into integers; num_in is a multiple of 32.
void quantize_row(const float* x, uint8_t* row, int64_t num_in, int32_t activations);

// Computes the outputs of tiles [begin, end), sixteen to a tile, for all rows on this thread.
void quantized_tiles(const QuantizedProduct& product, int64_t begin, int64_t end);

// Writes a row of a packed weight as num_in floats.
void unpack_row(int32_t type, const uint8_t* weight, int64_t row, float* out, int64_t num_in);

}  // namespace serve
