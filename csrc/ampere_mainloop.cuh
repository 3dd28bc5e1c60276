// The Ampere family's main loop: global memory -> shared memory (cp.async, a ring of stages) -> registers
// (ldmatrix) -> tensor cores (mma.sync m16n8k16, fp32 accumulation).
//
// A block computes many tiles one after another. Its loader does not stop at the border between two tiles:
// the first K-blocks of the next tile are on their way while the epilogue of this one runs.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <limits.h>
#include <stdint.h>

#include "tile_program.cuh"

namespace fodit::ampere {

// A block's tile is TileM x TileN, a warp's part of it WarpM x WarpN, in steps of TileK along K.
template <class Element_, int TileM_, int TileN_, int TileK_, int WarpM_, int WarpN_, int Stages_>
struct Shape {
  using Element = Element_;
  static constexpr int TileM = TileM_, TileN = TileN_, TileK = TileK_;
  static constexpr int WarpM = WarpM_, WarpN = WarpN_, Stages = Stages_;
  static constexpr int WarpsM = TileM / WarpM, WarpsN = TileN / WarpN;
  static constexpr int Threads = 32 * WarpsM * WarpsN;

  static constexpr int RowBytes = TileK * 2;                   // one row of A or W within a stage
  static constexpr int StageBytes = (TileM + TileN) * RowBytes;  // TileM rows of A, then TileN rows of W
  static constexpr int SharedBytes = Stages * StageBytes;

  static constexpr int Chunks = TileK / 8;                 // 16-byte chunks in a row
  static constexpr int RowsPerPass = Threads / Chunks;     // rows the block's threads copy at once
  static constexpr int PassesA = TileM / RowsPerPass;
  static constexpr int Passes = (TileM + TileN) / RowsPerPass;

  static constexpr int Steps = TileK / 16;                 // mma steps in a K-block
  static constexpr int MmasM = WarpM / 16, MmasN = WarpN / 8;

  static_assert(TileK == 32 || TileK == 64, "the swizzle below knows rows of 64 and 128 bytes");
  static_assert(TileM % RowsPerPass == 0 && TileN % RowsPerPass == 0 && RowsPerPass % 8 == 0, "");
  static_assert(TileM % WarpM == 0 && TileN % WarpN == 0 && WarpM % 16 == 0 && WarpN % 32 == 0, "");
  static_assert(Stages >= 2, "");

  // Where a row's chunks lie: permuted so that the 8 rows of an 8x8 matrix, and any 8 neighbouring threads of
  // a copy, touch all 32 banks once. Depends on row % 8 alone.
  static __device__ int swizzle(int row) { return TileK == 64 ? row & 7 : (row >> 1) & 3; }
};

// 16 bytes global -> shared, through L2 only. Where `inside` is false nothing is read and zeros are written.
__device__ __forceinline__ void copy_async(uint32_t to, const void* from, bool inside) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;\n" ::"r"(to), "l"(from), "r"(inside ? 16 : 0)
               : "memory");
}

__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;\n" ::: "memory"); }

template <int Pending>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(Pending) : "memory");
}

// Four 8x8 matrices of 16-bit elements; lane i names the 16-byte row i % 8 of matrix i / 8.
__device__ __forceinline__ void load_matrices(uint32_t (&r)[4], uint32_t from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(from)
               : "memory");
}

// c[16 x 8] += a[16 x 16] @ b[8 x 16].T
template <class Element>
__device__ __forceinline__ void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);

