// The library's C interface: checks the arguments, then hands over to the kernel's family.
#pragma GCC visibility push(default)
#include "fodit.h"
#pragma GCC visibility pop

#include <cutlass/version.h>

#include "driver.h"
#include "error.h"
#include "stream_value.h"

// The build defines FODIT_WITH_HOPPER and FODIT_WITH_AMPERE for the families it compiled, and FODIT_ARCHS.
extern "C" {
#ifdef FODIT_WITH_HOPPER
extern const FoditKernel fodit_hopper_kernels[];
extern const int fodit_hopper_kernel_count;
int fodit_hopper_gemm(const FoditGemm*, const FoditKernel*, void* stream, char* err, int errlen);
#endif
#ifdef FODIT_WITH_AMPERE
extern const FoditKernel fodit_ampere_kernels[];
extern const int fodit_ampere_kernel_count;
int fodit_ampere_gemm(const FoditGemm*, const FoditKernel*, void* stream, char* err, int errlen);
#endif
}

thread_local char fodit::last_error[fodit::kErrorLength] = "";

namespace {

#define STRING_(x) #x
#define STRING(x) STRING_(x)

using Gemm = int (*)(const FoditGemm*, const FoditKernel*, void*, char*, int);

struct Family {
  const FoditKernel* kernels;
  int count;
  Gemm gemm;
};

// Kernel indices count through the families in this order.
const Family families[] = {
#ifdef FODIT_WITH_HOPPER
    {fodit_hopper_kernels, fodit_hopper_kernel_count, fodit_hopper_gemm},
#endif
#ifdef FODIT_WITH_AMPERE
    {fodit_ampere_kernels, fodit_ampere_kernel_count, fodit_ampere_gemm},
#endif
};

bool aligned16(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

int check_arguments(const FoditGemm& g) {
  if (g.abi != FODIT_ABI) {
    FAIL("fodit_gemm: the caller's interface is version %d, the library's %d", g.abi, FODIT_ABI);
  }
  if (g.dtype != FODIT_BF16 && g.dtype != FODIT_FP16) {
    FAIL("fodit_gemm: dtype %d is neither bf16 (0) nor fp16 (1)", g.dtype);
  }
  if (g.act != FODIT_ACT_NONE && g.act != FODIT_ACT_GELU_TANH) {
    FAIL("fodit_gemm: act %d is neither none (0) nor gelu-tanh (1)", g.act);
  }
  if (g.m < 1 || g.k < 8 || g.k % 8 != 0) {
    FAIL("fodit_gemm: A is [%d, %d]; it needs at least one row, and K a positive multiple of 8", g.m, g.k);
  }
  if (g.lda < g.k || g.lda % 8 != 0) {
    FAIL("fodit_gemm: lda is %d; it must be a multiple of 8 and at least K = %d", g.lda, g.k);
  }
  if (!aligned16(g.a) || g.a == nullptr) FAIL("fodit_gemm: A is at %p; it must be 16-byte aligned", g.a);
  if (g.weights < 1 || g.weights > FODIT_MAX_WEIGHTS) {
    FAIL("fodit_gemm: %d weights were given, 1 to %d work", g.weights, FODIT_MAX_WEIGHTS);
  }
  for (int i = 0; i < g.weights; ++i) {
    if (g.n[i] < 1) FAIL("fodit_gemm: W[%d] has %d rows; it needs at least one", i, g.n[i]);
    if (g.ldw[i] < g.k || g.ldw[i] % 8 != 0) {
      FAIL("fodit_gemm: ldw[%d] is %d; it must be a multiple of 8 and at least K = %d", i, g.ldw[i], g.k);
    }
    if (!aligned16(g.w[i]) || g.w[i] == nullptr) {
      FAIL("fodit_gemm: W[%d] is at %p; it must be 16-byte aligned", i, g.w[i]);
    }
  }
  if (g.addends < 0 || (g.addends > 0 && g.addend == nullptr)) {
    FAIL("fodit_gemm: %d addends at %p; give none, or where they are", g.addends, g.addend);
  }
  if (g.tiles < 0 || g.sms < 0) FAIL("fodit_gemm: tiles = %d, sms = %d; neither can be negative", g.tiles, g.sms);
  if (g.tiles > 0 && (g.out == nullptr || !aligned16(g.program) || g.program == nullptr)) {
    FAIL("fodit_gemm: out is at %p, the program at %p; both are needed, the program 16-byte aligned", g.out,
         static_cast<const void*>(g.program));
  }
  return 0;
}

int check_device(const FoditKernel& kernel) {
  int device = 0, major = 0, minor = 0;
  cudaError_t status = cudaGetDevice(&device);
  if (status == cudaSuccess) status = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  if (status == cudaSuccess) status = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  if (status != cudaSuccess) {
    cudaGetLastError();
    FAIL("fodit_gemm: asking for the current CUDA device: %s", cudaGetErrorString(status));
  }
  const int arch = 10 * major + minor;
  if (arch < kernel.min_arch || arch > kernel.max_arch) {
    FAIL("fodit_gemm: kernel %s runs on compute capability %d.%d to %d.%d, device %d has %d.%d", kernel.name,
         kernel.min_arch / 10, kernel.min_arch % 10, kernel.max_arch / 10, kernel.max_arch % 10, device, major,
         minor);
  }
  return 0;
}

}  // namespace

int fodit_abi(void) { return FODIT_ABI; }

const char* fodit_last_error(void) { return fodit::last_error; }

const char* fodit_build_info(void) {
  return "architectures " STRING(FODIT_ARCHS) "; nvcc " STRING(__CUDACC_VER_MAJOR__) "." STRING(
      __CUDACC_VER_MINOR__) "; CUTLASS " STRING(CUTLASS_MAJOR) "." STRING(CUTLASS_MINOR) "." STRING(CUTLASS_PATCH);
}

int fodit_kernels(FoditKernel* out, int32_t capacity) {
  int total = 0;
  for (const Family& family : families) {
    for (int i = 0; i < family.count; ++i, ++total) {
      if (total < capacity) out[total] = family.kernels[i];
    }
  }
  return total;
}

int fodit_gemm(const FoditGemm* args, void* stream) {
  if (args == nullptr) FAIL("fodit_gemm: no arguments");
  if (check_arguments(*args) != 0) return 1;
  int index = args->kernel;
  for (const Family& family : families) {
    if (index >= 0 && index < family.count) {
      const FoditKernel& kernel = family.kernels[index];
      if (check_device(kernel) != 0) return 1;
      if (args->tiles == 0) return 0;
      char why[768] = "";
      if (family.gemm(args, &kernel, stream, why, sizeof(why)) == 0) return 0;
      FAIL("fodit_gemm: kernel %s: %s", kernel.name, why);
    }
    index -= family.count;
  }
  FAIL("fodit_gemm: there is no kernel %d, the library has %d", args->kernel, fodit_kernels(nullptr, 0));
}

int fodit_stream_sms(void* stream, int32_t* sms) {
  *sms = fodit::stream_sms(static_cast<cudaStream_t>(stream));
  if (*sms == 0) FAIL("fodit_stream_sms: there is no CUDA device");
  return 0;
}

int fodit_wait(void* stream, const int32_t* counter, int32_t target) {
  static const auto wait = fodit::driver_function<fodit::StreamValue>("cuStreamWaitValue32", 12000);
  return fodit::stream_value(wait, "fodit_wait: cuStreamWaitValue32", stream, counter, target,
                             CU_STREAM_WAIT_VALUE_GEQ);
}
