// The devices of the counting runtime, and streams, events and kernels, which do nothing.
//
//   COUNTING_CUDA_CAPABILITY  as "80" or "90"; default: 90
//   COUNTING_CUDA_DEVICES     how many there are, all alike; default: 1
#include "counting.h"

#include <cuda.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>

using counting::fail;

namespace {
thread_local cudaError_t last_error = cudaSuccess;
thread_local int current_device = 0;
std::atomic<size_t> last_handle{4096};

int capability() {
  static const char* text = getenv("COUNTING_CUDA_CAPABILITY");
  static const int value = text ? atoi(text) : 90;
  return value;
}
}  // namespace

cudaError_t counting::fail(cudaError_t error) { return last_error = error; }
int counting::current_device() { return ::current_device; }
int counting::devices() {
  static const char* text = getenv("COUNTING_CUDA_DEVICES");
  static const char* visible = getenv("CUDA_VISIBLE_DEVICES");
  static const int value = visible && !*visible ? 0 : text ? atoi(text) : 1;
  return value < kMostDevices ? value : kMostDevices;
}
void* counting::new_handle() { return (void*)(last_handle += 16); }

// The device

API cudaError_t cudaGetDeviceCount(int* count) {
  *count = counting::devices();
  return *count ? cudaSuccess : fail(cudaErrorNoDevice);
}
API cudaError_t cudaGetDevice(int* current) { *current = current_device; return cudaSuccess; }
API cudaError_t cudaSetDevice(int chosen) {
  if (chosen < 0 || chosen >= counting::devices()) return fail(cudaErrorInvalidDevice);
  current_device = chosen;
  NEEDS_CONTEXT();
  return cudaSuccess;
}
API cudaError_t cudaDriverGetVersion(int* version) { *version = CUDART_VERSION; return cudaSuccess; }
API cudaError_t cudaRuntimeGetVersion(int* version) { *version = CUDART_VERSION; return cudaSuccess; }
API cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) { *can = 0; return cudaSuccess; }
API cudaError_t cudaDeviceGetPCIBusId(char* out, int size, int device) {
  snprintf(out, size, "0000:%02d:00.0", device + 1);
  return cudaSuccess;
}
API cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  if (least) *least = 0;
  if (greatest) *greatest = -5;
  return cudaSuccess;
}
// Facts of an H200 but for the memory and the capability, on which PyTorch's choices depend.
API cudaError_t cudaGetDeviceProperties(cudaDeviceProp* out, int) {
  memset(out, 0, sizeof *out);
  strcpy(out->name, "counting CUDA");
  out->totalGlobalMem = counting::total();
  out->major = capability() / 10;
  out->minor = capability() % 10;
  out->multiProcessorCount = 132;
  out->maxThreadsPerMultiProcessor = 2048;
  out->maxBlocksPerMultiProcessor = 32;
  out->maxThreadsPerBlock = 1024;
  out->maxThreadsDim[0] = out->maxThreadsDim[1] = 1024;
  out->maxThreadsDim[2] = 64;
  out->maxGridSize[0] = 2147483647;
  out->maxGridSize[1] = out->maxGridSize[2] = 65535;
  out->warpSize = 32;
  out->sharedMemPerBlock = 49152;
  out->sharedMemPerBlockOptin = 232448;
  out->sharedMemPerMultiprocessor = 233472;
  out->regsPerBlock = out->regsPerMultiprocessor = 65536;
  out->l2CacheSize = 62914560;
  out->textureAlignment = 512;
  out->memPitch = 2147483647;
  out->totalConstMem = 65536;
  out->asyncEngineCount = 3;
  out->unifiedAddressing = out->concurrentKernels = out->managedMemory = 1;
  return cudaSuccess;
}
API cudaError_t cudaDeviceGetAttribute(int* out, cudaDeviceAttr attribute, int) {
  cudaDeviceProp known;
  cudaGetDeviceProperties(&known, 0);
  switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock: *out = known.maxThreadsPerBlock; break;
    case cudaDevAttrMaxBlockDimX: *out = known.maxThreadsDim[0]; break;
    case cudaDevAttrMaxBlockDimY: *out = known.maxThreadsDim[1]; break;
    case cudaDevAttrMaxBlockDimZ: *out = known.maxThreadsDim[2]; break;
    case cudaDevAttrMaxGridDimX: *out = known.maxGridSize[0]; break;
    case cudaDevAttrMaxGridDimY: *out = known.maxGridSize[1]; break;
    case cudaDevAttrMaxGridDimZ: *out = known.maxGridSize[2]; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *out = known.sharedMemPerBlock; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *out = known.sharedMemPerBlockOptin; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *out = known.sharedMemPerMultiprocessor; break;
    case cudaDevAttrMultiProcessorCount: *out = known.multiProcessorCount; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *out = known.maxThreadsPerMultiProcessor; break;
    case cudaDevAttrMaxBlocksPerMultiprocessor: *out = known.maxBlocksPerMultiProcessor; break;
    case cudaDevAttrComputeCapabilityMajor: *out = known.major; break;
    case cudaDevAttrComputeCapabilityMinor: *out = known.minor; break;
    case cudaDevAttrWarpSize: *out = known.warpSize; break;
    case cudaDevAttrMaxRegistersPerBlock: *out = known.regsPerBlock; break;
    case cudaDevAttrL2CacheSize: *out = known.l2CacheSize; break;
    default: *out = 0;
  }
  return cudaSuccess;
}
API cudaError_t cudaGetLastError() {
  const cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}
