// What the parts of the Hopper family share: tile shapes, kernel parameters, the layout of shared memory.
#pragma once
#include <cuda.h>

#include <cute/tensor.hpp>
#include <cute/atom/mma_atom.hpp>
#include <cute/atom/mma_traits_sm90_gmma.hpp>
#include <cutlass/numeric_types.h>

#include "tile_program.cuh"

namespace fodit {
namespace {

constexpr int kBlockK = 64;    // one row of a stage is 128 bytes, the widest swizzle
constexpr int kConsumers = 2;  // warpgroups
constexpr int kThreads = 128 * (1 + kConsumers);
constexpr int kConsumerWarps = 4 * kConsumers;
constexpr int kSlots = 2;      // tiles in flight between the roles
constexpr int kPartRows = 8;   // of a warp's rows, stored at a time

// What is added to a tile before it is stored. Each has a kernel of its own, with no instruction and register more than
// it needs: in one kernel, addends cost the plain product 1 %, and several of them the product with one 2 to 9 %.
enum class Adding { None, One, Many };

struct Params {
  CUtensorMap a, w[FODIT_MAX_WEIGHTS];
  const void* bias[FODIT_MAX_WEIGHTS];
  void* out;
  Addends addends;
  const FoditTile* program;
  int32_t* counters;
  int32_t* ticket;
  int32_t tiles, k_blocks, act;
};

template <class Element_, int TileM_, int TileN_, int Stages_, int Cluster_>
struct Config {
  using Element = Element_;  // as in memory
  using MmaElement = std::conditional_t<std::is_same_v<Element, __half>, cutlass::half_t, cutlass::bfloat16_t>;
  static constexpr int TileM = TileM_, TileN = TileN_, Stages = Stages_, Cluster = Cluster_;
  static constexpr int StageBytes = (TileM + TileN) * kBlockK * sizeof(Element);
  static constexpr int BoxW = TileN / Cluster;                       // rows of W in one TMA load
  static constexpr int Packed = TileM * TileN / (256 * kConsumers);  // 4-byte registers of a rounded tile
  static constexpr int Parts = Packed / 8;                           // of 8 rows and 64 columns a warp
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
  alignas(128) uint8_t staging[kConsumerWarps][kPartRows * 128];
  alignas(128) uint4 fetched[kConsumerWarps][2][32];  // of the first addend, for the part that is stored next
  alignas(16) FoditTile ring[kSlots][C::Cluster];  // the tiles of the whole cluster, in both blocks
  alignas(8) uint64_t stage_full[C::Stages], stage_free[C::Stages];
  uint64_t slot_full[kSlots], slot_free[kSlots], stored[kSlots];
};

}  // namespace
}  // namespace fodit
