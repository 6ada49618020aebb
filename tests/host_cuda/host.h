// CUDA kernels as C++ on the CPU, for tests: what of CUDA's language the sources in ringreduce/gpu use.
//
// A block's threads are coroutines of one thread of the host, which take turns at barriers and pauses. Blocks run
// one after the other or, if they wait for others, each in a thread of the host. So this shows results; it shows neither
// speed nor what a GPU's memory may reorder, nor lacks of its hardware.
#pragma once
#define RINGREDUCE_HOST

#include <sched.h>
#include <time.h>
#include <ucontext.h>

#include <functional>
#include <map>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#define __global__ static
#define __device__
#define __launch_bounds__(...)
#define __shared__ static thread_local

struct alignas(8) uint2 { unsigned int x, y; };
struct alignas(16) uint4 { unsigned int x, y, z, w; };
struct Index { unsigned int x; };
static thread_local Index threadIdx, blockIdx, blockDim, gridDim;

namespace host {

// Where some threads meet. `round` counts the meetings.
struct Barrier {
  unsigned expected = 0, arrived = 0, round = 0;
  int all[2] = {1, 1};  // of the meetings with even and with odd numbers
};

struct Thread {
  ucontext_t context;
  Barrier* waits = nullptr;  // until its round is not `seen`
  unsigned seen = 0;
  bool done = false;
};

struct Block {
  ucontext_t scheduler;
  std::vector<Thread> threads;
  Barrier barrier;
  std::vector<char> stacks;
  const std::function<void()>* kernel;
};
static thread_local Block* block;

static void let_others_run() {
  swapcontext(&block->threads[threadIdx.x].context, &block->scheduler);
}

// Meet the others, and return whether all of them said `yes`.
static int meet(Barrier& barrier, int yes) {
  Thread& self = block->threads[threadIdx.x];
  const unsigned round = barrier.round;
  barrier.all[round % 2] &= yes != 0;
  if (++barrier.arrived == barrier.expected) {
    barrier.arrived = 0;
    barrier.all[(round + 1) % 2] = 1;
    ++barrier.round;
  } else {
    self.waits = &barrier;
    self.seen = round;
    let_others_run();
    self.waits = nullptr;
  }
  return barrier.all[round % 2];
}

static void run_thread() {
  (*block->kernel)();
  block->threads[threadIdx.x].done = true;
  let_others_run();
}

// Run one block in this thread of the host. Threads that leave out a barrier that others wait at hang, as on a GPU.
static void run_block(const std::function<void()>& kernel, unsigned number, unsigned grid, unsigned nthreads) {
  const size_t stack = 32768;
  static thread_local Block self;
  block = &self;
  self.kernel = &kernel;
  self.threads.assign(nthreads, Thread());
  self.barrier = Barrier();
  self.barrier.expected = nthreads;
  if (self.stacks.size() < nthreads * stack) self.stacks.resize(nthreads * stack);
  blockIdx.x = number;
  blockDim.x = nthreads;
  gridDim.x = grid;
  for (unsigned i = 0; i < nthreads; ++i) {
    ucontext_t& context = self.threads[i].context;
    getcontext(&context);
    context.uc_stack.ss_sp = &self.stacks[i * stack];
    context.uc_stack.ss_size = stack;
    makecontext(&context, run_thread, 0);
  }
  for (unsigned left = nthreads; left > 0;) {
    for (unsigned i = 0; i < nthreads; ++i) {
      Thread& next = self.threads[i];
      if (next.done || (next.waits && next.waits->round == next.seen)) continue;
      threadIdx.x = i;
      swapcontext(&self.scheduler, &next.context);
      left -= next.done;
    }
  }
}

struct Instance {
  std::vector<int> sizes;  // of the arguments, in bytes
  std::function<void(void**)> call;
};

template <class... A, size_t... I>
Instance instance_of(void (*kernel)(A...), std::index_sequence<I...>) {
  return {{(int)sizeof(A)...}, [kernel](void** values) { kernel(*static_cast<A*>(values[I])...); }};
}

template <class... A> Instance instance_of(void (*kernel)(A...)) {
  return instance_of(kernel, std::index_sequence_for<A...>());
}

}  // namespace host

static inline void __syncthreads() { host::meet(host::block->barrier, 1); }
static inline int __syncthreads_and(int yes) { return host::meet(host::block->barrier, yes); }

static inline unsigned long long host_now_ns() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * 1000000000ull + time.tv_nsec;
}

static inline void host_pause() {
  sched_yield();
  host::let_others_run();
}

// The table of instances by name: tests append its definition to a family's source.
static const std::map<std::string, host::Instance>& instances();

// Run a kernel to its end, in as many threads of the host as there are blocks if `together`. Returns 0; 1 if there is
// no such instance; 2 if it does not take arguments of these sizes.
extern "C" int launch(const char* name, unsigned grid, unsigned block, int count, const int* sizes, void** values,
                      int together) {
  const auto found = instances().find(name);
  if (found == instances().end()) return 1;
  if (found->second.sizes != std::vector<int>(sizes, sizes + count)) return 2;
  const std::function<void()> kernel = [&] { found->second.call(values); };
  std::vector<std::thread> threads;
  for (unsigned number = 0; number < grid; ++number) {
    if (together)
      threads.emplace_back(host::run_block, std::cref(kernel), number, grid, block);
    else
      host::run_block(kernel, number, grid, block);
  }
  for (std::thread& each : threads) each.join();
  return 0;
}
