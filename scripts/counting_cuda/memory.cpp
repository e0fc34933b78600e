// A CUDA runtime without devices: memory is counted, small copies are real, kernels do nothing.
//
// PyTorch's own caching allocator, autograd, autocast and optimizers run on it as on a GPU: its
// limit, its out-of-memory errors and its statistics are the real ones. Numbers that a kernel would
// have computed are zeros. Functions that are not defined here answer "success"; see build.py.
//
//   COUNTING_CUDA_TOTAL       bytes of each device; default: an H200's
//   COUNTING_CUDA_STATE       the file in which processes share the count; set by run.sh
#include "counting.h"

#include <cuda.h>

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <map>
#include <mutex>

using counting::fail;
using counting::total;

namespace {

constexpr size_t kAddresses = size_t(1) << 46;
constexpr size_t kPage = size_t(2) << 20;  // the device hands out memory in whole pages
// Larger copies do not copy. To pages that nobody has touched, a GiB takes about half a second here,
// which would be most of a search's time (llama-80 of scripts/results/setups.json).
constexpr size_t kLargestRealCopy = size_t(1) << 20;
constexpr size_t kContextBytes = size_t(450) << 20;
constexpr size_t kNumber = 8;  // the bytes of a number that Python reads, at most
constexpr int kProcesses = 512;

struct Process {
  std::atomic<int> id;
  std::atomic<long long> used[counting::kMostDevices];
};
struct Piece {
  size_t bytes;
  int device;
};

std::mutex mutex;
std::map<size_t, Piece> blocks;    // by address
std::map<size_t, Piece> physical;  // by handle, of memory that is mapped page by page
std::map<size_t, size_t> copies;   // by address: bytes of the last copy to it
size_t first_address = 0, next_address = 0;
Process* processes = nullptr;
Process* self = nullptr;
bool context_exists[counting::kMostDevices] = {};

size_t whole_pages(size_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

[[noreturn]] void give_up(const char* what) {
  fprintf(stderr, "counting CUDA: %s\n", what);
  abort();
}

bool is_alive(int id) { return id && (id == getpid() || kill(id, 0) == 0); }

// Every process has a slot in a shared file; those of dead processes are used again.
void find_slot() {
  if (self && self->id == getpid()) return;  // else: first call, or the child of a fork
  if (!processes) {
    const char* path = getenv("COUNTING_CUDA_STATE");
    const int file = path ? open(path, O_RDWR | O_CREAT, 0600) : -1;
    const size_t size = sizeof(Process) * kProcesses;
    if (path && (file < 0 || ftruncate(file, size))) give_up("cannot open COUNTING_CUDA_STATE");
    const int flags = path ? MAP_SHARED : MAP_SHARED | MAP_ANONYMOUS;
    void* memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, flags, file, 0);
    if (memory == MAP_FAILED) give_up("cannot map COUNTING_CUDA_STATE");
    if (path) close(file);
    processes = static_cast<Process*>(memory);
  }
  for (int i = 0; i < kProcesses; i++) {
    int owner = processes[i].id;
    if (!is_alive(owner) && processes[i].id.compare_exchange_strong(owner, getpid())) {
      self = &processes[i];
      for (auto& used : self->used) used = 0;
      return;
    }
  }
  give_up("too many processes");
}
long long used_by_all(int device) {
  long long sum = 0;
  for (int i = 0; i < kProcesses; i++)
    if (is_alive(processes[i].id)) sum += processes[i].used[device];
  return sum;
}
bool take(size_t bytes, int device) {
  find_slot();
  if (used_by_all(device) + (long long)bytes > (long long)total()) return false;
  self->used[device] += bytes;
  return true;
}
// Addresses are real, so that small copies work; pages that nobody touches cost nothing.
size_t addresses(size_t bytes) {
  if (!first_address) {
    void* memory = mmap(nullptr, kAddresses, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) give_up("no addresses");
    first_address = next_address = whole_pages(size_t(memory));
  }
  const size_t address = next_address;
  next_address += whole_pages(bytes);
  return address;
}
bool is_on_device(const void* p) {
  return first_address && size_t(p) >= first_address && size_t(p) < first_address + kAddresses;
}
// Kernels write nothing, so a number that one computed would be read from what an earlier tensor
// left at its address: mask.all(), read as True, takes other ways through a model. A number is one
// that was copied there only if the last copy to its address had the same size.
bool is_result_of_kernel(const void* p, size_t bytes) {
  if (bytes > kNumber || !is_on_device(p)) return false;
  std::lock_guard<std::mutex> guard(mutex);
  const auto copy = copies.find(size_t(p));
  return copy == copies.end() || copy->second != bytes;
}
void note_copy(const void* to, size_t bytes) {
  if (!is_on_device(to)) return;
  std::lock_guard<std::mutex> guard(mutex);
  copies[size_t(to)] = bytes;
}

}  // namespace

