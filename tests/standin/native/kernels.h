// Kernels of the device: the CPU's, on the same memory, in tensors that the device's allocator holds.
#pragma once
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/NativeFunctions.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/transformers/attention.h>
#include <torch/library.h>

#include "device.h"

namespace standin {

using Below = c10::impl::ExcludeDispatchKeyGuard;
inline Below below_autograd() { return Below(c10::autograd_dispatch_keyset_with_ADInplaceOrView); }

// A CPU tensor that lies where a tensor of the device lies; it holds nothing.
inline at::Tensor on_host(const at::Tensor& t) {
  if (!t.defined() || !t.is_cuda()) return t;
  auto* start = t.storage().nbytes() ? static_cast<char*>(t.storage().mutable_data()) : nullptr;
  if (start) start += t.storage_offset() * t.element_size();
  auto options = t.options().device(at::kCPU).requires_grad(false);
  return at::for_blob(start, t.sizes()).strides(t.strides()).options(options).make_tensor();
}

inline DeviceIndex index_of(std::optional<Device> device) {
  return here(device && device->is_cuda() ? device->index() : DeviceIndex(-1));
}

inline at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>, std::optional<Device> device, std::optional<bool>) {
  OnDevice on(index_of(device));
  c10::DispatchKeySet key(c10::DispatchKey::CUDA);
  return at::detail::empty_strided_generic(size, stride, &allocator(), key, dtype.value_or(at::kFloat));
}

inline at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  OnDevice on(index_of(device));
  c10::DispatchKeySet key(c10::DispatchKey::CUDA);
  return at::detail::empty_generic(size, &allocator(), key, dtype.value_or(at::kFloat), format);
}

inline at::Tensor& copy_(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  if (self.numel() == 0) return self;
  auto to = on_host(self), from = on_host(source.sizes() == self.sizes() ? source : source.expand(self.sizes()));
  auto device = (self.is_cuda() ? self : source).device().index();
  auto stream = current_stream[device];
  if (stream == 0 || !streams().lazy || !non_blocking) {
    to.copy_(from);
    return self;
  }
  // The device's memory is not held: whoever frees it before the copy has run loses. The host's is, as torch's caching
  // allocator of pinned memory holds it until the copy has run.
  at::Tensor kept = self.is_cuda() ? (source.is_cuda() ? at::Tensor() : source) : self;
  auto bare = [](const at::Tensor& t) {
    return at::for_blob(t.data_ptr(), t.sizes()).strides(t.strides()).options(t.options()).make_tensor();
  };
  streams().issue(stream, [to = bare(to), from = bare(from), kept]() mutable {
    auto guard = below_autograd();
    to.copy_(from);
  });
  return self;
}

inline at::Scalar local_scalar(const at::Tensor& t) { return on_host(t).item(); }

inline const at::Tensor& resize_(const at::Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  auto* storage = self.storage().unsafeGetStorageImpl();
  size_t need = (c10::multiply_integers(size) + self.storage_offset()) * self.element_size();
  if (storage->nbytes() < need) {
    OnDevice on(self.device().index());
    auto larger = allocator().allocate(need);
    if (storage->nbytes()) std::memcpy(larger.get(), storage->data(), storage->nbytes());
    storage->set_data_ptr_noswap(std::move(larger));
    storage->set_nbytes(need);
  }
  self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  if (format && *format != at::MemoryFormat::Preserve) self.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  return self;
}

inline at::Tensor& set_storage(at::Tensor& self, at::Storage source, c10::SymInt offset, c10::SymIntArrayRef size,
    c10::SymIntArrayRef stride) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(source));
  self.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset);
  return self;
}

inline at::Tensor& set_source(at::Tensor& self, at::Storage source) {
  std::vector<c10::SymInt> size{static_cast<int64_t>(source.nbytes() / self.element_size())}, stride{1};
  return set_storage(self, std::move(source), 0, size, stride);
}

// Which attention a build with CUDA takes for what the stand-in has: memory-efficient, or math where that is off.
inline int64_t attention_choice(const at::Tensor&, const at::Tensor&, const at::Tensor&,
    const std::optional<at::Tensor>&, double, bool, std::optional<double>, bool) {
  constexpr int64_t MATH = 0, EFFICIENT = 2;
  return at::globalContext().userEnabledMemEfficientSDP() ? EFFICIENT : MATH;
}

// A library's handle takes a workspace when a thread first uses it, and keeps it until there is another library.
struct Library {
  std::mutex lock;
  size_t workspace = 0;
  int64_t number = 0;
  std::vector<c10::DataPtr> held;
  void replace(size_t bytes) {
    std::lock_guard guard(lock);
    held.clear();
    workspace = bytes;
    number++;
  }
};
inline Library& library() {
  static auto* made = new Library;
  return *made;
}
inline void take_library_workspace(const std::string& name) {
  static const std::set<std::string> users{"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"};
  static thread_local int64_t mine = 0;
  std::lock_guard guard(library().lock);
  if (!library().workspace || mine == library().number || !users.count(name)) return;
  mine = library().number;
  library().held.push_back(allocator().allocate(library().workspace));
}

