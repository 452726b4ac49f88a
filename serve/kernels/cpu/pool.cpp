#include "pool.h"

#include <pthread.h>
#include <time.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>

#include "doorbell.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif
#if defined(__linux__)
#include <sched.h>
#endif

namespace serve {
namespace {

constexpr int kMaxThreads = 256;
constexpr int64_t kChunksPerThread = 8;
// Waking a sleeping thread takes 50 us and more on a virtual machine, so waits up to that are spun.
constexpr std::chrono::microseconds kSpin(40);
constexpr std::chrono::microseconds kReadySpin(200);
constexpr int kSpinsPerLook = 32;  // between two looks at the clock

inline void relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

inline double nanoseconds(clockid_t clock) {
  timespec time;
  clock_gettime(clock, &time);
  return 1e9 * (double)time.tv_sec + (double)time.tv_nsec;
}

// Spins until is_over or until the time is up; gives the last answer of is_over.
template <typename Condition>
bool spin_until(std::chrono::microseconds time, Condition&& is_over) {
  for (int i = 0; i < 4 * kSpinsPerLook; i++) {
    if (is_over()) return true;
    relax();
  }
  const auto give_up = std::chrono::steady_clock::now() + time;
  do {
    for (int i = 0; i < kSpinsPerLook; i++) {
      if (is_over()) return true;
      relax();
    }
  } while (std::chrono::steady_clock::now() < give_up);
  return false;
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

// Where the chunks of a loop begin.
struct Cut {
  int64_t total;
  int64_t grain;
  int32_t num_chunks;

  static Cut make(int64_t total, int64_t min_range, int64_t grain, int num_threads) {
    const int64_t most = (total + min_range - 1) / min_range;
    return Cut{total, grain, (int32_t)std::min(num_threads * kChunksPerThread, most)};
  }

  int64_t begin(int32_t chunk) const {
    if (chunk >= num_chunks) return total;
    const int64_t item = total / num_chunks * chunk + total % num_chunks * chunk / num_chunks;
    return item - item % grain;
  }
};

// Measures whether helpers pay, on some of the loops, and turns them away for a while when they do
// not save a tenth of the time: then other programs run on their processors, and the caller waits
// for helpers that hold a chunk and do not run.
//
// What a loop would take on the caller alone is its processor time for the chunks it did, scaled up
// to all of them, times the stretch: time over processor time of loops that did run alone.
class Judge {
 public:
  bool sends_away() const { return num_alone_.load(std::memory_order_relaxed) > 0; }

  // Tells whether the next loop runs on the caller alone, and counts it.
  bool takes_next() {
    const int left = num_alone_.load(std::memory_order_relaxed);
    if (left == 0) return false;
    num_alone_.store(left - 1, std::memory_order_relaxed);
    if (left == 1) end_pause();
    return true;
  }

  // Tells whether the next loop is to be measured.
  bool samples_next() { return ++num_loops_ % (is_trial_ ? 1 : kStride) == 0; }

  // All times in nanoseconds: of the loop, and the processor time of the caller's own chunks.
  void note_together(double time, double own, uint32_t num_own, uint32_t num_chunks) {
    if (num_own == 0) return;
    together_ += time;
    alone_ += own * num_chunks / num_own;
    if (++num_noted_ == kWindow) end_window();
  }

  void note_alone(double time, double processor) {
    pause_time_ += time;
    pause_processor_ += processor;
  }

  void forget() {
    num_alone_.store(0, std::memory_order_relaxed);
    num_noted_ = 0;
    pause_ = kShortestPause;
    is_trial_ = is_doubtful_ = false;
    together_ = alone_ = pause_time_ = pause_processor_ = 0;
    stretch_ = 1;
  }

 private:
  // In loops; a step of a model has about two hundred.
  static constexpr uint32_t kStride = 8;
  static constexpr int kWindow = 32;  // of measured ones
  static constexpr int kShortestPause = 512;
  static constexpr int kLongestPause = 16384;

  void end_window() {
    const bool pays = together_ < 0.9 * stretch_ * alone_;
    if (pays) {
      pause_ = kShortestPause;
    } else if (is_trial_ || is_doubtful_) {
      num_alone_.store(pause_, std::memory_order_relaxed);
      pause_ = std::min(2 * pause_, kLongestPause);
    }
    is_doubtful_ = !pays;  // once may be chance
    is_trial_ = false;
    num_noted_ = 0;
    together_ = alone_ = 0;
  }

  void end_pause() {
    if (pause_processor_ > 0) stretch_ = std::max(1.0, pause_time_ / pause_processor_);
    pause_time_ = pause_processor_ = 0;
    is_trial_ = true;
  }

  std::atomic<int> num_alone_{0};  // loops left to run alone
  uint32_t num_loops_ = 0;
  int num_noted_ = 0;
  int pause_ = kShortestPause;
  bool is_trial_ = false;
  bool is_doubtful_ = false;
  double together_ = 0;
  double alone_ = 0;
  double pause_time_ = 0;
  double pause_processor_ = 0;
  double stretch_ = 1;
};

class Pool {
 public:
  int resize(int wanted) {
    std::lock_guard<std::mutex> sizing(size_mutex_);
    wanted = std::min(std::max(wanted, 1), kMaxThreads);
    while (num_helpers_ < wanted - 1) {
      const int index = num_helpers_;
      try {
        std::thread thread([this, index] { help(index); });
        threads_[index] = thread.native_handle();
        thread.detach();
      } catch (const std::system_error&) {
        break;
      }
      num_helpers_++;
    }
    while (is_running_.exchange(true, std::memory_order_acquire)) std::this_thread::yield();
    judge_.forget();
    is_running_.store(false, std::memory_order_release);
    active_.word.store((uint32_t)std::min(wanted, num_helpers_ + 1));
    active_.ring();
    call_helpers(kMaxThreads);
    return size();
  }

  int size() const { return (int)active_.word.load(std::memory_order_relaxed); }

  int pin(const int32_t* cpus, int32_t num_cpus) {
    std::lock_guard<std::mutex> sizing(size_mutex_);
    int num_pinned = 0;
#if defined(__linux__)
    for (int i = 0; i < num_helpers_; i++) {
      cpu_set_t set;
      CPU_ZERO(&set);
      if (i < num_cpus) {
        if (cpus[i] < 0 || cpus[i] >= CPU_SETSIZE) continue;
        CPU_SET(cpus[i], &set);
      } else {
        for (int cpu = 0; cpu < CPU_SETSIZE; cpu++) CPU_SET(cpu, &set);
      }
      const bool is_set = pthread_setaffinity_np(threads_[i], sizeof set, &set) == 0;
      if (is_set && i < num_cpus) num_pinned++;
    }
#else
    (void)cpus;
    (void)num_cpus;
#endif
    return num_pinned;
  }

  void run(int64_t total, int64_t min_range, int64_t grain, RangeFunction function, void* context) {
    if (is_running_.exchange(true, std::memory_order_acquire)) {  // another caller has the helpers
      function(context, 0, total);
      return;
    }
    const bool is_alone = size() == 1 || judge_.takes_next();
    const bool is_sampled = judge_.samples_next();
    if (is_alone) {
      run_alone(total, is_sampled, function, context);
    } else {
      run_together(Cut::make(total, min_range, grain, size()), is_sampled, function, context);
    }
    is_running_.store(false, std::memory_order_release);
  }

  void make_ready() {
    const bool is_first = num_ready_.fetch_add(1) == 0;
    if (is_first && size() > 1 && !judge_.sends_away()) call_helpers(size() - 1);
  }

  void let_rest() { num_ready_.fetch_sub(1); }

 private:
  void run_alone(int64_t total, bool is_sampled, RangeFunction function, void* context) {
    if (!is_sampled) return function(context, 0, total);
    const double start = nanoseconds(CLOCK_MONOTONIC);
    const double processor = nanoseconds(CLOCK_THREAD_CPUTIME_ID);
    function(context, 0, total);
    judge_.note_alone(nanoseconds(CLOCK_MONOTONIC) - start,
                      nanoseconds(CLOCK_THREAD_CPUTIME_ID) - processor);
  }

  void run_together(const Cut& cut, bool is_sampled, RangeFunction function, void* context) {
    const uint32_t num_chunks = (uint32_t)cut.num_chunks;
    const uint32_t epoch = ++epoch_;
    // All chunks of the last loop were claimed, so that nobody reads these until the ticket changes.
    cut_ = cut;
    function_ = function;
    context_ = context;
    done_.word.store(0, std::memory_order_relaxed);
    ticket_.store(Ticket{epoch, num_chunks, 0}.pack());
    if (num_sleeping_.load() > 0) call_helpers((int)num_chunks - 1);
    if (!is_sampled) return wait_for_helpers(num_chunks - work(epoch));
    const double start = nanoseconds(CLOCK_MONOTONIC);
    const double processor = nanoseconds(CLOCK_THREAD_CPUTIME_ID);
    const uint32_t num_own = work(epoch);
    const double own = nanoseconds(CLOCK_THREAD_CPUTIME_ID) - processor;
    wait_for_helpers(num_chunks - num_own);
    judge_.note_together(nanoseconds(CLOCK_MONOTONIC) - start, own, num_own, num_chunks);
  }

  // A helper that lost its processor may hold a chunk for milliseconds. Sleeping gives it this one.
  void wait_for_helpers(uint32_t num_theirs) {
    const auto is_done = [&] { return done_.word.load(std::memory_order_acquire) == num_theirs; };
    if (spin_until(kSpin, is_done)) return;
    is_waiting_.store(true);
    for (;;) {
      const uint32_t num_done = done_.word.load();
      if (num_done == num_theirs) break;
      done_.wait_while(num_done);
    }
    is_waiting_.store(false, std::memory_order_relaxed);
  }

  bool claim(uint32_t epoch, int32_t* chunk) {
    uint64_t word = ticket_.load(std::memory_order_acquire);
    for (;;) {
      const Ticket ticket = Ticket::unpack(word);
      if (ticket.epoch != epoch || ticket.next >= ticket.num_chunks) return false;
      *chunk = (int32_t)ticket.next;
      if (ticket_.compare_exchange_weak(word, word + 1, std::memory_order_acq_rel)) return true;
    }
  }

  // Returns how many chunks this thread has done.
  uint32_t work(uint32_t epoch) {
    uint32_t num_done = 0;
    for (int32_t chunk; claim(epoch, &chunk); num_done++) {
      const int64_t begin = cut_.begin(chunk), end = cut_.begin(chunk + 1);
      if (begin < end) function_(context_, begin, end);
    }
    return num_done;
  }

  void help(int index) {
    uint32_t seen = 0;
    for (;;) {
      const uint32_t num_active = active_.word.load();
      if ((uint32_t)index + 1 >= num_active) {
        active_.wait_while(num_active);
        continue;
      }
      if (!wait_for_loop(seen, num_active)) continue;
      seen = Ticket::unpack(ticket_.load()).epoch;
      const uint32_t num_done = work(seen);
      if (num_done == 0) continue;
      done_.word.fetch_add(num_done);
      if (is_waiting_.load()) done_.ring();
    }
  }

  // Returns false when it slept instead, or when the number of threads has changed.
  bool wait_for_loop(uint32_t seen, uint32_t num_active) {
    const bool is_ready = num_ready_.load() > 0;
    const auto has_changed = [&] { return active_.word.load(std::memory_order_relaxed) != num_active; };
    const auto is_due = [&] {
      return Ticket::unpack(ticket_.load(std::memory_order_acquire)).epoch != seen;
    };
    spin_until(is_ready ? kReadySpin : kSpin, [&] {
      return is_due() || has_changed() || (is_ready && num_ready_.load(std::memory_order_relaxed) == 0);
    });
    if (has_changed()) return false;
    if (is_due()) return true;
    const uint32_t call = call_.word.load();
    num_sleeping_.fetch_add(1);
    if (!is_due() && !has_changed()) call_.wait_while(call);
    num_sleeping_.fetch_sub(1);
    return false;
  }

  void call_helpers(int most) {
    call_.word.fetch_add(1);
    call_.ring(most);
  }

  // What a loop's claims read lies beside the ticket that they change.
  alignas(64) std::atomic<uint64_t> ticket_{0};
  RangeFunction function_ = nullptr;
  void* context_ = nullptr;
  Cut cut_{};
  alignas(64) Doorbell done_;  // chunks that helpers have done
  std::atomic<bool> is_waiting_{false};
  alignas(64) Doorbell call_;
  std::atomic<int> num_sleeping_{0};
  std::atomic<int> num_ready_{0};
  Doorbell active_{1};  // threads that share a loop
  alignas(64) std::atomic<bool> is_running_{false};
  uint32_t epoch_ = 0;
  Judge judge_;
  std::mutex size_mutex_;
  int num_helpers_ = 0;
  pthread_t threads_[kMaxThreads] = {};
};

std::atomic<Pool*> current_pool{nullptr};

// A forked child has no helpers: it starts with a pool of one thread. The old one is left as it
// is, since a thread that does not exist here may have been in the middle of changing it.
void start_anew() { current_pool.store(new Pool); }

// Never destroyed: helpers may still look at it while the process exits.
Pool& pool() {
  static const bool is_made = [] {
    start_anew();
    pthread_atfork(nullptr, nullptr, start_anew);
    return true;
  }();
  (void)is_made;
  return *current_pool.load(std::memory_order_relaxed);
}

}  // namespace

int set_num_threads(int num_threads) { return pool().resize(num_threads); }
int num_threads() { return pool().size(); }
int pin_helpers(const int32_t* cpus, int32_t num_cpus) { return pool().pin(cpus, num_cpus); }

void run_ranges(int64_t total, int64_t min_range, int64_t grain, RangeFunction function,
                void* context) {
  pool().run(total, min_range, grain, function, context);
}

ReadyHelpers::ReadyHelpers() { pool().make_ready(); }
ReadyHelpers::~ReadyHelpers() { pool().let_rest(); }

}  // namespace serve
