// Exchanges between the processes of one host by the GPUs' copy engines: no SM is taken, and nothing here waits for
// a kernel but through a stream. Progress is written into counters in host memory that all of these processes map.
#pragma GCC visibility push(default)
#include "fodit.h"
#pragma GCC visibility pop

#include <sched.h>

#include <algorithm>
#include <chrono>
#include <cstring>

#include "driver.h"
#include "error.h"
#include "stream_value.h"

namespace {

// Copies out and in overlap chunk by chunk. Of 1, 8, 42 and 126 MB through host memory between two H200 these were
// fastest, or within 3 %, among chunks of a quarter and an eighth, at least 256 KiB and 1 MiB, at most 4 and 8 MiB.
constexpr int64_t kLeastChunk = 1 << 20;
constexpr int64_t kChunks = 4;
constexpr int kKnownHandles = 64;

#define CHECK(call, ...)                                                                     \
  do {                                                                                       \
    const cudaError_t status_ = (call);                                                      \
    if (status_ != cudaSuccess) {                                                            \
      cudaGetLastError();                                                                    \
      FAIL(__VA_ARGS__, cudaGetErrorString(status_));                                        \
    }                                                                                        \
  } while (0)

int64_t chunk_bytes(int64_t bytes, int64_t slot) {
  const int64_t even = (bytes / kChunks + 511) / 512 * 512;
  return std::min(std::max(even, kLeastChunk), slot);
}

// Of the next chunk. The number of slots is a power of two, so that the order stays where the count wraps around.
char* slot_of(const FoditLane& lane) {
  return static_cast<char*>(lane.ring) + lane.moved % lane.slots * lane.slot_bytes;
}

int copy(void* stream, void* to, const void* from, int64_t bytes) {
  CHECK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, static_cast<cudaStream_t>(stream)),
        "fodit_push or fodit_stage: cudaMemcpyAsync(%p, %p, %lld bytes): %s", to, from, static_cast<long long>(bytes));
  return 0;
}

// Sets the counter after the stream's copies.
int write(void* stream, int32_t* counter, int32_t value) {
  static const auto write = fodit::driver_function<fodit::StreamValue>("cuStreamWriteValue32", 12000);
  // The default flags put a barrier before the write: whoever sees the value sees what the stream did before.
  return fodit::stream_value(write, "fodit_push, fodit_grant or fodit_stage: cuStreamWriteValue32", stream, counter,
                             value, CU_STREAM_WRITE_VALUE_DEFAULT);
}

// The handle of the allocation that a device address lies in, and the offset in it. CUDA is asked for few of them more
// than once: that takes longer than the rest of an exchange.
int locate(const void* device, FoditPost* post) {
  struct Known {
    unsigned long long allocation;  // its number in this process, which no other one will have
    cudaIpcMemHandle_t handle;
  };
  static thread_local Known known[kKnownHandles];
  static thread_local int count = 0;
  static const auto attributes =
      fodit::driver_function<decltype(&cuPointerGetAttributes)>("cuPointerGetAttributes", 12000);
  static_assert(sizeof(cudaIpcMemHandle_t) == FODIT_HANDLE_BYTES, "the interface has room for CUDA's handle");
  if (attributes == nullptr) FAIL("fodit_grant: cuPointerGetAttributes is missing from the driver");

  CUdeviceptr base = 0;
  unsigned long long allocation = 0;
  CUpointer_attribute names[] = {CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, CU_POINTER_ATTRIBUTE_BUFFER_ID};
  void* values[] = {&base, &allocation};
  const auto address = reinterpret_cast<CUdeviceptr>(device);
  if (attributes(2, names, values, address) != CUDA_SUCCESS || base == 0) {
    FAIL("fodit_grant: %p is not device memory", device);
  }
  Known* const end = known + std::min(count, kKnownHandles);
  Known* found = std::find_if(known, end, [&](const Known& one) { return one.allocation == allocation; });
  if (found == end) {
    cudaIpcMemHandle_t handle;
    CHECK(cudaIpcGetMemHandle(&handle, reinterpret_cast<void*>(base)),
          "fodit_grant: cudaIpcGetMemHandle(%p, not of expandable segments): %s", reinterpret_cast<void*>(base));
    found = known + count++ % kKnownHandles;
    *found = {allocation, handle};
  }
  memcpy(post->handle, &found->handle, sizeof(found->handle));
  post->offset = address - base;
  return 0;
}