// Random numbers of the CPU's kernels, from the seed and offset of the device's generator, which move on.
class DeviceRandomness {
 public:
  DeviceRandomness(bool needed, DeviceIndex device) {
    if (!needed) return;
    auto* own = static_cast<Generator*>(generator_of(device).unsafeGetGeneratorImpl());
    before_ = cpu_.get_state();
    cpu_.set_current_seed(own->seed_ * 1000003 + own->offset_);
    own->offset_ += 4;
  }
  ~DeviceRandomness() {
    if (before_.defined()) cpu_.set_state(before_);
  }

 private:
  at::Generator cpu_ = at::detail::getDefaultCPUGenerator();
  at::Tensor before_;
};

// One call of an operator that has no kernel of the device's own.
class Fallback {
 public:
  Fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack)
      : op_(op), stack_(*stack), first_(stack->size() - op.schema().arguments().size()) {}

  void run() {
    OnDevice on(device());
    take_library_workspace(op_.schema().name());
    for (size_t i = first_; i < stack_.size(); i++) stack_[i] = lent(stack_[i], is_out(i - first_));
    {
      DeviceRandomness random(op_.hasTag(at::Tag::nondeterministic_seeded), current_device);
      auto guard = below_autograd();
      op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack_);
      for (auto& [copy, original] : written_) copy_back(copy, original);
    }
    for (auto& value : stack_) value = returned(value);
  }

 private:
  const c10::OperatorHandle& op_;
  torch::jit::Stack& stack_;
  size_t first_;
  std::unordered_map<at::TensorImpl*, at::Tensor> originals_;
  std::vector<std::pair<at::Tensor, at::Tensor>> written_;  // results that the kernel is to make as large as they get

  DeviceIndex device() const {
    std::optional<DeviceIndex> named;
    auto look = [&](const at::Tensor& t) {
      if (!named && t.defined() && t.is_cuda()) named = t.device().index();
    };
    for (size_t i = first_; i < stack_.size(); i++) {
      const auto& value = stack_[i];
      if (value.isTensor()) look(value.toTensor());
      if (value.isTensorList()) for (const at::Tensor& t : value.toTensorVector()) look(t);
      if (!named && value.isDevice() && value.toDevice().is_cuda()) named = here(value.toDevice().index());
    }
    return named.value_or(current_device);
  }

  bool is_out(size_t argument) const {
    const auto& formal = op_.schema().arguments()[argument];
    return formal.kwarg_only() && formal.alias_info() && formal.alias_info()->isWrite();
  }

  at::Tensor lent(const at::Tensor& t, bool out = false) {
    if (!t.defined() || !t.is_cuda()) return t;
    bool apart = out || t.numel() == 0;
    auto copy = apart ? at::empty_strided(t.sizes(), t.strides(), t.options().device(at::kCPU)) : on_host(t);
    if (apart) written_.emplace_back(copy, t);
    originals_[copy.unsafeGetTensorImpl()] = t;
    return copy;
  }

  c10::IValue lent(const c10::IValue& value, bool out) {
    if (value.isTensor()) return lent(value.toTensor(), out);
    if (value.isTensorList()) {
      std::vector<at::Tensor> list;
      for (const at::Tensor& t : value.toTensorVector()) list.push_back(lent(t));
      return list;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const auto& entry : value.toOptionalTensorList()) {
        std::optional<at::Tensor> t = entry;
        list.push_back(t ? std::optional(lent(*t)) : t);
      }
      return list;
    }
    if (value.isDevice() && value.toDevice().is_cuda()) return Device(at::kCPU);
    if (value.isGenerator()) return c10::IValue();
    return value;
  }

  static void copy_back(const at::Tensor& copy, const at::Tensor& original) {
    if (!copy.numel()) return;
    if (copy.sizes() != original.sizes() || copy.strides() != original.strides()) {
      resize_(original, copy.sizes(), std::nullopt);
      original.unsafeGetTensorImpl()->set_sizes_and_strides(copy.sizes(), copy.strides());
    }
    on_host(original).copy_(copy);
  }

  at::Tensor returned(const at::Tensor& t) {
    if (!t.defined()) return t;
    auto found = originals_.find(t.unsafeGetTensorImpl());
    if (found != originals_.end()) return found->second;
    auto options = t.options().device(Device(CUDA, current_device));
    auto made = at::empty_strided(t.sizes(), t.strides(), options);
    if (t.numel()) std::memcpy(made.storage().mutable_data(), t.data_ptr(), made.storage().nbytes());
    return made;
  }

  c10::IValue returned(const c10::IValue& value) {
    if (value.isTensor()) return returned(value.toTensor());
    if (!value.isTensorList()) return value;
    std::vector<at::Tensor> list;
    for (const at::Tensor& t : value.toTensorVector()) list.push_back(returned(t));
    return list;
  }
};

inline void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  Fallback(op, stack).run();
}

}  // namespace standin
