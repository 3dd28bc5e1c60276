// Driver functions by name, so that the library links against no libcuda and loads on machines without a GPU.
#pragma once
#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdarg>
#include <cstdio>

namespace fodit {

// The function as CUDA `version` (12000 is 12.0) declares it, or null where the driver has none.
template <class Function>
Function driver_function(const char* name, unsigned version) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found;
  if (cudaGetDriverEntryPointByVersion(name, &function, version, cudaEnableDefault, &found) != cudaSuccess) {
    cudaGetLastError();  // reported by the caller, who knows what the function was for
    return nullptr;
  }
  return found == cudaDriverEntryPointSuccess ? reinterpret_cast<Function>(function) : nullptr;
}

// How many SMs the kernels of a stream can run on: those of its green context if it has one, else the device's.
inline int stream_sms(cudaStream_t stream) {
  static const auto green_context = driver_function<decltype(&cuStreamGetGreenCtx)>("cuStreamGetGreenCtx", 12040);
  static const auto resource_of =
      driver_function<decltype(&cuGreenCtxGetDevResource)>("cuGreenCtxGetDevResource", 12040);
  CUgreenCtx green = nullptr;
  CUdevResource resource;
  if (green_context != nullptr && resource_of != nullptr && green_context(stream, &green) == CUDA_SUCCESS &&
      green != nullptr && resource_of(green, &resource, CU_DEV_RESOURCE_TYPE_SM) == CUDA_SUCCESS) {
    return resource.sm.smCount;
  }
  int device = 0, sms = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device);
  return sms;
}

// Writes a message and returns 1, so that a failing function can end with `return fail(...)`.
__attribute__((format(printf, 3, 4))) inline int fail(char* err, int errlen, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(err, errlen, format, arguments);
  va_end(arguments);
  return 1;
}

}  // namespace fodit
