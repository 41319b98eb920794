// A simulated accelerator with the device type "sim": two devices, whose work runs as late as it may.
//
// Memory. Whole pages that the host may not touch: reading device memory without a copy ends in SIGSEGV. What was freed
// is filled with 0xFF (NaN) in the order of the stream on which it was allocated, and is used again on that stream.
//
// Streams. A stream is a queue, and nothing in it runs before somebody waits for it: a host that synchronizes, another
// stream that waits for an event, an operator on the same stream. Whoever forgets to wait sees what was there before,
// every time. Or streams other than the default one run at once, which finds who gives memory away too early. Copies
// that are not blocking are queued, from and to pinned memory as they are; pageable memory is read at once, as CUDA
// stages it.
//
// Records. While record() is on, each kernel, copy, allocation, event, wait and collective is recorded, in order.
//
// Operators run on the CPU, by copies. Their inputs are read when all work of the current stream is done; their results
// are queued, so another stream sees them only if it waits.
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <ATen/record_function.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include "world.h"

namespace {

// -- streams and events -----------------------------------------------------------------------------------

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kSim; }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return {kSim, current_device}; }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(index_of(device) < devices(), "sim: there is no device ", device);
    current_device = index_of(device);
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override { current_device = index_of(device); }
  c10::DeviceIndex deviceCount() const noexcept override { return devices(); }

  c10::Stream stream(StreamKey key) const {
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(kSim, key.first), key.second);
  }
  c10::Stream getStream(c10::Device device) const override {
    return stream({index_of(device), current_stream[index_of(device)]});
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream({index_of(device), 0}); }
  c10::Stream getNewStream(c10::Device device, int) const override {
    Lock lock(world().mutex);
    return stream({index_of(device), ++world().streams});
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream exchangeStream(c10::Stream next) const override {
    auto before = getStream(next.device());
    current_stream[index_of(next.device())] = next.id();
    return before;
  }
  bool queryStream(const c10::Stream& stream) const override {
    Lock lock(world().mutex);
    auto& queue = world().queues[key_of(stream)];
    return queue.done == queue.queued;
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    Lock lock(world().mutex);
    note_waiting("a stream is synchronized");
    finish(key_of(stream));
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    Lock lock(world().mutex);
    note_waiting("it is synchronized");
    for (auto& [key, queue] : world().queues)
      if (key.first == device) finish(key);
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    note("event", "");
    Lock lock(world().mutex);
    if (!*event) *event = new Event;
    *static_cast<Event*>(*event) = {key_of(stream), world().queues[key_of(stream)].queued};
  }
  void block(void* event, const c10::Stream& stream) const override {
    note("stream wait", "");
    Lock lock(world().mutex);
    if (!event) return;
    auto [key, number] = *static_cast<Event*>(event);
    if (key != key_of(stream)) enqueue(key_of(stream), [key = key, number = number] { run_until(key, number); });
  }
  // Time passes between two questions: the second finds the work done.
  bool queryEvent(void* event) const override {
    Lock lock(world().mutex);
    if (!event) return true;
    auto [key, number] = *static_cast<Event*>(event);
    bool done = world().queues[key].done >= number;
    run_until(key, number);
    return done;
  }
  void synchronizeEvent(void* event) const override {
    Lock lock(world().mutex);
    // A host that synchronizes with one event knows what for: this is never an error.
    note("wait", "an event is synchronized");
    if (event) run_until(static_cast<Event*>(event)->stream, static_cast<Event*>(event)->number);
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  double elapsedTime(void*, void*, const c10::DeviceIndex) const override { return 0.0; }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return devices(); }
  c10::DeviceIndex getCurrentDevice() const override { return current_device; }
  void setCurrentDevice(c10::DeviceIndex device) const override { Guard().setDevice({kSim, device}); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return Guard().exchangeDevice({kSim, device}).index();
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return device < 0 ? current_device : exchangeDevice(device);
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::detail::createCPUGenerator(); }
  bool isPinnedPtr(const void* at) const override { return is_pinned(at); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    auto before = current_device;
    current_device = storage.device().index();
    auto data = device_memory.allocate(bytes);
    current_device = before;
    auto options = at::TensorOptions().dtype(at::kByte);
    auto count = static_cast<int64_t>(std::min(bytes, storage.nbytes()));
    if (count > 0) {
      Lock lock(world().mutex);
      auto stream = current(storage.device().index());
      auto *from = world().blocks.at(storage.mutable_data()), *to = world().blocks.at(data.get());
      enqueue(stream, [from, to, count] {
        for (auto* block : {from, to}) mprotect(block->at, block->bytes, PROT_READ | PROT_WRITE);
        std::memcpy(to->at, from->at, count);
        for (auto* block : {from, to}) mprotect(block->at, block->bytes, PROT_NONE);
      });
    }
    storage.unsafeGetStorageImpl()->set_data_ptr(std::move(data));
    storage.unsafeGetStorageImpl()->set_nbytes(bytes);
  }
};

