// Logits to tokens: argmax, and the draw behind min-p, top-k and top-p. Nothing is ever sorted.
//
// A row is worked on by one thread, in one order, so its token depends on that row alone.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <new>
#include <vector>

#include "entry_points.h"
#include "lanes.h"
#include "pool.h"

namespace serve {
namespace {

constexpr int64_t kStrip = 128 * kLanes;  // floats whose largest is found before the place of it
constexpr int kGroupSize = 128;          // of the draw without filters; as in draw.py
constexpr int64_t kMinMaxima = 384;
// Slack of the bound on what top-p can keep: far above the rounding of a float32 sum, far below
// any probability that matters.
constexpr double kSlack = 1e-5;
constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();
constexpr float kLowestExponent = -87.3f;  // e^x below it counts as nothing

struct Scratch {
  std::vector<float> weights;  // of candidates, or of the whole row
  std::vector<float> values;
  std::vector<int32_t> ids;
  std::vector<double> mass;

  void resize(int64_t size) {
    weights.resize((size_t)size + kLanes);
    values.resize((size_t)size + kLanes);
    ids.resize((size_t)size + kLanes);
    mass.resize(1 << 12);
  }
};

// Where each set bit of a byte is, lowest first.
struct BitPlaces {
  uint8_t place[256][8];

  constexpr BitPlaces() : place() {
    for (int bits = 0; bits < 256; bits++) {
      int count = 0;
      for (int bit = 0; bit < 8; bit++) {
        if (bits >> bit & 1) place[bits][count++] = (uint8_t)bit;
      }
    }
  }
};
constexpr BitPlaces kBitPlaces;

// Writes the lanes of value that are not below the bound, and first_id plus their place, side by
// side; gives how many. There is room for kNative of each.
SERVE_INLINE int pack_reaching(Native value, Native bound, int32_t first_id, float* values,
                               int32_t* ids) {
#if defined(__AVX512F__)
  const __mmask16 is_set = _mm512_cmp_ps_mask((__m512)value, (__m512)bound, _CMP_GE_OQ);
  if (is_set == 0) return 0;
  const __m512i all = _mm512_add_epi32(
      _mm512_set1_epi32(first_id),
      _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
  _mm512_storeu_ps(values, _mm512_maskz_compress_ps(is_set, (__m512)value));
  _mm512_storeu_si512(ids, _mm512_maskz_compress_epi32(is_set, all));
  return __builtin_popcount(is_set);
#elif defined(__AVX2__)
  const __m256 is_set = _mm256_cmp_ps((__m256)value, (__m256)bound, _CMP_GE_OQ);
  const int bits = _mm256_movemask_ps(is_set);
  if (bits == 0) return 0;
  const __m256i place =
      _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)kBitPlaces.place[bits]));
  _mm256_storeu_ps(values, _mm256_permutevar8x32_ps((__m256)value, place));
  _mm256_storeu_si256((__m256i*)ids, _mm256_add_epi32(_mm256_set1_epi32(first_id), place));
  return __builtin_popcount((unsigned)bits);
#else
  const NativeInt is_set = value >= bound;
  int count = 0;
  for (int lane = 0; lane < kNative; lane++) {
    values[count] = value[lane];
    ids[count] = first_id + lane;
    count += is_set[lane] & 1;
  }
  return count;
#endif
}

// The larger of each pair, a where b is no number.
SERVE_INLINE Lanes larger(Lanes a, Lanes b) {
  for (int i = 0; i < kParts; i++) {
#if defined(__AVX512F__)
    a.part[i] = (Native)_mm512_max_ps((__m512)b.part[i], (__m512)a.part[i]);
#elif defined(__AVX__)
    a.part[i] = (Native)_mm256_max_ps((__m256)b.part[i], (__m256)a.part[i]);
#else
    a.part[i] = b.part[i] > a.part[i] ? b.part[i] : a.part[i];
#endif
  }
  return a;
}

