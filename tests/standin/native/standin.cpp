// A stand-in for CUDA devices in a build of torch for the CPU: it registers what torch looks for, and has a few
// functions of C for the tests that steer it. It must be loaded before torch asks for CUDA's hooks, once, on import.
#include "kernels.h"

namespace standin {

using at::CUDAHooksRegistry, at::RegistererCUDAHooksRegistry;
using CUDAHooks = Hooks;
REGISTER_CUDA_HOOKS(CUDAHooks);
C10_REGISTER_GUARD_IMPL(CUDA, Guard);

TORCH_LIBRARY_IMPL(_, CUDA, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("copy_", copy_);
  library.impl("_local_scalar_dense", local_scalar);
  library.impl("resize_", resize_);
  library.impl("set_.source_Storage_storage_offset", set_storage);
  library.impl("set_.source_Storage", set_source);
  library.impl("as_strided", at::native::as_strided_tensorimpl);
  library.impl("view", at::native::view);
  library.impl("_reshape_alias", at::native::_reshape_alias);
  library.impl("unfold", at::native::unfold);
}

const bool registered = [] {
  at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&attention_choice);
  c10::SetAllocator(CUDA, &allocator(), 100);
  return true;
}();

}  // namespace standin

extern "C" {
using namespace standin;

int standin_device() { return current_device; }
void standin_set_device(int device) { current_device = here(static_cast<c10::DeviceIndex>(device)); }
int64_t standin_stream(int device) { return current_stream[device]; }
void standin_set_stream(int device, int64_t stream) { current_stream[device] = stream; }
void standin_synchronize() { streams().run_all(); }

// allocated, requested and reserved bytes: each now and at most
void standin_figures(int device, int64_t* into) {
  const Figures& figures = memory_of(device).figures;
  for (const Count* count : {&figures.allocated, &figures.requested, &figures.reserved}) {
    *into++ = count->now;
    *into++ = count->peak;
  }
}
void standin_forget_peaks(int device) { memory_of(device).figures.forget_peaks(); }
void standin_empty_cache() { allocator().emptyCache({0, 0}); }

void standin_limit(int device, int64_t bytes) { memory_of(device).limit = bytes; }
void standin_poison(int on) {
  for (int device = 0; device < ALLOCATORS; device++) memory_of(device).poison = on;
}
void standin_expandable(int on) {
  for (int device = 0; device < ALLOCATORS; device++) memory_of(device).expandable = on;
}
// [blocks][8]: segment, address, size, requested (-1: free), stream, small, expandable, 0; the number of blocks
int64_t standin_blocks(int device, int64_t* into, int64_t room) {
  int64_t count = 0;
  memory_of(device).each_block([&](const Block& first, const Block& block) {
    if (count++ >= room) return;
    int64_t requested = block.used ? int64_t(block.requested) : -1;
    for (int64_t n : {reinterpret_cast<int64_t>(first.start), reinterpret_cast<int64_t>(block.start), int64_t(block.size),
             requested, block.stream, int64_t(block.pool->small), int64_t(block.expandable), int64_t(0)}) *into++ = n;
  });
  return count;
}

void standin_capture(int on) { capturing = on; }
int standin_capturing() { return capturing; }
// whether the generator was set since this was asked
int standin_generator_is_fresh(int device) {
  auto* own = static_cast<Generator*>(generator_of(static_cast<DeviceIndex>(device)).unsafeGetGeneratorImpl());
  return std::exchange(own->fresh_, false);
}

void standin_lazy(int on) { streams().lazy = on; }
void standin_cudnn(int on) { with_cudnn = on; }
void standin_library_workspace(int64_t bytes) { library().replace(bytes); }

// the allocator alone, for its own tests
void* standin_allocate(int device, int64_t bytes) {
  try {
    return memory_of(device).allocate(bytes, 0);
  } catch (const OutOfMemory&) {
    return nullptr;
  }
}
void standin_release(int device, void* start) { memory_of(device).release(start); }
}
