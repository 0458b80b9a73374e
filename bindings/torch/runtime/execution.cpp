#include "runtime/execution.h"

#include <dlfcn.h>
#include <torch/csrc/stable/ops.h>

#include <atomic>
#include <limits>
#include <mutex>
#include <unordered_set>
#include <utility>

#include "moegemm/error.h"
#include "moegemm/info.h"

namespace moegemm::torch_ops {
namespace {

class TorchExecutor final : public Executor {
 public:
  int concurrency() const override { return static_cast<int>(torch::stable::get_num_threads()); }

  void run(int workers, const std::function<void(int)>& work) override {
    torch::stable::parallel_for(0, workers, 1, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t worker = begin; worker < end; ++worker) work(static_cast<int>(worker));
    });
  }
};

/// A fork and join of torch's pool takes about 5 microseconds, in which one core does this much.
constexpr double kSerialFlops = 256 * 1024;

class SerialExecutor final : public Executor {
 public:
  int concurrency() const override { return 1; }
  void run(int workers, const std::function<void(int)>& work) override {
    for (int worker = 0; worker < workers; ++worker) work(worker);
  }
};

using CurrentStream = AOTITorchError (*)(std::int32_t, void**);

/// The only function of libtorch_cuda we call. A CPU-only torch lacks it, so it is looked up in the
/// library that the process has loaded instead of being linked.
CurrentStream find_current_stream() {
  constexpr const char* kName = "aoti_torch_get_current_cuda_stream";
  void* symbol = dlsym(RTLD_DEFAULT, kName);
  if (symbol == nullptr) {
    // Extension modules are loaded without RTLD_GLOBAL, which hides what they bring along.
    if (void* cuda = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD)) {
      symbol = dlsym(cuda, kName);
    }
  }
  return reinterpret_cast<CurrentStream>(symbol);
}

void* current_stream(int device_index) {
  static const CurrentStream get = find_current_stream();
  if (get == nullptr) {
    throw Error(ErrorKind::kRuntime,
                "libtorch_cuda.so of this torch has no aoti_torch_get_current_cuda_stream; CUDA "
                "tensors need a CUDA build of torch 2.10 or newer");
  }
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(get(device_index, &stream));
  return stream;
}

std::atomic<int> max_multiprocessors = 0;

struct Notes {
  std::mutex mutex;
  std::unordered_set<std::string> seen;
  std::string pending;

  static Notes& of_process() {
    static Notes notes;
    return notes;
  }
};

}  // namespace

std::int64_t set_max_multiprocessors(std::int64_t most) {
  constexpr int kMost = std::numeric_limits<int>::max();
  if (most < 0 || most > kMost) {
    throw Error(ErrorKind::kInvalidValue, "max_multiprocessors is " + std::to_string(most) +
                                              "; 0 (all) to " + std::to_string(kMost) +
                                              " are accepted");
  }
  return max_multiprocessors.exchange(static_cast<int>(most));
}

Execution::Execution(Device device, double flops) {
  context_.max_multiprocessors = max_multiprocessors.load(std::memory_order_relaxed);
  if (device.type == DeviceType::kCuda) {
    // A guard costs an allocation, and even to ask costs time; most programs stay on one device.
    static const bool several = gpus().size() > 1;
    if (several && torch::stable::accelerator::getCurrentDeviceIndex() != device.index) {
      guard_.emplace(device.index);
    }
    context_.stream = current_stream(device.index);
  } else if (flops < kSerialFlops) {
    static SerialExecutor executor;
    context_.executor = &executor;
  } else {
    static TorchExecutor executor;
    context_.executor = &executor;
  }
}

void note_once(const std::string& note, bool at_once) {
  Notes& notes = Notes::of_process();
  {
    const std::lock_guard lock(notes.mutex);
    if (!notes.seen.insert(note).second) return;
    if (!at_once) notes.pending += note + "\n";
  }
  if (at_once) aoti_torch_warn("plan", "moegemm", 0, ("moegemm: " + note).c_str());
}

std::string take_notes() {
  Notes& notes = Notes::of_process();
  const std::lock_guard lock(notes.mutex);
  return std::exchange(notes.pending, {});
}

}  // namespace moegemm::torch_ops
