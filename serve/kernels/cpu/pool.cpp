#include "pool.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace serve {
namespace {

constexpr int kMaxThreads = 256;
constexpr int64_t kRangesPerThread = 8;
constexpr std::chrono::microseconds kSpinTime(30);

inline void relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// epoch (32 bits), number of chunks (16), next chunk (16) in one word: a claim that was prepared
// for an older loop cannot succeed, because its epoch no longer matches.
struct Ticket {
  uint32_t epoch;
  uint32_t num_chunks;
  uint32_t next;

  static Ticket unpack(uint64_t word) {
    return Ticket{(uint32_t)(word >> 32), (uint32_t)(word >> 16) & 0xffffu,
                  (uint32_t)word & 0xffffu};
  }
  uint64_t pack() const { return (uint64_t)epoch << 32 | (uint64_t)num_chunks << 16 | next; }
};

class Pool {
 public:
  int resize(int wanted) {
    std::lock_guard<std::mutex> running(run_mutex_);
    wanted = std::min(std::max(wanted, 1), kMaxThreads);
    while (num_helpers_ < wanted - 1) {
      const int index = num_helpers_;
      try {
        std::thread([this, index] { help(index); }).detach();
      } catch (const std::system_error&) {
        break;
      }
      num_helpers_++;
    }
    std::lock_guard<std::mutex> sleeping(sleep_mutex_);
    active_.store(std::min(wanted, num_helpers_ + 1));
    wake_.notify_all();
    return active_.load();
  }

  int size() const { return active_.load(std::memory_order_relaxed); }

  void run(int64_t total, int64_t min_range, RangeFunction function, void* context) {
    std::unique_lock<std::mutex> running(run_mutex_, std::try_to_lock);
    if (!running.owns_lock()) {  // another caller has the helpers
      function(context, 0, total);
      return;
    }
    const int64_t most = std::min<int64_t>(active_.load() * kRangesPerThread, 0xffff);
    const int64_t num_chunks = std::min(most, (total + min_range - 1) / min_range);
    const uint32_t epoch = epoch_.load() + 1;
    ticket_.store(Ticket{epoch, 0, 0}.pack());  // closed while the loop is set up
    function_ = function;
    context_ = context;
    total_ = total;
    num_done_.store(0);
    ticket_.store(Ticket{epoch, (uint32_t)num_chunks, 0}.pack());
    epoch_.store(epoch);
    if (num_sleeping_.load() > 0) {
      { std::lock_guard<std::mutex> sleeping(sleep_mutex_); }
      wake_.notify_all();
    }
    work(epoch);
    for (int spins = 0; num_done_.load(std::memory_order_acquire) < num_chunks; spins++) {
      relax();
      if (spins >= 2000) std::this_thread::yield();  // the helper may need this core
    }
  }

 private:
  bool claim(uint32_t epoch, Ticket* claimed) {
    uint64_t word = ticket_.load(std::memory_order_acquire);
    for (;;) {
      *claimed = Ticket::unpack(word);
      if (claimed->epoch != epoch || claimed->next >= claimed->num_chunks) return false;
      if (ticket_.compare_exchange_weak(word, word + 1, std::memory_order_acq_rel)) return true;
    }
  }

  void work(uint32_t epoch) {
    Ticket chunk;
    while (claim(epoch, &chunk)) {
      const int64_t begin = total_ * chunk.next / chunk.num_chunks;
      const int64_t end = total_ * (chunk.next + 1) / chunk.num_chunks;
      function_(context_, begin, end);
      num_done_.fetch_add(1, std::memory_order_release);
    }
  }

  void help(int index) {
    uint32_t seen = 0;
    for (;;) {
      seen = wait_for_epoch(index, seen);
      work(seen);
    }
  }

  uint32_t wait_for_epoch(int index, uint32_t seen) {
    const auto is_due = [&] { return epoch_.load() != seen && index + 1 < active_.load(); };
    const auto give_up = std::chrono::steady_clock::now() + kSpinTime;
    do {
      for (int i = 0; i < 16; i++) {
        if (is_due()) return epoch_.load();
        relax();
      }
    } while (std::chrono::steady_clock::now() < give_up);
    std::unique_lock<std::mutex> sleeping(sleep_mutex_);
    num_sleeping_.fetch_add(1);
    wake_.wait(sleeping, is_due);
    num_sleeping_.fetch_sub(1);
    return epoch_.load();
  }

  std::mutex run_mutex_;
  std::mutex sleep_mutex_;
  std::condition_variable wake_;
  std::atomic<int> num_sleeping_{0};
  std::atomic<int> active_{1};
  std::atomic<uint32_t> epoch_{0};
  std::atomic<uint64_t> ticket_{0};
  std::atomic<int64_t> num_done_{0};
  int num_helpers_ = 0;
  RangeFunction function_ = nullptr;
  void* context_ = nullptr;
  int64_t total_ = 0;
};

// Never destroyed: helpers may still look at it while the process exits.
Pool& pool() {
  static Pool* const instance = new Pool;
  return *instance;
}

}  // namespace

int set_num_threads(int num_threads) { return pool().resize(num_threads); }
int num_threads() { return pool().size(); }

void run_ranges(int64_t total, int64_t min_range, RangeFunction function, void* context) {
  pool().run(total, min_range, function, context);
}

}  // namespace serve
