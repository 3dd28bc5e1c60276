// The C interface of fodit's kernel library: plain C types, no torch, no libcuda and no NCCL at link time.
//
// One operation:  D = act(A @ W.T + bias) + addends, driven by a tile program. The program says in which order
// output tiles are computed, where each is stored, and which counter rises when its stores are visible.
// And what exchanges between the processes of one host are made of: copies and counters, in the order of streams.
#pragma once
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define FODIT_ABI 3
#define FODIT_MAX_WEIGHTS 4
#define FODIT_HANDLE_BYTES 64

enum FoditDtype { FODIT_BF16 = 0, FODIT_FP16 = 1 };
enum FoditAct { FODIT_ACT_NONE = 0, FODIT_ACT_GELU_TANH = 1 };
enum FoditFamily { FODIT_AMPERE = 0, FODIT_HOPPER = 1 };

// One output tile, 48 bytes, laid out as twelve int32. Tiles run in the order of the table.
// D[m0 : m0 + rows, n0 : n0 + cols] (columns counted inside weight `weight`) is stored row by row at
// out + offset, consecutive rows `ld` elements apart. Afterwards counters[slab] rises by one (slab < 0: none).
typedef struct {
  int32_t m0, n0;      // first row of A, first row of W[weight]
  int32_t rows, cols;  // at most the kernel's tile shape; less at the edges of a slab or of the matrix
  int32_t weight, slab;
  int32_t ld, unused;
  int64_t offset;      // elements
  int64_t unused2;
} FoditTile;

typedef struct {
  int32_t abi;              // FODIT_ABI
  int32_t dtype, act;
  int32_t kernel;           // index into fodit_kernels()
  int32_t m, k, lda;        // A is [m, k], row-major, lda elements between rows
  int32_t weights;          // W[i] is [n[i], k], row-major, ldw[i] elements between rows
  int32_t n[FODIT_MAX_WEIGHTS];
  int32_t ldw[FODIT_MAX_WEIGHTS];
  int32_t tiles;
  int32_t sms;              // thread blocks resident at most this many SMs; 0: every SM of the stream's context
  const void* a;
  const void* w[FODIT_MAX_WEIGHTS];
  const void* bias[FODIT_MAX_WEIGHTS];  // [n[i]] or null
  void* out;
  const FoditTile* program;  // device memory
  int32_t* counters;         // device memory, or null
  // One int32 in device memory, zero before and zero again after the launch; launches that may run at the same
  // time need one each. Tiles then go to whichever thread block is free, in the order of the program. Null: they
  // are dealt out in turn, which is as fast where every block gets its SM at once. The Hopper family reads it.
  int32_t* ticket;
  // Matrices that lie like `out`, `addend_stride` elements apart. What each has where a tile is stored is added to the
  // rounded tile in fp32, one after the other, and the sum is rounded. None for 0.
  const void* addend;
  int64_t addend_stride;
  int32_t addends;
  int32_t unused;
} FoditGemm;

typedef struct {
  int32_t family, tile_m, tile_n, tile_k, stages, threads, min_arch, max_arch;
  char name[48];
} FoditKernel;

// One direction between two processes: a ring of slots in host memory, all addresses those of this process's GPU.
typedef struct {
  void* ring;
  int32_t* filled;     // chunks that the sender has put into the ring
  int32_t* freed;      // chunks that the receiver has taken out
  int64_t slot_bytes;
  uint32_t slots;      // a power of two
  uint32_t moved;      // chunks that this process has put in or taken out so far; counters wrap around
} FoditLane;

// Where a message may be stored: in a receiver's device memory, told to the sender through host memory. 128 bytes.
typedef struct {
  int64_t number;      // of the message, written last
  int64_t offset;      // from the start of the allocation that the handle stands for
  uint8_t handle[FODIT_HANDLE_BYTES];
  uint8_t unused[48];
} FoditPost;

// Every function returns 0, or a nonzero code after which fodit_last_error() says what failed and with what.
int fodit_abi(void);
const char* fodit_last_error(void);                     // of the calling thread
const char* fodit_build_info(void);                     // architectures, nvcc version, CUTLASS version
int fodit_kernels(FoditKernel* out, int32_t capacity);  // returns how many kernels the library has
int fodit_gemm(const FoditGemm* args, void* stream);
int fodit_stream_sms(void* stream, int32_t* sms);       // that its kernels can run on
int fodit_wait(void* stream, const int32_t* counter, int32_t target);  // stream waits until *counter >= target

int fodit_host_register(void* host, int64_t bytes, void** device);  // pins host memory; its address for the GPU
int fodit_host_unregister(void* host);
int fodit_import(const uint8_t* handle, void** base);  // another process's allocation
int fodit_unimport(void* base);

// A message to and one from another process, chunk by chunk through host memory, on two streams.
int fodit_stage(FoditLane* out, const void* from, int64_t from_bytes, FoditLane* in, void* to, int64_t to_bytes,
                void* sending, void* receiving);

// From GPU to GPU: says that message `number` may be stored at `device` once the stream is there (null: it is empty);
// waits until another process has said so; and stores a message once the other stream was there.
int fodit_grant(FoditPost* post, int64_t number, const void* device, void* stream, int32_t* freed);
int fodit_collect(const FoditPost* post, int64_t number, double timeout_s, uint8_t* handle, int64_t* offset);
int fodit_push(void* stream, void* to, const void* from, int64_t bytes, int32_t* freed, int32_t* filled,
               int64_t number);

#ifdef __cplusplus
}
#endif
