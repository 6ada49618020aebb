// What all kernels share: the element types with their arithmetic, the reduce operations, 16-byte loads and stores.
//
// No header is needed, so that NVRTC compiles this without the toolkit's files; ringreduce/gpu/kernels.py puts
// this text in place of the #include. Compiled without fused multiply-add, flushing to zero or approximate division, a
// kernel gives the bits that NumPy gives with the same operations. The same text compiles as C++ behind
// tests/host_cuda/host.h, which defines RINGREDUCE_HOST: so results are tested where there is no GPU.
#pragma once

namespace ringreduce {

typedef signed char int8;
typedef short int16;
typedef int int32;
typedef long long int64;
typedef unsigned char uint8;
typedef unsigned short uint16;
typedef unsigned int uint32;
typedef unsigned long long uint64;
typedef float float32;
typedef double float64;

struct float16 { uint16 bits; };
struct bfloat16 { uint16 bits; };  // the upper half of a float32
struct complex64 { float32 real, imag; };
struct complex128 { float64 real, imag; };
struct boolean { uint8 bits; };  // NumPy's bool: 0 or 1; what is read as true may be any other byte

// ---- bits ----

__device__ inline uint32 bits_of(float32 value) {
  union { float32 value; uint32 bits; } both;
  both.value = value;
  return both.bits;
}

__device__ inline float32 float_of(uint32 bits) {
  union { uint32 bits; float32 value; } both;
  both.bits = bits;
  return both.value;
}

__device__ inline float32 widen(bfloat16 value) { return float_of((uint32)value.bits << 16); }

// To nearest even. Rounding would carry a NaN's payload into the exponent; a quiet NaN keeps its sign.
__device__ inline bfloat16 narrow_bfloat16(float32 value) {
  const uint32 bits = bits_of(value), upper = bits >> 16;
  bfloat16 result;
  result.bits = (uint16)(value != value ? upper | 0x40 : (bits + 0x7fff + (upper & 1)) >> 16);
  return result;
}

// Exact. A NaN stays one, with a payload that is up to the processor.
__device__ inline float32 widen(float16 value) {
#ifndef RINGREDUCE_HOST
  float32 result;
  asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(value.bits));
  return result;
#else
  const uint32 sign = (uint32)(value.bits & 0x8000) << 16, magnitude = value.bits & 0x7fff;
  if (magnitude >= 0x7c00) return float_of(sign | 0x7f800000 | (magnitude & 0x3ff) << 13);
  // The exponent's bias differs by 112; a product with 2**112 is exact for subnormal numbers too.
  return float_of(sign | bits_of(float_of(magnitude << 13) * 5192296858534827628530496329220096.0f));
#endif
}

// To nearest even; inf from 65520 on. The conversion of a GPU forgets which NaN it was.
__device__ inline float16 narrow_float16(float32 value) {
  const uint32 sign = bits_of(value) >> 16 & 0x8000, magnitude = bits_of(value) & 0x7fffffff;
  float16 result;
  if (magnitude > 0x7f800000) {
    result.bits = (uint16)(sign | 0x7e00 | (magnitude >> 13 & 0x3ff));
    return result;
  }
#ifndef RINGREDUCE_HOST
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(result.bits) : "f"(value));
#else
  if (magnitude >= 0x477ff000)
    result.bits = (uint16)(sign | 0x7c00);
  else if (magnitude < 0x38800000)  // below 2**-14: 0.5 has the spacing 2**-24, and the sum is rounded to it
    result.bits = (uint16)(sign | (bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f)));
  else
    result.bits = (uint16)(sign | (((magnitude + 0xfff + (magnitude >> 13 & 1)) >> 13) - (112 << 10)));
#endif
  return result;
}

// ---- element types ----
//
// Type<T>::Wide is what elements of T are accumulated in; `widen` and `Type<T>::narrow` go there and back. `add`,
// `multiply`, `divide` and the order `first` (whether a is chosen before b as the smaller, or one of them is NaN and
// that is a) mean what NumPy's ufuncs mean.

template <class T> struct Type;

template <class T> __device__ inline T widen(T value) { return value; }

