// The driver's library, where PyTorch links to it by name: one device with one context.
#define API extern "C" __attribute__((visibility("default")))

API int cuDriverGetVersion(int* version) { *version = 13000; return 0; }
API int cuDeviceGetCount(int* count) { *count = 1; return 0; }
API int cuDevicePrimaryCtxGetState(int, unsigned* flags, int* active) {
  *flags = 0;
  *active = 1;
  return 0;
}
API int cuCtxGetCurrent(void** context) { *context = (void*)4096; return 0; }