// Loads with minus infinity beyond the end.
SERVE_INLINE Lanes load_logits(const float* row, int64_t count) {
  if (count >= kLanes) return load(row);
  return select(lanes_between(0, (int)count), load_some(row, count), splat(kMinusInfinity));
}

// e^x, and exactly nothing for what is too small or minus infinity.
SERVE_INLINE Lanes weight_of(Lanes x) {
  Lanes weight = exponential(x);
  for (int i = 0; i < kParts; i++) {
    const NativeInt is_tiny = x.part[i] < splat_native(kLowestExponent);
    weight.part[i] = is_tiny ? Native{} : weight.part[i];
  }
  return weight;
}

bool holds_nan(const float* values, int64_t count) {
  bool found = false;
  for (int64_t i = 0; i < count; i++) found |= values[i] != values[i];
  return found;
}

// The first index of the largest value, or of the first NaN.
int32_t find_largest(const float* row, int64_t size) {
  float best = kMinusInfinity;
  int64_t best_strip = 0;
  for (int64_t strip = 0; strip < size; strip += kStrip) {
    const int64_t count = std::min(kStrip, size - strip);
    Lanes top[2] = {splat(kMinusInfinity), splat(kMinusInfinity)};
    Lanes zero[2] = {splat(0.0f), splat(0.0f)};  // becomes NaN with a NaN, and with an infinity
    int64_t i = 0;
    for (; i + 2 * kLanes <= count; i += 2 * kLanes) {
      for (int half = 0; half < 2; half++) {
        const Lanes value = load(row + strip + i + half * kLanes);
        top[half] = larger(top[half], value);
        zero[half] = fma(value, splat(0.0f), zero[half]);
      }
    }
    for (; i < count; i += kLanes) {
      const Lanes value = load_logits(row + strip + i, count - i);
      top[0] = larger(top[0], value);
      zero[0] = fma(value, splat(0.0f), zero[0]);
    }
    if (sum(zero[0] + zero[1]) != 0.0f && holds_nan(row + strip, count)) {
      while (row[strip] == row[strip]) strip++;
      return (int32_t)strip;
    }
    const float strip_top = largest(larger(top[0], top[1]));
    if (strip_top > best) {
      best = strip_top;
      best_strip = strip;
    }
  }
  for (int64_t i = best_strip; i < size; i++) {
    if (row[i] == best) return (int32_t)i;
  }
  return 0;
}

// Entries of a row that may be drawn, ids ascending: their scaled logits, then their weights.
struct Candidates {
  int32_t* ids;
  float* values;
  int64_t count;

  template <typename Keep>
  void filter(Keep&& keep) {
    int64_t kept = 0;
    for (int64_t i = 0; i < count; i++) {  // without a branch that could only be guessed
      const bool is_kept = keep(values[i]);
      ids[kept] = ids[i];
      values[kept] = values[i];
      kept += is_kept;
    }
    count = kept;
  }
};

// Takes the entries of values * factor that are not below the bound.
Candidates gather(const float* values, float factor, int64_t size, float bound, Scratch* scratch) {
  Candidates found{scratch->ids.data(), scratch->values.data(), 0};
  for (int64_t i = 0; i < size; i += kLanes) {
    const Lanes scaled = load_logits(values + i, size - i) * splat(factor);
    for (int part = 0; part < kParts; part++) {
      const int64_t first = i + part * kNative;
      found.count += pack_reaching(scaled.part[part], splat_native(bound), (int32_t)first,
                                   found.values + found.count, found.ids + found.count);
    }
  }
  // Lanes beyond the end are minus infinity: they get in where that is the bound.
  while (found.count > 0 && found.ids[found.count - 1] >= size) found.count--;
  return found;
}

float kth_largest(float* values, int64_t count, int64_t k) {
  std::nth_element(values, values + (k - 1), values + count, [](float a, float b) { return a > b; });
  return values[k - 1];
}