struct Floats {  // float32 and float64, with halves accumulated in float32
  template <class W> __device__ static W add(W a, W b) { return a + b; }
  template <class W> __device__ static W multiply(W a, W b) { return a * b; }
  template <class W> __device__ static W divide(W a, uint32 size) { return a / (W)size; }
  template <class W> __device__ static bool smaller(W a, W b) { return a <= b || a != a; }
  template <class W> __device__ static bool larger(W a, W b) { return a >= b || a != a; }
};

template <> struct Type<float32> : Floats {
  typedef float32 Wide;
  __device__ static float32 narrow(Wide value) { return value; }
};

template <> struct Type<float64> : Floats {
  typedef float64 Wide;
  __device__ static float64 narrow(Wide value) { return value; }
};

template <> struct Type<float16> : Floats {
  typedef float32 Wide;
  __device__ static float16 narrow(Wide value) { return narrow_float16(value); }
};

template <> struct Type<bfloat16> : Floats {
  typedef float32 Wide;
  __device__ static bfloat16 narrow(Wide value) { return narrow_bfloat16(value); }
};

// Complex numbers are ordered by real, then by imaginary part; one that has a NaN in either counts as NaN.
template <class C, class Part> struct Complex {
  typedef C Wide;
  __device__ static C narrow(C value) { return value; }
  __device__ static C make(Part real, Part imag) {
    C result;
    result.real = real;
    result.imag = imag;
    return result;
  }
  __device__ static C add(C a, C b) { return make(a.real + b.real, a.imag + b.imag); }
  __device__ static C multiply(C a, C b) {
    return make(a.real * b.real - a.imag * b.imag, a.real * b.imag + a.imag * b.real);
  }
  __device__ static C divide(C a, uint32 size) { return make(a.real / (Part)size, a.imag / (Part)size); }
  __device__ static bool nan(C a) { return a.real != a.real || a.imag != a.imag; }
  __device__ static bool before(C a, C b) { return a.real < b.real || (a.real == b.real && a.imag <= b.imag); }
  __device__ static bool smaller(C a, C b) { return nan(a) || (!nan(b) && before(a, b)); }
  __device__ static bool larger(C a, C b) { return nan(a) || (!nan(b) && before(b, a)); }
};

template <> struct Type<complex64> : Complex<complex64, float32> {};
template <> struct Type<complex128> : Complex<complex128, float64> {};

// Integers wrap around: U is unsigned, of at least 32 bits, where C++ says that they do.
template <class T, class U> struct Integers {
  typedef T Wide;
  __device__ static T narrow(T value) { return value; }
  __device__ static T add(T a, T b) { return (T)((U)a + (U)b); }
  __device__ static T multiply(T a, T b) { return (T)((U)a * (U)b); }
  __device__ static bool smaller(T a, T b) { return a <= b; }
  __device__ static bool larger(T a, T b) { return a >= b; }
};

template <> struct Type<int8> : Integers<int8, uint32> {};
template <> struct Type<int16> : Integers<int16, uint32> {};
template <> struct Type<int32> : Integers<int32, uint32> {};
template <> struct Type<int64> : Integers<int64, uint64> {};
template <> struct Type<uint8> : Integers<uint8, uint32> {};
template <> struct Type<uint16> : Integers<uint16, uint32> {};
template <> struct Type<uint32> : Integers<uint32, uint32> {};
template <> struct Type<uint64> : Integers<uint64, uint64> {};

template <> struct Type<boolean> {  // any and all
  typedef boolean Wide;
  __device__ static boolean make(bool value) {
    boolean result;
    result.bits = value;
    return result;
  }
  __device__ static boolean narrow(boolean value) { return value; }
  __device__ static boolean add(boolean a, boolean b) { return make(a.bits || b.bits); }
  __device__ static boolean multiply(boolean a, boolean b) { return make(a.bits && b.bits); }
  __device__ static bool smaller(boolean a, boolean) { return !a.bits; }
  __device__ static bool larger(boolean a, boolean) { return a.bits; }
};

// ---- reduce operations ----
//
// `fold` combines two elements, `finish` ends a reduction over `size` ranks.

struct sum {
  template <class T, class W> __device__ static W fold(W a, W b) { return Type<T>::add(a, b); }
  template <class T, class W> __device__ static W finish(W total, uint32) { return total; }
};

