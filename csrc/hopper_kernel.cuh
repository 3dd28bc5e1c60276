// The Hopper family (sm_90a): TMA loads, wgmma, one persistent thread block per SM.
//
// Every block has five roles that talk through barriers in shared memory:
//
//   scheduler   draws the next entry of the tile program and hands it to the others through a ring of two slots
//   loader      fills the stages of the main loop by TMA
//   consumers   two warpgroups, each with half of the tile's rows in registers: wgmma, then the epilogue
//   signaler    waits until both have stored their half, then raises the slab's counter
//
// A consumer rounds its finished tile into spare registers and goes on with the next; the stores follow a part at a
// time behind the wgmmas of that tile's first stages, the two consumers taking turns. The tensor cores pause only
// for the rounding. The signaler's fence costs the consumers nothing.
//
// No role ever waits for communication or for another kernel, only for other roles of its own cluster. A launch
// that gets fewer SMs than it asked for, or gets them late, is slower and not stuck.
//
// Two blocks of a cluster take neighbouring entries of the program. If those share their rows of W, each block
// loads one half and multicasts it to both.
#pragma once
#include <climits>

#include <cute/arch/cluster_sm90.hpp>
#include <cute/arch/copy_sm90_desc.hpp>
#include <cute/arch/copy_sm90_tma.hpp>
#include <cutlass/arch/barrier.h>
#include <cutlass/arch/reg_reconfig.h>

#include "hopper_config.cuh"
#include "hopper_epilogue.cuh"

namespace fodit {
namespace {

using cutlass::arch::ClusterBarrier;
using cutlass::arch::ClusterTransactionBarrier;

constexpr int kStagesPerPart = 2;  // between two stores of one consumer; the other's fall between them
constexpr int kTileWords = sizeof(FoditTile) / 4;
constexpr int kRowsWord = 2, kWeightWord = 4, kSlabWord = 5;
constexpr int kSlotReaders = 32 * kConsumerWarps + 2;  // threads of one block: consumers, loader, signaler

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
template <class C>
__device__ __forceinline__ void arrive_at(uint64_t* barrier, uint32_t block) {
  if constexpr (C::Cluster == 1) {
    arrive(barrier);
  } else {
    asm volatile(
        "{ .reg .b32 remote;\n"
        "mapa.shared::cluster.u32 remote, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [remote]; }" ::"r"(shared_address(barrier)), "r"(block)
        : "memory");
  }
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
    uint64_t* full = &s.slot_full[slot.index];
    int* to = reinterpret_cast<int*>(s.ring[slot.index]);
    if constexpr (C::Cluster == 1) {
      if (lane < kTileWords) {
        to[lane] = word;
        arrive(full);
      }
    } else {
      for (uint32_t block = 0; block < C::Cluster; ++block) {
        if (lane == 0) ClusterTransactionBarrier::arrive_and_expect_tx(full, sizeof(s.ring[0]), block, 1);
        if (lane < C::Cluster * kTileWords) {
          cute::store_shared_remote(word, shared_address(to + lane), shared_address(full), block);
        }
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
    arrive_at<C>(&s.slot_free[slot.index], 0);
  }
}

// One thread of each block.
template <class C>
__device__ void run_signaler(Shared<C>& s, const Params& p, uint32_t rank) {
  for (Cursor<kSlots> slot; next_tile<C>(s, slot); slot.advance()) {
    wait(&s.stored[slot.index], slot.phase);
    raise_signal(p.counters, s.ring[slot.index][rank].slab);
    arrive_at<C>(&s.slot_free[slot.index], 0);
  }
}

// One warpgroup. A tile's signal comes at most Parts x kStagesPerPart stages after its last product.
// Inlined by force: at a function's border wgmma would wait for all that is under way.
template <class C, Adding Adds>
__device__ __forceinline__ void run_consumer(Shared<C>& s, const Params& p, uint32_t rank, int group) {
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
  uint4* fetched = &s.fetched[4 * group + thread / 32][0][lane];

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
    if (reading >= 0 && lane < C::Cluster) arrive_at<C>(&s.stage_free[reading], lane);
  };
  const auto retire = [&] {
    warpgroup_wait<1>();  // the previous stage's products are done, this stage's go on
    warpgroup_fence_operand(acc);
    release_stage();
    reading = stage.index;
    stage.advance();
  };
  // Of the tile in `slot`, stores the parts that fall behind the stages from `k` up to `end` of the next one. A call
  // would put `packed` into memory.
  const auto store_behind = [&](int k, int end, int slot) __attribute__((always_inline)) {
    for_each(make_int_sequence<C::Parts>{}, [&](auto part) {
      const int at = part * kStagesPerPart + group;
      if (k <= at && at < end) {
        const FoditTile& tile = s.ring[slot][rank];
        store_part<C, Adds, part>(packed, tile, staging, fetched, p.out, p.addends, group);
        if constexpr (Adds != Adding::None && part + 1 < C::Parts) {
          fetch_part<C, part + 1>(tile, fetched, p.out, p.addends, group);
        }
        if (part == C::Parts - 1) {
          arrive_at<C>(&s.slot_free[slot], 0);
          __syncwarp();
          if (lane == 0) arrive(&s.stored[slot]);
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
    if constexpr (Adds != Adding::None) fetch_part<C, 0>(tile, fetched, p.out, p.addends, group);
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
    ClusterBarrier::init(&s.slot_full[i], C::Cluster == 1 ? kTileWords : 1);
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

template <class C, Adding Adds>
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
    run_consumer<C, Adds>(s, p, rank, warp / 4 - 1);
  }
  __syncwarp();
  sync_cluster<C>();  // the other block may still arrive at this one's barriers
}

}  // namespace
}  // namespace fodit
