// A simulated accelerator with the device type "sim": two devices, whose work runs as late as it may.
//
// Memory. Whole pages that the host may not touch: reading device memory without a copy ends in SIGSEGV. What was freed
// is filled with 0xFF (NaN) in the order of the stream on which it was allocated, and is used again on that stream.
//
// Streams. A stream is a queue, and nothing in it runs before somebody waits for it: a host that synchronizes, another
// stream that waits for an event, an operator on the same stream. Whoever forgets to wait sees what was there before,
// every time. Or streams other than the default one run at once, which finds who gives memory away too early. Copies that are not blocking are queued, from and to pinned memory as they are; pageable memory is read
// at once, as CUDA stages it.
//
// Operators run on the CPU, by copies. Their inputs are read when all work of the current stream is done; their results
// are queued, so another stream sees them only if it waits.
#include <ATen/EmptyTensor.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <sys/mman.h>
#include <torch/extension.h>

#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <set>

namespace {

constexpr auto kSim = c10::DeviceType::PrivateUse1;
constexpr c10::DeviceIndex kDevices = 2;
constexpr size_t kPage = 4096;

thread_local c10::DeviceIndex current_device = 0;
thread_local c10::StreamId current_stream[kDevices] = {0, 0};
thread_local bool in_operator = false;  // copies to and from the CPU are then an operator's, not the script's

using StreamKey = std::pair<c10::DeviceIndex, c10::StreamId>;

struct Queue {
  std::deque<std::function<void()>> work;
  uint64_t queued = 0, done = 0;
};

struct Block {
  void* at;
  size_t bytes;
  StreamKey stream;              // on which it was allocated
  std::set<StreamKey> users;     // by Tensor.record_stream
};

struct Event {
  StreamKey stream;
  uint64_t number;
};

struct World {
  std::recursive_mutex mutex;
  std::map<StreamKey, Queue> queues;
  std::map<void*, Block*> blocks;
  std::map<std::pair<StreamKey, size_t>, std::vector<Block*>> unused;
  std::map<const void*, size_t> pinned;
  at::Generator generators[kDevices] = {at::detail::createCPUGenerator(), at::detail::createCPUGenerator()};
  c10::StreamId streams = 0;
  bool waiting_is_an_error = false, eager = false;
};

World& world() {  // never destroyed: tensors may outlive everything static
  static World* it = new World;
  return *it;
}

using Lock = std::lock_guard<std::recursive_mutex>;

c10::DeviceIndex index_of(c10::Device device) { return device.index() < 0 ? current_device : device.index(); }
StreamKey key_of(const c10::Stream& stream) { return {index_of(stream.device()), stream.id()}; }
StreamKey current(c10::DeviceIndex device) { return {device, current_stream[device]}; }

// Run a stream's work up to the item of that number.
void run_until(StreamKey key, uint64_t number) {
  Queue& queue = world().queues[key];
  while (queue.done < number) {
    auto work = std::move(queue.work.front());
    queue.work.pop_front();
    ++queue.done;
    work();
  }
}

void finish(StreamKey key) { run_until(key, world().queues[key].queued); }

uint64_t enqueue(StreamKey key, std::function<void()> work) {
  Queue& queue = world().queues[key];
  queue.work.push_back(std::move(work));
  auto number = ++queue.queued;
  if (world().eager && key.second != 0) run_until(key, number);
  return number;
}

// The script makes the host wait for a device.
void note_waiting(const char* what) {
  TORCH_CHECK(in_operator || !world().waiting_is_an_error, "sim: the host waits for the device (", what, ")");
}

// -- memory -----------------------------------------------------------------------------------------------

size_t in_pages(size_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

void poison(const Block& block) {
  mprotect(block.at, block.bytes, PROT_READ | PROT_WRITE);
  std::memset(block.at, 0xFF, block.bytes);
  mprotect(block.at, block.bytes, PROT_NONE);
}

void release(void* context) {
  Lock lock(world().mutex);
  auto* block = static_cast<Block*>(context);
  for (auto user : block->users) {
    auto number = world().queues[user].queued;
    enqueue(block->stream, [user, number] { run_until(user, number); });
  }
  block->users.clear();
  enqueue(block->stream, [block] { poison(*block); });
  world().unused[{block->stream, block->bytes}].push_back(block);
}

struct DeviceMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    c10::Device device(kSim, current_device);
    if (bytes == 0) return {nullptr, device};
    Lock lock(world().mutex);
    auto stream = current(current_device);
    auto& unused = world().unused[{stream, in_pages(bytes)}];
    Block* block;
    if (!unused.empty()) {
      block = unused.back();
      unused.pop_back();
    } else {
      void* at = mmap(nullptr, in_pages(bytes), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      TORCH_CHECK(at != MAP_FAILED, "sim: out of memory");
      block = new Block{at, in_pages(bytes), stream, {}};
      world().blocks[at] = block;
      poison(*block);
    }
    return {block->at, block, &release, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void*, const void*, size_t) const override { TORCH_CHECK(false, "sim: no raw copies"); }
};

struct PinnedMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    Lock lock(world().mutex);
    void* at = std::aligned_alloc(64, (std::max<size_t>(bytes, 1) + 63) / 64 * 64);
    world().pinned[at] = std::max<size_t>(bytes, 1);
    return {at, at, &forget, c10::Device(c10::kCPU)};
  }
  static void forget(void* at) {
    Lock lock(world().mutex);
    world().pinned.erase(at);
    std::memset(at, 0xFF, 1);
    std::free(at);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &forget; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
};

bool is_pinned(const void* at) {
  Lock lock(world().mutex);
  auto after = world().pinned.upper_bound(at);
  if (after == world().pinned.begin()) return false;
  auto& [begin, bytes] = *std::prev(after);
  return static_cast<const char*>(at) < static_cast<const char*>(begin) + bytes;
}

DeviceMemory device_memory;
PinnedMemory pinned_memory;
REGISTER_ALLOCATOR(c10::DeviceType::PrivateUse1, &device_memory);

// What a queued copy needs of a tensor. It keeps pinned memory alive, as CUDA's allocator does, but no device memory.
struct Place {
  bool on_device;
  void* base;  // of the storage
  size_t offset;
  std::vector<int64_t> sizes, strides;
  c10::ScalarType dtype;
  bool conj, neg;
  c10::Storage kept;

