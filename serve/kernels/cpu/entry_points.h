// Every function that the library offers, each described where it is defined.
//
// Sources that define some include this, so that what others call is what is there. binding.py
// describes the same functions to Python.
#pragma once

#include <cstdint>

#include "cache_description.h"
#include "linear_description.h"
#include "pool.h"
#include "sampling.h"
#include "stack.h"
#include "status.h"

// library.cpp
SERVE_API int32_t serve_abi_version();
SERVE_API int32_t serve_cpu_level();
SERVE_API int32_t serve_set_num_threads(int32_t num_threads);
SERVE_API int32_t serve_num_threads();
SERVE_API int32_t serve_pin_helpers(const int32_t* cpus, int32_t num_cpus);
SERVE_API void serve_run_ranges(int64_t total, int64_t min_range, int64_t grain,
                                serve::RangeFunction function, void* context);

// elementwise.cpp
SERVE_API void serve_rms_norm(const float* x, const float* weight, float* out, int64_t num_groups,
                              int64_t rows_per_group, int64_t size, int64_t x_stride,
                              int64_t out_stride, float eps);
SERVE_API void serve_add_rms_norm(const float* x, float* residual, const float* weight, float* out,
                                  int64_t num_rows, int64_t size, float eps);
SERVE_API int32_t serve_rope(const int64_t* positions, float* query, float* key, int64_t num_tokens,
                             int64_t query_stride, int64_t key_stride, int32_t num_heads,
                             int32_t num_kv_heads, int32_t head_size, const float* cos_sin,
                             int64_t max_position, int32_t rotary_size, serve::Fault* fault);
SERVE_API void serve_silu_and_mul(const float* gate_up, float* out, int64_t num_rows, int64_t size,
                                  int64_t gate_up_stride, int64_t out_stride);

// linear.cpp
SERVE_API serve::Status serve_linear(int32_t type, const float* x, int64_t x_stride,
                                     const void* weight, const float* bias, float* out,
                                     int64_t out_stride, int64_t num_rows, int64_t num_in,
                                     int64_t num_out);
SERVE_API int64_t serve_packed_bytes(int32_t type, int64_t num_in, int64_t num_out);
SERVE_API serve::Status serve_pack_linear(int32_t type, const void* weight, void* packed,
                                          int64_t first, int64_t num_rows, int64_t num_in);
SERVE_API serve::Status serve_packed_rows(int32_t type, const void* packed, const int64_t* indices,
                                          int64_t count, float* out, int64_t num_in,
                                          int64_t num_out, serve::Fault* fault);

// quantized_rows.cpp
SERVE_API int64_t serve_quantized_row_bytes(int64_t num_in, int32_t activations);
SERVE_API serve::Status serve_quantize_rows(const float* x, int64_t x_stride, uint8_t* rows,
                                            int64_t num_rows, int64_t num_in, int32_t activations);

// quantized_linear.cpp
SERVE_API serve::Status serve_quantized_linear(int32_t type, const uint8_t* rows,
                                               const uint8_t* weight, const float* bias, float* out,
                                               int64_t out_stride, int64_t num_rows, int64_t num_in,
                                               int64_t num_out, int32_t activations);

// quantized_pack.cpp
SERVE_API int64_t serve_quantized_bytes(int32_t type, int64_t num_in, int64_t num_out);
SERVE_API serve::Status serve_pack_quantized(int32_t type, const uint8_t* rows, int64_t row_bytes,
                                             uint8_t* packed, int64_t num_in, int64_t num_out);
SERVE_API serve::Status serve_pack_affine(int32_t type, const uint8_t* codes, const float* scales,
                                          const uint8_t* zeros, uint8_t* packed, int64_t num_in,
                                          int64_t num_out);
SERVE_API int32_t serve_quantized_rows(int32_t type, const uint8_t* packed, const int64_t* indices,
                                       int64_t count, float* out, int64_t num_in, int64_t num_out,
                                       serve::Fault* fault);

// sampling.cpp
SERVE_API void serve_argmax_rows(const float* rows, int64_t stride, int64_t num_rows, int64_t size,
                                 int64_t* indices, float* tops);
SERVE_API serve::Status serve_draw_rows(const float* logits, int64_t stride, int64_t num_rows,
                                        int64_t size, serve::DrawRow* draws, int64_t num_draws,
                                        serve::Fault* fault);

// kv_cache.cpp
SERVE_API serve::Status serve_write_kv(const float* key, const float* value, int64_t key_stride,
                                       int64_t value_stride, const serve::AttentionBatch* batch,
                                       const serve::CacheDescription* cache, serve::Fault* fault);

// attention.cpp
SERVE_API serve::Status serve_paged_attention(
    const float* query, float* out, int64_t query_stride, int64_t out_stride, int32_t num_heads,
    const serve::AttentionBatch* batch, const serve::AttentionOptions* options,
    const serve::CacheDescription* cache, serve::Fault* fault);

// linear_layer.cpp
SERVE_API int32_t serve_linear_layer(const serve::LinearLayer* layer, const float* x,
                                     int64_t x_stride, int64_t num_rows, uint8_t* codes,
                                     float* out);

// stack.cpp
SERVE_API int32_t serve_check_stack(const serve::StackPlan* plan);
SERVE_API int64_t serve_stack_scratch_bytes(const serve::StackPlan* plan, int64_t num_tokens);
SERVE_API serve::Status serve_run_stack(const serve::StackPlan* plan, const serve::StepInputs* step,
                                        serve::Fault* fault);
