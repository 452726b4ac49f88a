#include "linear_layer.h"

#include <algorithm>

#include "entry_points.h"
#include "lanes.h"
#include "linear.h"
#include "pool.h"
#include "quantized_linear.h"
#include "quantized_rows.h"

namespace serve {
namespace {

constexpr int64_t kMinClaim = 32 * 1024;   // a range smaller than this does not pay for its claim
constexpr int64_t kGrain = 4;                 // tiles that are computed side by side, or read in order

int64_t num_tiles(const LinearPart& part) { return (part.num_out + kLanes - 1) / kLanes; }

void run_tiles(const LinearPart& part, const LinearLayer& layer, const LayerInput& input, float* out,
               int64_t out_stride, int64_t begin, int64_t end) {
  const int64_t num_in = layer.num_in;
  if (part.kind == kQuantized) {
    quantized_tiles(QuantizedProduct{part.type, input.codes, (const uint8_t*)part.weight, part.bias,
                                     out, out_stride, input.num_rows, num_in, part.num_out,
                                     layer.activations},
                    begin, end);
  } else {
    dense_tiles(DenseProduct{input.x, input.x_stride, part.weight, part.bias, out, out_stride,
                             input.num_rows, num_in, part.num_out, part.type},
                begin, end);
  }
}

}  // namespace

bool is_sound(const LinearLayer& layer) {
  if (layer.num_parts <= 0 || layer.num_in < 0) return false;
  if (!is_activations(layer.activations)) return false;
  for (int64_t i = 0; i < layer.num_parts; i++) {
    const LinearPart& part = layer.parts[i];
    if (part.weight == nullptr || part.num_out < 0) return false;
    if (part.kind == kDense) {
      if (!is_weight_type(part.type)) return false;
    } else if (part.kind == kQuantized) {
      if (serve_quantized_bytes(part.type, layer.num_in, part.num_out) < 0) return false;
    } else {
      return false;
    }
  }
  return true;
}

bool has_quantized_parts(const LinearLayer& layer) {
  return std::any_of(layer.parts, layer.parts + layer.num_parts,
                     [](const LinearPart& part) { return part.kind == kQuantized; });
}

bool has_dense_parts(const LinearLayer& layer) {
  return std::any_of(layer.parts, layer.parts + layer.num_parts,
                     [](const LinearPart& part) { return part.kind == kDense; });
}

int64_t num_outputs(const LinearLayer& layer) {
  int64_t total = 0;
  for (int64_t i = 0; i < layer.num_parts; i++) total += layer.parts[i].num_out;
  return total;
}

void run_layer(const LinearLayer& layer, const LayerInput& input, float* out, int64_t out_stride) {
  if (input.num_rows <= 0) return;
  int64_t total = 0;
  for (int64_t i = 0; i < layer.num_parts; i++) total += num_tiles(layer.parts[i]);
  const int64_t products = input.num_rows * layer.num_in * kLanes + 1;
  const int64_t min_tiles = total * products < kMinParallelWork ? total : kMinClaim / products + 1;
  auto run_range = [&](int64_t begin, int64_t end) {
    int64_t first_tile = 0;
    float* target = out;
    for (int64_t i = 0; i < layer.num_parts && first_tile < end; i++) {
      const LinearPart& part = layer.parts[i];
      const int64_t first = std::max(begin - first_tile, (int64_t)0);
      const int64_t last = std::min(end - first_tile, num_tiles(part));
      if (first < last) run_tiles(part, layer, input, target, out_stride, first, last);
      first_tile += num_tiles(part);
      target += part.num_out;
    }
  };
  parallel_for(total, std::max(min_tiles, kGrain), run_range, kGrain);
}

}  // namespace serve

// out [num_rows][outputs of all parts] = rows of x, x_stride floats apart, times the layer's weights,
// plus biases. codes has room for the rows of serve_quantized_row_bytes where a part is quantised.
SERVE_API int32_t serve_linear_layer(const serve::LinearLayer* layer, const float* x,
                                     int64_t x_stride, int64_t num_rows, uint8_t* codes,
                                     float* out) {
  using namespace serve;
  if (!is_sound(*layer)) return kBadLayer;
  if (!is_size(num_rows)) return kBadShape;
  if (has_quantized_parts(*layer)) {
    const Status status =
        serve_quantize_rows(x, x_stride, codes, num_rows, layer->num_in, layer->activations);
    if (status != kOk) return status;
  }
  run_layer(*layer, LayerInput{x, x_stride, codes, num_rows}, out, num_outputs(*layer));
  return kOk;
}
