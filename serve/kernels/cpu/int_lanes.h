// Products of 16-bit and 8-bit integers on the same sixteen lanes as lanes.h.
//
// A lane holds two or four columns of its output: their products are added to one 32-bit sum. The
// sums are exact, so they depend neither on their order nor on the machine.
#pragma once

#include "lanes.h"

namespace serve {

typedef uint16_t NativeWords __attribute__((vector_size(kNative * 4)));
typedef int16_t NativeShorts __attribute__((vector_size(kNative * 4)));
typedef int16_t NativeNarrow __attribute__((vector_size(kNative * 2)));

struct ShortLanes {
  NativeShorts part[kParts];
};

struct WordLanes {
  NativeWords part[kParts];
};

SERVE_INLINE NativeInt splat_int(int32_t value) {
#if defined(__AVX512F__)
  return (NativeInt)_mm512_set1_epi32(value);
#elif defined(__AVX2__)
  return (NativeInt)_mm256_set1_epi32(value);
#else
  return value - NativeInt{};
#endif
}

// Gives every lane the four bytes at source.
SERVE_INLINE NativeInt splat_bytes(const void* source) {
  int32_t bytes;
  std::memcpy(&bytes, source, sizeof bytes);
  return splat_int(bytes);
}

// Gives every lane the pair of columns at source.
SERVE_INLINE NativeShorts splat_pair(const int16_t* source) { return (NativeShorts)splat_bytes(source); }

// Gives every lane the four columns at source.
SERVE_INLINE NativeWords splat_quad(const int8_t* source) { return (NativeWords)splat_bytes(source); }

// Keeps a sum in its register: a compiler that regroups exact sums holds all products first, in more
// registers than there are.
template <typename Sum>
SERVE_INLINE void pin(Sum* sum) {
#if defined(__AVX512F__)
  asm("" : "+v"(*sum));
#elif defined(__x86_64__)
  asm("" : "+x"(*sum));
#elif defined(__aarch64__)
  asm("" : "+w"(*sum));
#endif
}

// sum + a.low * b.low + a.high * b.high, lane by lane
SERVE_INLINE NativeInt add_products(NativeInt sum, NativeShorts a, NativeShorts b) {
#if defined(__AVX512VNNI__)
  return (NativeInt)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)a, (__m512i)b);
#elif defined(__AVX512BW__)
  return sum + (NativeInt)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
  return sum + (NativeInt)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#elif defined(__SSE2__)
  return sum + (NativeInt)_mm_madd_epi16((__m128i)a, (__m128i)b);
#elif defined(__aarch64__)
  const int32x4_t low = vmull_s16(vget_low_s16((int16x8_t)a), vget_low_s16((int16x8_t)b));
  return sum + (NativeInt)vpaddq_s32(low, vmull_high_s16((int16x8_t)a, (int16x8_t)b));
#else
  for (int lane = 0; lane < kNative; lane++) {
    sum[lane] += a[2 * lane] * b[2 * lane] + a[2 * lane + 1] * b[2 * lane + 1];
  }
  return sum;
#endif
}

// Sums of products of unsigned and signed bytes. Without an instruction for sums of 32 bits each
// half of a lane sums every second column in 16 bits, modulo 2^16.
#if defined(__AVX512VNNI__) || defined(__ARM_FEATURE_DOTPROD)
constexpr bool kWideByteSums = true;
typedef NativeInt ByteSum;
#else
constexpr bool kWideByteSums = false;
typedef NativeWords ByteSum;
#endif

// sum + a * b over the columns of each lane; two products of neighbouring columns fit 16 bits.
SERVE_INLINE ByteSum add_byte_products(ByteSum sum, NativeWords a, NativeWords b) {
#if defined(__AVX512VNNI__)
  return (NativeInt)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)a, (__m512i)b);
#elif defined(__ARM_FEATURE_DOTPROD)
  // Both factors are signed here: 128 less of a, and twice 64 times b instead.
  const int8x16_t columns = (int8x16_t)b;
  int32x4_t total = vdotq_s32((int32x4_t)sum, veorq_s8((int8x16_t)a, vdupq_n_s8(-128)), columns);
  total = vdotq_s32(total, vdupq_n_s8(64), columns);
  return (NativeInt)vdotq_s32(total, vdupq_n_s8(64), columns);
#elif defined(__AVX512BW__)
  return sum + (NativeWords)_mm512_maddubs_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
  return sum + (NativeWords)_mm256_maddubs_epi16((__m256i)a, (__m256i)b);
#else
  const NativeWords even = (a & (uint16_t)255) * (NativeWords)((NativeShorts)(b << 8) >> 8);
  const NativeWords odd = (a >> 8) * (NativeWords)((NativeShorts)b >> 8);
  return sum + even + odd;
#endif
}

SERVE_INLINE NativeInt widen_sum(NativeInt sum) { return sum; }

SERVE_INLINE NativeInt widen_sum(NativeWords sum) {
  return add_products(NativeInt{}, (NativeShorts)sum, (NativeShorts)splat_int(0x00010001));
}

SERVE_INLINE NativeWords load_words(const uint8_t* source) {
  NativeWords out;
  std::memcpy(&out, source, sizeof out);
  return out;
}

// Widens bytes, signed or not, to floats.
SERVE_INLINE Native widen_bytes(const uint8_t* source, bool is_signed) {
#if defined(__AVX512F__)
  const __m128i bytes = _mm_loadu_si128((const __m128i*)source);
  const __m512i wide = is_signed ? _mm512_cvtepi8_epi32(bytes) : _mm512_cvtepu8_epi32(bytes);
  return (Native)_mm512_cvtepi32_ps(wide);
#elif defined(__AVX2__)
  const __m128i bytes = _mm_loadl_epi64((const __m128i*)source);
  const __m256i wide = is_signed ? _mm256_cvtepi8_epi32(bytes) : _mm256_cvtepu8_epi32(bytes);
  return (Native)_mm256_cvtepi32_ps(wide);
#else
  Native out;
  for (int i = 0; i < kNative; i++) out[i] = is_signed ? (float)(int8_t)source[i] : (float)source[i];
  return out;
#endif
}

SERVE_INLINE Lanes load_bytes(const uint8_t* source, bool is_signed) {
  Lanes out;
  for (int i = 0; i < kParts; i++) out.part[i] = widen_bytes(source + i * kNative, is_signed);
  return out;
}

}  // namespace serve
