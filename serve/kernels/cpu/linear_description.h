// A linear layer in any of its storage forms, as entry points take it. descriptions.py declares the
// same structures, field by field.
#pragma once

#include <cstdint>

namespace serve {

enum LinearKind : int32_t { kDense = 0, kQuantized = 1 };

// Some of a layer's outputs.
struct LinearPart {
  int32_t kind;       // a LinearKind
  int32_t type;       // of kDense a WeightType, of kQuantized a TileType
  const void* weight;  // packed
  const float* bias;   // [num_out] or null
  int64_t num_out;
};

// Parts of the same inputs, their outputs side by side.
struct LinearLayer {
  const LinearPart* parts;
  int64_t num_parts;
  int64_t num_in;
  int32_t activations;  // of kQuantized parts: Activations (quantized_rows.h)
};

}  // namespace serve
