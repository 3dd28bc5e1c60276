// The Ampere family's epilogue: bias and activation in fp32, rounding, and 16-byte stores.
//
// The tensor cores leave two neighbouring elements of a row in a thread. The four threads that share a row
// exchange them, so that each holds eight: 16-byte stores of 64 contiguous bytes a row, straight from the
// registers. Shared memory stays with the main loop, which is already filling it for the next tile.
#pragma once
#include "ampere_mainloop.cuh"
#include "tile_program.cuh"

namespace fodit::ampere {

// Before: thread q of a quad holds elements 2 q, 2 q + 1 of four groups of eight, group i in v[i].
// After: it holds the whole group q, in order. A 4 x 4 transposition in two butterfly steps.
__device__ __forceinline__ void transpose_quad(uint32_t (&v)[4]) {
  const int q = threadIdx.x % 4;
#pragma unroll
  for (int d = 1; d <= 2; d *= 2) {
    const bool upper = q & d;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & d) continue;
      const uint32_t received = __shfl_xor_sync(0xffffffff, upper ? v[i] : v[i + d], d);
      v[i] = upper ? received : v[i];
      v[i + d] = upper ? v[i + d] : received;
    }
  }
}

// Eight neighbouring elements at once, or the first `count` of them one by one.
__device__ __forceinline__ void store_eight(void* to, const uint32_t (&v)[4], bool whole, int count) {
  if (whole) {
    *static_cast<uint4*>(to) = make_uint4(v[0], v[1], v[2], v[3]);
    return;
  }
#pragma unroll
  for (int i = 0; i < 8; ++i)
    if (i < count) static_cast<uint16_t*>(to)[i] = static_cast<uint16_t>(v[i / 2] >> (i % 2 * 16));
}

// Stores one tile's accumulators, nothing beyond its rows x cols.
template <class S>
__device__ void store_tile(const FoditGemm& g, const FoditTile& tile, int warp_row, int warp_col,
                           float (&acc)[S::MmasM][S::MmasN][4]) {
  using Element = typename S::Element;
  const int lane = threadIdx.x % 32, quad = lane / 4, q = lane % 4;
  Element* out = static_cast<Element*>(g.out) + tile.offset;
  const Element* bias = static_cast<const Element*>(g.bias[tile.weight]);
  const bool aligned = reinterpret_cast<uintptr_t>(out) % 16 == 0 && tile.ld % 8 == 0;
  const Addends addends = {g.addend, g.addend_stride, g.addends};
  const bool fits = loads_fit(addends);

#pragma unroll
  for (int n = 0; n < S::MmasN; n += 4) {  // 32 columns
    const int first = warp_col + n * 8;
    float b[4][2] = {};
    if (bias != nullptr) {
#pragma unroll
      for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const int col = first + i * 8 + q * 2 + j;
          if (col < tile.cols) b[i][j] = to_float(bias[tile.n0 + col]);
        }
    }
    const int col = first + q * 8;  // this thread's eight columns once the quad has exchanged
#pragma unroll
    for (int m = 0; m < S::MmasM; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = warp_row + m * 16 + half * 8 + quad;
        uint32_t v[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float x = acc[m][n + i][half * 2] + b[i][0], y = acc[m][n + i][half * 2 + 1] + b[i][1];
          if (g.act == FODIT_ACT_GELU_TANH) x = gelu_tanh(x), y = gelu_tanh(y);
          v[i] = pack2<Element>(x, y);
        }
        transpose_quad(v);
        if (row < tile.rows && col < tile.cols) {
          const int64_t at = int64_t(row) * tile.ld + col;
          const bool whole = aligned && col + 8 <= tile.cols;
          if (g.addends > 0) {
            const uint4 x = load_addend(addends, 0, tile.offset + at, whole && fits, tile.cols - col);
            if (g.addends == 1) {
              add_one<Element>(v, x);
            } else {
              add_all<Element>(v, x, addends, tile.offset + at, whole && fits, tile.cols - col);
            }
          }
          store_eight(out + at, v, whole, tile.cols - col);
        }
      }
  }
}

}  // namespace fodit::ampere
