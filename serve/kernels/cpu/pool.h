// Worker threads for the kernels.
//
// One loop runs at a time. Its work is cut into chunks that the caller and the helpers claim from
// one atomic word. The caller waits only for chunks that a helper has claimed, never for a helper
// that has not started: on a busy machine it does all of the work itself. Helpers spin for a few
// microseconds after a loop and then sleep. While helpers cost more than they save, because other
// programs have their processors, loops run on the caller alone.
#pragma once

#include <cstdint>
#include <type_traits>

namespace serve {

typedef void (*RangeFunction)(void* context, int64_t begin, int64_t end);

// Multiply-adds that pay for waking a helper.
constexpr int64_t kMinParallelWork = 150 * 1000;

// Sets how many threads share a loop, the caller included. Returns the number in force.
int set_num_threads(int num_threads);
int num_threads();

// Ties helper i to processor cpus[i], one after the other as far as the list goes; helpers beyond it
// and those of an empty list run where the system puts them. Returns how many were tied.
int pin_helpers(const int32_t* cpus, int32_t num_cpus);

// Runs function over [0, total), cut into ranges of about min_range items or more that begin at
// multiples of grain.
void run_ranges(int64_t total, int64_t min_range, int64_t grain, RangeFunction function,
                void* context);

// While one exists, helpers stay awake for the next loop; with the last one gone they sleep at once.
class ReadyHelpers {
 public:
  ReadyHelpers();
  ~ReadyHelpers();
  ReadyHelpers(const ReadyHelpers&) = delete;
  ReadyHelpers& operator=(const ReadyHelpers&) = delete;
};

// Calls body(begin, end) for ranges that cover [0, total) once, in any order, on several threads.
template <typename Body>
inline void parallel_for(int64_t total, int64_t min_range, Body&& body, int64_t grain = 1) {
  typedef typename std::remove_reference<Body>::type Callable;
  if (total <= 0) return;
  if (total <= min_range || num_threads() == 1) {
    body((int64_t)0, total);
    return;
  }
  RangeFunction function = [](void* context, int64_t begin, int64_t end) {
    (*static_cast<Callable*>(context))(begin, end);
  };
  run_ranges(total, min_range, grain, function, &body);
}

}  // namespace serve
