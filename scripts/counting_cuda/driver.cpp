// The driver's library, where PyTorch links to it by name: as many devices as the runtime has.
#include "counting.h"

API int cuDriverGetVersion(int* version) { *version = 13000; return 0; }
API int cuDeviceGetCount(int* count) { *count = counting::devices(); return 0; }
API int cuDevicePrimaryCtxGetState(int, unsigned* flags, int* active) {
  *flags = 0;
  *active = 1;
  return 0;
}
API int cuCtxGetCurrent(void** context) { *context = (void*)4096; return 0; }
