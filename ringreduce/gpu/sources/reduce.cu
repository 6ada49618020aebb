// Many arrays into one result, which is written to many places.

#include "common.cuh"

namespace ringreduce {

// For every element: all targets = Op over the sources in the order given; floats of 16 bits are accumulated in
// float32 and rounded once; an average is divided by `size`, which need not be the number of sources.
//
// sources, targets: device arrays of nsources (at least 1) and ntargets addresses of arrays of `count` elements, each
//   aligned to the parts of its elements. Where they are aligned alike modulo 16, accesses take 16 bytes. A target may
//   be one of the sources; otherwise nothing overlaps.
// Grid and block: any number of threads. An element is read from all sources and then written by one thread, so blocks
//   do not depend on each other. Two blocks of 512 to a multiprocessor leave 64 registers to a thread; left alone, the
//   compiler gives them 40 and keeps the rest in memory.
template <class T, class Op>
__global__ void __launch_bounds__(512, 2)
    combine(uint64 sources, uint32 nsources, uint64 targets, uint32 ntargets, uint64 count, uint32 size) {
  Combine<T, Op> body;
  body.sources = at<uint64>(sources);
  body.targets = at<uint64>(targets);
  body.nsources = nsources;
  body.ntargets = ntargets;
  body.size = size;
  for_each<T, 16 / sizeof(T)>(body, body.targets[0], 0, count, grid_thread(), grid_threads());
}

}  // namespace ringreduce