struct average {  // of floats and complex numbers; others have no `divide`
  template <class T, class W> __device__ static W fold(W a, W b) { return Type<T>::add(a, b); }
  template <class T, class W> __device__ static W finish(W total, uint32 size) { return Type<T>::divide(total, size); }
};

struct product {
  template <class T, class W> __device__ static W fold(W a, W b) { return Type<T>::multiply(a, b); }
  template <class T, class W> __device__ static W finish(W total, uint32) { return total; }
};

struct min {
  template <class T, class W> __device__ static W fold(W a, W b) { return Type<T>::smaller(a, b) ? a : b; }
  template <class T, class W> __device__ static W finish(W total, uint32) { return total; }
};

struct max {
  template <class T, class W> __device__ static W fold(W a, W b) { return Type<T>::larger(a, b) ? a : b; }
  template <class T, class W> __device__ static W finish(W total, uint32) { return total; }
};

// ---- loads and stores ----

template <class T> __device__ inline T* at(uint64 address) { return reinterpret_cast<T*>(address); }

template <class T, int N> struct Items { T item[N]; };

// The widest access that NBYTES are a multiple of, and how many of them that takes.
template <int NBYTES> struct Words {
  static const int WIDTH = NBYTES % 16 == 0 ? 16 : NBYTES % 8 == 0 ? 8 : NBYTES % 4 == 0 ? 4 : NBYTES % 2 == 0 ? 2 : 1;
  static const int COUNT = NBYTES / WIDTH;
};
template <int WIDTH> struct Word;
template <> struct Word<16> { typedef uint4 type; };
template <> struct Word<8> { typedef uint2 type; };
template <> struct Word<4> { typedef uint32 type; };
template <> struct Word<2> { typedef uint16 type; };
template <> struct Word<1> { typedef uint8 type; };

// Read N elements at once, from an address that is a multiple of their widest access; a single one from any.
template <class T, int N> __device__ inline Items<T, N> load(const T* source) {
  typedef Words<N * sizeof(T)> W;
  typedef typename Word<W::WIDTH>::type Access;
  union { Access words[W::COUNT]; Items<T, N> items; } both;
  if (N == 1) {
    both.items.item[0] = *source;
  } else {
#pragma unroll
    for (int k = 0; k < W::COUNT; ++k) both.words[k] = reinterpret_cast<const Access*>(source)[k];
  }
  return both.items;
}

template <class Access> __device__ inline void put(Access* target, const Access& words) { *target = words; }

#ifndef RINGREDUCE_HOST
// Compilers take some of these to pieces, into four stores.
__device__ inline void put(uint4* target, const uint4& words) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(target)), "r"(words.x),
               "r"(words.y), "r"(words.z), "r"(words.w)
               : "memory");
}
#endif

// Write N elements as `load` reads them.
template <class T, int N> __device__ inline void store(T* target, const Items<T, N>& items) {
  typedef Words<N * sizeof(T)> W;
  typedef typename Word<W::WIDTH>::type Access;
  if (N == 1) {
    *target = items.item[0];
  } else {
    union { Access words[W::COUNT]; Items<T, N> items; } both;
    both.items = items;
#pragma unroll
    for (int k = 0; k < W::COUNT; ++k) put(reinterpret_cast<Access*>(target) + k, both.words[k]);
  }
}

template <class T> __device__ inline bool aligned(const T* address) { return (uint64)address % 16 == 0; }

