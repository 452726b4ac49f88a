// A whole linear layer, whatever its parts are, in one loop over the threads.
#pragma once

#include "linear_description.h"
#include "status.h"

namespace serve {

// The rows that a layer is given.
struct LayerInput {
  const float* x;
  int64_t x_stride;     // floats from row to row
  const uint8_t* codes;  // the same rows by quantize_row, one after the other; for kQuantized parts
  int64_t num_rows;
};

bool is_sound(const LinearLayer& layer);
bool has_quantized_parts(const LinearLayer& layer);
bool has_dense_parts(const LinearLayer& layer);
int64_t num_outputs(const LinearLayer& layer);

// out [num_rows][num_outputs], rows out_stride floats apart.
void run_layer(const LinearLayer& layer, const LayerInput& input, float* out, int64_t out_stride);

}  // namespace serve