  explicit Place(const at::Tensor& t)
      : on_device(t.device().type() == kSim),
        base(t.storage().mutable_data()),
        offset(t.storage_offset() * t.itemsize()),
        sizes(t.sizes().vec()),
        strides(t.strides().vec()),
        dtype(t.scalar_type()),
        conj(t.is_conj()),
        neg(t.is_neg()) {
    if (!on_device) kept = t.storage();
  }
  at::Tensor tensor() const {
    auto t = at::from_blob(static_cast<char*>(base) + offset, sizes, strides, at::TensorOptions().dtype(dtype));
    if (conj) t = t.conj();
    return neg ? t._neg_view() : t;
  }
};

// Device memory is open while this lives.
class Open {
 public:
  explicit Open(const Place& place) {
    if (!place.on_device || place.base == nullptr) return;
    block_ = world().blocks.at(place.base);
    mprotect(block_->at, block_->bytes, PROT_READ | PROT_WRITE);
  }
  ~Open() {
    if (block_) mprotect(block_->at, block_->bytes, PROT_NONE);
  }

 private:
  Block* block_ = nullptr;
};

void copy_now(const Place& from, const Place& to) {
  at::AutoDispatchBelowADInplaceOrView guard;
  Open a(from), b(to);
  auto source = from.tensor();
  to.tensor().copy_(from.base == to.base ? source.clone() : source);
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& target, bool non_blocking) {
  if (target.numel() == 0) return target;
  Lock lock(world().mutex);
  bool from_device = self.device().type() == kSim, to_device = target.device().type() == kSim;
  auto device = index_of(from_device ? self.device() : target.device());
  auto stream = current(device);
  if (from_device && to_device) {
    Place from(self), to(target);
    auto other = current(index_of(target.device()));  // both devices' streams wait for each other, as CUDA's do
    if (other != stream) {
      auto number = world().queues[other].queued;
      enqueue(stream, [other, number] { run_until(other, number); });
    }
    auto number = enqueue(stream, [from, to] { copy_now(from, to); });
    if (other != stream) enqueue(other, [stream, number] { run_until(stream, number); });
    return target;
  }
  const auto& host = from_device ? target : self;
  bool pinned = host.numel() > 0 && is_pinned(host.storage().data());
  if (to_device) {
    // Pinned memory is read when the copy runs, pageable memory now.
    Place from(pinned && !in_operator ? self : self.clone()), to(target);
    enqueue(stream, [from, to] { copy_now(from, to); });
    if (non_blocking || in_operator) return target;
  } else {
    Place from(self), to(target);
    enqueue(stream, [from, to] { copy_now(from, to); });
    if (non_blocking && pinned && !in_operator) return target;
  }
  note_waiting(to_device ? "a blocking copy to it" : "a copy from it");
  finish(stream);
  return target;
}

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
    TORCH_CHECK(index_of(device) < kDevices, "sim: there is no device ", device);
    current_device = index_of(device);
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override { current_device = index_of(device); }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }

  c10::Stream stream(StreamKey key) const {
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(kSim, key.first), key.second);
  }
  c10::Stream getStream(c10::Device device) const override { return stream(current(index_of(device))); }
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
    Lock lock(world().mutex);
    if (!*event) *event = new Event;
    *static_cast<Event*>(*event) = {key_of(stream), world().queues[key_of(stream)].queued};
  }
  void block(void* event, const c10::Stream& stream) const override {
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
    // Who synchronizes with one event knows what for: this is not noted as waiting.
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
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  c10::DeviceIndex getCurrentDevice() const override { return current_device; }
  void setCurrentDevice(c10::DeviceIndex device) const override { Guard().setDevice({kSim, device}); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return Guard().exchangeDevice({kSim, device}).index();
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return device < 0 ? current_device : exchangeDevice(device);
  }
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

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
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
    at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed, at::IntArrayRef output_padding, int64_t groups) {
  Operator here;
  auto y = at::convolution(
      input.cpu(), weight.cpu(), to_cpu(bias), stride, padding, dilation, transposed, output_padding, groups);
  return y.to(input.device());
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& gradient, const at::Tensor& input, const at::Tensor& weight, at::IntArrayRef stride,
    at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed, at::IntArrayRef output_padding, int64_t groups,
    std::array<bool, 3> wanted) {
  Operator here;
  std::vector<int64_t> bias_sizes{transposed ? weight.size(1) * groups : weight.size(0)};
  auto [a, b, c] = at::convolution_backward(
      gradient.cpu(), input.cpu(), weight.cpu(), bias_sizes, stride, padding, dilation, transposed, output_padding,
      groups, wanted);
  auto back = [&](const at::Tensor& t) { return t.defined() ? t.to(input.device()) : t; };
  return {back(a), back(b), back(c)};
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
  m.impl("_reshape_alias", reshape_alias);
  m.impl("resize_", resize);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Storage", set_whole_storage);
  m.impl("_has_compatible_shallow_copy_type", can_take_the_place);
  m.impl("record_stream", record_stream);
  m.impl("native_batch_norm", batch_norm);
  m.impl("convolution_overrideable", convolution);
  m.impl("convolution_backward_overrideable", convolution_backward);
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  static Hooks hooks;
  at::RegisterPrivateUse1HooksInterface(&hooks);
  m.def("current_device", [] { return static_cast<int>(current_device); });
  m.def("set_device", [](int device) { Guard().setDevice({kSim, static_cast<c10::DeviceIndex>(device)}); });
  m.def("manual_seed", [](int device, uint64_t seed) { world().generators[device].set_current_seed(seed); });
  m.def("get_rng_state", [](int device) { return Drawing::state(world().generators[device]); });
  m.def("set_rng_state", [](int device, const at::Tensor& state) { Drawing::set(world().generators[device], state); });
  m.def("run_side_streams_at_once", [](bool eager) { world().eager = eager; });
  m.def("make_waiting_an_error", [](bool error) { world().waiting_is_an_error = error; });
}