// -- operators --------------------------------------------------------------------------------------------

class Operator {
 public:
  Operator() : before_(in_operator) { in_operator = true; }
  ~Operator() { in_operator = before_; }

 private:
  bool before_;
};

class OnDevice {
 public:
  explicit OnDevice(std::optional<c10::Device> device) : before_(current_device) {
    if (device) Guard().setDevice(*device);
  }
  ~OnDevice() { current_device = before_; }

 private:
  c10::DeviceIndex before_;
};

// Random operators draw from the device's generator, not from the CPU's.
class Drawing {
 public:
  explicit Drawing(c10::DeviceIndex device) : device_(device), cpu_(at::detail::getDefaultCPUGenerator()) {
    outside_ = state(cpu_);
    set(cpu_, state(world().generators[device_]));
  }
  ~Drawing() {
    set(world().generators[device_], state(cpu_));
    set(cpu_, outside_);
  }
  static at::Tensor state(at::Generator generator) {
    std::lock_guard<std::mutex> lock(generator.mutex());
    return generator.get_state();
  }
  static void set(at::Generator generator, const at::Tensor& state) {
    std::lock_guard<std::mutex> lock(generator.mutex());
    generator.set_state(state);
  }

 private:
  c10::DeviceIndex device_;
  at::Generator cpu_;
  at::Tensor outside_;
};

// The number of kernels that CUDA starts for as many lists of tensors as this one: a kernel takes a limited number of
// tensors, and of chunks of them (ATen/native/cuda/MultiTensorApply.cuh).
size_t kernels_for(const std::vector<at::Tensor>& list, size_t lists) {
  constexpr int64_t kChunk = 65536, kChunks = 320, kTensors[] = {110, 64, 48, 36, 30};
  int64_t most = kTensors[std::min<size_t>(lists, 5) - 1], tensors = 0, chunks = 0;
  size_t kernels = 0;
  for (const auto& tensor : list) {
    if (tensor.numel() == 0) continue;
    ++tensors;
    for (int64_t left = (tensor.numel() + kChunk - 1) / kChunk; left > 0;) {
      auto taken = std::min(left, kChunks - chunks);
      left -= taken;
      chunks += taken;
      if (chunks == kChunks || (left == 0 && tensors == most)) {
        ++kernels;
        chunks = 0;
        tensors = left > 0;
      }
    }
  }
  return kernels + (chunks > 0);
}

void note_kernels(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  if (!world().recording) return;
  size_t kernels = 1;
  if (op.schema().name().find("_foreach_") != std::string::npos) {
    size_t lists = !op.schema().returns().empty();  // the results
    std::vector<at::Tensor> list;
    for (const auto& argument : torch::jit::last(stack, op.schema().arguments().size()))
      if (argument.isTensorList() && ++lists) list = argument.toTensorVector();
    kernels = kernels_for(list, lists);
  }
  for (size_t i = 0; i < kernels; ++i) note("kernel", op.schema().name());
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  note_kernels(op, *stack);
  if (op.schema().name() == "aten::nonzero") note_waiting("it counts what a mask selects");
  Operator here;
  std::optional<Drawing> drawing;
  if (op.hasTag(at::Tag::nondeterministic_seeded)) {
    c10::DeviceIndex device = current_device;
    for (const auto& argument : torch::jit::last(*stack, op.schema().arguments().size()))
      if (argument.isTensor() && argument.toTensor().defined() && argument.toTensor().device().type() == kSim) {
        device = argument.toTensor().device().index();
        break;
      }
    drawing.emplace(device);
  }
  at::native::cpu_fallback(op, stack);
}