// The k best of some maxima are k values, so the k-th best of them is at most the k-th best of all.
float bound_of_kth(const float* row, float factor, int64_t size, int64_t k, Scratch* scratch) {
  float* maxima = scratch->weights.data();
  const int64_t num_strips = std::max(kMinMaxima, 4 * k) / kLanes;
  const int64_t strip = (size / num_strips + kLanes - 1) / kLanes * kLanes;
  if (strip < 2 * kLanes) return kMinusInfinity;
  int64_t num_maxima = 0;
  for (int64_t begin = 0; begin < size; begin += strip, num_maxima += kLanes) {
    Lanes top = splat(kMinusInfinity);
    for (int64_t i = begin; i < std::min(begin + strip, size); i += kLanes) {
      top = larger(top, load_logits(row + i, size - i) * splat(factor));
    }
    store(maxima + num_maxima, top);
  }
  return num_maxima < k ? kMinusInfinity : kth_largest(maxima, num_maxima, k);
}

// Entries that reach the k-th largest value; ties at it are all taken.
Candidates reaching_kth(const float* row, float factor, int64_t size, int64_t k, Scratch* scratch) {
  const float bound = bound_of_kth(row, factor, size, k, scratch);
  Candidates found = gather(row, factor, size, bound, scratch);
  if (found.count <= k) return found;
  float* copy = scratch->weights.data();
  std::copy(found.values, found.values + found.count, copy);
  const float kth = kth_largest(copy, found.count, k);
  found.filter([&](float value) { return value >= kth; });
  return found;
}

void to_weights(Candidates* found, float top) {
  for (int64_t i = 0; i < found->count; i += kLanes) {
    const int64_t count = found->count - i;
    store_some(found->values + i, weight_of(load_logits(found->values + i, count) - splat(top)),
               count);
  }
}

// The lightest weight that is kept, and how many entries of exactly that weight.
struct Border {
  float weight;
  int64_t num_ties;
};

// Walks down over boxes of mass, the heaviest last, until the ones passed and the next hold what is
// wanted; gives that next one, or the lowest that holds anything. passed grows by what was passed.
int64_t find_box(const double* mass, int64_t num_boxes, double wanted, double* passed) {
  int64_t border = -1;
  for (int64_t box = num_boxes - 1; box >= 0; box--) {
    if (mass[box] <= 0) continue;
    if (border >= 0) *passed += mass[border];
    border = box;
    if (*passed + mass[box] >= wanted) break;
  }
  return border;
}

// Finds how far down entries are kept that together hold the wanted mass. A weight's highest bits
// are looked at first, so that few boxes are needed; what lies below the border is dropped.
Border find_border(Candidates* found, double wanted, double* mass) {
  constexpr int kShifts[] = {19, 10, 0};
  constexpr int kBoxes[] = {1 << 12, 1 << 9, 1 << 10};
  uint32_t lowest = 0;  // bits of a weight in the border box
  double passed = 0;
  for (int round = 0; round < 3; round++) {
    const int shift = kShifts[round];
    const uint32_t last = (uint32_t)kBoxes[round] - 1;
    std::fill(mass, mass + kBoxes[round], 0.0);
    for (int64_t i = 0; i < found->count; i++) {
      // Weights above the border box of the last round were passed.
      const uint32_t box = (bit_cast<uint32_t>(found->values[i]) - lowest) >> shift;
      if (box <= last) mass[box] += found->values[i];
    }
    const int64_t border = find_box(mass, kBoxes[round], wanted, &passed);
    if (border < 0) return Border{0.0f, 0};
    lowest += (uint32_t)border << shift;
    if (round == 0) {
      const float bound = bit_cast<float>(lowest);
      found->filter([&](float weight) { return weight >= bound; });
    }
  }
  const float weight = bit_cast<float>(lowest);
  return Border{weight, std::max<int64_t>((int64_t)std::ceil((wanted - passed) / weight), 1)};
}

double total_of(const Candidates& found) {
  double total = 0;
  for (int64_t i = 0; i < found.count; i++) total += found.values[i];
  return total;
}

