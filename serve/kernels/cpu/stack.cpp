// All layers of a decoder for one step.
//
// The same functions as op by op, row by row in the same order, so with the same bits. What a call
// for all layers saves: checks once a step, one loop over the threads for what a row needs between
// two products, no temporary tensors, and in the last layer the rows that nobody asked for.

#include "stack.h"

#include <algorithm>

#include "attention.h"
#include "batch_checks.h"
#include "entry_points.h"
#include "kv_cache.h"
#include "lanes.h"
#include "linear.h"
#include "linear_layer.h"
#include "pool.h"
#include "quantized_linear.h"
#include "quantized_rows.h"
#include "rows.h"

namespace serve {
namespace {

constexpr int64_t kCacheLine = 64;
// Less work than this between two products does not pay for a helper.
constexpr int64_t kMinFloats = 6 * 1024;

int64_t min_rows(int64_t floats_per_row) { return kMinFloats / (floats_per_row + 1) + 1; }

int64_t on_cache_lines(int64_t num_bytes) {
  return (num_bytes + kCacheLine - 1) / kCacheLine * kCacheLine;
}

// Sizes in floats of a token's rows, and in bytes of its integers.
struct Sizes {
  int64_t hidden, heads, qkv, gate_up, codes;

  explicit Sizes(const StackPlan& plan)
      : hidden(plan.hidden_size),
        heads((int64_t)plan.num_heads * plan.head_size),
        qkv(heads + 2 * (int64_t)plan.num_kv_heads * plan.head_size),
        gate_up(2 * plan.inner_size),
        codes(quantized_row_bytes(std::max({hidden, heads, plan.inner_size}), kExact)) {}
};

// Working memory of a step. A row of update is added to its residual, then holds the norm.
struct Scratch {
  float* residual;
  float* update;
  float* qkv;
  float* attended;
  float* gate_up;
  uint8_t* codes;
  int64_t num_bytes = 0;

