// The Hopper family's epilogue: from accumulators to rounded registers, from there to memory.
#pragma once
#include <cute/arch/copy_sm80.hpp>
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
__device__ __forceinline__ void store_some(uint16_t* to, const uint32_t (&two)[4], int count, bool pairs) {
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

// Where a thread's share of part `Part` of a tile lies: eight elements of a row, and those four rows below.
template <class C, int Part>
struct Share {
  // wgmma leaves a warp 16 rows; their upper and lower eight alternate in `packed`.
  static constexpr int kSquare = Part / 2, kLower = Part % 2;
  static constexpr int kBlock = kSquare / (C::TileN / 64), kColumn = kSquare % (C::TileN / 64) * 64;
  int row, chunk, rows, count;  // `rows`: below 1 there is nothing here, up to 4 only the first row; `count` of elements
  int64_t first, ld;
  bool whole, even;  // 16-byte accesses fit; 4-byte accesses do

  __device__ __forceinline__ Share(const FoditTile& tile, const void* out, int group) {
    const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
    row = lane / 8, chunk = lane % 8, ld = tile.ld;
    const int column = kColumn + chunk * 8;
    const int m = (kBlock * kConsumers + group) * 64 + warp * 16 + kLower * 8 + row;
    rows = column < tile.cols ? tile.rows - m : 0;
    count = tile.cols - column;
    first = tile.offset + m * ld + column;
    const int misaligned = (reinterpret_cast<uintptr_t>(out) / 2 | tile.offset | ld) & 7;
    whole = misaligned == 0 && tile.cols % 8 == 0;
    even = misaligned % 2 == 0;
  }
};

// Starts to fetch what the first addend has for part `Part` of a tile. Every thread fetches for itself alone.
template <class C, int Part>
__device__ __forceinline__ void fetch_part(const FoditTile& tile, uint4* fetched, const void* out,
                                           const Addends& addends, int group) {
  const Share<C, Part> share(tile, out, group);
  if (!share.whole || !loads_fit(addends)) return;
  const auto* from = static_cast<const uint16_t*>(addends.first) + share.first;
#pragma unroll
  for (int i = 0; i < 8; i += 4) {
    if (i < share.rows) {
      cute::SM80_CP_ASYNC_CACHEGLOBAL<uint4>::copy(*reinterpret_cast<const uint4*>(from + i * share.ld),
                                                   fetched[i / 4 * 32]);
    }
  }
}

// Stores part `Part` of a tile: of each of the warpgroup's warps, 8 rows of 64 columns. They pass through shared
// memory of the warp's own, so that whole 128-byte lines leave.
template <class C, Adding Adds, int Part>
__device__ __forceinline__ void store_part(const uint32_t (&packed)[C::Packed], const FoditTile& tile,
                                           uint8_t* staging, const uint4* fetched, void* out, const Addends& addends,
                                           int group) {
  const Share<C, Part> share(tile, out, group);
  const int lane = threadIdx.x % 32;

  // A row of the staging area is eight chunks of 16 bytes, permuted by the row's number against bank conflicts.
  __syncwarp();
#pragma unroll
  for (int i = 0; i < 8; i += 4) {
    const uint32_t* v = packed + share.kSquare * 16 + i * 2 + share.kLower;
    uint8_t* to = staging + lane % 8 * 128 + ((i + lane / 8) ^ lane % 8) * 16;
    cute::SM90_U32x4_STSM_N::copy(v[0], v[2], v[4], v[6], *reinterpret_cast<cute::uint128_t*>(to));
  }
  __syncwarp();

  if constexpr (Adds != Adding::None) cute::cp_async_wait<0>();
  const bool fits = share.whole && loads_fit(addends);
  uint16_t* to = static_cast<uint16_t*>(out) + share.first;
#pragma unroll
  for (int i = 0; i < 8; i += 4) {
    const int row = i + share.row;
    const uint4 four = *reinterpret_cast<const uint4*>(staging + row * 128 + (share.chunk ^ row) * 16);
    uint32_t v[4] = {four.x, four.y, four.z, four.w};
    if (i >= share.rows) continue;
    const int64_t below = i * share.ld;
    if constexpr (Adds != Adding::None) {
      const int64_t at = share.first + below;
      const uint4 x = fits ? fetched[i / 4 * 32] : load_addend(addends, 0, at, false, share.count);
      if constexpr (Adds == Adding::One) {
        add_one<typename C::Element>(v, x);
      } else {
        add_all<typename C::Element>(v, x, addends, at, fits, share.count);
      }
    }
    if (share.whole) {
      *reinterpret_cast<uint4*>(to + below) = make_uint4(v[0], v[1], v[2], v[3]);
    } else {
      store_some(to + below, v, share.count, share.even);
    }
  }
}

}  // namespace
}  // namespace fodit
