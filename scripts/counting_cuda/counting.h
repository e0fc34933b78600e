// What the parts of the runtime share.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

#define API extern "C" __attribute__((visibility("default")))

// The context takes memory of its own, as soon as anything needs it.
#define NEEDS_CONTEXT() \
  do { \
    if (cudaError_t error = counting::ensure_context()) return counting::fail(error); \
  } while (0)

namespace counting {

constexpr int kMostDevices = 8;

size_t total();                         // bytes of a device
int devices();
int current_device();                   // of this thread
cudaError_t ensure_context();           // on the current device
cudaError_t fail(cudaError_t error);    // remembers it for cudaGetLastError
void* new_handle();                     // of a stream, an event, a piece of memory
void* driver_function(const char* name);  // nullptr: none is needed
bool has_context(int device);

}  // namespace counting