API cudaError_t cudaPeekAtLastError() { return last_error; }
API const char* cudaGetErrorName(cudaError_t error) {
  return error == cudaErrorMemoryAllocation ? "cudaErrorMemoryAllocation" : "cudaErrorUnknown";
}
API const char* cudaGetErrorString(cudaError_t error) {
  if (error == cudaErrorMemoryAllocation) return "out of memory";
  return error == cudaSuccess ? "no error" : "unknown error";
}

// Streams and events

API cudaError_t cudaStreamCreateWithPriority(cudaStream_t* out, unsigned, int) {
  NEEDS_CONTEXT();
  *out = cudaStream_t(counting::new_handle());
  return cudaSuccess;
}
API cudaError_t cudaStreamGetPriority(cudaStream_t, int* out) { *out = 0; return cudaSuccess; }
API cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* out) {
  *out = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
API cudaError_t cudaStreamGetCaptureInfo(
    cudaStream_t, cudaStreamCaptureStatus* out, unsigned long long* id, cudaGraph_t*,
    const cudaGraphNode_t**, const cudaGraphEdgeData**, size_t* count) {
  *out = cudaStreamCaptureStatusNone;
  if (id) *id = 0;
  if (count) *count = 0;
  return cudaSuccess;
}
API cudaError_t cudaEventCreate(cudaEvent_t* out) {
  NEEDS_CONTEXT();
  *out = cudaEvent_t(counting::new_handle());
  return cudaSuccess;
}
API cudaError_t cudaEventCreateWithFlags(cudaEvent_t* out, unsigned) { return cudaEventCreate(out); }
API cudaError_t cudaEventElapsedTime(float* out, cudaEvent_t, cudaEvent_t) {
  *out = 1;
  return cudaSuccess;
}
API cudaError_t cudaLaunchHostFunc(cudaStream_t, cudaHostFn_t function, void* data) {
  function(data);
  return cudaSuccess;
}
API cudaError_t cudaStreamAddCallback(
    cudaStream_t stream, cudaStreamCallback_t function, void* data, unsigned) {
  function(stream, cudaSuccess, data);
  return cudaSuccess;
}

// Kernels

API cudaError_t cudaLaunchKernel(const void*, dim3, dim3, void**, size_t, cudaStream_t) {
  NEEDS_CONTEXT();
  return cudaSuccess;
}
API cudaError_t __cudaLaunchKernel(cudaKernel_t, dim3, dim3, void**, size_t, cudaStream_t) {
  NEEDS_CONTEXT();
  return cudaSuccess;
}
API cudaError_t __cudaGetKernel(cudaKernel_t* out, const void* function) {
  *out = cudaKernel_t(function);
  return cudaSuccess;
}
API cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* out, const void*) {
  memset(out, 0, sizeof *out);
  out->maxThreadsPerBlock = 1024;
  out->numRegs = 32;
  out->ptxVersion = out->binaryVersion = capability();
  out->maxDynamicSharedSizeBytes = 232448;
  return cudaSuccess;
}
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
    int* out, const void*, int, size_t, unsigned) {
  *out = 2;
  return cudaSuccess;
}
API void** __cudaRegisterFatBinary(void*) {
  static void* handle[4];
  return handle;
}
API char __cudaInitModule(void**) { return 1; }
static thread_local struct { dim3 grid, block; size_t shared; void* stream; } launch;
API unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void* stream) {
  launch = {grid, block, shared, stream};
  return 0;
}
API cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  *grid = launch.grid;
  *block = launch.block;
  *shared = launch.shared;
  *(void**)stream = launch.stream;
  return cudaSuccess;
}

// Functions of the driver that PyTorch looks up by name

static CUresult nothing() { return CUDA_SUCCESS; }
static CUresult context_state(CUdevice device, unsigned* flags, int* active) {
  if (flags) *flags = 0;
  *active = counting::has_context(device);
  return CUDA_SUCCESS;
}
static CUresult error_text(CUresult result, const char** out) {
  *out = result == CUDA_ERROR_OUT_OF_MEMORY ? "out of memory" : "unknown";
  return CUDA_SUCCESS;
}
API cudaError_t cudaGetDriverEntryPointByVersion(
    const char* name, void** out, unsigned, unsigned long long,
    cudaDriverEntryPointQueryResult* found) {
  *out = counting::driver_function(name);
  if (!strcmp(name, "cuDevicePrimaryCtxGetState")) *out = (void*)context_state;
  if (!strcmp(name, "cuGetErrorString") || !strcmp(name, "cuGetErrorName")) *out = (void*)error_text;
  if (!*out) *out = (void*)nothing;
  if (found) *found = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