size_t counting::total() {
  static const char* text = getenv("COUNTING_CUDA_TOTAL");
  static const size_t bytes = text ? strtoull(text, nullptr, 10) : 150121545728ull;
  return bytes;
}
bool counting::has_context(int device) { return context_exists[device]; }
cudaError_t counting::ensure_context() {
  std::lock_guard<std::mutex> guard(mutex);
  const int device = current_device();
  if (context_exists[device]) return cudaSuccess;
  if (!take(kContextBytes, device)) return cudaErrorMemoryAllocation;
  context_exists[device] = true;
  return cudaSuccess;
}

// cudaMalloc and its like

API cudaError_t cudaMalloc(void** out, size_t bytes) {
  NEEDS_CONTEXT();
  std::lock_guard<std::mutex> guard(mutex);
  *out = nullptr;
  const Piece piece = {whole_pages(bytes), counting::current_device()};
  if (!take(piece.bytes, piece.device)) return fail(cudaErrorMemoryAllocation);
  const size_t address = addresses(bytes);
  blocks[address] = piece;
  *out = (void*)address;
  return cudaSuccess;
}
API cudaError_t cudaFree(void* p) {
  NEEDS_CONTEXT();
  if (!p) return cudaSuccess;
  std::lock_guard<std::mutex> guard(mutex);
  const auto block = blocks.find(size_t(p));
  if (block == blocks.end()) return fail(cudaErrorInvalidValue);
  const Piece piece = block->second;
  self->used[piece.device] -= piece.bytes;
  madvise(p, piece.bytes, MADV_DONTNEED);
  blocks.erase(block);
  return cudaSuccess;
}
API cudaError_t cudaMemGetInfo(size_t* free, size_t* all) {
  NEEDS_CONTEXT();
  const long long left = (long long)total() - used_by_all(counting::current_device());
  *free = left > 0 ? left : 0;
  *all = total();
  return cudaSuccess;
}
API cudaError_t cudaHostAlloc(void** out, size_t bytes, unsigned) {
  NEEDS_CONTEXT();
  *out = aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
  return *out ? cudaSuccess : fail(cudaErrorMemoryAllocation);
}
// It is not counted: a driver pages it out, as the states of paged optimizers.
API cudaError_t cudaMallocManaged(void** out, size_t bytes, unsigned) {
  return cudaHostAlloc(out, bytes, 0);
}
API cudaError_t cudaFreeHost(void* p) { free(p); return cudaSuccess; }
API cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  NEEDS_CONTEXT();
  if (is_result_of_kernel(from, bytes)) memset(to, 0, bytes);
  else if (bytes <= kLargestRealCopy) memmove(to, from, bytes);
  else if (!is_on_device(to)) memset(to, 0, bytes);
  note_copy(to, bytes);
  return cudaSuccess;
}
API cudaError_t cudaMemcpyAsync(
    void* to, const void* from, size_t bytes, cudaMemcpyKind kind, cudaStream_t) {
  return cudaMemcpy(to, from, bytes, kind);
}
API cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* out, const void* p) {
  memset(out, 0, sizeof *out);
  out->type = is_on_device(p) ? cudaMemoryTypeDevice : cudaMemoryTypeUnregistered;
  (is_on_device(p) ? out->devicePointer : out->hostPointer) = const_cast<void*>(p);
  std::lock_guard<std::mutex> guard(mutex);
  const auto next = blocks.upper_bound(size_t(p));
  if (next != blocks.begin()) out->device = std::prev(next)->second.device;
  return cudaSuccess;
}
API cudaError_t cudaGetSymbolAddress(void** out, const void*) {
  std::lock_guard<std::mutex> guard(mutex);
  *out = (void*)addresses(kPage);
  return cudaSuccess;
}

// Memory that is mapped page by page, as expandable segments do

static CUresult page_size(
    size_t* out, const CUmemAllocationProp*, CUmemAllocationGranularity_flags) {
  *out = kPage;
  return CUDA_SUCCESS;
}
static CUresult reserve(CUdeviceptr* out, size_t bytes, size_t, CUdeviceptr, unsigned long long) {
  std::lock_guard<std::mutex> guard(mutex);
  *out = addresses(bytes);
  return CUDA_SUCCESS;
}
static CUresult create(
    CUmemGenericAllocationHandle* out, size_t bytes, const CUmemAllocationProp* wanted,
    unsigned long long) {
  std::lock_guard<std::mutex> guard(mutex);
  const Piece piece = {bytes, wanted->location.id};
  if (!take(piece.bytes, piece.device)) return CUDA_ERROR_OUT_OF_MEMORY;
  *out = CUmemGenericAllocationHandle(counting::new_handle());
  physical[*out] = piece;
  return CUDA_SUCCESS;
}
static CUresult release(CUmemGenericAllocationHandle handle) {
  std::lock_guard<std::mutex> guard(mutex);
  self->used[physical[handle].device] -= physical[handle].bytes;
  physical.erase(handle);
  return CUDA_SUCCESS;
}
void* counting::driver_function(const char* name) {
  if (!strcmp(name, "cuMemGetAllocationGranularity")) return (void*)page_size;
  if (!strcmp(name, "cuMemAddressReserve")) return (void*)reserve;
  if (!strcmp(name, "cuMemCreate")) return (void*)create;
  if (!strcmp(name, "cuMemRelease")) return (void*)release;
  return nullptr;
}
