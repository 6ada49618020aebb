// Allreduce in one kernel on each of the ranks of a node, each with a GPU of its own that can reach the others' memory.
//
// The kernels wait for each other: all ranks launch the same one with the same grid, every block of every rank gets a
// multiprocessor at once (a grid of at most MAX_BLOCKS does, where there are half as many multiprocessors: two blocks fit
// on each, once what else the GPU does has ended), and no two ranks share a GPU, where contexts take turns and one would
// wait for a kernel that does not run. Two blocks of 512 leave 64 registers to a thread; left alone, the compiler gives
// them fewer and keeps the rest in memory.
//
// Every rank exports an area of flags, which begins as zeros and is never cleared:
//   uint32 rounds[MAX_BLOCKS]               of its own: barriers that the block has been through
//   uint32 arrived[MAX_BLOCKS][MAX_RANKS]   written by the peers: the barrier that the peer's block has come to
// In a barrier, block b of a rank meets the blocks b of its peers only. Numbers wrap around and are compared as such.
//
// A rank that waits longer than the time limit writes 1 + the peer's number to its error word and ends, with the result
// undefined; a kernel that finds an error there does nothing. The flags are of no use after that.
//
// ringreduce/algorithms/two_shot.py and one_shot.py describe the algorithms and name their literature.

#include "common.cuh"

namespace ringreduce {

// As in ringreduce/gpu/kernels.py. SHOT_NBYTES is what a block does of a one-shot.
enum : uint32 { MAX_BLOCKS = 64, MAX_RANKS = 16, SHOT_NBYTES = 16384 };

__device__ inline void store_release(uint32* target, uint32 value) {
#ifndef RINGREDUCE_HOST
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(__cvta_generic_to_global(target)), "r"(value) : "memory");
#else
  __atomic_store_n(target, value, __ATOMIC_RELEASE);
#endif
}

__device__ inline uint32 load_acquire(const uint32* source) {
#ifndef RINGREDUCE_HOST
  uint32 value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(__cvta_generic_to_global(source)) : "memory");
  return value;
#else
  return __atomic_load_n(source, __ATOMIC_ACQUIRE);
#endif
}

__device__ inline uint64 now_ns() {
#ifndef RINGREDUCE_HOST
  uint64 time;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(time));
  return time;
#else
  return host_now_ns();
#endif
}

// Let others run before the next look at a flag.
__device__ inline void pause() {
#ifdef RINGREDUCE_HOST
  host_pause();
#endif
}

// What a block knows of its peers.
struct Group {
  const uint64* flags;  // the ranks' areas
  uint32 rank, nranks;
  uint64 timeout_ns;
  uint32* error;

  __device__ uint32* rounds() const { return at<uint32>(flags[rank]) + blockIdx.x; }
  __device__ uint32* arrived(uint32 owner, uint32 peer) const {
    return at<uint32>(flags[owner]) + MAX_BLOCKS + blockIdx.x * MAX_RANKS + peer;
  }
};

// Return, to all threads of the block, whether the block has met its peers. What any rank's block wrote before, its
// peers' blocks see afterwards.
__device__ inline bool meet(const Group& group, uint32 round) {
  __syncthreads();
  bool met = true;
  if (threadIdx.x < group.nranks) {
    const uint32 peer = threadIdx.x;
    store_release(group.arrived(peer, group.rank), round);
    const uint64 begin = now_ns();
    while ((int32)(load_acquire(group.arrived(group.rank, peer)) - round) < 0) {
      if (now_ns() - begin > group.timeout_ns) {
        store_release(group.error, 1 + peer);
        met = false;
        break;
      }
      pause();
    }
  }
  return __syncthreads_and(met);
}

// How a block begins: the number of its next barrier, and whether it may go there or has to end because of an error.
struct Entry {
  uint32 round;
  bool open;
};

__device__ inline Entry enter(const Group& group) {
  Entry entry;
  // One thread looks: the word is in host memory, and one that another block writes now all threads should see or none.
  entry.open = __syncthreads_and(threadIdx.x != 0 || load_acquire(group.error) == 0);
  entry.round = *group.rounds() + 1;
  return entry;
}

// Write down the last barrier that the block has been through.
__device__ inline void leave(const Group& group, uint32 round) {
  if (threadIdx.x == 0) *group.rounds() = round;
}

