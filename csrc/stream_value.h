// What streams do to 32-bit counters: wait for one, or write one.
#pragma once
#include "driver.h"
#include "error.h"

namespace fodit {

using StreamValue = decltype(&cuStreamWaitValue32);  // and cuStreamWriteValue32's

// `operation` is null where the driver has none; `what` names the caller and the driver's function for the message.
inline int stream_value(StreamValue operation, const char* what, void* stream, const int32_t* counter, int32_t value,
                        unsigned flags) {
  if (operation == nullptr) FAIL("%s is missing from the driver", what);
  const CUresult result = operation(static_cast<CUstream>(stream), reinterpret_cast<CUdeviceptr>(counter),
                                    static_cast<cuuint32_t>(value), flags);
  if (result == CUDA_SUCCESS) return 0;
  FAIL("%s(counter %p, value %d) returned CUresult %d", what, static_cast<const void*>(counter), value, int(result));
}

}  // namespace fodit
