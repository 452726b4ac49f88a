// Sixteen float lanes on any machine.
//
// Lanes is one AVX512 register, two AVX registers, or four 128-bit ones. All arithmetic goes
// through these functions and the build switches floating-point contraction off, so that a result
// depends neither on how a loop was unrolled nor, among machines with fused multiply-add, on the
// register width.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define SERVE_INLINE inline __attribute__((always_inline))

namespace serve {

#if defined(__AVX512F__)
constexpr int kNative = 16;
#elif defined(__AVX__)
constexpr int kNative = 8;
#else
constexpr int kNative = 4;
#endif
constexpr int kLanes = 16;
constexpr int kParts = kLanes / kNative;

typedef float Native __attribute__((vector_size(kNative * 4)));
typedef int32_t NativeInt __attribute__((vector_size(kNative * 4)));
typedef uint32_t NativeBits __attribute__((vector_size(kNative * 4)));
typedef uint16_t NativeShort __attribute__((vector_size(kNative * 2)));

struct Lanes {
  Native part[kParts];
};

struct Mask {
  NativeInt part[kParts];  // all ones where set
};

struct Bf16 {
  uint16_t bits;
};

struct Fp16 {
  uint16_t bits;
};

template <typename Target, typename Source>
SERVE_INLINE Target bit_cast(Source source) {
  static_assert(sizeof(Target) == sizeof(Source), "bit_cast keeps the size");
  Target target;
  std::memcpy(&target, &source, sizeof target);
  return target;
}

SERVE_INLINE Native splat_native(float value) {
#if defined(__AVX512F__)
  return (Native)_mm512_set1_ps(value);
#elif defined(__AVX__)
  return (Native)_mm256_set1_ps(value);
#else
  return value - Native{};  // subtracting zero costs nothing, adding it would turn -0 into +0
#endif
}

SERVE_INLINE Native fma_native(Native a, Native b, Native c) {
#if defined(__AVX512F__)
  return (Native)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX__) && defined(__FMA__)
  return (Native)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
  return (Native)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}

SERVE_INLINE Lanes splat(float value) {
  Lanes out;
  for (int i = 0; i < kParts; i++) out.part[i] = splat_native(value);
  return out;
}

SERVE_INLINE Lanes operator+(Lanes a, Lanes b) {
  for (int i = 0; i < kParts; i++) a.part[i] = a.part[i] + b.part[i];
  return a;
}

SERVE_INLINE Lanes operator-(Lanes a, Lanes b) {
  for (int i = 0; i < kParts; i++) a.part[i] = a.part[i] - b.part[i];
  return a;
}

SERVE_INLINE Lanes operator*(Lanes a, Lanes b) {
  for (int i = 0; i < kParts; i++) a.part[i] = a.part[i] * b.part[i];
  return a;
}

SERVE_INLINE Lanes operator/(Lanes a, Lanes b) {
  for (int i = 0; i < kParts; i++) a.part[i] = a.part[i] / b.part[i];
  return a;
}

// a * b + c
SERVE_INLINE Lanes fma(Lanes a, Lanes b, Lanes c) {
  for (int i = 0; i < kParts; i++) c.part[i] = fma_native(a.part[i], b.part[i], c.part[i]);
  return c;
}

SERVE_INLINE Lanes fma(Lanes a, Native b, Lanes c) {
  for (int i = 0; i < kParts; i++) c.part[i] = fma_native(a.part[i], b, c.part[i]);
  return c;
}

// Keeps a where it is a number not below b; a NaN in a stays.
SERVE_INLINE Lanes at_least(Lanes a, Lanes b) {
  for (int i = 0; i < kParts; i++) a.part[i] = a.part[i] < b.part[i] ? b.part[i] : a.part[i];
  return a;
}

SERVE_INLINE Lanes at_most(Lanes a, Lanes b) {
  for (int i = 0; i < kParts; i++) a.part[i] = a.part[i] > b.part[i] ? b.part[i] : a.part[i];
  return a;
}

