// Arrays of float32 in fewer bits: byte for byte what ringreduce/wire/codecs.py writes, which describes the formats.

#include "common.cuh"

namespace ringreduce {
namespace wire {

struct bf16 {
  typedef bfloat16 Half;
};
struct fp16 {
  typedef float16 Half;
};

// Of a scaled format: elements that share a scale, the largest value, and codes from and to values in units of scale.

struct fp8 {
  static const int BLOCK = 256, BITS = 8;
  __device__ static float32 largest() { return 448.0f; }
  __device__ static uint32 code(float32 scaled) {
    const uint32 bits = bits_of(scaled), sign = bits >> 24 & 0x80, magnitude = bits & 0x7fffffff;
    // From 2**-6 on, a code is the upper bits of the float32 but for the exponent's bias; below, it counts 512ths.
    if (magnitude < 0x3c800000) return sign | (uint32)rintf(float_of(magnitude) * 512.0f);
    return sign | (((magnitude + 0x7ffff + (magnitude >> 20 & 1)) >> 20) - ((127 - 7) << 3));
  }
  __device__ static float32 value(uint32 code) {
    const uint32 sign = (code & 0x80) << 24, magnitude = code & 0x7f;
    if (magnitude == 0x7f) return float_of(sign | 0x7fc00000);
    // The exponent's bias differs by 120; a product with 2**120 is exact for subnormal numbers too.
    return float_of(sign | bits_of(float_of(magnitude << 20) * 1329227995784915872903807060280344576.0f));
  }
};

struct int8 {
  static const int BLOCK = 256, BITS = 8;
  __device__ static float32 largest() { return 127.0f; }
  __device__ static uint32 code(float32 scaled) { return (uint32)(int32)rintf(scaled) & 0xff; }
  __device__ static float32 value(uint32 code) { return (float32)(signed char)code; }
};

struct int4 {
  static const int BLOCK = 64, BITS = 4;
  __device__ static float32 largest() { return 7.0f; }
  __device__ static uint32 code(float32 scaled) { return (uint32)((int32)rintf(scaled) + 8); }
  __device__ static float32 value(uint32 code) { return (float32)((int32)(code & 0xf) - 8); }
};

}  // namespace wire

// ---- formats of one rounded number per element ----

template <class Half> struct Encode : Between<float32, Half> {
  static const int AHEAD = 4;

  template <int N> __device__ Items<Half, N> read(uint64 first) const {
    const Items<float32, N> values = load<float32, N>(this->source + first);
    Items<Half, N> result;
#pragma unroll
    for (int i = 0; i < N; ++i) result.item[i] = Type<Half>::narrow(values.item[i]);
    return result;
  }
};

template <class Half, bool ADD> struct Decode : Between<Half, float32> {
  static const int AHEAD = 2;

  template <int N> __device__ Items<float32, N> read(uint64 first) const {
    const Items<Half, N> halves = load<Half, N>(this->source + first);
    Items<float32, N> result;
#pragma unroll
    for (int i = 0; i < N; ++i) result.item[i] = widen(halves.item[i]);
    if (ADD) {
      const Items<float32, N> before = load<float32, N>(this->target + first);
#pragma unroll
      for (int i = 0; i < N; ++i) result.item[i] = before.item[i] + result.item[i];
    }
    return result;
  }
};

// ---- formats with a scale per block: a warp does a block, a lane pairs of neighbouring elements ----

// The bytes of a whole block; the bytes of the codes are whole, and even in number.
template <class Format> struct Row {
  static const int NBYTES = 2 + Format::BLOCK * Format::BITS / 8;
  static const int PAIRS = Format::BLOCK / 64;  // for each lane
};

// Whether pairs of a block's elements can be loaded and stored at once: all of them, if the block is a whole one.
template <class Format> __device__ inline bool paired(const float32* values, uint32 count) {
  return count == Format::BLOCK && (uint64)values % 8 == 0;
}

// Read the lane's pairs of a block that ends at `count`; what is behind it is 0.
template <class Format>
__device__ inline void get_values(const float32* values, uint32 count, Items<float32, 2> (&pairs)[Row<Format>::PAIRS]) {
  const uint32 lane = threadIdx.x % 32;
  if (paired<Format>(values, count)) {
#pragma unroll
    for (int k = 0; k < Row<Format>::PAIRS; ++k) pairs[k] = load<float32, 2>(values + k * 64 + lane * 2);
  } else {
#pragma unroll
    for (int k = 0; k < Row<Format>::PAIRS; ++k) {
      const uint32 i = k * 64 + lane * 2;
      pairs[k].item[0] = i < count ? values[i] : 0.0f;
      pairs[k].item[1] = i + 1 < count ? values[i + 1] : 0.0f;
    }
  }
}

// Write the lane's pairs.
template <class Format>
__device__ inline void put_values(float32* values, uint32 count, const Items<float32, 2> (&pairs)[Row<Format>::PAIRS]) {
  const uint32 lane = threadIdx.x % 32;
  const bool whole = paired<Format>(values, count);
#pragma unroll
  for (int k = 0; k < Row<Format>::PAIRS; ++k) {
    const uint32 i = k * 64 + lane * 2;
    if (whole) {
      store<float32, 2>(values + i, pairs[k]);
    } else {
      if (i < count) values[i] = pairs[k].item[0];
      if (i + 1 < count) values[i + 1] = pairs[k].item[1];
    }
  }
}

__device__ inline uint32 larger_of(uint32 a, uint32 b) { return a < b ? b : a; }

// The bits of the block's largest magnitude, for all lanes. As integers, magnitudes have the same order, NaN last.
template <int PAIRS> __device__ inline uint32 largest_bits(const Items<float32, 2> (&pairs)[PAIRS]) {
  uint32 largest = 0;
#pragma unroll
  for (int k = 0; k < PAIRS; ++k) {
    largest = larger_of(largest, bits_of(pairs[k].item[0]) & 0x7fffffff);
    largest = larger_of(largest, bits_of(pairs[k].item[1]) & 0x7fffffff);
  }
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    largest = larger_of(largest, __shfl_xor_sync(0xffffffffu, largest, distance));
  }
  return largest;
}

