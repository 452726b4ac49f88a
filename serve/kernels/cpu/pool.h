// Worker threads for the kernels.
//
// One loop runs at a time. Its work is cut into chunks that the caller and the helpers claim from
// one atomic word. The caller waits only for chunks that a helper has claimed, never for a helper
// that has not started: on a busy machine it does all of the work itself. Helpers spin for a few
// microseconds after a loop and then sleep.
#pragma once

#include <cstdint>
#include <type_traits>

namespace serve {

typedef void (*RangeFunction)(void* context, int64_t begin, int64_t end);

// Sets how many threads share a loop, the caller included. Returns the number in force.
int set_num_threads(int num_threads);
int num_threads();

// Runs function over [0, total), cut into ranges of at least min_range items.
void run_ranges(int64_t total, int64_t min_range, RangeFunction function, void* context);

// Calls body(begin, end) for ranges that cover [0, total) once, in any order, on several threads.
template <typename Body>
inline void parallel_for(int64_t total, int64_t min_range, Body&& body) {
  typedef typename std::remove_reference<Body>::type Callable;
  if (total <= 0) return;
  if (total <= min_range || num_threads() == 1) {
    body((int64_t)0, total);
    return;
  }
  RangeFunction function = [](void* context, int64_t begin, int64_t end) {
    (*static_cast<Callable*>(context))(begin, end);
  };
  run_ranges(total, min_range, function, &body);
}

}  // namespace serve