SERVE_INLINE Lanes select(Mask mask, Lanes yes, Lanes no) {
  for (int i = 0; i < kParts; i++) yes.part[i] = mask.part[i] ? yes.part[i] : no.part[i];
  return yes;
}

SERVE_INLINE Mask below(Lanes a, Lanes b) {
  Mask mask;
  for (int i = 0; i < kParts; i++) mask.part[i] = a.part[i] < b.part[i];
  return mask;
}

// Sets the lanes whose index is in [begin, end).
SERVE_INLINE Mask lanes_between(int begin, int end) {
  Mask mask;
  NativeInt index;
  for (int lane = 0; lane < kNative; lane++) index[lane] = lane;
  for (int i = 0; i < kParts; i++) {
    mask.part[i] = (index >= begin) & (index < end);
    index = index + kNative;
  }
  return mask;
}

SERVE_INLINE float half_to_float(uint16_t half) {
  const uint32_t sign = (uint32_t)(half & 0x8000u) << 16;
  const uint32_t magnitude = half & 0x7fffu;
  if (magnitude >= 0x7c00u) {
    return bit_cast<float>(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);
  }
  // 2^112 moves the exponent bias from 15 to 127 and is exact for subnormal halves too.
  const float value = bit_cast<float>(magnitude << 13) * 5.192296858534828e33f;
  return bit_cast<float>(bit_cast<uint32_t>(value) | sign);
}

SERVE_INLINE Native widen(const float* source) {
  Native out;
  std::memcpy(&out, source, sizeof out);
  return out;
}

SERVE_INLINE Native widen(const Bf16* source) {
#if defined(__AVX512F__)
  const __m512i bits = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)source));
  return bit_cast<Native>((NativeBits)bits << 16);
#elif defined(__AVX2__)
  const __m256i bits = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)source));
  return bit_cast<Native>((NativeBits)bits << 16);
#else
  NativeShort bits;
  std::memcpy(&bits, source, sizeof bits);
  return bit_cast<Native>(__builtin_convertvector(bits, NativeBits) << 16);
#endif
}

SERVE_INLINE Native widen(const Fp16* source) {
#if defined(__AVX512F__)
  return (Native)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)source));
#elif defined(__AVX__) && defined(__F16C__)
  return (Native)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)source));
#else
  Native out;
  for (int lane = 0; lane < kNative; lane++) out[lane] = half_to_float(source[lane].bits);
  return out;
#endif
}

SERVE_INLINE Native widen(const int8_t* source) {
#if defined(__AVX512F__)
  return (Native)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)source)));
#elif defined(__AVX2__)
  return (Native)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)source)));
#else
  Native out;
  for (int lane = 0; lane < kNative; lane++) out[lane] = (float)source[lane];
  return out;
#endif
}

SERVE_INLINE float widen_one(float value) { return value; }
SERVE_INLINE float widen_one(Bf16 value) { return bit_cast<float>((uint32_t)value.bits << 16); }
SERVE_INLINE float widen_one(Fp16 value) { return half_to_float(value.bits); }

template <typename T>
SERVE_INLINE Lanes load(const T* source) {
  Lanes out;
  for (int i = 0; i < kParts; i++) out.part[i] = widen(source + i * kNative);
  return out;
}

SERVE_INLINE void store(float* target, Lanes value) {
  for (int i = 0; i < kParts; i++) {
    std::memcpy(target + i * kNative, &value.part[i], sizeof value.part[i]);
  }
}

// Loads the first count lanes, the rest are zero. Never reads past source + count.
SERVE_INLINE Lanes load_some(const float* source, int64_t count) {
  if (count >= kLanes) return load(source);
  float buffer[kLanes] = {};
  std::memcpy(buffer, source, (size_t)count * sizeof(float));
  return load(buffer);
}

SERVE_INLINE void store_some(float* target, Lanes value, int64_t count) {
  if (count >= kLanes) return store(target, value);
  float buffer[kLanes];
  store(buffer, value);
  std::memcpy(target, buffer, (size_t)count * sizeof(float));
}

