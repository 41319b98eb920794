// What the simulated accelerator is made of: queues of work, memory that the host may not touch, copies between them
// (device.cpp says how it behaves).
#pragma once

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <c10/core/Allocator.h>
#include <sys/mman.h>

#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <string>

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

// An event on a device, or a call of the script about it (device.cpp).
struct Record {
  std::string kind, name;
  size_t bytes;
  c10::StreamId stream;
};

struct World {
  std::recursive_mutex mutex;
  std::map<StreamKey, Queue> queues;
  std::map<void*, Block*> blocks;
  std::map<std::pair<StreamKey, size_t>, std::vector<Block*>> unused;
  std::map<const void*, size_t> pinned;
  at::Generator generators[kDevices] = {at::detail::createCPUGenerator(), at::detail::createCPUGenerator()};
  c10::StreamId streams = 0;
  size_t live = 0, peak = 0;  // bytes of tensors on devices, in whole pages: now, and at most
  bool waiting_is_an_error = false, eager = false, recording = false;
  std::vector<Record> records;
};

// Then there is one order of work, whatever the stream, and one device in a process (tpu.py has the rest).
bool is_tpu() {
  static const char* kind = std::getenv("MIRRORED_TEST_DEVICE");
  return kind && !std::strcmp(kind, "tpu");
}

World& world() {  // never destroyed: tensors may outlive everything static
  static World* it = new World;
  return *it;
}

using Lock = std::lock_guard<std::recursive_mutex>;

c10::DeviceIndex index_of(c10::Device device) { return device.index() < 0 ? current_device : device.index(); }
StreamKey key_of(c10::DeviceIndex device, c10::StreamId stream) { return {device, is_tpu() ? 0 : stream}; }
StreamKey key_of(const c10::Stream& stream) { return key_of(index_of(stream.device()), stream.id()); }
StreamKey current(c10::DeviceIndex device) { return key_of(device, current_stream[device]); }
c10::DeviceIndex devices() { return is_tpu() ? 1 : kDevices; }

void note_always(const char* kind, const std::string& name, size_t bytes) {
  if (!world().recording) return;
  Lock lock(world().mutex);
  world().records.push_back({kind, name, bytes, current_stream[current_device]});
}

// Ignores the calls with which this simulation carries out an operator.
void note(const char* kind, const std::string& name, size_t bytes = 0) {
  if (!in_operator) note_always(kind, name, bytes);
}

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
  note("wait", what);
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
  world().live -= block->bytes;
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
    note_always("allocation", "", bytes);
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
    world().live += block->bytes;
    world().peak = std::max(world().peak, world().live);
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
  bool plain =
      self.dtype() == target.dtype() && self.is_non_overlapping_and_dense() && self.strides() == target.strides();
  if (from_device && to_device && !plain)
    note("kernel", "aten::copy_");  // bytes that stay as they are are copied without one
  else
    note("copy", !from_device ? "to device" : to_device ? "on device" : "from device", self.nbytes());
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

}  // namespace
