// What one row of logits asks of the draw.
#pragma once

#include <cstdint>

namespace serve {

// Described to Python in sampling.py. The scaled logits of a row are its logits times
// inverse_temperature.
struct DrawRow {
  uint64_t seed;
  int64_t position;  // index of the token to be drawn in its request; with seed it fixes the noise
  int64_t row;       // of the logits
  double top_p;      // 1: off
  double min_p;      // 0: off
  int32_t* kept;     // room for a row of ids, gets those that the filters keep; or null
  int64_t num_kept;  // result, where kept is given
  float inverse_temperature;
  float top;      // the largest scaled logit, finite
  int32_t top_k;  // 0: off
  int32_t token;  // result
};

}  // namespace serve
