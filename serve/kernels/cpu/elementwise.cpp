// Norm, rotary embedding and gated activation on float32 rows.
//
// Each row is computed alone and in one fixed order, so that its result depends neither on the
// batch nor on the number of threads.

#include "entry_points.h"
#include "pool.h"
#include "rows.h"
#include "status.h"

namespace serve {
namespace {

constexpr int64_t kMinFloats = 32768;  // a range smaller than this does not pay for a helper

inline int64_t min_rows(int64_t row_size) { return kMinFloats / (row_size + 1) + 1; }

}  // namespace
}  // namespace serve

// num_rows groups of rows_per_group rows of size floats; groups lie x_stride and out_stride floats
// apart, rows of a group are adjacent. out may be x.
SERVE_API void serve_rms_norm(const float* x, const float* weight, float* out, int64_t num_groups,
                              int64_t rows_per_group, int64_t size, int64_t x_stride,
                              int64_t out_stride, float eps) {
  using namespace serve;
  parallel_for(num_groups, min_rows(rows_per_group * size), [&](int64_t begin, int64_t end) {
    for (int64_t group = begin; group < end; group++) {
      const float* source = x + group * x_stride;
      float* target = out + group * out_stride;
      for (int64_t row = 0; row < rows_per_group; row++) {
        norm_row(source + row * size, weight, target + row * size, size, eps);
      }
    }
  });
}

// residual += x, out = norm(residual); all three contiguous.
SERVE_API void serve_add_rms_norm(const float* x, float* residual, const float* weight, float* out,
                                  int64_t num_rows, int64_t size, float eps) {
  using namespace serve;
  parallel_for(num_rows, min_rows(size), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row++) {
      add_row(x + row * size, residual + row * size, size);
      norm_row(residual + row * size, weight, out + row * size, size, eps);
    }
  });
}

// cos_sin is [max_position][rotary_size]: half of a row are cosines, the other half sines.
// Checks every position before the first write.
SERVE_API int32_t serve_rope(const int64_t* positions, float* query, float* key, int64_t num_tokens,
                             int64_t query_stride, int64_t key_stride, int32_t num_heads,
                             int32_t num_kv_heads, int32_t head_size, const float* cos_sin,
                             int64_t max_position, int32_t rotary_size, serve::Fault* fault) {
  using namespace serve;
  for (int64_t token = 0; token < num_tokens; token++) {
    if (positions[token] < 0 || positions[token] >= max_position) {
      *fault = Fault{token, positions[token], 0};
      return kBadPosition;
    }
  }
  const int64_t half = rotary_size / 2;
  const int64_t floats_per_token = (int64_t)(num_heads + num_kv_heads) * rotary_size;
  parallel_for(num_tokens, min_rows(floats_per_token), [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; token++) {
      const float* cosine = cos_sin + positions[token] * rotary_size;
      for (int head = 0; head < num_heads; head++) {
        rotate_head(query + token * query_stride + head * head_size, cosine, cosine + half, half);
      }
      for (int head = 0; head < num_kv_heads; head++) {
        rotate_head(key + token * key_stride + head * head_size, cosine, cosine + half, half);
      }
    }
  });
  return kOk;
}

// out[i] = silu(gate_up[i]) * gate_up[size + i] for each row of 2 * size floats.
SERVE_API void serve_silu_and_mul(const float* gate_up, float* out, int64_t num_rows, int64_t size,
                                  int64_t gate_up_stride, int64_t out_stride) {
  using namespace serve;
  parallel_for(num_rows, min_rows(2 * size), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row++) {
      const float* gate = gate_up + row * gate_up_stride;
      gate_row(gate, gate + size, out + row * out_stride, size);
    }
  });
}
