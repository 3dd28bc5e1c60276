// The Ampere kernel family: D = act(A @ W.T + bias) with mma.sync, for sm_80, 86, 89, 90 and 120.
//
// A persistent kernel: block b computes tiles b, b + blocks, b + 2 blocks, ... of the program. It never waits for
// communication, nor for another block, so it ends whatever the collectives do and however few SMs it gets:
// waiting is the business of the communication stream alone.
#include <string.h>

#include <algorithm>

#include "ampere_epilogue.cuh"
#include "driver.h"

namespace fodit::ampere {

template <class S, int BlocksPerSm>
__global__ void __launch_bounds__(S::Threads, BlocksPerSm) kernel(const __grid_constant__ FoditGemm g) {
  extern __shared__ __align__(128) uint8_t shared[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int warp_row = warp % S::WarpsM * S::WarpM, warp_col = warp / S::WarpsM * S::WarpN;

  Mainloop<S> mainloop(g, static_cast<uint32_t>(__cvta_generic_to_shared(shared)), warp_row, warp_col, lane);
  int stored = -1;  // slab of the last tile stored, until its signal is raised
  for (int index = blockIdx.x; index < g.tiles; index += gridDim.x) {
    float acc[S::MmasM][S::MmasN][4] = {};
    for (int left = (g.k + S::TileK - 1) / S::TileK; left > 0;) {
      // As many K-blocks as need nothing in between: the innermost loop has no other branch.
      const int blocks = stored >= 0 ? 1 : min(left, mainloop.loader.left);
#pragma unroll 1
      for (int i = 0; i < blocks; ++i) mainloop.k_block(acc);
      left -= blocks;
      mainloop.loader.loaded(blocks);

      // The K-block's barrier comes after every thread's stores of the last tile, so its signal needs none of its
      // own, and by now the stores have reached L2: the fence has little to wait for.
      if (threadIdx.x == 0) raise_signal(g.counters, stored);
      stored = -1;
    }
    const FoditTile tile = load_tile(g.program, index);
    store_tile<S>(g, tile, warp_row, warp_col, acc);
    stored = tile.slab;
  }
  __syncthreads();
  if (threadIdx.x == 0) raise_signal(g.counters, stored);
}

// Every tile shape of the family:  TileM, TileN, TileK,  WarpM, WarpN,  stages,  blocks per SM that the registers
// must allow. A block needs stages x (TileM + TileN) x TileK x 2 bytes of shared memory; sm_86, 89 and 120 offer
// 99 KB, sm_80 163 KB and sm_90 227 KB. Shapes of four warps (the last four) want two blocks or more on an SM, so
// they lose more than the others where `sms` leaves SMs to collectives and each block has its SM to itself.
#define FODIT_AMPERE_SHAPES(X)  \
  X(128, 256, 32, 64, 64, 4, 1) \
  X(128, 256, 64, 64, 64, 3, 1) \
  X(256, 128, 32, 64, 64, 4, 1) \
  X(128, 128, 32, 64, 64, 4, 2) \
  X(128, 128, 64, 64, 64, 3, 2) \
  X(64, 128, 32, 32, 64, 4, 2)  \
  X(64, 64, 64, 32, 32, 4, 2)

// Elements between two rows of A or W: the loader counts a tile's bytes in 32 bits.
constexpr int MaxStride = (1 << 23) - 8;

struct Launch {
  const void* function[2];  // by FoditDtype
  int threads, shared_bytes;
};

#define FODIT_LAUNCH(M, N, K, WM, WN, S, B)                                              \
  {{reinterpret_cast<const void*>(&kernel<Shape<__nv_bfloat16, M, N, K, WM, WN, S>, B>),  \
    reinterpret_cast<const void*>(&kernel<Shape<__half, M, N, K, WM, WN, S>, B>)},        \
   Shape<__half, M, N, K, WM, WN, S>::Threads,                                            \
   Shape<__half, M, N, K, WM, WN, S>::SharedBytes},

const Launch launches[] = {FODIT_AMPERE_SHAPES(FODIT_LAUNCH)};

// What a device offers to a block and an SM.
struct Device {
  int shared_per_sm = 0, shared_per_block = 0, major = 0, minor = 0;

  cudaError_t query() {
    int device = 0;
    cudaError_t e = cudaGetDevice(&device);
    const auto get = [&](int* value, cudaDeviceAttr attribute) {
      if (e == cudaSuccess) e = cudaDeviceGetAttribute(value, attribute, device);
    };
    get(&shared_per_sm, cudaDevAttrMaxSharedMemoryPerMultiprocessor);
    get(&shared_per_block, cudaDevAttrMaxSharedMemoryPerBlockOptin);
    get(&major, cudaDevAttrComputeCapabilityMajor);
    get(&minor, cudaDevAttrComputeCapabilityMinor);
    return e;
  }
};

}  // namespace fodit::ampere

extern "C" {
extern const FoditKernel fodit_ampere_kernels[];
extern const int fodit_ampere_kernel_count;

#define FODIT_DESCRIBE(M, N, K, WM, WN, S, B) \
  {FODIT_AMPERE, M, N, K, S, 32 * (M / WM) * (N / WN), 80, 121, "ampere_" #M "x" #N "x" #K "_s" #S},

const FoditKernel fodit_ampere_kernels[] = {FODIT_AMPERE_SHAPES(FODIT_DESCRIBE)};
const int fodit_ampere_kernel_count = sizeof(fodit_ampere_kernels) / sizeof(fodit_ampere_kernels[0]);

// Launches `kernel`, one of fodit_ampere_kernels (or a copy), on arguments that the caller has checked.
// Returns 0, or a nonzero code with the reason in `err`.
int fodit_ampere_gemm(const FoditGemm* args, const FoditKernel* kernel, void* stream, char* err, int errlen) {
  using namespace fodit::ampere;
  const auto failed = [&](const char* call, cudaError_t e) {
    cudaGetLastError();  // reported here, not by the next call
    return fodit::fail(err, errlen, "%s: %s (m %d, k %d, tiles %d, sms %d)", call, cudaGetErrorString(e), args->m,
                       args->k, args->tiles, args->sms);
  };

  const Launch* launch = nullptr;
  for (int i = 0; i < fodit_ampere_kernel_count; ++i)
    if (strcmp(fodit_ampere_kernels[i].name, kernel->name) == 0) launch = &launches[i];
  if (launch == nullptr) return fodit::fail(err, errlen, "the Ampere family has no kernel of this name");

  const int widest = std::max(args->lda, *std::max_element(args->ldw, args->ldw + args->weights));
  if (widest > MaxStride) {
    return fodit::fail(err, errlen, "rows of A or W are %d elements apart, at most %d work", widest, MaxStride);
  }
  Device device;
  cudaError_t e = device.query();
  if (e != cudaSuccess) return failed("reading the device's attributes", e);
  int shared = launch->shared_bytes;
  if (shared > device.shared_per_block) {
    return fodit::fail(err, errlen,
                       "it needs %d bytes of shared memory a block, this device (compute capability %d.%d) offers %d; "
                       "kernels with stages x (tile_m + tile_n) x tile_k x 2 at most that work",
                       shared, device.major, device.minor, device.shared_per_block);
  }

  // The hardware spreads blocks over all SMs before two share one. Where SMs are to stay free for collectives, a
  // block must have its SM to itself, so it asks for more than half of the SM's shared memory.
  const int available = fodit::stream_sms(static_cast<cudaStream_t>(stream));
  const bool limited = args->sms > 0 && args->sms < available;
  if (limited) shared = std::max(shared, std::min(device.shared_per_block, device.shared_per_sm / 2));

  const void* function = launch->function[args->dtype];
  e = cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  if (e != cudaSuccess) return failed("cudaFuncSetAttribute", e);
  int blocks_per_sm = 0;
  e = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks_per_sm, function, launch->threads, shared);
  if (e != cudaSuccess) return failed("cudaOccupancyMaxActiveBlocksPerMultiprocessor", e);

  const int blocks = limited ? args->sms : available * std::max(blocks_per_sm, 1);
  void* parameters[] = {const_cast<FoditGemm*>(args)};
  e = cudaLaunchKernel(function, std::min(blocks, args->tiles), launch->threads, parameters, shared,
                       static_cast<cudaStream_t>(stream));
  return e == cudaSuccess ? 0 : failed("cudaLaunchKernel", e);
}
}
