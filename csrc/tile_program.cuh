// Device side of the tile program, shared by both kernel families: reading a tile, raising its signal,
// and the element-wise tail of the product.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "fodit.h"

namespace fodit {

static_assert(sizeof(FoditTile) == 48, "the tile program is a table of twelve int32 per tile");

__device__ __forceinline__ FoditTile load_tile(const FoditTile* program, int index) {
  FoditTile tile;
  const int4* words = reinterpret_cast<const int4*>(program + index);
#pragma unroll
  for (int i = 0; i < 3; ++i) reinterpret_cast<int4*>(&tile)[i] = __ldg(words + i);
  return tile;
}

// Raises the tile's counter. One thread calls this after a barrier with every thread that stored a part of the
// tile: the barrier orders their stores before this thread's fence, the fence (with the addition after it, a release
// add) makes them visible to the device, and so to whatever another stream starts once it sees the counter.
__device__ __forceinline__ void raise_signal(int32_t* counters, int slab) {
  if (counters == nullptr || slab < 0) return;
  asm volatile("fence.acq_rel.gpu;" ::: "memory");
  asm volatile("red.relaxed.gpu.global.add.s32 [%0], 1;" ::"l"(counters + slab) : "memory");
}

// 0.5 x (1 + tanh(u)), u = sqrt(2/pi) (x + 0.044715 x^3), written as x * sigmoid(2u): tanh.approx would lose
// the small values left of zero to cancellation.
__device__ __forceinline__ float gelu_tanh(float x) {
  const float minus_2u_log2e = x * (-2.302208198f - 0.1029432396f * x * x);
  float e;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(minus_2u_log2e));
  return __fdividef(x, 1.0f + e);
}

// The same for four values with one reciprocal, since these two functions, not the rest, take the time. Bounding the
// exponents keeps the product of the four denominators finite; it turns 1e-9 x and less into that.
__device__ __forceinline__ void gelu_tanh4(float (&x)[4]) {
  float d[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float minus_2u_log2e = x[i] * (-2.302208198f - 0.1029432396f * x[i] * x[i]);
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(d[i]) : "f"(fminf(minus_2u_log2e, 30.0f)));
    d[i] += 1.0f;
  }
  const float d01 = d[0] * d[1], d23 = d[2] * d[3];
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(d01 * d23));
  const float r01 = r * d23, r23 = r * d01;
  x[0] *= r01 * d[1];
  x[1] *= r01 * d[0];
  x[2] *= r23 * d[3];
  x[3] *= r23 * d[2];
}

__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }

// Two neighbouring outputs, rounded to nearest even and packed as they lie in memory.
template <class Element>
__device__ __forceinline__ uint32_t pack2(float low, float high);

template <>
__device__ __forceinline__ uint32_t pack2<__nv_bfloat16>(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<const uint32_t&>(pair);
}

template <>
__device__ __forceinline__ uint32_t pack2<__half>(float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  return reinterpret_cast<const uint32_t&>(pair);
}

// And back.
template <class Element>
__device__ __forceinline__ float2 unpack2(uint32_t two);

template <>
__device__ __forceinline__ float2 unpack2<__nv_bfloat16>(uint32_t two) {
  return __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(two));
}

template <>
__device__ __forceinline__ float2 unpack2<__half>(uint32_t two) {
  return __half22float2(reinterpret_cast<const __half2&>(two));
}

// Sums of two neighbouring elements each, rounded.
template <class Element>
__device__ __forceinline__ uint32_t add2(uint32_t x, uint32_t y);

template <>
__device__ __forceinline__ uint32_t add2<__nv_bfloat16>(uint32_t x, uint32_t y) {
  const __nv_bfloat162 sum =
      __hadd2(reinterpret_cast<const __nv_bfloat162&>(x), reinterpret_cast<const __nv_bfloat162&>(y));
  return reinterpret_cast<const uint32_t&>(sum);
}

template <>
__device__ __forceinline__ uint32_t add2<__half>(uint32_t x, uint32_t y) {
  const __half2 sum = __hadd2(reinterpret_cast<const __half2&>(x), reinterpret_cast<const __half2&>(y));
  return reinterpret_cast<const uint32_t&>(sum);
}

// The matrices that are added to what is stored; see FoditGemm.
struct Addends {
  const void* first;
  int64_t stride;
  int count;
};

// Whether 16-byte loads fit where 16-byte stores do.
__device__ __forceinline__ bool loads_fit(const Addends& addends) {
  return (reinterpret_cast<uintptr_t>(addends.first) / 2 | addends.stride) % 8 == 0;
}

// Eight elements, or the first `count` of them one by one, the others zero.
__device__ __forceinline__ uint4 load_eight(const uint16_t* from, bool whole, int count) {
  if (whole) return __ldcs(reinterpret_cast<const uint4*>(from));
  uint32_t two[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t low = 2 * i < count ? from[2 * i] : 0, high = 2 * i + 1 < count ? from[2 * i + 1] : 0;
    two[i] = low | high << 16;
  }
  return make_uint4(two[0], two[1], two[2], two[3]);
}

template <class Element>
__device__ __forceinline__ void add_wide(float2 (&sums)[4], const uint4& eight) {
  const uint32_t x[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 two = unpack2<Element>(x[i]);
    sums[i].x += two.x, sums[i].y += two.y;
  }
}

// What matrix `index` has for eight neighbouring elements; only the first `count` of them exist. `whole`: there are
// eight, and 16-byte loads fit.
__device__ __forceinline__ uint4 load_addend(const Addends& addends, int index, int64_t offset, bool whole, int count) {
  return load_eight(static_cast<const uint16_t*>(addends.first) + index * addends.stride + offset, whole, count);
}

// Adds to eight elements what the only matrix has there.
template <class Element>
__device__ __forceinline__ void add_one(uint32_t (&v)[4], const uint4& x) {
  v[0] = add2<Element>(v[0], x.x), v[1] = add2<Element>(v[1], x.y);
  v[2] = add2<Element>(v[2], x.z), v[3] = add2<Element>(v[3], x.w);
}

// Adds to eight elements what every matrix has there, `x` of the first one, and rounds the sum once; the rest as for
// `load_addend`.
template <class Element>
__device__ __forceinline__ void add_all(uint32_t (&v)[4], const uint4& x, const Addends& addends, int64_t offset,
                                        bool whole, int count) {
  float2 sums[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) sums[i] = unpack2<Element>(v[i]);
  add_wide<Element>(sums, x);
#pragma unroll 1
  for (int i = 1; i < addends.count; i += 2) {  // two on their way at a time
    const uint4 one = load_addend(addends, i, offset, whole, count);
    const bool another = i + 1 < addends.count;
    const uint4 next = another ? load_addend(addends, i + 1, offset, whole, count) : make_uint4(0, 0, 0, 0);
    add_wide<Element>(sums, one);
    add_wide<Element>(sums, next);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) v[i] = pack2<Element>(sums[i].x, sums[i].y);
}

}  // namespace fodit
