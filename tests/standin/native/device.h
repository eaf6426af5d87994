// What torch asks of a kind of device: memory, guard, generators, hooks. Two devices, a current one for each thread.
#pragma once
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <array>

#include "allocator.h"
#include "streams.h"

namespace standin {

using c10::Device, c10::DeviceIndex, c10::Stream;
constexpr auto CUDA = c10::DeviceType::CUDA;
constexpr DeviceIndex DEVICES = 2;
constexpr DeviceIndex ALLOCATORS = 3;  // the last is of no device: tests of the policy have it to themselves

inline thread_local DeviceIndex current_device = 0;
inline thread_local std::array<int64_t, DEVICES> current_stream{};

inline Streams& streams() {
  static auto* made = new Streams;
  return *made;
}
inline CachingAllocator& memory_of(DeviceIndex device) {
  static auto* made = new std::array<CachingAllocator, ALLOCATORS>;
  return (*made)[device];
}
inline DeviceIndex here(DeviceIndex device) { return device < 0 ? current_device : device; }

struct OnDevice {  // the current device meanwhile, as every kernel makes its tensors' device the current one
  DeviceIndex before = current_device;
  explicit OnDevice(DeviceIndex device) { current_device = device; }
  ~OnDevice() { current_device = before; }
};

// The device and the start of what is released, since a deleter is given one pointer.
struct Held {
  DeviceIndex device;
  void* start;
};
inline void release(void* context) {
  auto* held = static_cast<Held*>(context);
  if (held) memory_of(held->device).release(held->start);
  delete held;
}

struct Allocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t n) override {
    Device device(CUDA, current_device);
    if (n == 0) return {nullptr, nullptr, &release, device};
    try {
      void* start = memory_of(current_device).allocate(n, current_stream[current_device]);
      return {start, new Held{current_device, start}, &release, device};
    } catch (const OutOfMemory& error) {
      TORCH_CHECK_WITH(OutOfMemoryError, false, "CUDA out of memory. Tried to allocate ", error.wanted,
          " bytes. The stand-in has reserved ", error.reserved, " of ", error.limit, " bytes.");
    }
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t n) const override { std::memcpy(to, from, n); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {
    for (DeviceIndex device = 0; device < ALLOCATORS; device++) memory_of(device).empty_cache();
  }
  void recordStream(const c10::DataPtr&, Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex device) override {
    c10::CachingDeviceAllocator::DeviceStats found;
    const Figures& figures = memory_of(here(device)).figures;
    auto put = [](auto& into, const Count& count) {
      into[0].current = count.now;
      into[0].peak = count.peak;
    };
    put(found.allocated_bytes, figures.allocated);
    put(found.active_bytes, figures.allocated);
    put(found.requested_bytes, figures.requested);
    put(found.reserved_bytes, figures.reserved);
    return found;
  }
  void resetAccumulatedStats(DeviceIndex) override {}
  void resetPeakStats(DeviceIndex device) override { memory_of(here(device)).figures.forget_peaks(); }
};
inline Allocator& allocator() {
  static auto* made = new Allocator;
  return *made;
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return CUDA; }
  Device exchangeDevice(Device device) const override {
    Device before = getDevice();
    current_device = here(device.index());
    return before;
  }
  Device getDevice() const override { return Device(CUDA, current_device); }
  void setDevice(Device device) const override { current_device = here(device.index()); }
  void uncheckedSetDevice(Device device) const noexcept override { current_device = here(device.index()); }
  static Stream stream_of(DeviceIndex device, int64_t id) {
    return Stream(Stream::UNSAFE, Device(CUDA, here(device)), id);
  }
  Stream getStream(Device device) const override {
    return stream_of(device.index(), current_stream[here(device.index())]);
  }
  Stream getDefaultStream(Device device) const override { return stream_of(device.index(), 0); }
  Stream getNewStream(Device device, int) const override { return stream_of(device.index(), streams().made()); }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return getNewStream(device, 0); }
  Stream exchangeStream(Stream stream) const override {
    auto& current = current_stream[stream.device_index()];
    Stream before = stream_of(stream.device_index(), current);
    current = stream.id();
    return before;
  }
  DeviceIndex deviceCount() const noexcept override { return DEVICES; }
  void record(void** event, const Stream& stream, const DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new Mark;
    streams().record(*static_cast<Mark*>(*event), stream.id());
  }
  void block(void* event, const Stream&) const override {
    if (event) streams().wait(*static_cast<Mark*>(event));
  }
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete static_cast<Mark*>(event); }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream& stream) const override { streams().run(stream.id()); }
  void synchronizeEvent(void* event) const override {
    if (event) streams().wait(*static_cast<Mark*>(event));
  }
  void synchronizeDevice(const DeviceIndex) const override { streams().run_all(); }
  double elapsedTime(void* start, void* end, const DeviceIndex) const override {
    auto took = static_cast<Mark*>(end)->at - static_cast<Mark*>(start)->at;
    return std::chrono::duration<double, std::milli>(took).count();
  }
};