  Scratch(const Sizes& sizes, int64_t num_tokens, uint8_t* memory) {
    const auto take = [&](int64_t bytes_per_token) {
      uint8_t* const taken = memory == nullptr ? nullptr : memory + num_bytes;
      num_bytes += on_cache_lines(num_tokens * bytes_per_token);
      return taken;
    };
    constexpr int64_t kFloat = sizeof(float);
    residual = (float*)take(sizes.hidden * kFloat);
    update = (float*)take(sizes.hidden * kFloat);
    qkv = (float*)take(sizes.qkv * kFloat);
    attended = (float*)take(sizes.heads * kFloat);
    gate_up = (float*)take(sizes.gate_up * kFloat);
    codes = take(sizes.codes);
  }
};

bool is_layer(const LinearLayer& layer, int64_t num_in, int64_t num_out) {
  return is_sound(layer) && layer.num_in == num_in && num_outputs(layer) == num_out;
}

bool fits_together(const StackPlan& plan) {
  const bool has_sizes = plan.num_layers > 0 && plan.layers != nullptr && plan.hidden_size > 0 &&
                         is_size(plan.hidden_size) && plan.inner_size > 0 &&
                         is_size(plan.inner_size) && plan.cos_sin != nullptr &&
                         plan.max_position > 0 && is_size(plan.num_heads) &&
                         is_size(plan.embedding.num_rows) &&
                         plan.num_kv_heads > 0 && plan.num_heads > 0 &&
                         plan.num_heads % plan.num_kv_heads == 0 && plan.head_size > 0 &&
                         plan.head_size <= kMaxHeadSize && plan.rotary_size >= 0 &&
                         plan.rotary_size <= plan.head_size && plan.rotary_size % 2 == 0;
  if (!has_sizes || plan.norm == nullptr || plan.embedding.weight == nullptr) return false;
  const Sizes sizes(plan);
  const EmbeddingPlan& rows = plan.embedding;
  const bool has_type = rows.kind == kQuantizedRows
                            ? serve_quantized_bytes(rows.type, plan.hidden_size, rows.num_rows) >= 0
                            : is_weight_type(rows.type);
  if (!has_type) return false;
  return std::all_of(plan.layers, plan.layers + plan.num_layers, [&](const LayerPlan& layer) {
    return layer.input_norm != nullptr && layer.post_attention_norm != nullptr &&
           (layer.query_norm == nullptr) == (layer.key_norm == nullptr) &&
           is_layer(layer.qkv, sizes.hidden, sizes.qkv) &&
           is_layer(layer.out, sizes.heads, sizes.hidden) &&
           is_layer(layer.gate_up, sizes.hidden, sizes.gate_up) &&
           is_layer(layer.down, plan.inner_size, sizes.hidden);
  });
}

bool is_same_geometry(const CacheDescription& a, const CacheDescription& b) {
  return a.num_blocks == b.num_blocks && a.type == b.type && a.block_size == b.block_size &&
         a.num_kv_heads == b.num_kv_heads && a.head_size == b.head_size;
}

// Refuses what would be read or written out of bounds; true for a list [count] within [0, limit).
bool are_within(const int64_t* values, int64_t count, int64_t limit, Fault* fault) {
  for (int64_t i = 0; i < count; i++) {
    if (values == nullptr || values[i] < 0 || values[i] >= limit) {
      *fault = Fault{i, values == nullptr ? -1 : values[i], 0};
      return false;
    }
  }
  return true;
}

// An empty choice may have no address.
bool wants_all_rows(const StepInputs& step) {
  return step.rows == nullptr && step.num_rows == step.batch.num_tokens;
}

Status check_caches(const StackPlan& plan, const StepInputs& step, Fault* fault) {
  bool sees_all = false;
  int window = 0;
  for (int64_t i = 0; i < plan.num_layers; i++) {
    const CacheDescription& cache = step.caches[i];
    if (!is_same_geometry(cache, step.caches[0]) || cache.num_kv_heads != plan.num_kv_heads ||
        cache.head_size != plan.head_size) {
      *fault = Fault{cache.type, cache.block_size, cache.head_size};
      return kBadCache;
    }
    const int layer_window = plan.layers[i].attention.window;
    sees_all = sees_all || layer_window <= 0;
    window = std::max(window, layer_window);
  }
  return check_batch(step.batch, step.caches[0], sees_all ? 0 : window, fault);
}

Status check_step(const StackPlan& plan, const StepInputs& step, Fault* fault) {
  const int64_t num_tokens = step.batch.num_tokens;
  // Tokens of no request would be attended to by nobody and go on as they are.
  const int32_t* starts = step.batch.query_start_loc;
  if (starts[0] != 0 || starts[step.batch.num_reqs] != num_tokens) {
    *fault = Fault{step.batch.num_reqs, starts[step.batch.num_reqs], 0};
    return kBadQueryStart;
  }
  for (int64_t token = 0; token < num_tokens; token++) {
    const int64_t id = step.input_ids[token];
    if (id < 0 || id >= plan.embedding.num_rows) {
      *fault = Fault{token, id, 0};
      return kBadToken;
    }
  }
  if (!are_within(step.positions, num_tokens, plan.max_position, fault)) return kBadPosition;
  if (!are_within(step.embed_rows, step.num_embeds, num_tokens, fault)) return kBadRow;
  if (!wants_all_rows(step) && !are_within(step.rows, step.num_rows, num_tokens, fault)) {
    return kBadRow;
  }
  return check_caches(plan, step, fault);
}

class Step {
 public:
  Step(const StackPlan& plan, const StepInputs& step)
      : plan_(plan),
        step_(step),
        sizes_(plan),
        scratch_(sizes_, step.batch.num_tokens, step.scratch),
        num_rows_(step.batch.num_tokens) {}

