// The Hopper family (sm_90a): TMA loads, wgmma, one persistent thread block per SM.
//
// Every block has five roles that talk through barriers in shared memory:
//
//   scheduler   draws the next entry of the tile program and hands it to the others through a ring of two slots
//   loader      fills the stages of the main loop by TMA
//   consumers   two warpgroups, each with half of the tile's rows in registers: wgmma, then the epilogue
//   signaler    waits until both have stored their half, then raises the slab's counter
//
// The consumers do not wait for each other. While one is in its epilogue the other has the tensor cores for
// itself, so that after the first tile epilogues run behind main loops. The signaler's fence costs them nothing.
//
// No role ever waits for communication or for another kernel, only for other roles of its own cluster. A launch
// that gets fewer SMs than it asked for, or gets them late, is slower and not stuck.
//
// Two blocks of a cluster take neighbouring entries of the program. If those share their rows of W, each block
// loads one half and multicasts it to both.
#pragma once
#include <climits>

#include <cuda.h>
#include <cuda_runtime.h>

#include <cute/tensor.hpp>
#include <cute/arch/cluster_sm90.hpp>
#include <cute/arch/copy_sm90.hpp>
#include <cute/arch/copy_sm90_desc.hpp>
#include <cute/arch/copy_sm90_tma.hpp>
#include <cute/atom/mma_atom.hpp>
#include <cute/atom/mma_traits_sm90_gmma.hpp>
#include <cutlass/arch/barrier.h>
#include <cutlass/arch/reg_reconfig.h>
#include <cutlass/numeric_types.h>

#include "tile_program.cuh"

