// What played_link.py plays a collective with: `blocks` thread blocks that copy and then hold their SMs until `ns` have
// passed since they started, as NCCL's blocks do while they wait for the link.
//   nvcc -O2 -std=c++17 -arch=native -shared -Xcompiler -fPIC played_link.cu -o played_link.so
#include <cuda_runtime.h>

constexpr int THREADS = 544;        // of an NCCL block
constexpr int SHARED = 80 * 1024;   // about its shared memory

__global__ void play(long long ns, const uint4* from, uint4* to, long long words) {
  long long begin, now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin));
  for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < words; i += (long long)gridDim.x * blockDim.x) {
    to[i] = from[i];
  }
  if (threadIdx.x == 0) {
    do {
      asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    } while (now - begin < ns);
  }
  __syncthreads();
}

extern "C" int play_collective(void* stream, long long ns, int blocks, const void* from, void* to, long long words) {
  cudaError_t error = cudaFuncSetAttribute(play, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED);
  if (error != cudaSuccess) return (int)error;
  play<<<blocks, THREADS, SHARED, (cudaStream_t)stream>>>(ns, (const uint4*)from, (uint4*)to, words);
  return (int)cudaGetLastError();
}