  Status run() {
    // Without a choice of rows the residual stream ends where the result belongs.
    if (wants_all_rows(step_)) scratch_.residual = step_.hidden_states;
    embed();
    for (int64_t i = 0; i < plan_.num_layers; i++) {
      const Status status = run_block(plan_.layers[i], step_.caches[i], i);
      if (status != kOk) return status;
    }
    finish();
    return kOk;
  }

 private:
  void embed() {
    const EmbeddingPlan& embedding = plan_.embedding;
    parallel_for(num_rows_, min_rows(sizes_.hidden), [&](int64_t begin, int64_t end) {
      for (int64_t token = begin; token < end; token++) {
        look_up(embedding, step_.input_ids[token], scratch_.residual + token * sizes_.hidden);
      }
    });
    for (int64_t i = 0; i < step_.num_embeds; i++) {
      std::copy_n(step_.embeds + i * sizes_.hidden, sizes_.hidden,
                  scratch_.residual + step_.embed_rows[i] * sizes_.hidden);
    }
  }

  void look_up(const EmbeddingPlan& embedding, int64_t id, float* out) const {
    const int64_t size = sizes_.hidden;
    if (embedding.kind == kQuantizedRows) {
      unpack_row(embedding.type, (const uint8_t*)embedding.weight, id, out, size);
    } else if (embedding.kind == kPackedRows) {
      packed_row(embedding.type, embedding.weight, id, out, size);
    } else {
      plain_row(embedding.type, embedding.weight, id, out, size);
    }
  }

  Status run_block(const LayerPlan& layer, const CacheDescription& cache, int64_t index) {
    normalize(layer.input_norm, layer.qkv, index > 0);
    run_layer(layer.qkv, input(scratch_.update, sizes_.hidden), scratch_.qkv, sizes_.qkv);
    place(layer, cache);
    const Status status =
        paged_attention(scratch_.qkv, scratch_.attended, sizes_.qkv, sizes_.heads, plan_.num_heads,
                        step_.batch, layer.attention, cache);
    if (status != kOk) return status;
    if (index == plan_.num_layers - 1 && !wants_all_rows(step_)) keep_wanted_rows();
    quantize(layer.out, scratch_.attended);
    run_layer(layer.out, input(scratch_.attended, sizes_.heads), scratch_.update,
              sizes_.hidden);
    normalize(layer.post_attention_norm, layer.gate_up, true);
    run_layer(layer.gate_up, input(scratch_.update, sizes_.hidden), scratch_.gate_up,
              sizes_.gate_up);
    gate(layer.down);
    run_layer(layer.down, input(scratch_.gate_up, sizes_.gate_up), scratch_.update,
              sizes_.hidden);
    return kOk;
  }

  LayerInput input(const float* x, int64_t x_stride) const {
    return LayerInput{x, x_stride, scratch_.codes, num_rows_};
  }

  uint8_t* codes_of(int64_t row, const LinearLayer& next) const {
    return scratch_.codes + row * quantized_row_bytes(next.num_in, next.activations);
  }

  // residual += update unless this is the first layer; update = norm(residual), as next wants it.
  void normalize(const float* weight, const LinearLayer& next, bool has_update) {
    const int64_t size = sizes_.hidden;
    const bool quantizes = has_quantized_parts(next);
    parallel_for(num_rows_, min_rows(4 * size), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; row++) {
        float* const residual = scratch_.residual + row * size;
        float* const update = scratch_.update + row * size;
        if (has_update) add_row(update, residual, size);
        norm_row(residual, weight, update, size, plan_.eps);
        if (quantizes) quantize_row(update, codes_of(row, next), size, next.activations);
      }
    });
  }