template <>
__device__ __forceinline__ void mma<__nv_bfloat16>(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
               "{%0, %1, %2, %3};\n"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <>
__device__ __forceinline__ void mma<__half>(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
               "{%0, %1, %2, %3};\n"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Brings the K-blocks of the block's tiles into shared memory, one after another in program order.
//
// Rows past the tile's `rows` (`cols`) repeat its last one: they are read from valid memory and only reach
// elements of the product that are never stored. Past the end of K, and past the last tile, zeros are copied.
template <class S>
struct Loader {
  const FoditGemm& g;
  const int row, column;  // this thread's row in a pass, its first element of a K-block
  const uint32_t target;  // its place in a stage, bytes
  int tile;               // whose K-blocks are being loaded
  int left;               // K-blocks of it still to load
  int k_left;             // elements along K from the next K-block on
  const char *a, *w;      // the next K-block: the tile's first row, this thread's column
  uint32_t lda, ldw;      // bytes; the host has made sure that a tile spans less than 4 GiB
  int last_row, last_col;
  FoditTile next;         // read a whole tile ahead, so that nobody waits for it

  __device__ explicit Loader(const FoditGemm& gemm)
      : g(gemm),
        row(threadIdx.x / S::Chunks),
        column(threadIdx.x % S::Chunks * 8),
        target(row * S::RowBytes + ((threadIdx.x % S::Chunks) ^ S::swizzle(row)) * 16),
        tile(blockIdx.x),
        next(load_tile(gemm.program, blockIdx.x)) {
    enter_tile();
  }

  __device__ void enter_tile() {
    left = (g.k + S::TileK - 1) / S::TileK;
    k_left = g.k;
    lda = g.lda * 2;
    ldw = g.ldw[next.weight] * 2;
    last_row = next.rows - 1;
    last_col = next.cols - 1;
    a = static_cast<const char*>(g.a) + uint64_t(next.m0) * lda + column * 2;
    w = static_cast<const char*>(g.w[next.weight]) + uint64_t(next.n0) * ldw + column * 2;
    if (tile + int(gridDim.x) < g.tiles) next = load_tile(g.program, tile + gridDim.x);
  }

  // Starts passes [first, last) of the next K-block's copies into `stage`.
  __device__ __forceinline__ void copy(uint32_t stage, int first, int last) const {
    const bool inside = column < k_left;
#pragma unroll
    for (int pass = first; pass < last; ++pass) {
      const bool is_a = pass < S::PassesA;
      const int r = min(row + (is_a ? pass : pass - S::PassesA) * S::RowsPerPass, is_a ? last_row : last_col);
      const char* from = (is_a ? a : w) + uint32_t(r) * (is_a ? lda : ldw);
      copy_async(stage + target + pass * S::RowsPerPass * S::RowBytes, from, inside);
    }
  }

  // On to the next K-block, of the same tile.
  __device__ __forceinline__ void advance() {
    a += S::RowBytes;
    w += S::RowBytes;
    k_left -= S::TileK;
  }

  // Accounts for `blocks` K-blocks, and goes on to the next tile after this one's last.
  __device__ void loaded(int blocks) {
    left -= blocks;
    if (left > 0) return;
    tile += gridDim.x;
    if (tile < g.tiles) {
      enter_tile();
    } else {
      left = INT_MAX;
      k_left = 0;
    }
  }
};

// One warp's operands of one mma step.
template <class S>
struct Fragment {
  uint32_t a[S::MmasM][4];
  uint32_t b[S::MmasN / 2][4];  // two 8-column operands each

  // `a_lane` and `b_lane`: lane addresses within a stage, from `lane_address`.
  __device__ __forceinline__ void load(uint32_t stage, int step, uint32_t a_lane, uint32_t b_lane) {
#pragma unroll
    for (int m = 0; m < S::MmasM; ++m) load_matrices(a[m], stage + (a_lane ^ (step * 32)) + m * 16 * S::RowBytes);
#pragma unroll
    for (int n = 0; n < S::MmasN / 2; ++n)
      load_matrices(b[n], stage + (b_lane ^ (step * 32)) + n * 16 * S::RowBytes);
  }

  // Row `r` (from a multiple of 8 on, counted over A's and W's rows), chunk `half` of step 0. The chunk of step s
  // is 2 s + half, and as 2 s has no bit in common with `half`, its address differs by an exclusive or.
  static __device__ uint32_t lane_address(int r, int half) { return r * S::RowBytes + ((half ^ S::swizzle(r)) * 16); }

  // acc += a @ b.T, with `between(i)` before the i-th of the MmasM x MmasN instructions.
  template <class Between>
  __device__ __forceinline__ void multiply(float (&acc)[S::MmasM][S::MmasN][4], Between between) const {
#pragma unroll
    for (int m = 0; m < S::MmasM; ++m) {
#pragma unroll
      for (int i = 0; i < S::MmasN; ++i) {
        between(m * S::MmasN + i);
        const int n = m % 2 ? S::MmasN - 1 - i : i;  // back and forth: neighbours share an operand
        mma<typename S::Element>(acc[m][n], a[m], b[n / 2][n % 2 * 2], b[n / 2][n % 2 * 2 + 1]);
      }
    }
  }
};

// The ring of stages between the loader and the warps.
template <class S>
struct Mainloop {
  Loader<S> loader;
  Fragment<S> fragment[2];
  const uint32_t shared;        // first byte of the ring
  const uint32_t a_lane, b_lane;
  uint32_t read = 0, write = (S::Stages - 1) * S::StageBytes;

  __device__ Mainloop(const FoditGemm& g, uint32_t ring, int warp_row, int warp_col, int lane)
      : loader(g),
        shared(ring),
        a_lane(Fragment<S>::lane_address(warp_row + lane % 16, lane / 16)),
        b_lane(Fragment<S>::lane_address(S::TileM + warp_col + lane % 8 + lane / 16 * 8, lane / 8 % 2)) {
#pragma unroll
    for (int stage = 0; stage < S::Stages - 1; ++stage) {
      loader.copy(shared + stage * S::StageBytes, 0, S::Passes);
      commit_copies();
      loader.advance();
      loader.loaded(1);
    }
    wait_copies<S::Stages - 2>();
    __syncthreads();
    fragment[0].load(shared, 0, a_lane, b_lane);
  }

  static __device__ __forceinline__ uint32_t after(uint32_t stage) {
    return stage == (S::Stages - 1) * S::StageBytes ? 0 : stage + S::StageBytes;
  }

  // One K-block, while another is loaded. On entry its first fragment is in registers, on return the next one's is.
  __device__ __forceinline__ void k_block(float (&acc)[S::MmasM][S::MmasN][4]) {
    constexpr int Last = S::Steps - 1;
#pragma unroll
    for (int step = 0; step < Last; ++step) {
      fragment[(step + 1) % 2].load(shared + read, step + 1, a_lane, b_lane);
      // The copies are spread among the mma instructions, so that neither waits for the other's issue slots.
      fragment[step % 2].multiply(acc, [&](int i) {
        constexpr int Slots = Last * S::MmasM * S::MmasN;
        const int slot = step * S::MmasM * S::MmasN + i;
        loader.copy(shared + write, S::Passes * slot / Slots, S::Passes * (slot + 1) / Slots);
      });
    }
    commit_copies();

    // The next stage is complete, and everyone has read the last fragment of this one: it may be overwritten.
    wait_copies<S::Stages - 2>();
    __syncthreads();
    read = after(read);
    write = after(write);
    fragment[0].load(shared + read, 0, a_lane, b_lane);
    loader.advance();
    fragment[Last % 2].multiply(acc, [](int) {});
  }
};

}  // namespace fodit::ampere
