// NVML, as far as PyTorch asks: expandable segments look here for memory shared across machines.
#include "counting.h"

constexpr int kNotSupported = 3;  // NVML_ERROR_NOT_SUPPORTED

API int nvmlInit_v2() { return 0; }
API int nvmlDeviceGetHandleByPciBusId_v2(const char*, void** device) {
  *device = (void*)4096;
  return 0;
}
API int nvmlDeviceGetComputeRunningProcesses(void*, unsigned* count, void*) {
  *count = 0;
  return 0;
}
API int nvmlDeviceGetNvLinkRemoteDeviceType(void*, unsigned, unsigned*) { return kNotSupported; }
API int nvmlDeviceGetNvLinkRemotePciInfo_v2(void*, unsigned, void*) { return kNotSupported; }
API int nvmlSystemGetCudaDriverVersion_v2(int* version) { *version = 13000; return 0; }