// The scale of a block: never below the smallest normal number, NaN if there is a NaN or an infinity in the block.
__device__ inline bfloat16 scale_of(uint32 largest_bits, float32 largest) {
  bfloat16 scale;
  scale.bits = 0x7fc0;
  if (largest_bits >= 0x7f800000) return scale;
  const float32 exact = float_of(largest_bits) / largest, smallest = float_of(0x00800000);
  return narrow_bfloat16(exact < smallest ? smallest : exact);
}

// Write the codes of elements i and i + 1; an element behind the end has code 0, and no byte of its own.
template <class Format>
__device__ inline void put_pair(uint8* codes, uint32 i, uint32 count, uint32 first, uint32 second) {
  if (i >= count) return;
  if (i + 1 >= count) second = 0;
  if (Format::BITS == 4)
    codes[i / 2] = (uint8)(first | second << 4);
  else if (i + 1 < count)
    *reinterpret_cast<uint16*>(codes + i) = (uint16)(first | second << 8);
  else
    codes[i] = (uint8)first;
}

// Return the codes that `put_pair` has written, the first in the lower byte; 0 behind the end.
template <class Format> __device__ inline uint32 get_pair(const uint8* codes, uint32 i, uint32 count) {
  if (i >= count) return 0;
  if (Format::BITS == 4) return (codes[i / 2] & 0xf) | (uint32)(codes[i / 2] >> 4) << 8;
  return i + 1 < count ? *reinterpret_cast<const uint16*>(codes + i) : codes[i];
}

template <class Format> __device__ inline void encode_row(const float32* values, uint8* row, uint32 count) {
  const uint32 lane = threadIdx.x % 32;
  Items<float32, 2> pairs[Row<Format>::PAIRS];
  get_values<Format>(values, count, pairs);
  const bfloat16 scale = scale_of(largest_bits(pairs), Format::largest());
  const float32 unit = widen(scale);
  const bool broken = unit != unit;
  if (lane == 0) *reinterpret_cast<uint16*>(row) = scale.bits;
#pragma unroll
  for (int k = 0; k < Row<Format>::PAIRS; ++k) {
    const uint32 first = Format::code(broken ? 0.0f : pairs[k].item[0] / unit);
    const uint32 second = Format::code(broken ? 0.0f : pairs[k].item[1] / unit);
    put_pair<Format>(row + 2, k * 64 + lane * 2, count, first, second);
  }
}