inline bool capturing = false;  // whether the computing stream is being captured as a graph

// A seed and an offset, as a counter-based generator has them. Whoever sets either makes it fresh: libraries that keep
// states of their own seed them anew then (cuDNN's dropout between the layers of an RNN).
struct Generator final : c10::GeneratorImpl {
  uint64_t seed_ = 0, offset_ = 0;
  bool fresh_ = true;
  explicit Generator(DeviceIndex device = 0)
      : GeneratorImpl(Device(CUDA, device), c10::DispatchKeySet(c10::DispatchKey::CUDA)) {}
  void set_current_seed(uint64_t seed) override { seed_ = seed, offset_ = 0, fresh_ = true; }
  void set_offset(uint64_t offset) override { offset_ = offset; }
  uint64_t get_offset() const override { return offset_; }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom(true));
    return seed_;
  }
  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(!capturing, "Cannot call CUDAGeneratorImpl::set_state during CUDA graph capture");
    TORCH_CHECK(state.numel() == 16, "a state of the stand-in's generator has 16 bytes");
    auto* words = static_cast<const uint64_t*>(state.data());
    seed_ = words[0], offset_ = words[1], fresh_ = true;
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto state = at::detail::empty_cpu({16}, at::kByte, std::nullopt, std::nullopt, std::nullopt, std::nullopt);
    auto* words = static_cast<uint64_t*>(state.data_ptr());
    words[0] = seed_, words[1] = offset_;
    return state.getIntrusivePtr();
  }
  Generator* clone_impl() const override {
    auto* copy = new Generator(device().index());
    copy->seed_ = seed_, copy->offset_ = offset_;
    return copy;
  }
};
inline at::Generator& generator_of(DeviceIndex device) {
  static auto* made = new std::array<at::Generator, DEVICES>{
      at::make_generator<Generator>(DeviceIndex(0)), at::make_generator<Generator>(DeviceIndex(1))};
  return (*made)[device];
}
inline DeviceIndex next_generator = 0;  // those that Python asks for first are the default ones, in order

inline bool with_cudnn = false;

struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool hasCUDART() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool compiledWithCuDNN() const override { return with_cudnn; }
  bool hasCuDNN() const override { return with_cudnn; }
  long versionCuDNN() const override { return 91900; }
  long versionRuntimeCuDNN() const override { return 91900; }
  double batchnormMinEpsilonCuDNN() const override { return 0; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return DEVICES; }
  int getNumGPUs() const override { return DEVICES; }
  DeviceIndex current_device() const override { return standin::current_device; }
  DeviceIndex getCurrentDevice() const override { return standin::current_device; }
  void setCurrentDevice(DeviceIndex device) const override { standin::current_device = device; }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    auto before = standin::current_device;
    standin::current_device = device;
    return before;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override {
    return device < 0 ? standin::current_device : exchangeDevice(device);
  }
  const at::Generator& getDefaultGenerator(DeviceIndex device = -1) const override { return generator_of(here(device)); }
  at::Generator getNewGenerator(DeviceIndex device = -1) const override {
    if (next_generator < DEVICES) return generator_of(next_generator++);
    return at::make_generator<Generator>(here(device));
  }
  c10::Allocator* getPinnedMemoryAllocator() const override { return c10::GetAllocator(c10::kCPU); }
  bool isPinnedPtr(const void*) const override { return false; }
  c10::Allocator* getCUDADeviceAllocator() const override { return &allocator(); }
  void deviceSynchronize(DeviceIndex) const override { streams().run_all(); }
};

}  // namespace standin
