// Calls entry points of a kernel library on the memory of another process.
//
//     runner LIBRARY PROCESS-ID < requests > answers
//
// The process that writes the requests passes its own addresses. Its memory is not mapped here: the
// first touch of a page faults, the handler copies the page from the other process to the same
// address, and after the call whatever has changed is written back. So a library of another
// instruction set can run, in an emulator, on the tensors of a test.

#include <dlfcn.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace {

constexpr size_t kPageSize = 4096;
constexpr size_t kMaxPages = 1 << 16;
constexpr int kMaxIntegers = 32;
constexpr int kMaxFloats = 4;
// The address is taken in this process: another run, with other addresses, may succeed.
constexpr int kExitTaken = 77;
// Neither process has memory there.
constexpr int kExitWild = 78;

struct Request {
  char function[64];
  int64_t integers[kMaxIntegers];  // also addresses, in the order of the arguments without floats
  float floats[kMaxFloats];        // in their order
};

struct Page {
  uint8_t* address;
  uint8_t original[kPageSize];
};

Page* pages;
size_t num_pages;
std::atomic_flag pages_lock = ATOMIC_FLAG_INIT;
int other_memory;

[[noreturn]] void stop(int code, const void* address) {
  char text[96];
  const int size = snprintf(text, sizeof text, "runner: exit %d at %p\n", code, address);
  if (write(2, text, (size_t)size) < 0) _exit(code);
  _exit(code);
}

void fetch_page(int, siginfo_t* info, void*) {
  uint8_t* const address = (uint8_t*)((uintptr_t)info->si_addr / kPageSize * kPageSize);
  while (pages_lock.test_and_set(std::memory_order_acquire)) {
  }
  bool is_there = false;  // another thread was faster
  for (size_t i = num_pages; i > 0 && !is_there; i--) is_there = pages[i - 1].address == address;
  if (!is_there) {
    if (num_pages == kMaxPages) stop(kExitWild, address);
    Page& page = pages[num_pages];
    const ssize_t size = pread(other_memory, page.original, kPageSize, (off_t)(uintptr_t)address);
    if (size != (ssize_t)kPageSize) stop(kExitWild, info->si_addr);
    void* const got = mmap(address, kPageSize, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (got != address) stop(kExitTaken, address);
    // Filled elsewhere and moved: another thread must not see the page before its content.
    void* const filled = mmap(nullptr, kPageSize, PROT_READ | PROT_WRITE,
                              MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    memcpy(filled, page.original, kPageSize);
    if (mremap(filled, kPageSize, kPageSize, MREMAP_MAYMOVE | MREMAP_FIXED, address) != address) {
      stop(kExitTaken, address);
    }
    page.address = address;
    num_pages++;
  }
  pages_lock.clear(std::memory_order_release);
}

// Writes back runs of changed bytes only: the rest of a page may belong to somebody else.
void return_pages() {
  for (size_t i = 0; i < num_pages; i++) {
    const Page& page = pages[i];
    for (size_t begin = 0; begin < kPageSize;) {
      if (page.address[begin] == page.original[begin]) {
        begin++;
        continue;
      }
      size_t end = begin + 1;
      while (end < kPageSize && page.address[end] != page.original[end]) end++;
      const ssize_t size = (ssize_t)(end - begin);
      const off_t place = (off_t)(uintptr_t)(page.address + begin);
      if (pwrite(other_memory, page.address + begin, (size_t)size, place) != size) {
        stop(kExitWild, page.address + begin);
      }
      begin = end;
    }
    munmap(page.address, kPageSize);
  }
  num_pages = 0;
}

typedef int64_t I;
typedef I (*Function)(I, I, I, I, I, I, I, I, I, I, I, I, I, I, I, I, I, I, I, I, I, I, I, I, I, I, I,
                      I, I, I, I, I, float, float, float, float);

// Integers and addresses fill registers and the stack in order, floats go to registers of their own,
// and a function does not look at arguments that it does not have: one type serves all.
I call(Function function, const Request& request) {
  const I* a = request.integers;
  const float* f = request.floats;
  return function(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10], a[11], a[12],
                  a[13], a[14], a[15], a[16], a[17], a[18], a[19], a[20], a[21], a[22], a[23],
                  a[24], a[25], a[26], a[27], a[28], a[29], a[30], a[31], f[0], f[1], f[2], f[3]);
}

}  // namespace

// The C library clears memory with an instruction (dc zva) that the emulator does not resume rightly
// after a fault: the rest of the range stays as it was. The library under test finds this one first.
extern "C" void* memset(void* target, int value, size_t size) {
  volatile uint8_t* const bytes = (volatile uint8_t*)target;
  for (size_t i = 0; i < size; i++) bytes[i] = (uint8_t)value;
  return target;
}

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  void* const library = dlopen(argv[1], RTLD_NOW);
  if (library == nullptr) {
    fprintf(stderr, "runner: %s\n", dlerror());
    return 2;
  }
  char path[64];
  snprintf(path, sizeof path, "/proc/%s/mem", argv[2]);
  other_memory = open(path, O_RDWR);
  if (other_memory < 0) {
    perror(path);
    return 2;
  }
  pages = (Page*)malloc(kMaxPages * sizeof(Page));
  struct sigaction action = {};
  action.sa_sigaction = fetch_page;
  action.sa_flags = SA_SIGINFO;
  sigaction(SIGSEGV, &action, nullptr);
  Request request;
  while (fread(&request, sizeof request, 1, stdin) == 1) {
    void* const function = dlsym(library, request.function);
    if (function == nullptr) {
      fprintf(stderr, "runner: no entry point %s\n", request.function);
      return 2;
    }
    const I result = call((Function)function, request);
    return_pages();
    fwrite(&result, sizeof result, 1, stdout);
    fflush(stdout);
  }
  return 0;
}