template <class Format, bool ADD>
__device__ inline void decode_row(const uint8* row, float32* values, uint32 count) {
  bfloat16 scale;
  scale.bits = *reinterpret_cast<const uint16*>(row);
  const float32 unit = widen(scale);
  Items<float32, 2> pairs[Row<Format>::PAIRS], before[Row<Format>::PAIRS];
  if (ADD) get_values<Format>(values, count, before);
#pragma unroll
  for (int k = 0; k < Row<Format>::PAIRS; ++k) {
    const uint32 codes = get_pair<Format>(row + 2, k * 64 + threadIdx.x % 32 * 2, count);
    pairs[k].item[0] = Format::value(codes & 0xff) * unit;
    pairs[k].item[1] = Format::value(codes >> 8) * unit;
    if (ADD) {
      pairs[k].item[0] = before[k].item[0] + pairs[k].item[0];
      pairs[k].item[1] = before[k].item[1] + pairs[k].item[1];
    }
  }
  put_values<Format>(values, count, pairs);
}

// ---- the kernels ----
//
// encode_half, encode_scaled: write the encoding of `count` float32 at `source` to `target`.
// decode_half, decode_scaled: overwrite `count` float32 at `target` with what the bytes at `source` stand for, or, with
//   ADD, add that to them, with one rounding each. A NaN arrives as some NaN.
//
// Values are aligned to 4 bytes, encoded arrays to 2. Accesses for halves take 16 bytes where both are aligned so.
// What is read and what is written does not overlap.
// Grid and block: any for the halves; for scaled formats the block is a multiple of 32, and warps take blocks of the
// format in turn. Every element and every byte is written by one thread: blocks do not depend on each other.

template <class Format>
__global__ void __launch_bounds__(512) encode_half(uint64 source, uint64 target, uint64 count) {
  typedef typename Format::Half Half;
  Encode<Half> body;
  body.source = at<float32>(source);
  body.target = at<Half>(target);
  for_each<Half, 8>(body, target, 0, count, grid_thread(), grid_threads());
}

template <class Format, bool ADD>
__global__ void __launch_bounds__(512) decode_half(uint64 source, uint64 target, uint64 count) {
  typedef typename Format::Half Half;
  Decode<Half, ADD> body;
  body.source = at<Half>(source);
  body.target = at<float32>(target);
  for_each<Half, 8>(body, source, 0, count, grid_thread(), grid_threads());
}

// The elements of the format's block `number` of an array of `count`.
template <class Format> __device__ inline uint32 row_count(uint64 number, uint64 count) {
  const uint64 left = count - number * Format::BLOCK;
  return left < Format::BLOCK ? (uint32)left : (uint32)Format::BLOCK;
}

template <class Format>
__global__ void __launch_bounds__(512) encode_scaled(uint64 source, uint64 target, uint64 count) {
  const uint64 rows = (count + Format::BLOCK - 1) / Format::BLOCK;
  for (uint64 row = grid_thread() / 32; row < rows; row += grid_threads() / 32) {
    encode_row<Format>(at<float32>(source) + row * Format::BLOCK, at<uint8>(target) + row * Row<Format>::NBYTES,
                       row_count<Format>(row, count));
  }
}

template <class Format, bool ADD>
__global__ void __launch_bounds__(512) decode_scaled(uint64 source, uint64 target, uint64 count) {
  const uint64 rows = (count + Format::BLOCK - 1) / Format::BLOCK;
  for (uint64 row = grid_thread() / 32; row < rows; row += grid_threads() / 32) {
    decode_row<Format, ADD>(at<uint8>(source) + row * Row<Format>::NBYTES, at<float32>(target) + row * Format::BLOCK,
                            row_count<Format>(row, count));
  }
}

}  // namespace ringreduce