// Keeps the heaviest entries until what is left holds at most 1 - top_p of the total. Of equal
// weights the lower id counts as heavier.
void keep_nucleus(Candidates* found, double top_p, double total, Scratch* scratch) {
  Border border = find_border(found, top_p * total, scratch->mass.data());
  found->filter([&](float weight) {
    return weight > border.weight || (weight == border.weight && border.num_ties-- > 0);
  });
}

// Weights of the whole row into scratch; gives their sum.
double fill_weights(const float* row, float factor, float top, int64_t size, Scratch* scratch) {
  float* weights = scratch->weights.data();
  double total = 0;
  for (int64_t strip = 0; strip < size; strip += kStrip) {
    const int64_t end = std::min(strip + kStrip, size);
    Lanes part = splat(0.0f);
    for (int64_t i = strip; i < end; i += kLanes) {
      const Lanes scaled = load_logits(row + i, end - i) * splat(factor);
      const Lanes weight = weight_of(scaled - splat(top));
      part = part + weight;
      store_some(weights + i, weight, end - i);
    }
    total += sum(part);
  }
  return total;
}

// The number in [0, 1) that belongs to a seed and a position: Philox-4x64-10, as in philox.py.
double uniform(uint64_t seed, uint64_t position) {
  __extension__ typedef unsigned __int128 Wide;
  uint64_t key0 = seed, key1 = 0x73616D706C65u;
  uint64_t c0 = position, c1 = 0, c2 = 0, c3 = 0;
  for (int round = 0; round < 10; round++) {
    const Wide product0 = (Wide)0xD2E7470EE14C6C93u * c0;
    const Wide product1 = (Wide)0xCA5A826395121157u * c2;
    c0 = (uint64_t)(product1 >> 64) ^ c1 ^ key0;
    c1 = (uint64_t)product1;
    c2 = (uint64_t)(product0 >> 64) ^ c3 ^ key1;
    c3 = (uint64_t)product0;
    key0 += 0x9E3779B97F4A7C15u;
    key1 += 0xBB67AE8584CAA73Bu;
  }
  return (double)(c0 >> 11) * 0x1p-53;
}

// Gives the first index whose accumulated weight exceeds the target, at most the last with a weight.
class Finder {
 public:
  explicit Finder(double target) : target_(target) {}

  // Returns true when this index is the one; then index() no longer changes.
  bool pass(int64_t index, double weight) {
    const double before = passed_;
    passed_ += weight;
    if (passed_ > before) {
      index_ = index;
      before_ = before;
    }
    return passed_ > target_;
  }

  int64_t index() const { return index_; }
  double before() const { return before_; }  // weight of all before index()

 private:
  double target_;
  double passed_ = 0;
  double before_ = 0;
  int64_t index_ = 0;
};

// Without filters: first the group, then the token in it, so that only group sums are accumulated.
// Token t belongs to group t % num_groups.
int32_t draw_unfiltered(const float* row, const DrawRow& draw, int64_t size, Scratch* scratch) {
  const int64_t num_groups = (size + kGroupSize - 1) / kGroupSize;
  const Lanes factor = splat(draw.inverse_temperature), top = splat(draw.top);
  float* sums = scratch->weights.data();
  std::fill(sums, sums + num_groups, 0.0f);
  for (int64_t first = 0; first < size; first += num_groups) {
    const int64_t count = std::min(num_groups, size - first);
    for (int64_t i = 0; i < count; i += kLanes) {
      const Lanes weight = weight_of(load_logits(row + first + i, count - i) * factor - top);
      store_some(sums + i, load_some(sums + i, count - i) + weight, count - i);
    }
  }
  double total = 0;
  for (int64_t group = 0; group < num_groups; group++) total += sums[group];
  const double target = uniform(draw.seed, (uint64_t)draw.position) * total;
  Finder group(target);
  for (int64_t i = 0; i < num_groups && !group.pass(i, sums[i]);) i++;
  Finder token(target - group.before());
  for (int64_t i = group.index(); i < size; i += num_groups) {
    const Lanes weight = weight_of(splat(row[i]) * factor - top);
    if (token.pass(i, weight.part[0][0])) break;
  }
  return (int32_t)token.index();
}

