// cuBLAS and cuBLASLt that compute nothing: PyTorch asks for handles and takes its workspaces.
//
// Status and enumerations are ints and handles pointers, as in cublas_api.h and cublasLt.h, which
// need headers of the CUDA toolkit that no package of PyTorch's brings.
#include <cstddef>

#define API extern "C" __attribute__((visibility("default")))

namespace {
char handle[64];
struct Heuristic {  // cublasLtMatmulHeuristicResult_t
  unsigned long long algorithm[8];
  size_t workspace_bytes;
  int status;
  float waves;
  int reserved[4];
};
}  // namespace

#ifdef COUNTING_CUBLAS
// Each a handle of its own: PyTorch keeps a workspace for each, and each thread has one.
API int cublasCreate_v2(void** out) { *out = new char[64]; return 0; }
API int cublasGetMathMode(void*, int* out) { *out = 0; return 0; }
API int cublasGetPointerMode_v2(void*, int* out) { *out = 0; return 0; }
#else
API size_t cublasLtGetVersion() { return 130000; }
API int cublasLtMatmulDescCreate(void** out, int, int) { *out = handle; return 0; }
API int cublasLtMatmulPreferenceCreate(void** out) { *out = handle; return 0; }
API int cublasLtMatrixLayoutCreate(
    void** out, int, unsigned long long, unsigned long long, long long) {
  *out = handle;
  return 0;
}
API int cublasLtMatmulAlgoGetHeuristic(
    void*, void*, void*, void*, void*, void*, void*, int, Heuristic* results, int* found) {
  *results = {};
  *found = 1;
  return 0;
}
#endif