// Adds the lanes in one fixed tree, whatever the register width.
SERVE_INLINE float sum(Lanes value) {
  float buffer[kLanes];
  store(buffer, value);
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int lane = 0; lane < width; lane++) buffer[lane] += buffer[lane + width];
  }
  return buffer[0];
}

SERVE_INLINE float largest(Lanes value) {
  float buffer[kLanes];
  store(buffer, value);
  float best = buffer[0];
  for (int lane = 1; lane < kLanes; lane++) best = buffer[lane] > best ? buffer[lane] : best;
  return best;
}

// e^x to 2 ulp for x in [-87.3, 88]; saturates outside, keeps NaN, is exactly 1 at 0.
//
// Cody-Waite split into 2^n * e^r with |r| <= ln(2)/2, then the Taylor series to the seventh power.
SERVE_INLINE Lanes exponential(Lanes x) {
  x = at_most(at_least(x, splat(-87.33654f)), splat(88.0f));
  const Lanes magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const Lanes shifted = fma(x, splat(1.44269504088896341f), magic);
  const Lanes n = shifted - magic;
  Lanes r = fma(n, splat(-0.693359375f), x);
  r = fma(n, splat(2.12194440054690583e-4f), r);
  Lanes series = splat(1.0f / 5040);
  series = fma(series, r, splat(1.0f / 720));
  series = fma(series, r, splat(1.0f / 120));
  series = fma(series, r, splat(1.0f / 24));
  series = fma(series, r, splat(1.0f / 6));
  series = fma(series, r, splat(0.5f));
  series = fma(series, r, splat(1.0f));
  series = fma(series, r, splat(1.0f));
  Lanes power;
  for (int i = 0; i < kParts; i++) {
    power.part[i] = bit_cast<Native>((bit_cast<NativeBits>(shifted.part[i]) << 23) + (127u << 23));
  }
  return series * power;
}

SERVE_INLINE float exponential(float x) { return exponential(splat(x)).part[0][0]; }

// 2^x to 1.3 ulp for x in [-126, 127]; saturates outside, keeps NaN, is exactly 1 at 0.
//
// The polynomial is the one of degree six with the least relative error on [-1/2, 1/2].
SERVE_INLINE Lanes power_of_two(Lanes x) {
  x = at_most(at_least(x, splat(-126.0f)), splat(127.0f));
  const Lanes magic = splat(12582912.0f);  // as above
  const Lanes shifted = x + magic;
  const Lanes r = x - (shifted - magic);
  Lanes series = splat(0.00015353362f);
  series = fma(series, r, splat(0.0013398875f));
  series = fma(series, r, splat(0.009618437f));
  series = fma(series, r, splat(0.055503324f));
  series = fma(series, r, splat(0.24022648f));
  series = fma(series, r, splat(0.6931472f));
  series = fma(series, r, splat(1.0f));
  Lanes power;
  for (int i = 0; i < kParts; i++) {
    power.part[i] = bit_cast<Native>((bit_cast<NativeBits>(shifted.part[i]) << 23) + (127u << 23));
  }
  return series * power;
}

SERVE_INLINE float power_of_two(float x) { return power_of_two(splat(x)).part[0][0]; }

// tanh(x) to 4 ulp: the odd Taylor series to the thirteenth power below 0.4, exponentials above.
SERVE_INLINE Lanes hyperbolic_tangent(Lanes x) {
  const Lanes square = x * x;
  Lanes series = splat(21844.0f / 6081075);
  series = fma(series, square, splat(-1382.0f / 155925));
  series = fma(series, square, splat(62.0f / 2835));
  series = fma(series, square, splat(-17.0f / 315));
  series = fma(series, square, splat(2.0f / 15));
  series = fma(series, square, splat(-1.0f / 3));
  series = fma(series * square, x, x);
  const Lanes one = splat(1.0f);
  const Lanes large = one - splat(2.0f) / (exponential(x + x) + one);
  return select(below(square, splat(0.16f)), series, large);
}

}  // namespace serve
