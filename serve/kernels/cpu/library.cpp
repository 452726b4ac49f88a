// What the loader asks of the library itself.

#if defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

#include "entry_points.h"
#include "pool.h"

namespace {

// Raised with every change of an entry point, together with ABI_VERSION in binding.py.
constexpr int32_t kAbiVersion = 10;

}  // namespace

SERVE_API int32_t serve_abi_version() { return kAbiVersion; }

// x86: 3: this processor runs the AVX512 build with VNNI, 2: the one without, 1: the AVX2 build.
// AArch64: 1: the build with dot products. 0: the portable build only.
SERVE_API int32_t serve_cpu_level() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                        __builtin_cpu_supports("f16c");
  const bool has_avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (!has_avx2 || !has_avx512) return has_avx2 ? 1 : 0;
  return __builtin_cpu_supports("avx512vnni") ? 3 : 2;
#elif defined(__aarch64__) && defined(__linux__)
  return (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0 ? 1 : 0;
#else
  return 0;
#endif
}

SERVE_API int32_t serve_set_num_threads(int32_t num_threads) {
  return serve::set_num_threads(num_threads);
}

SERVE_API int32_t serve_num_threads() { return serve::num_threads(); }

// Ties helper i to processor cpus[i]. Returns how many helpers were tied.
SERVE_API int32_t serve_pin_helpers(const int32_t* cpus, int32_t num_cpus) {
  return serve::pin_helpers(cpus, num_cpus);
}

// Calls function(context, begin, end) on all threads for ranges that cover [0, total) once; they have
// about min_range items or more and begin at multiples of grain.
SERVE_API void serve_run_ranges(int64_t total, int64_t min_range, int64_t grain,
                                serve::RangeFunction function, void* context) {
  if (total <= 0) return;
  serve::run_ranges(total, min_range < 1 ? 1 : min_range, grain < 1 ? 1 : grain, function, context);
}
