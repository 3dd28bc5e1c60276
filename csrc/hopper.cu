// Host side of the Hopper family: the kernel list, tensor maps, launch.
#include <algorithm>

#include "driver.h"
#include "hopper_kernel.cuh"

namespace fodit {
namespace {

// Tile rows, tile columns, stages, blocks in a cluster. Everything that names the family's kernels reads this list.
#define FODIT_HOPPER_KERNELS(X) \
  X(128, 256, 4, 2)             \
  X(128, 256, 4, 1)             \
  X(256, 128, 4, 2)             \
  X(128, 192, 5, 2)             \
  X(128, 128, 6, 2)             \
  X(128, 128, 6, 1)             \
  X(128, 64, 8, 1)

// A row-major [rows, columns] matrix of 2-byte elements, read in boxes of box_rows x kBlockK; outside it reads zero.
const char* encode(CUtensorMap* map, int dtype, const void* data, int rows, int columns, int ld, int box_rows) {
  static const auto encode_tiled =
      driver_function<decltype(&cuTensorMapEncodeTiled)>("cuTensorMapEncodeTiled", 12000);
  if (encode_tiled == nullptr) return "cuTensorMapEncodeTiled is missing from the driver";
  const cuuint64_t size[2] = {cuuint64_t(columns), cuuint64_t(rows)};
  const cuuint64_t stride[1] = {cuuint64_t(ld) * 2};
  const cuuint32_t box[2] = {kBlockK, cuuint32_t(box_rows)};
  const cuuint32_t step[2] = {1, 1};
  const CUresult result =
      encode_tiled(map, dtype == FODIT_BF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 2,
                   const_cast<void*>(data), size, stride, box, step, CU_TENSOR_MAP_INTERLEAVE_NONE,
                   CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? nullptr : "cuTensorMapEncodeTiled refused the matrix";
}

template <class C>
int launch(const FoditGemm& g, cudaStream_t stream, char* err, int errlen) {
  Params p = {};
  if (const char* why = encode(&p.a, g.dtype, g.a, g.m, g.k, g.lda, C::TileM)) {
    return fail(err, errlen, "%s: A [%d, %d] with %d elements between rows", why, g.m, g.k, g.lda);
  }
  for (int i = 0; i < g.weights; ++i) {
    if (const char* why = encode(&p.w[i], g.dtype, g.w[i], g.n[i], g.k, g.ldw[i], C::BoxW)) {
      return fail(err, errlen, "%s: W[%d] [%d, %d] with %d elements between rows", why, i, g.n[i], g.k, g.ldw[i]);
    }
    p.bias[i] = g.bias[i];
  }
  p.out = g.out;
  p.addends = {g.addend, g.addend_stride, g.addends};
  p.program = g.program;
  p.counters = g.counters;
  p.ticket = g.ticket;
  p.tiles = g.tiles;
  p.k_blocks = (g.k + kBlockK - 1) / kBlockK;
  p.act = g.act;

  const int available = stream_sms(stream);
  const int sms = g.sms > 0 ? std::min(g.sms, available) : available;
  const int clusters = std::min(sms / C::Cluster, (g.tiles + C::Cluster - 1) / C::Cluster);
  if (clusters == 0) {
    return fail(err, errlen, "this kernel runs on at least %d SMs; sms=%d, the stream has %d", C::Cluster, g.sms,
                available);
  }

  cudaLaunchAttribute cluster = {};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {unsigned(C::Cluster), 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = clusters * C::Cluster;
  config.blockDim = kThreads;
  config.dynamicSmemBytes = sizeof(Shared<C>);
  config.stream = stream;
  config.attrs = &cluster;
  config.numAttrs = 1;
  const auto kernel = g.addends == 0   ? hopper_gemm<C, Adding::None>
                      : g.addends == 1 ? hopper_gemm<C, Adding::One>
                                       : hopper_gemm<C, Adding::Many>;
  cudaError_t status =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Shared<C>));
  if (status == cudaSuccess) status = cudaLaunchKernelEx(&config, kernel, p);
  if (status == cudaSuccess) return 0;
  cudaGetLastError();
  return fail(err, errlen, "launching %u blocks of %d threads with %zu bytes of shared memory: %s", config.gridDim.x,
              kThreads, sizeof(Shared<C>), cudaGetErrorString(status));
}

using Launch = int (*)(const FoditGemm&, cudaStream_t, char*, int);

#define FODIT_LAUNCH(M, N, STAGES, CLUSTER)                  \
  {launch<Config<__nv_bfloat16, M, N, STAGES, CLUSTER>>,     \
   launch<Config<__half, M, N, STAGES, CLUSTER>>},
constexpr Launch kLaunch[][2] = {FODIT_HOPPER_KERNELS(FODIT_LAUNCH)};

}  // namespace
}  // namespace fodit

#define FODIT_DESCRIBE(M, N, STAGES, CLUSTER)                                                             \
  {FODIT_HOPPER, M, N, fodit::kBlockK, STAGES, fodit::kThreads, 90, 90,                                   \
   "hopper_" #M "x" #N "x64_s" #STAGES "_c" #CLUSTER},

extern "C" const FoditKernel fodit_hopper_kernels[] = {FODIT_HOPPER_KERNELS(FODIT_DESCRIBE)};
extern "C" const int fodit_hopper_kernel_count = sizeof(fodit_hopper_kernels) / sizeof(FoditKernel);

extern "C" int fodit_hopper_gemm(const FoditGemm* args, const FoditKernel* kernel, void* stream, char* err,
                                 int errlen) {
  const auto& by_dtype = fodit::kLaunch[kernel - fodit_hopper_kernels];
  return by_dtype[args->dtype](*args, static_cast<cudaStream_t>(stream), err, errlen);
}