// Two-shot: rank r reduces the r-th part of all ranks' arrays and writes the result into all ranks' arrays. Of n bytes,
// (P - 1) / P n come in and as many go out at each rank: the least there is.
//
// sources, targets, flags: device arrays of nranks addresses each, in rank order, of the ranks' arrays and flags as
//   this rank reaches them. A rank's target may be its source; otherwise nothing overlaps. Arrays are aligned to the
//   parts of their elements, and where they are aligned alike modulo 16, accesses take 16 bytes.
// rank, nranks: of this GPU, and at most MAX_RANKS. size: what an average is divided by.
// timeout_ns, error: how long to wait at a barrier, in nanoseconds; the address of this rank's error word.
// Grid and block: the same on all ranks, at most MAX_BLOCKS of at least nranks threads; so is `count`. Kernels end when
//   their rank's target is complete, and its source free.
// Races: element e of a source is read, and then all targets' e are written, by one thread of one rank.
template <class T, class Op>
__global__ void __launch_bounds__(512, 2)
    two_shot(uint64 sources, uint64 targets, uint64 flags, uint32 rank, uint32 nranks, uint64 count, uint32 size,
             uint64 timeout_ns, uint64 error) {
  const Group group = {at<uint64>(flags), rank, nranks, timeout_ns, at<uint32>(error)};
  const Entry entry = enter(group);
  if (!entry.open || !meet(group, entry.round)) return;
  Combine<T, Op> body;
  body.sources = at<uint64>(sources);
  body.targets = at<uint64>(targets);
  body.nsources = body.ntargets = nranks;
  body.size = size;
  // Parts are whole groups of 16 bytes, so that only the last may need single accesses at its end.
  const uint64 unit = 16 / sizeof(T), part = (count + nranks * unit - 1) / (nranks * unit) * unit;
  const uint64 begin = rank * part < count ? rank * part : count;
  const uint64 end = begin + part < count ? begin + part : count;
  for_each<T, 16 / sizeof(T)>(body, body.sources[rank], begin, end, grid_thread(), grid_threads());
  if (meet(group, entry.round + 1)) leave(group, entry.round + 1);
}

// One-shot: every rank copies its array where all can see it, meets the others, and reduces all of it for itself. For
// small arrays: one barrier, though (P - 1) n come in. Arrays need not be exported.
//
// source, target: this rank's arrays, which may be the same; otherwise they do not overlap. Aligned as for `two_shot`.
// scratch, flags: device arrays of nranks addresses, in rank order, of the ranks' exported areas. A scratch area,
//   aligned to 16 bytes, has for each block 2 parts of SHOT_NBYTES. The block uses them in turn: when it writes to one,
//   its peers have been at the next barrier since they read that one, and it needs no second barrier in a call.
// Others, and errors: as for `two_shot`.
// Grid and block: block b does the elements that the b-th SHOT_NBYTES hold, and the grid is as large as that takes.
template <class T, class Op>
__global__ void __launch_bounds__(512, 2)
    one_shot(uint64 source, uint64 target, uint64 scratch, uint64 flags, uint32 rank, uint32 nranks, uint64 count,
             uint32 size, uint64 timeout_ns, uint64 error) {
  const Group group = {at<uint64>(flags), rank, nranks, timeout_ns, at<uint32>(error)};
  const Entry entry = enter(group);
  if (!entry.open) return;
  const uint64 part = SHOT_NBYTES / sizeof(T), begin = blockIdx.x * part;
  const uint32 length = (uint32)(count - begin < part ? count - begin : part);
  const uint64 place = (2 * blockIdx.x + entry.round % 2) * (uint64)SHOT_NBYTES;
  // The addresses that `Combine` takes: all ranks' scratch for this block as the sources, and its part of the target.
  __shared__ uint64 table[MAX_RANKS + 1];
  if (threadIdx.x < nranks) table[threadIdx.x] = at<uint64>(scratch)[threadIdx.x] + place;
  if (threadIdx.x == 0) table[MAX_RANKS] = target + begin * sizeof(T);
  __syncthreads();
  Move<T> publish;
  publish.source = at<T>(source) + begin;
  publish.target = at<T>(table[rank]);
  for_each<T, 16 / sizeof(T)>(publish, table[rank], 0, length, threadIdx.x, blockDim.x);
  if (!meet(group, entry.round)) return;
  Combine<T, Op> body;
  body.sources = table;
  body.targets = table + MAX_RANKS;
  body.nsources = nranks;
  body.ntargets = 1;
  body.size = size;
  for_each<T, 16 / sizeof(T)>(body, table[0], 0, length, threadIdx.x, blockDim.x);
  leave(group, entry.round);
}

}  // namespace ringreduce