// Let the body do the elements `begin` to `end`, each once, shared among `nthreads` threads that call this with their
// `thread`: what body.read<N>(i) returns for the N elements from i on goes to body.write<N>(i, ...). A thread reads
// Body::AHEAD groups before it writes them, so that enough bytes are on their way.
//
// Groups have N elements and begin where an array of T whose element 0 is at `lead` is aligned to 16 bytes, if
// body.aligned(i) says that all others are aligned there too; otherwise elements are done one by one. N elements of
// any of the arrays take a multiple of 16 bytes.
template <class T, int N, class Body>
__device__ inline void for_each(const Body& body, uint64 lead, uint64 begin, uint64 end, uint32 thread,
                                uint32 nthreads) {
  const uint64 wanted = (16 - (lead + begin * sizeof(T)) % 16) % 16 / sizeof(T);
  const uint64 first = wanted < end - begin ? begin + wanted : end;
  const uint64 groups = body.aligned(first) ? (end - first) / N : 0, last = first + groups * N;
  uint64 group = thread;
  const uint64 stride = nthreads;
  for (; group + (Body::AHEAD - 1) * stride < groups; group += Body::AHEAD * stride) {
    Items<typename Body::Result, N> results[Body::AHEAD];
#pragma unroll
    for (int k = 0; k < Body::AHEAD; ++k) results[k] = body.template read<N>(first + (group + k * stride) * N);
#pragma unroll
    for (int k = 0; k < Body::AHEAD; ++k) body.template write<N>(first + (group + k * stride) * N, results[k]);
  }
  for (; group < groups; group += nthreads) {
    body.template write<N>(first + group * N, body.template read<N>(first + group * N));
  }
  for (uint64 i = begin + thread; i < first; i += nthreads) body.template write<1>(i, body.template read<1>(i));
  for (uint64 i = last + thread; i < end; i += nthreads) body.template write<1>(i, body.template read<1>(i));
}

__device__ inline uint32 grid_thread() { return blockIdx.x * blockDim.x + threadIdx.x; }
__device__ inline uint32 grid_threads() { return gridDim.x * blockDim.x; }

// An array to another place.
template <class T> struct Move {
  typedef T Result;
  static const int AHEAD = 4;
  const T* source;
  T* target;

  __device__ bool aligned(uint64 i) const {
    return ringreduce::aligned(source + i) && ringreduce::aligned(target + i);
  }
  template <int N> __device__ Items<T, N> read(uint64 first) const { return load<T, N>(source + first); }
  template <int N> __device__ void write(uint64 first, const Items<T, N>& items) const {
    store<T, N>(target + first, items);
  }
};

// The reduction of `nsources` arrays of T into `ntargets` arrays; what it writes of an element depends on no other one.
template <class T, class Op> struct Combine {
  typedef T Result;
  typedef typename Type<T>::Wide Wide;
  static const int AHEAD = 1;  // of each of the sources
  const uint64* sources;
  const uint64* targets;
  uint32 nsources, ntargets, size;

  __device__ bool aligned(uint64 i) const {
    bool all = true;
    for (uint32 k = 0; k < nsources; ++k) all = all && ringreduce::aligned(at<T>(sources[k]) + i);
    for (uint32 k = 0; k < ntargets; ++k) all = all && ringreduce::aligned(at<T>(targets[k]) + i);
    return all;
  }

  template <int N> __device__ Items<T, N> read(uint64 first) const {
    const Items<T, N> items = load<T, N>(at<T>(sources[0]) + first);
    Items<Wide, N> totals;
#pragma unroll
    for (int i = 0; i < N; ++i) totals.item[i] = widen(items.item[i]);
    uint32 k = 1;
    for (; k + 3 <= nsources; k += 3) fold<N, 3>(totals, k, first);
    if (k + 2 <= nsources) fold<N, 2>(totals, k, first);
    if (k + 1 == nsources) fold<N, 1>(totals, k, first);
    Items<T, N> result;
#pragma unroll
    for (int i = 0; i < N; ++i) result.item[i] = Type<T>::narrow(Op::template finish<T>(totals.item[i], size));
    return result;
  }

  // Fold COUNT sources from the k-th on into the totals; all of them are on their way before the first is used.
  template <int N, int COUNT> __device__ void fold(Items<Wide, N>& totals, uint32 k, uint64 first) const {
    const T* from[COUNT];
    Items<T, N> next[COUNT];
#pragma unroll
    for (int j = 0; j < COUNT; ++j) from[j] = at<T>(sources[k + j]) + first;
#pragma unroll
    for (int j = 0; j < COUNT; ++j) next[j] = load<T, N>(from[j]);
#pragma unroll
    for (int j = 0; j < COUNT; ++j) {
#pragma unroll
      for (int i = 0; i < N; ++i) totals.item[i] = Op::template fold<T>(totals.item[i], widen(next[j].item[i]));
    }
  }

  template <int N> __device__ void write(uint64 first, const Items<T, N>& result) const {
    for (uint32 k = 0; k < ntargets; ++k) store<T, N>(at<T>(targets[k]) + first, result);
  }
};

}  // namespace ringreduce
