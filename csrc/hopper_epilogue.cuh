// The Hopper family's epilogue: from accumulators to rounded registers, from there to memory.
#pragma once
#include <cute/arch/copy_sm90.hpp>

#include "hopper_config.cuh"

namespace fodit {
namespace {

// Adds the bias, activates and rounds: acc[2i], acc[2i + 1] are neighbours in a row and become packed[i].
template <class C, int Act, class Accumulators>
__device__ __forceinline__ void pack_tile(uint32_t (&packed)[C::Packed], const Accumulators& acc,
                                          const float* bias) {
  const int column = threadIdx.x % 4 * 2;
#pragma unroll
  for (int i = 0; i < C::Packed; i += 2) {
    // packed[i] and packed[i + 1] lie in the same eight columns, in the upper and the lower eight rows.
    const float2 b = *reinterpret_cast<const float2*>(bias + i % (C::TileN / 4) * 4 + column);
    float x[4] = {acc[2 * i] + b.x, acc[2 * i + 1] + b.y, acc[2 * i + 2] + b.x, acc[2 * i + 3] + b.y};
    if (Act == FODIT_ACT_GELU_TANH) gelu_tanh4(x);
    packed[i] = pack2<typename C::Element>(x[0], x[1]);
    packed[i + 1] = pack2<typename C::Element>(x[2], x[3]);
  }
}

// Stores the first `count` of eight elements where 16-byte stores do not fit; `pairs`: 4-byte stores do.
__device__ __forceinline__ void store_some(uint16_t* to, uint4 v, int count, bool pairs) {
  const uint32_t two[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (pairs && 2 * i + 1 < count) {
      reinterpret_cast<uint32_t*>(to)[i] = two[i];
    } else {
      if (2 * i < count) to[2 * i] = uint16_t(two[i]);
      if (2 * i + 1 < count) to[2 * i + 1] = uint16_t(two[i] >> 16);
    }
  }
}

// Stores part `Part` of a tile: of each of the warpgroup's warps, 8 rows of 64 columns. They pass through shared
// memory of the warp's own, so that whole 128-byte lines leave.
template <class C, int Part>
__device__ __forceinline__ void store_part(const uint32_t (&packed)[C::Packed], const FoditTile& tile,
                                           uint8_t* staging, void* out, int group) {
  // wgmma leaves a warp 16 rows; their upper and lower eight alternate in `packed`.
  constexpr int kSquare = Part / 2, kLower = Part % 2;
  constexpr int kBlock = kSquare / (C::TileN / 64), kColumn = kSquare % (C::TileN / 64) * 64;
  const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;

  // A row of the staging area is eight chunks of 16 bytes, permuted by the row's number against bank conflicts.
  __syncwarp();
#pragma unroll
  for (int i = 0; i < 8; i += 4) {
    const uint32_t* v = packed + kSquare * 16 + i * 2 + kLower;
    uint8_t* to = staging + lane % 8 * 128 + ((i + lane / 8) ^ lane % 8) * 16;
    cute::SM90_U32x4_STSM_N::copy(v[0], v[2], v[4], v[6], *reinterpret_cast<cute::uint128_t*>(to));
  }
  __syncwarp();

  const int row = lane / 8, chunk = lane % 8, column = kColumn + chunk * 8;
  uint4 v[2];
#pragma unroll
  for (int i = 0; i < 8; i += 4) {
    v[i / 4] = *reinterpret_cast<const uint4*>(staging + (i + row) * 128 + (chunk ^ (i + row)) * 16);
  }

  const int64_t ld = tile.ld, offset = tile.offset;
  const int misaligned = (reinterpret_cast<uintptr_t>(out) / 2 | offset | ld) & 7;
  const int m = (kBlock * kConsumers + group) * 64 + warp * 16 + kLower * 8 + row;
  const int rows = column < tile.cols ? tile.rows - m : 0;
  uint16_t* to = static_cast<uint16_t*>(out) + offset + m * ld + column;
  if (misaligned == 0 && tile.cols % 8 == 0) {
#pragma unroll
    for (int i = 0; i < 8; i += 4) {
      if (i < rows) *reinterpret_cast<uint4*>(to + i * ld) = v[i / 4];
    }
  } else {
#pragma unroll
    for (int i = 0; i < 8; i += 4) {
      if (i < rows) store_some(to + i * ld, v[i / 4], tile.cols - column, misaligned % 2 == 0);
    }
  }
}

}  // namespace
}  // namespace fodit