// The next chunk of a message into a slot of the lane's ring, once the slot is free.
int fill(FoditLane& lane, void* stream, const char* from, int64_t bytes) {
  char* slot = slot_of(lane);
  if (fodit_wait(stream, lane.freed, lane.moved - lane.slots + 1) != 0) return 1;
  if (copy(stream, slot, from, bytes) != 0) return 1;
  return write(stream, lane.filled, ++lane.moved);
}

// The next chunk of a message out of a slot of the lane's ring, once it is there.
int drain(FoditLane& lane, void* stream, char* to, int64_t bytes) {
  char* slot = slot_of(lane);
  if (fodit_wait(stream, lane.filled, lane.moved + 1) != 0) return 1;
  if (copy(stream, to, slot, bytes) != 0) return 1;
  return write(stream, lane.freed, ++lane.moved);
}

}  // namespace

int fodit_host_register(void* host, int64_t bytes, void** device) {
  CHECK(cudaHostRegister(host, bytes, cudaHostRegisterPortable | cudaHostRegisterMapped),
        "fodit_host_register: cudaHostRegister(%p, %lld bytes): %s", host, static_cast<long long>(bytes));
  CHECK(cudaHostGetDevicePointer(device, host, 0), "fodit_host_register: cudaHostGetDevicePointer(%p): %s", host);
  return 0;
}

int fodit_host_unregister(void* host) {
  CHECK(cudaHostUnregister(host), "fodit_host_unregister: cudaHostUnregister(%p): %s", host);
  return 0;
}

int fodit_grant(FoditPost* post, int64_t number, const void* device, void* stream, int32_t* freed) {
  if (device != nullptr) {
    if (locate(device, post) != 0) return 1;
    if (write(stream, freed, static_cast<int32_t>(number)) != 0) return 1;
  }
  __atomic_store_n(&post->number, number, __ATOMIC_RELEASE);
  return 0;
}

int fodit_import(const uint8_t* handle, void** base) {
  cudaIpcMemHandle_t given;
  memcpy(&given, handle, sizeof(given));
  // Opened on the current device: peers' memory is mapped into its context, and no context is made on the peer.
  CHECK(cudaIpcOpenMemHandle(base, given, cudaIpcMemLazyEnablePeerAccess),
        "fodit_import: cudaIpcOpenMemHandle(%p): %s", static_cast<const void*>(handle));
  return 0;
}

int fodit_unimport(void* base) {
  CHECK(cudaIpcCloseMemHandle(base), "fodit_unimport: cudaIpcCloseMemHandle(%p): %s", base);
  return 0;
}

int fodit_push(void* stream, void* to, const void* from, int64_t bytes, int32_t* freed, int32_t* filled,
               int64_t number) {
  if (fodit_wait(stream, freed, static_cast<int32_t>(number)) != 0) return 1;
  if (copy(stream, to, from, bytes) != 0) return 1;
  return write(stream, filled, static_cast<int32_t>(number));
}

int fodit_stage(FoditLane* out, const void* from, int64_t from_bytes, FoditLane* in, void* to, int64_t to_bytes,
                void* sending, void* receiving) {
  const int64_t out_chunk = chunk_bytes(from_bytes, out->slot_bytes), in_chunk = chunk_bytes(to_bytes, in->slot_bytes);
  int64_t gone = 0, come = 0;
  // In turns: if both streams share one hardware queue, what another process waits for is never behind a wait for it.
  while (gone < from_bytes || come < to_bytes) {
    if (gone < from_bytes) {
      const int64_t bytes = std::min(out_chunk, from_bytes - gone);
      if (fill(*out, sending, static_cast<const char*>(from) + gone, bytes) != 0) return 1;
      gone += bytes;
    }
    if (come < to_bytes) {
      const int64_t bytes = std::min(in_chunk, to_bytes - come);
      if (drain(*in, receiving, static_cast<char*>(to) + come, bytes) != 0) return 1;
      come += bytes;
    }
  }
  return 0;
}

int fodit_collect(const FoditPost* post, int64_t number, double timeout_s, uint8_t* handle, int64_t* offset) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(timeout_s);
  while (__atomic_load_n(&post->number, __ATOMIC_ACQUIRE) != number) {
    sched_yield();
    if (std::chrono::steady_clock::now() > end) {
      FAIL("fodit_collect: message %lld was not posted within %g s", static_cast<long long>(number), timeout_s);
    }
  }
  memcpy(handle, post->handle, FODIT_HANDLE_BYTES);
  *offset = post->offset;
  return 0;
}