  // Queries and keys get their norms and their positions, keys and values go to the cache.
  void place(const LayerPlan& layer, const CacheDescription& cache) {
    const int64_t head_size = plan_.head_size;
    const int64_t half = plan_.rotary_size / 2;
    const int num_rotated = plan_.num_heads + plan_.num_kv_heads;
    parallel_for(num_rows_, min_rows(2 * sizes_.qkv), [&](int64_t begin, int64_t end) {
      for (int64_t token = begin; token < end; token++) {
        float* const heads = scratch_.qkv + token * sizes_.qkv;
        const float* cosine = plan_.cos_sin + step_.positions[token] * plan_.rotary_size;
        for (int head = 0; head < num_rotated; head++) {
          float* const vector = heads + head * head_size;
          const float* norm = head < plan_.num_heads ? layer.query_norm : layer.key_norm;
          if (norm != nullptr) norm_row(vector, norm, vector, head_size, plan_.eps);
          rotate_head(vector, cosine, cosine + half, half);
        }
        write_token_kv(heads + sizes_.heads, heads + num_rotated * head_size,
                       step_.batch.slot_mapping[token], cache);
      }
    });
  }

  // After the last attention only the rows that are wanted go on, side by side.
  void keep_wanted_rows() {
    parallel_for(step_.num_rows, min_rows(sizes_.hidden + sizes_.heads), [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; i++) {
        std::copy_n(scratch_.residual + step_.rows[i] * sizes_.hidden, sizes_.hidden,
                    step_.hidden_states + i * sizes_.hidden);
        std::copy_n(scratch_.attended + step_.rows[i] * sizes_.heads, sizes_.heads,
                    scratch_.qkv + i * sizes_.heads);
      }
    });
    num_rows_ = step_.num_rows;
    scratch_.residual = step_.hidden_states;
    scratch_.attended = scratch_.qkv;
  }

  void quantize(const LinearLayer& next, const float* x) {
    if (!has_quantized_parts(next)) return;
    const int64_t size = next.num_in;
    parallel_for(num_rows_, min_rows(2 * size), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; row++) {
        quantize_row(x + row * size, codes_of(row, next), size, next.activations);
      }
    });
  }

  // silu(gate) * up takes the place of gate.
  void gate(const LinearLayer& next) {
    const int64_t size = plan_.inner_size;
    const bool quantizes = has_quantized_parts(next);
    parallel_for(num_rows_, min_rows(6 * size), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; row++) {
        float* const gate = scratch_.gate_up + row * sizes_.gate_up;
        gate_row(gate, gate + size, gate, size);
        if (quantizes) quantize_row(gate, codes_of(row, next), size, next.activations);
      }
    });
  }

  void finish() {
    const int64_t size = sizes_.hidden;
    parallel_for(num_rows_, min_rows(3 * size), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; row++) {
        float* const residual = scratch_.residual + row * size;
        add_row(scratch_.update + row * size, residual, size);
        norm_row(residual, plan_.norm, residual, size, plan_.eps);
      }
    });
  }

  const StackPlan& plan_;
  const StepInputs& step_;
  const Sizes sizes_;
  Scratch scratch_;
  int64_t num_rows_;
};

}  // namespace
}  // namespace serve

// Tells whether the parts of a plan fit each other: kOk, or kBadLayer.
SERVE_API int32_t serve_check_stack(const serve::StackPlan* plan) {
  return serve::fits_together(*plan) ? serve::kOk : serve::kBadLayer;
}

// Gives the bytes that a step of num_tokens needs to work.
SERVE_API int64_t serve_stack_scratch_bytes(const serve::StackPlan* plan, int64_t num_tokens) {
  using namespace serve;
  return Scratch(Sizes(*plan), num_tokens, nullptr).num_bytes;
}

// Runs all layers of a plan that has passed serve_check_stack. Checks the whole step first: when it
// refuses, neither the caches nor hidden_states have been written.
SERVE_API serve::Status serve_run_stack(const serve::StackPlan* plan, const serve::StepInputs* step,
                                        serve::Fault* fault) {
  using namespace serve;
  const Status status = check_step(*plan, *step, fault);
  if (status != kOk) return status;
  const ReadyHelpers ready;
  return Step(*plan, *step).run();
}