namespace fodit {
namespace {

using cutlass::arch::ClusterBarrier;
using cutlass::arch::ClusterTransactionBarrier;

constexpr int kBlockK = 64;       // one row of a stage is 128 bytes, the widest swizzle
constexpr int kConsumers = 2;     // warpgroups
constexpr int kThreads = 128 * (1 + kConsumers);
constexpr int kConsumerWarps = 4 * kConsumers;
constexpr int kSlots = 2;         // tiles in flight between the roles
#ifndef PER
#define PER 1
#endif
constexpr int kStagesPerPart = PER;
#ifdef HALF
constexpr int kPartRows = 8;
#else
constexpr int kPartRows = 16;
#endif
#ifndef STAGGER
#define STAGGER 0
#endif
constexpr int kTileWords = sizeof(FoditTile) / 4;
constexpr int kRowsWord = 2, kWeightWord = 4, kSlabWord = 5;
constexpr int kSlotReaders = kConsumerWarps + 2;  // of one block: consumers, loader, signaler

struct Params {
  CUtensorMap a, w[FODIT_MAX_WEIGHTS];
  const void* bias[FODIT_MAX_WEIGHTS];
  void* out;
  const FoditTile* program;
  int32_t* counters;
  int32_t* ticket;
  int32_t tiles, k_blocks, act;
};

template <class Element_, int TileM_, int TileN_, int Stages_, int Cluster_>
struct Config {
  using Element = Element_;                                              // as in memory
  using MmaElement = std::conditional_t<std::is_same_v<Element, __half>, cutlass::half_t, cutlass::bfloat16_t>;
  static constexpr int TileM = TileM_, TileN = TileN_, Stages = Stages_, Cluster = Cluster_;
  static constexpr int StageBytes = (TileM + TileN) * kBlockK * sizeof(Element);
  static constexpr int BoxW = TileN / Cluster;                           // rows of W in one TMA load
  static constexpr int Packed = TileM * TileN / (256 * kConsumers);      // 4-byte registers of a rounded tile
  static constexpr int Parts = Packed / kPartRows;                              // in which it is stored
  static constexpr auto K = cute::GMMA::Major::K;
  using Mma = decltype(cute::make_tiled_mma(
      cute::GMMA::ss_op_selector<MmaElement, MmaElement, float,
                                 cute::Shape<cute::Int<64>, cute::Int<TileN>, cute::Int<kBlockK>>, K, K>(),
      cute::Layout<cute::Shape<cute::Int<kConsumers>, cute::_1, cute::_1>>{}));
  using Swizzle = cute::GMMA::Layout_K_SW128_Atom<MmaElement>;
  using LayoutA = decltype(cute::tile_to_shape(
      Swizzle{}, cute::Shape<cute::Int<TileM>, cute::Int<kBlockK>, cute::Int<Stages>>{}));
  using LayoutW = decltype(cute::tile_to_shape(
      Swizzle{}, cute::Shape<cute::Int<TileN>, cute::Int<kBlockK>, cute::Int<Stages>>{}));
  static_assert(TileM % (64 * kConsumers) == 0 && TileN % 64 == 0 && TileM <= 256 && TileN <= 256);
};

template <class C>
struct Shared {
  alignas(1024) typename C::MmaElement a[C::Stages][C::TileM * kBlockK];
  alignas(1024) typename C::MmaElement w[C::Stages][C::TileN * kBlockK];
  alignas(16) float bias[kConsumers][2][C::TileN];  // double buffered, so that one barrier a tile is enough
  alignas(128) uint8_t staging[kConsumerWarps][16 * 128];
  alignas(16) FoditTile ring[kSlots][C::Cluster];   // the tiles of the whole cluster, in both blocks
  alignas(8) uint64_t stage_full[C::Stages], stage_free[C::Stages];
  uint64_t slot_full[kSlots], slot_free[kSlots], stored[kSlots];
};

__device__ __forceinline__ uint32_t shared_address(const void* p) { return cute::cast_smem_ptr_to_uint(p); }

__device__ __forceinline__ void wait(const uint64_t* barrier, uint32_t phase) {
  asm volatile(
      "{ .reg .pred done;\n"
      "AGAIN: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra AGAIN; }" ::"r"(shared_address(barrier)), "r"(phase)
      : "memory");
}

__device__ __forceinline__ void arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// At the same barrier of another block of the cluster, or of this one. It orders shared-memory reads alone, which
// have happened by then; release.cluster would make the thread wait for its global stores too.
__device__ __forceinline__ void arrive_at(uint64_t* barrier, uint32_t block) {
  asm volatile(
      "{ .reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote]; }" ::"r"(shared_address(barrier)), "r"(block)
      : "memory");
}

// Walks a ring of N barriers: index, and the parity that its next completed phase will have.
template <int N>
struct Cursor {
  int index = 0;
  uint32_t phase = 0;
  __device__ __forceinline__ void advance() {
    if (++index == N) index = 0, phase ^= 1;
  }
};

// Waits for the next tile of this block; false: the program is at its end.
template <class C>
__device__ __forceinline__ bool next_tile(const Shared<C>& s, Cursor<kSlots> slot) {
  wait(&s.slot_full[slot.index], slot.phase);
  return s.ring[slot.index][0].weight >= 0;
}

// One warp of the cluster's first block. With a ticket, tiles go to whichever cluster is free, in the order of the
// program; without one they are dealt out in turn.
template <class C>
__device__ void run_scheduler(Shared<C>& s, const Params& p) {
  const int lane = threadIdx.x % 32;
  const int clusters = gridDim.x / C::Cluster;
  const int units = (p.tiles + C::Cluster - 1) / C::Cluster;
  int unit = blockIdx.x / C::Cluster - clusters;
  for (Cursor<kSlots> slot;; slot.advance()) {
    wait(&s.slot_free[slot.index], slot.phase ^ 1);
    if (p.ticket != nullptr) {
      if (lane == 0) unit = atomicAdd(p.ticket, 1);
      unit = __shfl_sync(~0u, unit, 0);
      // Every cluster draws exactly one ticket too many: the last of these leaves the counter as it was found.
      if (lane == 0 && unit == units + clusters - 1) *p.ticket = 0;
    } else {
      unit += clusters;
    }

    const bool done = unit >= units;
    int word = 0;
    if (lane < C::Cluster * kTileWords) {
      const int index = unit * C::Cluster + lane / kTileWords, field = lane % kTileWords;
      if (!done) word = reinterpret_cast<const int*>(p.program + min(index, p.tiles - 1))[field];
      if (done && field == kWeightWord) word = -1;
      // An odd program ends on a tile without rows: the cluster's blocks always load in step.
      if (index >= p.tiles && field == kRowsWord) word = 0;
      if (index >= p.tiles && field == kSlabWord) word = -1;
    }
    for (uint32_t block = 0; block < C::Cluster; ++block) {
      if (lane == 0) {
        ClusterTransactionBarrier::arrive_and_expect_tx(&s.slot_full[slot.index], sizeof(s.ring[0]), block, 1);
      }
      if (lane < C::Cluster * kTileWords) {
        const uint32_t to = shared_address(s.ring[slot.index]) + 4 * lane;
        cute::store_shared_remote(word, to, shared_address(&s.slot_full[slot.index]), block);
      }
    }
    if (done) break;
  }
}

// One thread of each block.
template <class C>
__device__ void run_loader(Shared<C>& s, const Params& p, uint32_t rank) {
  constexpr uint64_t kHint = uint64_t(cute::TMA::CacheHintSm90::EVICT_NORMAL);
  Cursor<C::Stages> stage;
  for (Cursor<kSlots> slot; next_tile<C>(s, slot); slot.advance()) {
    const FoditTile& first = s.ring[slot.index][0];
    const FoditTile& mine = s.ring[slot.index][rank];
    const FoditTile& last = s.ring[slot.index][C::Cluster - 1];
    const bool share = first.weight == last.weight && first.n0 == last.n0;
    const int m0 = mine.m0, n0 = mine.n0;
    const CUtensorMap* w_map = &p.w[mine.weight];

    for (int k = 0; k < p.k_blocks * kBlockK; k += kBlockK, stage.advance()) {
      wait(&s.stage_free[stage.index], stage.phase ^ 1);
      uint64_t* full = &s.stage_full[stage.index];
      ClusterTransactionBarrier::arrive_and_expect_tx(full, C::StageBytes);
      cute::SM90_TMA_LOAD_2D::copy(&p.a, full, kHint, s.a[stage.index], k, m0);
      auto* w = s.w[stage.index];
      if (C::Cluster > 1 && share) {
        const int half = rank * C::BoxW;
        cute::SM90_TMA_LOAD_MULTICAST_2D::copy(w_map, full, (1 << C::Cluster) - 1, kHint, w + half * kBlockK, k,
                                               n0 + half);
      } else {
        for (int half = 0; half < C::TileN; half += C::BoxW) {
          cute::SM90_TMA_LOAD_2D::copy(w_map, full, kHint, w + half * kBlockK, k, n0 + half);
        }
      }
    }
    arrive_at(&s.slot_free[slot.index], 0);
  }
}

// One thread of each block.
template <class C>
__device__ void run_signaler(Shared<C>& s, const Params& p, uint32_t rank) {
  for (Cursor<kSlots> slot; next_tile<C>(s, slot); slot.advance()) {
    wait(&s.stored[slot.index], slot.phase);
    raise_signal(p.counters, s.ring[slot.index][rank].slab);
    arrive_at(&s.slot_free[slot.index], 0);
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

// Adds the bias, activates and rounds: acc[2i], acc[2i + 1] are neighbours in a row and become packed[i].
template <class C, int Act, class Accumulators>
__device__ __forceinline__ void pack_tile(uint32_t (&packed)[C::Packed], const Accumulators& acc, const float* bias) {
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

// Stores ROWS rows of 64 columns of each warp. They pass through shared memory of the warp's own, so that whole
// 128-byte lines leave.
template <class C, int Part>
__device__ __forceinline__ void store_part(const uint32_t (&packed)[C::Packed], const FoditTile& tile, uint8_t* staging,
                                           void* out, int group) {
  constexpr int kSquare = Part * kPartRows / 16, kHalf = Part * kPartRows % 16 / 8;
  constexpr int kBlock = kSquare / (C::TileN / 64), kColumn = kSquare % (C::TileN / 64) * 64;
  const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
  // A row of the staging area is eight chunks of 16 bytes, permuted by the row's number against bank conflicts.
  __syncwarp();
#pragma unroll
  for (int i = 0; i < kPartRows / 4; ++i) {
    const uint32_t* v = packed + kSquare * 16;
    if (kPartRows == 16) {
      const int in_row = lane % 16, in_chunk = 2 * i + lane / 16;
      uint8_t* to = staging + in_row * 128 + (in_chunk ^ in_row % 8) * 16;
      cute::SM90_U32x4_STSM_N::copy(v[4 * i], v[4 * i + 1], v[4 * i + 2], v[4 * i + 3], *reinterpret_cast<cute::uint128_t*>(to));
    } else {
      const int in_row = lane % 8, in_chunk = 4 * i + lane / 8;
      uint8_t* to = staging + in_row * 128 + (in_chunk ^ in_row) * 16;
      v += 8 * i + kHalf;
      cute::SM90_U32x4_STSM_N::copy(v[0], v[2], v[4], v[6], *reinterpret_cast<cute::uint128_t*>(to));
    }
  }
  __syncwarp();

  const int row = lane / 8, chunk = lane % 8, column = kColumn + chunk * 8;
  uint4 v[kPartRows / 4];
#pragma unroll
  for (int i = 0; i < kPartRows; i += 4) {
    v[i / 4] = *reinterpret_cast<const uint4*>(staging + (i + row) * 128 + (chunk ^ (i + row) % 8) * 16);
  }
  const int64_t ld = tile.ld, offset = tile.offset;
  const int misaligned = (reinterpret_cast<uintptr_t>(out) / 2 | offset | ld) & 7;
  const int m = (kBlock * kConsumers + group) * 64 + warp * 16 + kHalf * 8 + row;
  const int rows = column < tile.cols ? tile.rows - m : 0;
  uint16_t* to = static_cast<uint16_t*>(out) + offset + m * ld + column;
  if (misaligned == 0 && tile.cols % 8 == 0) {
#pragma unroll
    for (int i = 0; i < kPartRows; i += 4) {
      if (i < rows) *reinterpret_cast<uint4*>(to + i * ld) = v[i / 4];
    }
  } else {
#pragma unroll
    for (int i = 0; i < kPartRows; i += 4) {
      if (i < rows) store_some(to + i * ld, v[i / 4], tile.cols - column, misaligned % 2 == 0);
    }
  }
}

// One warpgroup. A tile is stored during the main loop of the next one, a part behind each of its first stages: the
// tensor cores pause only while the accumulators are rounded.
template <class C>
__device__ void run_consumer(Shared<C>& s, const Params& p, uint32_t rank, int group) {
  using namespace cute;
  const int thread = threadIdx.x % 128, lane = threadIdx.x % 32;
  Tensor a = make_tensor(make_smem_ptr(&s.a[0][0]), typename C::LayoutA{});
  Tensor w = make_tensor(make_smem_ptr(&s.w[0][0]), typename C::LayoutW{});
  typename C::Mma mma;
  auto slice = mma.get_slice(group * 128);
  Tensor a_desc = slice.make_fragment_A(slice.partition_A(a));  // (MMA, M, K, stage)
  Tensor w_desc = slice.make_fragment_B(slice.partition_B(w));  // (MMA, N, K, stage)
  Tensor acc = partition_fragment_C(mma, Shape<Int<C::TileM>, Int<C::TileN>>{});
  uint32_t packed[C::Packed];
  uint8_t* staging = s.staging[4 * group + thread / 32];

  Cursor<C::Stages> stage;
  int reading = -1;  // the stage that the last finished products have read
  const auto multiply = [&] {
    wait(&s.stage_full[stage.index], stage.phase);
    warpgroup_fence_operand(acc);
    warpgroup_arrive();
#pragma unroll
    for (int i = 0; i < size<2>(a_desc); ++i) {
      gemm(mma, a_desc(_, _, i, stage.index), w_desc(_, _, i, stage.index), acc);
      mma.accumulate_ = GMMA::ScaleOut::One;
    }
    warpgroup_commit_batch();
  };
  // A stage is free when every consumer warp of the cluster has read it: both blocks' loaders write into it.
  const auto release_stage = [&] {
    if (reading >= 0 && lane < C::Cluster) arrive_at(&s.stage_free[reading], lane);
  };
  const auto retire = [&] {
    warpgroup_wait<1>();  // the previous stage's products are done, this stage's go on
    warpgroup_fence_operand(acc);
    release_stage();
    reading = stage.index;
    stage.advance();
  };
  // Of the tile in `slot`, stores the parts that belong behind the stages from `k` up to `end`.
  const auto store_behind = [&](int k, int end, int slot) {
    for_each(make_int_sequence<C::Parts>{}, [&](auto part) {
      const int at = part * kStagesPerPart + STAGGER * group;
      if (k <= at && at < end) {
        store_part<C, part>(packed, s.ring[slot][rank], staging, p.out, group);
        if (part == C::Parts - 1) {
          __syncwarp();
          if (lane == 0) {
            arrive(&s.stored[slot]);
            arrive_at(&s.slot_free[slot], 0);
          }
        }
      }
    });
  };

  bool pending = false;  // packed holds the tile of the other slot
  int buffer = 0;
  Cursor<kSlots> slot;
  for (; next_tile<C>(s, slot); slot.advance(), buffer ^= 1) {
    const FoditTile& tile = s.ring[slot.index][rank];

    // The bias is fetched now and needed after the main loop.
    float b[(C::TileN + 127) / 128] = {};
    if (const auto* from = static_cast<const typename C::Element*>(p.bias[tile.weight])) {
      for (int i = 0; i < int(sizeof(b) / 4); ++i) {
        const int n = i * 128 + thread;
        if (n < tile.cols) b[i] = to_float(from[tile.n0 + n]);
      }
    }

    mma.accumulate_ = GMMA::ScaleOut::Zero;
#pragma unroll 1
    for (int k = 0; k < p.k_blocks; ++k) {
      multiply();
      if (pending) store_behind(k, k + 1, slot.index ^ 1);
      retire();
    }
    if (pending) store_behind(p.k_blocks, INT_MAX, slot.index ^ 1);
    warpgroup_wait<0>();
    warpgroup_fence_operand(acc);
    release_stage();
    reading = -1;

    float* bias = s.bias[group][buffer];
    for (int i = 0; i < int(sizeof(b) / 4); ++i) {
      const int n = i * 128 + thread;
      if (n < C::TileN) bias[n] = b[i];
    }
    cutlass::arch::NamedBarrier::sync(128, 1 + group);
    if (p.act == FODIT_ACT_GELU_TANH) {
      pack_tile<C, FODIT_ACT_GELU_TANH>(packed, acc, bias);
    } else {
      pack_tile<C, FODIT_ACT_NONE>(packed, acc, bias);
    }
    pending = true;
  }
  if (pending) store_behind(0, INT_MAX, slot.index ^ 1);
}

template <class C>
__device__ void init_barriers(Shared<C>& s) {
  for (int i = 0; i < C::Stages; ++i) {
    ClusterBarrier::init(&s.stage_full[i], 1);
    ClusterBarrier::init(&s.stage_free[i], kConsumerWarps * C::Cluster);
  }
  for (int i = 0; i < kSlots; ++i) {
    ClusterBarrier::init(&s.slot_full[i], 1);
    ClusterBarrier::init(&s.slot_free[i], kSlotReaders * C::Cluster);
    ClusterBarrier::init(&s.stored[i], kConsumerWarps);
  }
  cutlass::arch::fence_barrier_init();
}

// All threads of a cluster; of a block where that is the cluster.
template <class C>
__device__ __forceinline__ void sync_cluster() {
  if constexpr (C::Cluster > 1) {
    cute::cluster_sync();
  } else {
    __syncthreads();
  }
}

template <class C>
__global__ void __launch_bounds__(kThreads, 1) hopper_gemm(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) uint8_t shared_bytes[];
  Shared<C>& s = *reinterpret_cast<Shared<C>*>(shared_bytes);
  const int warp = cutlass::canonical_warp_idx_sync();
  const uint32_t rank = C::Cluster > 1 ? cute::block_rank_in_cluster() : 0;
  if (threadIdx.x == 0) init_barriers<C>(s);
  sync_cluster<C>();

  if (warp < 4) {
    cutlass::arch::warpgroup_reg_dealloc<40>();
    const bool elected = threadIdx.x % 32 == 0;
    if (warp == 0 && elected) run_loader<C>(s, p, rank);
    if (warp == 1 && rank == 0) run_scheduler<C>(s, p);
    if (warp == 2 && elected) run_signaler<C>(s, p, rank);
  } else {
    cutlass::arch::warpgroup_reg_alloc<232>();
    run_consumer<C>(s, p, rank, warp / 4 - 1);
  }
  __syncwarp();
  sync_cluster<C>();  // the other block may still arrive at this one's barriers
}

}  // namespace
}  // namespace fodit
