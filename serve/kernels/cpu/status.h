// How an entry point tells Python what is wrong with its input.
#pragma once

#include <cstdint>

namespace serve {

enum Status : int32_t {
  kOk = 0,
  kOutOfMemory = 1,
  kBadSlot = 2,          // fault: token, slot
  kBadPosition = 3,      // fault: token, position
  kBadQueryStart = 4,    // fault: request, value
  kBadSeqLen = 5,        // fault: request, value
  kBadBlock = 6,         // fault: request, block index, block id
  kBadRow = 7,           // fault: place, row
  kBadCache = 8,         // fault: type, block size, head size
  kBadHeads = 9,         // fault: query heads, kv heads
  kBadLayer = 10,        // parts that do not fit each other
  kBadToken = 11,        // fault: token, id
  kBadType = 12,         // of weights
  kBadShape = 13,        // a size that is negative or above kMaxSize, or no whole blocks
};

// Most rows, inputs or outputs of a product: two of them and a tile's lanes multiply within 64 bits.
constexpr int64_t kMaxSize = 1 << 28;

inline bool is_size(int64_t size) { return size >= 0 && size <= kMaxSize; }

// Names the offending value; the meaning of a, b and c goes with the Status.
struct Fault {
  int64_t a;
  int64_t b;
  int64_t c;
};

}  // namespace serve

#define SERVE_API extern "C" __attribute__((visibility("default")))