Candidates keep_filtered(const float* row, const DrawRow& draw, int64_t size, Scratch* scratch) {
  const float factor = draw.inverse_temperature;
  Candidates found;
  if (draw.top_k == 0 && draw.min_p == 0) {
    const double total = fill_weights(row, factor, draw.top, size, scratch);
    // Entries below this hold less than 1 - top_p even if all of them were just below it.
    const double bound = (1 - draw.top_p) * total / (double)size * (1 - kSlack);
    found = gather(scratch->weights.data(), 1.0f, size, (float)bound, scratch);
    keep_nucleus(&found, draw.top_p, total, scratch);
    return found;
  }
  const float lowest = (float)((double)draw.top + std::log(draw.min_p));
  if (draw.top_k > 0) {
    found = reaching_kth(row, factor, size, draw.top_k, scratch);
    if (draw.min_p > 0) found.filter([&](float value) { return value >= lowest; });
  } else {
    found = gather(row, factor, size, lowest, scratch);
  }
  to_weights(&found, draw.top);
  if (draw.top_p < 1) keep_nucleus(&found, draw.top_p, total_of(found), scratch);
  return found;
}

void draw_token(const float* row, DrawRow* draw, int64_t size, Scratch* scratch) {
  scratch->resize(size);
  if (draw->top_k == 0 && draw->min_p == 0 && draw->top_p >= 1) {
    draw->token = draw_unfiltered(row, *draw, size, scratch);
    return;
  }
  const Candidates found = keep_filtered(row, *draw, size, scratch);
  Finder place(uniform(draw->seed, (uint64_t)draw->position) * total_of(found));
  for (int64_t i = 0; i < found.count && !place.pass(i, found.values[i]);) i++;
  draw->token = found.ids[place.index()];
  if (draw->kept == nullptr) return;
  std::copy(found.ids, found.ids + found.count, draw->kept);
  draw->num_kept = found.count;
}

}  // namespace
}  // namespace serve

// For each row, which lie stride floats apart: the first index of its largest value, or of its first
// NaN, and the value there. size is at least 1.
SERVE_API void serve_argmax_rows(const float* rows, int64_t stride, int64_t num_rows, int64_t size,
                                 int64_t* indices, float* tops) {
  using namespace serve;
  if (size < 1) return;
  parallel_for(num_rows, (1 << 15) / size + 1, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row++) {
      indices[row] = find_largest(rows + row * stride, size);
      tops[row] = rows[row * stride + indices[row]];
    }
  });
}

// Draws a token for each of draws from logits [num_rows][size], whose rows lie stride floats apart
// and stay as they are. fault: place, row.
SERVE_API serve::Status serve_draw_rows(const float* logits, int64_t stride, int64_t num_rows,
                                        int64_t size, serve::DrawRow* draws, int64_t num_draws,
                                        serve::Fault* fault) {
  using namespace serve;
  for (int64_t i = 0; i < num_draws; i++) {
    const DrawRow& draw = draws[i];
    const bool is_possible = size >= 1 && draw.row >= 0 && draw.row < num_rows && draw.top_k >= 0 &&
                             draw.top_k <= size && draw.top - draw.top == 0 && draw.min_p >= 0 &&
                             draw.min_p <= 1 && draw.top_p > 0 && draw.inverse_temperature > 0 &&
                             draw.inverse_temperature <= std::numeric_limits<float>::max();
    if (!is_possible) {
      *fault = Fault{i, draw.row, 0};
      return kBadRow;
    }
  }
  std::atomic<bool> is_short{false};
  parallel_for(num_draws, 1, [&](int64_t begin, int64_t end) {
    static thread_local Scratch scratch;
    try {
      for (int64_t i = begin; i < end; i++) {
        draw_token(logits + draws[i].row * stride, &draws[i], size, &scratch);
      }
    } catch (const std::bad_alloc&) {
      is_short.store(true);
    }
  });
  return is_short.load() ? kOutOfMemory : kOk;
}
