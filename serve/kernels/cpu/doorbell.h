// Sleeping until a 32-bit word changes: a futex on Linux, a condition variable elsewhere.
#pragma once

#include <atomic>
#include <climits>
#include <cstdint>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#include <condition_variable>
#include <mutex>
#endif

namespace serve {

// A word that threads wait for. Whoever changes it rings afterwards.
class Doorbell {
 public:
  std::atomic<uint32_t> word;

  explicit Doorbell(uint32_t value = 0) : word(value) {}

  // Returns when the word is no longer value; may also return early.
  void wait_while(uint32_t value) {
#if defined(__linux__)
    syscall(SYS_futex, address(), FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
#else
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return word.load() != value; });
#endif
  }

  void ring(int num_threads = INT_MAX) {
#if defined(__linux__)
    syscall(SYS_futex, address(), FUTEX_WAKE_PRIVATE, num_threads, nullptr, nullptr, 0);
#else
    (void)num_threads;
    { std::lock_guard<std::mutex> lock(mutex_); }
    changed_.notify_all();
#endif
  }

 private:
#if defined(__linux__)
  static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t), "a futex is a plain word");
  uint32_t* address() { return reinterpret_cast<uint32_t*>(&word); }
#else
  std::mutex mutex_;
  std::condition_variable changed_;
#endif
};

}  // namespace serve
