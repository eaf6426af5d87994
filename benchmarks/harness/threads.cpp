// The CPU's allocator as torch has it, but that what a thread without a profiler frees is told to the open one.

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <memory>
#include <mutex>

namespace {

using c10::DebugInfoKind;
using c10::ThreadLocalDebugInfo;

c10::Allocator* torchs = nullptr;
std::mutex guarding;
c10::DebugInfoBase* known = nullptr;
std::weak_ptr<c10::DebugInfoBase> open; // the profiler of the thread that allocated last under one

void note_profiler() {
  auto* here = ThreadLocalDebugInfo::get(DebugInfoKind::PROFILER_STATE);
  if (here == nullptr) return;
  std::lock_guard<std::mutex> guard(guarding);
  if (here == known && !open.expired()) return;
  try {
    open = ThreadLocalDebugInfo::_peek(DebugInfoKind::PROFILER_STATE);
    known = here;
  } catch (const std::exception&) { // something else was pushed on top of it: the next request is soon enough
  }
}

void free_and_tell(void* block) {
  std::shared_ptr<c10::DebugInfoBase> profiler;
  if (ThreadLocalDebugInfo::get(DebugInfoKind::PROFILER_STATE) == nullptr) {
    std::lock_guard<std::mutex> guard(guarding);
    profiler = open.lock();
  }
  if (profiler) {
    c10::DebugInfoGuard guard(DebugInfoKind::PROFILER_STATE, profiler);
    torchs->raw_deleter()(block);
  } else {
    torchs->raw_deleter()(block);
  }
}

struct Telling final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    note_profiler();
    auto* block = torchs->raw_allocate(size);
    return {block, block, &free_and_tell, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_and_tell; }
  void copy_data(void* to, const void* from, size_t size) const override { default_copy_data(to, from, size); }
};

} // namespace

extern "C" void install() {
  if (torchs != nullptr) return;
  torchs = c10::GetCPUAllocator();
  c10::SetCPUAllocator(new Telling);
}