at::Tensor empty(
    c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  OnDevice on(device);
  return at::detail::empty_generic_symint(
      size, &device_memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  OnDevice on(device);
  return at::detail::empty_strided_symint_generic(
      size, stride, &device_memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

at::Scalar local_scalar(const at::Tensor& t) {
  note("copy", "from device", t.nbytes());
  note_waiting("a number is read");
  Operator here;
  return t.cpu().item();
}

at::Tensor as_strided(
    const at::Tensor& t, c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<c10::SymInt> offset) {
  auto from = offset ? std::optional<int64_t>(offset->expect_int()) : std::nullopt;
  return at::native::as_strided_tensorimpl(t, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), from);
}

at::Tensor view(const at::Tensor& t, c10::SymIntArrayRef size) {
  return at::native::view(t, C10_AS_INTARRAYREF_SLOW(size));
}

at::Tensor reshape_alias(const at::Tensor& t, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(t, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

const at::Tensor& resize_to(const at::Tensor& t, at::IntArrayRef size) {
  if (t.sizes() == size) return t;
  t.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  size_t bytes = (t.storage_offset() + t.numel()) * t.itemsize();
  if (bytes > t.storage().nbytes()) at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(t.storage(), bytes);
  return t;
}

const at::Tensor& resize(const at::Tensor& t, c10::SymIntArrayRef size, std::optional<at::MemoryFormat>) {
  return resize_to(t, C10_AS_INTARRAYREF_SLOW(size));
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& target) {
  return copy_from(self, resize_to(target, self.sizes()), false);
}

at::Tensor& set_storage(
    at::Tensor& t, at::Storage storage, c10::SymInt offset, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::set_storage_cpu_(
      t, std::move(storage), offset.expect_int(), C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

at::Tensor& set_whole_storage(at::Tensor& t, at::Storage storage) {
  int64_t count = storage.nbytes() / t.itemsize();
  return at::native::set_storage_cpu_(t, std::move(storage), 0, {count}, {1});
}

// So that Module.to() keeps the parameters and moves what they hold, as for CUDA.
bool can_take_the_place(const at::Tensor&, const at::Tensor&) { return true; }

void record_stream(at::Tensor& t, c10::Stream stream) {
  Lock lock(world().mutex);
  auto found = world().blocks.find(t.storage().mutable_data());
  if (found != world().blocks.end() && found->second->stream != key_of(stream))
    found->second->users.insert(key_of(stream));
}

std::optional<at::Tensor> to_cpu(const std::optional<at::Tensor>& t) {
  return t && t->defined() ? std::optional<at::Tensor>(t->cpu()) : std::nullopt;
}

// Its schema does not say that it writes to the running statistics, so the fallback would not copy them back.
std::tuple<at::Tensor, at::Tensor, at::Tensor> batch_norm(
    const at::Tensor& input, const std::optional<at::Tensor>& weight, const std::optional<at::Tensor>& bias,
    const std::optional<at::Tensor>& mean, const std::optional<at::Tensor>& variance, bool training, double momentum,
    double epsilon) {
  note("kernel", "aten::native_batch_norm");
  Operator here;
  auto new_mean = to_cpu(mean), new_variance = to_cpu(variance);
  auto [y, a, b] = at::native_batch_norm(
      input.cpu(), to_cpu(weight), to_cpu(bias), new_mean, new_variance, training, momentum, epsilon);
  if (training && new_mean) mean->copy_(*new_mean);
  if (training && new_variance) variance->copy_(*new_variance);
  return {y.to(input.device()), a.to(input.device()), b.to(input.device())};
}

at::Tensor convolution(
    const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias, at::IntArrayRef stride,
    at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed, at::IntArrayRef output_padding,
    int64_t groups) {
  note("kernel", "aten::convolution");
  Operator here;
  auto y = at::convolution(
      input.cpu(), weight.cpu(), to_cpu(bias), stride, padding, dilation, transposed, output_padding, groups);
  return y.to(input.device());
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& gradient, const at::Tensor& input, const at::Tensor& weight, at::IntArrayRef stride,
    at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed, at::IntArrayRef output_padding, int64_t groups,
    std::array<bool, 3> wanted) {
  note("kernel", "aten::convolution_backward");
  Operator here;
  std::vector<int64_t> bias_sizes{transposed ? weight.size(1) * groups : weight.size(0)};
  auto [a, b, c] = at::convolution_backward(
      gradient.cpu(), input.cpu(), weight.cpu(), bias_sizes, stride, padding, dilation, transposed, output_padding,
      groups, wanted);
  auto back = [&](const at::Tensor& t) { return t.defined() ? t.to(input.device()) : t; };
  return {back(a), back(b), back(c)};
}

// Sends lists of tensors to one operator, as on CUDA, and not to one for each tensor.
void take_lists() {
  static torch::Library library(torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  for (const auto& name : c10::Dispatcher::singleton().getAllOpNames())
    if (name.name.rfind("aten::_foreach_", 0) == 0)
      library.impl(toString(name).c_str(), torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

std::unique_ptr<at::ObserverContext> no_context(const at::RecordFunction&) { return nullptr; }
void note_node(const at::RecordFunction& fn, at::ObserverContext*) { note("node", fn.name()); }

// Records from now on, the ends of autograd's functions included.
void record() {
  static at::CallbackHandle nodes = at::addGlobalCallback(
      at::RecordFunctionCallback(&no_context, &note_node).scopes({at::RecordScope::BACKWARD_FUNCTION}));
  (void)nodes;
  world().records.clear();
  world().recording = true;
}

py::list recorded() {
  world().recording = false;
  py::list records;
  for (const auto& [kind, name, bytes, stream] : world().records)
    records.append(py::make_tuple(kind, name, bytes, stream));
  return records;
}

}  // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar);
  m.impl("as_strided", as_strided);
  m.impl("view", view);
  m.impl("view_as_real", at::native::view_as_real);
  m.impl("view_as_complex", at::native::view_as_complex);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("resize_", resize);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Storage", set_whole_storage);
  m.impl("_has_compatible_shallow_copy_type", can_take_the_place);
  if (!is_tpu()) m.impl("record_stream", record_stream);
  m.impl("native_batch_norm", batch_norm);
  m.impl("convolution_overrideable", convolution);
  m.impl("convolution_backward_overrideable", convolution_backward);
}

// Up to torch 2.9 its other kernel would be in the way.
TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) {
  m.impl("_has_compatible_shallow_copy_type", can_take_the_place);
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  static Hooks hooks;
  at::RegisterPrivateUse1HooksInterface(&hooks);
  take_lists();
  m.def("current_device", [] { return static_cast<int>(current_device); });
  m.def("set_device", [](int device) { Guard().setDevice({kSim, static_cast<c10::DeviceIndex>(device)}); });
  m.def("manual_seed", [](int device, uint64_t seed) { world().generators[device].set_current_seed(seed); });
  m.def("get_rng_state", [](int device) { return Drawing::state(world().generators[device]); });
  m.def("set_rng_state", [](int device, const at::Tensor& state) { Drawing::set(world().generators[device], state); });
  m.def("run_side_streams_at_once", [](bool eager) { world().eager = eager; });
  m.def("make_waiting_an_error", [](bool error) { world().waiting_is_an_error = error; });
  m.def("memory", [] { return std::make_pair(world().live, world().peak); });
  m.def("reset_peak_memory", [] { world().peak = world().live; });
  m.def("record", &record);
  m.def("recorded", &recorded);
  m.def("note", [](const char* kind, const std::string& name, size_t bytes) { note(kind, name, bytes); });
  m.def("set_in_operator", [](bool now) { return std::exchange(in_operator, now); });
  m.def("is_initialized", [] { return !world().blocks.empty(); });
  m.def("generator", [](int device) { return world().generators[device]; });
}
