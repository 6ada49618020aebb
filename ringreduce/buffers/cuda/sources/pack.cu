// Many tensors into one buffer, and back, in one launch, with what else can be done on the way.

#include "common.cuh"

namespace ringreduce {

// One tensor's way: `count` elements of From at `source` go to `target` as To.
struct Piece {
  uint64 source, target, count;
};

// A part of a tensor, for one block: up to `length` elements of the piece from `first` on.
struct Chunk {
  uint32 piece, length;
  uint64 first;
};

template <class From, class To> struct Convert : Between<From, To> {
  static const int AHEAD = 4;
  typedef typename Type<From>::Wide Wide;
  Wide scale;

  template <int N> __device__ Items<To, N> read(uint64 first) const {
    const Items<From, N> items = load<From, N>(this->source + first);
    Items<To, N> result;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      result.item[i] = Type<To>::narrow(Type<From>::multiply(widen(items.item[i]), scale));
    }
    return result;
  }
};

// Elements in a group of `for_each`: of the smaller type they take 16 bytes.
template <class From, class To> struct Together {
  static const int COUNT = 16 / (sizeof(From) < sizeof(To) ? sizeof(From) : sizeof(To));
};

// For every element of every chunk: target = source * scale, in float32 (float64 for float64) and rounded once.
//
// pieces, chunks: device arrays of Piece and of `nchunks` Chunk. Addresses are aligned to their elements; where they
//   are aligned to 16 bytes, accesses take 16 bytes. A target may be its own source if the types are equally wide;
//   otherwise nothing overlaps.
// Grid and block: any; blocks take chunks in turn, and the threads of a block share one. Blocks do not depend on each
// other.
template <class From, class To>
__global__ void __launch_bounds__(512) convert(uint64 pieces, uint64 chunks, uint32 nchunks, float64 scale) {
  for (uint32 number = blockIdx.x; number < nchunks; number += gridDim.x) {
    const Chunk chunk = at<Chunk>(chunks)[number];
    const Piece piece = at<Piece>(pieces)[chunk.piece];
    Convert<From, To> body;
    body.source = at<From>(piece.source);
    body.target = at<To>(piece.target);
    body.scale = (typename Type<From>::Wide)scale;
    for_each<To, Together<From, To>::COUNT>(body, piece.target, chunk.first, chunk.first + chunk.length, threadIdx.x,
                                         blockDim.x);
  }
}

// As `convert`, without arithmetic: for elements of any type that is as wide as T, or a multiple of it.
template <class T>
__global__ void __launch_bounds__(512) move(uint64 pieces, uint64 chunks, uint32 nchunks) {
  for (uint32 number = blockIdx.x; number < nchunks; number += gridDim.x) {
    const Chunk chunk = at<Chunk>(chunks)[number];
    const Piece piece = at<Piece>(pieces)[chunk.piece];
    Move<T> body;
    body.source = at<T>(piece.source);
    body.target = at<T>(piece.target);
    for_each<T, 16 / sizeof(T)>(body, piece.target, chunk.first, chunk.first + chunk.length, threadIdx.x, blockDim.x);
  }
}

}  // namespace ringreduce
