// CUTLASS's own Ampere kernels of fodit's tile shapes, to time fodit's against (tests/gpu/ampere_check.py --stock).
//   nvcc -shared -Xcompiler -fPIC -std=c++17 -O3 -arch=sm_90 -I<CUTLASS>/include benchmarks/stock_cutlass.cu -o stock.so
#include <cutlass/epilogue/thread/linear_combination.h>
#include <cutlass/gemm/device/gemm.h>

using Element = cutlass::bfloat16_t;

// D = A @ W.T, all row-major bf16; returns cutlass::Status.
template <int M, int N, int K, int WarpM, int WarpN, int Stages>
int run(int m, int n, int k, const void* a, const void* w, void* d, void* stream) {
  using Gemm = cutlass::gemm::device::Gemm<
      Element, cutlass::layout::RowMajor, Element, cutlass::layout::ColumnMajor, Element, cutlass::layout::RowMajor,
      float, cutlass::arch::OpClassTensorOp, cutlass::arch::Sm80, cutlass::gemm::GemmShape<M, N, K>,
      cutlass::gemm::GemmShape<WarpM, WarpN, K>, cutlass::gemm::GemmShape<16, 8, 16>,
      cutlass::epilogue::thread::LinearCombination<Element, 8, float, float>,
      cutlass::gemm::threadblock::GemmIdentityThreadblockSwizzle<8>, Stages, 8, 8>;
  const auto* A = static_cast<const Element*>(a);
  const auto* W = static_cast<const Element*>(w);
  auto* D = static_cast<Element*>(d);
  Gemm gemm;
  return int(gemm({{m, n, k}, {A, k}, {W, k}, {D, n}, {D, n}, {1.f, 0.f}}, nullptr,
                  static_cast<cudaStream_t>(stream)));
}

// The kernel with this tile and number of stages; -1 where there is none.
extern "C" int stock_gemm(int tile_m, int tile_n, int tile_k, int stages, int m, int n, int k, const void* a,
                          const void* w, void* d, void* stream) {
#define SHAPE(M, N, K, WM, WN, S) \
  if (tile_m == M && tile_n == N && tile_k == K && stages == S) return run<M, N, K, WM, WN, S>(m, n, k, a, w, d, stream);
  SHAPE(128, 256, 32, 64, 64, 4)
  SHAPE(128, 256, 64, 64, 64, 3)
  SHAPE(256, 128, 32, 64, 64, 4)
  SHAPE(128, 128, 32, 64, 64, 4)
  SHAPE(128, 128, 64, 64, 64, 3)
  SHAPE(64, 128, 32, 32, 64, 4)
  SHAPE(64, 64, 64, 32, 32, 4)
  return -1;
}
